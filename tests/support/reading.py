"""Bodies of answers, read as stores read them."""

import pytest

from cloudckpt.errors import ConnectionLostError


def get(client, url, size, progress=None, views=lambda whole: [whole]):
    """The body of an answer, which is read into views of its memory."""
    memory = bytearray(size)
    with client.send("GET", url, {}) as reply:
        assert reply.status == 200
        reply.read_into(views(memoryview(memory)), progress)
    return bytes(memory)


def lost(client, url, size):
    """How the connection of a body that is read ends, and what has come of it."""
    memory = bytearray(size)
    with client.send("GET", url, {}) as reply, pytest.raises(ConnectionLostError) as caught:
        reply.read_into([memoryview(memory)[:100], memoryview(memory)[100:]])
    return caught.value, bytes(memory[: caught.value.received])
