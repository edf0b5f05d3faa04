"""The HTTP layer: buffers go out and come in as they lie, and no connection holds a transfer up.

Runs against the scripted stub of ``conftest.py``.
"""

import contextlib
import logging
import random
import re
import socket
import threading
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloudckpt.errors import ConfigError, ConnectionLostError, TLSError
from cloudckpt.stores.http import client as module
from cloudckpt.stores.http import connections as watch
from cloudckpt.stores.http.expect import EXPECT
from support.emulators import free_port
from support.reading import get, lost

MIB = 1024 * 1024
STEP = MIB


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(module, "STEP", STEP)


in_all_ways = pytest.mark.parametrize("way", ["plain", "tls", "python's tls"], indirect=True)


@pytest.fixture
def way(request):
    return getattr(request, "param", "plain")


@pytest.fixture
def server(way, stub_server, tls_of):
    with stub_server(tls_of(way)) as server:
        yield server


@pytest.fixture
def client(open_client):
    return open_client()


@pytest.fixture
def impatient(open_client):
    """A client that takes half a second without progress for a stall, and has time for the rest."""
    return open_client(read_timeout=3600.0, stall_timeout=0.5)


def put(client, url, views, progress=None):
    headers = {"Content-Length": str(sum(view.nbytes for view in views))}
    with client.send("PUT", url, headers, views, progress) as reply:
        return reply.status


def failure(client, url, kind=ConnectionLostError, match=None, **more):
    """Why no answer begins."""
    with pytest.raises(kind, match=match) as caught, client.send("GET", url, {}, **more):
        pass
    return caught.value


# sending


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.lists(
        st.one_of(
            st.integers(0, 100),
            st.sampled_from([65_535, 65_536, 65_537, 262_144, STEP - 1, STEP, STEP + 1]),
            st.integers(60_000, MIB),
        ),
        max_size=12,
    )
)
def test_views_of_any_sizes_arrive_in_order(server, client, sizes):
    server.reset_script()
    server.answer(status=200)
    data = [random.Random(n).randbytes(size) for n, size in enumerate(sizes)]
    moved = []
    put(client, server.url, [memoryview(piece) for piece in data], moved.append)
    assert server.requests[0].body == b"".join(data)
    assert sum(moved) == sum(sizes)


@contextlib.contextmanager
def little_memory():
    """What happens within takes little, the stub's own buffers included."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * MIB


def test_a_large_body_is_not_copied(server, client):
    server.keep_bodies = False
    server.answer(status=200)
    views = [memoryview(bytes(32 * MIB))]
    with little_memory():
        put(client, server.url, views)


@in_all_ways
def test_an_answer_before_the_end_of_the_body_is_read(server, client):
    server.answer(status=412, body=b"too late", hasty=True)
    assert refusal(client, server.url) == (412, b"too late")


def refusal(client, url):
    """The answer to a body that does not fit into the buffers on its way."""
    body = memoryview(bytes(64 * MIB))
    with client.send("PUT", url, {"Content-Length": str(body.nbytes)}, [body]) as reply:
        return reply.status, reply.read_refusal()


def test_a_server_that_does_not_read_is_given_up(server, open_client):
    client = open_client(connect_timeout=3600.0, read_timeout=3600.0, stall_timeout=0.5)
    server.answer(deaf=True)
    with pytest.raises(ConnectionLostError):
        put(client, server.url, [memoryview(bytes(64 * MIB))])


# receiving


def test_a_large_answer_is_not_copied(server, client):
    server.answer(body=bytes(MIB), repeat=32)
    memory = bytearray(32 * MIB)
    with little_memory(), client.send("GET", server.url, {}) as reply:
        reply.read_into([memoryview(memory)])


@in_all_ways
@pytest.mark.parametrize("framing", ["length", "chunked", "none"])
def test_any_framing_of_an_answer_is_understood(server, client, framing):
    data = random.Random(1).randbytes(300_000)
    server.respond(lambda request: server.Answer(body=data, framing=framing))
    assert get(client, server.url, len(data)) == data
    assert get(client, server.url, len(data)) == data


def test_the_text_of_an_error_is_read_up_to_a_limit(server, client):
    server.answer(status=500, body=b"reason" * 100_000)
    with client.send("GET", server.url, {}) as reply:
        assert len(reply.read_refusal()) == 64 * 1024


@in_all_ways
@pytest.mark.parametrize("cut", [0, 1, 70_000, STEP, 2 * STEP + 1, 3 * STEP - 1])
def test_a_body_that_ends_early_tells_how_much_came(server, client, cut):
    data = random.Random(2).randbytes(3 * STEP)
    server.answer(body=data[:cut], size=len(data), hang_up=True)
    error, came = lost(client, server.url, len(data))
    assert (error.received, came) == (cut, data[:cut])


@in_all_ways
def test_a_connection_that_breaks_tells_what_certainly_came(server, client):
    data = random.Random(3).randbytes(3 * STEP)
    server.answer(body=data[: STEP + MIB], size=len(data), reset=True)
    error, came = lost(client, server.url, len(data))
    assert error.received <= STEP + MIB
    assert data.startswith(came)


# stalls


@in_all_ways
@pytest.mark.parametrize("drip", [True, False], ids=["dripping", "silent"])
def test_a_body_that_makes_no_progress_is_given_up(server, impatient, drip):
    body = b"x" * 100_000 if drip else b"x"  # at the stub's pace that takes half an hour
    server.answer(body=body, size=100_000, drip=drip)
    assert lost(impatient, server.url, 100_000)[0].received < 1000


@in_all_ways
def test_what_came_before_a_stall_is_not_forgotten_and_its_connection_not_used(server, impatient):
    data = random.Random(4).randbytes(STEP)
    server.answer(body=data[:-1000], size=len(data))
    error, came = lost(impatient, server.url, len(data))
    assert "stalled" in f"{error}{error.__cause__}"
    assert came == data[:-1000]
    server.answer(status=403, body=b"<Code>ExpiredToken</Code>", size=1000)
    with impatient.send("GET", server.url, {}) as reply:
        assert reply.read_refusal() == b"<Code>ExpiredToken</Code>"
    assert server.requests[0].port != server.requests[1].port


def test_a_slow_transfer_that_makes_progress_goes_on(server, open_client, monkeypatch):
    class Clock:
        now = 0.0

        def monotonic(self):
            return self.now

        def sleep(self, seconds):
            server.is_over.wait(0.001)

    clock = Clock()
    monkeypatch.setattr(watch, "time", clock)
    client = open_client(stall_timeout=30.0)
    body = random.Random(5).randbytes(4 * STEP)
    server.answer(body=body)

    def take_a_while(count):
        clock.now += 29.0

    assert get(client, server.url, len(body), take_a_while) == body
    assert clock.now > 30.0


def read_all(client, url):
    with client.send("POST", url, {}) as reply:
        return reply.read_all()


def test_white_space_keeps_a_slow_answer_alive(server, open_client):
    """S3 sends it while it completes an upload."""
    client = open_client(stall_timeout=2.0)
    body = b" " * 150 + b"<Done/>"  # at the stub's pace that takes three seconds
    server.answer(body=body, framing="chunked", drip=True)
    assert read_all(client, server.url) == body
    server.answer(body=bytes(300_000), framing="chunked")
    assert read_all(client, server.url) == bytes(300_000)
    assert len({request.port for request in server.requests}) == 1


@pytest.mark.parametrize(
    ("limits", "answer", "told"),
    [
        ({"read_timeout": 0.2}, {"body": b" " * 100_000, "drip": True}, "took more than"),
        ({"stall_timeout": 0.5}, {"body": b" ", "unfinished": True}, "stalled"),
        ({}, {"body": b" ", "unfinished": True, "hang_up": True}, "broke off after 1 bytes"),
    ],
    ids=["without an end", "falls silent", "breaks off"],
)
def test_a_slow_answer_that_does_not_come_whole_is_given_up(
    server, open_client, limits, answer, told
):
    server.answer(framing="chunked", **answer)
    with pytest.raises(ConnectionLostError, match=told):
        read_all(open_client(**limits), server.url)


@in_all_ways
@pytest.mark.parametrize("stuck", ["silent", "body", "deaf"])
def test_a_transfer_of_another_thread_can_be_broken_off(server, open_client, stuck):
    client = open_client(connect_timeout=3600.0, read_timeout=3600.0, stall_timeout=3600.0)
    server.answer(silent=stuck == "silent", deaf=stuck == "deaf", size=100_000)
    begun, outcome = threading.Event(), []

    def transfer():
        begun.set()
        try:
            if stuck == "deaf":
                put(client, server.url, [memoryview(bytes(64 * MIB))])
            else:
                get(client, server.url, 100_000)
        except ConnectionLostError as error:
            outcome.append(error)

    thread = threading.Thread(target=transfer)
    thread.start()
    assert begun.wait(30)
    while thread.is_alive():  # as soon as it is on its way
        client.interrupt([thread.ident])
        thread.join(0.05)
    assert len(outcome) == 1


def test_only_the_threads_that_are_named_are_broken_off(server, client):
    body = random.Random(8).randbytes(2 * STEP)
    server.answer(body=body)

    def interrupt_another(count):
        client.interrupt([threading.get_ident() + 1])

    assert get(client, server.url, len(body), interrupt_another) == body


@pytest.mark.skipif(not watch.Traffic.counts, reason="this kernel does not count")
def test_what_a_connection_moves_is_counted_amid_a_call(server, client):
    """A call moves a whole part, which takes seconds where a connection is slow."""
    body, this = bytes(4 * STEP), threading.get_ident()
    server.respond(lambda request: server.Answer(body=body, repeat=1))
    seen = []
    memory = memoryview(bytearray(len(body)))
    for _ in range(2):
        with client.send("GET", server.url, {}) as reply:
            client.moved([this])
            reply.read_into([memory], lambda count: seen.append(client.moved([this, 0])))
    assert {len(counts) for counts in seen} == {2}
    assert {counts[1] for counts in seen} == {0}
    assert 0 < sum(counts[0] for counts in seen) < 2 * len(body) + 4 * STEP
    assert client.moved([this]) == [0]


def test_an_answer_that_never_begins_is_given_up_and_one_that_may_take_long_later(
    server, open_client
):
    client = open_client(read_timeout=0.04)
    server.answer(server.Answer(silent=True), server.Answer(silent=True))
    failure(client, server.url, match=r"0\.6 s \(15 times read_timeout\)", is_long=True)
    failure(client, server.url, match=r"no answer from .*0\.04 s \(read_timeout\)")


# connections


def test_a_connection_is_used_again_also_of_more_than_one_transfer_has(server, client):
    server.respond(lambda request: server.Answer(body=b"data"))
    for _ in range(3):
        with contextlib.ExitStack() as stack:
            [stack.enter_context(client.send("GET", server.url, {})) for _ in range(6)]
        put(client, server.url, [memoryview(b"data")])
    assert len({request.port for request in server.requests}) == 6


@pytest.mark.parametrize(
    "answer",
    [
        {"status": 204},
        {"status": 404, "body": b"<Error/>"},
        {"status": 200, "body": b"<Unread/>"},
        {"status": 304},
    ],
)
def test_a_connection_is_used_again_after_an_answer_that_nobody_read(server, client, answer):
    server.respond(lambda request: server.Answer(**answer))
    for _ in range(2):
        with client.send("GET", server.url, {}) as reply:
            assert reply.status == answer["status"]
    assert len({request.port for request in server.requests}) == 1


def test_an_answer_that_closes_the_connection_is_read_whole(server, client):
    body = random.Random(6).randbytes(2 * MIB)
    server.respond(lambda request: server.Answer(body=body, headers={"Connection": "close"}))
    assert [get(client, server.url, len(body)) for _ in range(2)] == [body] * 2
    assert len({request.port for request in server.requests}) == 2


def test_a_stall_is_noticed_on_a_connection_that_is_to_close(server, impatient):
    server.answer(size=100_000, headers={"Connection": "close"})
    lost(impatient, server.url, 100_000)


def test_an_idle_connection_that_was_closed_is_replaced(server, client):
    server.answer(server.Answer(body=b"data", hang_up=True), server.Answer(body=b"more"))
    assert get(client, server.url, 4) == b"data"
    server.hung_up.wait()
    assert get(client, server.url, 4) == b"more"


def test_nobody_there_is_a_lost_connection(client):
    text = str(failure(client, f"http://127.0.0.1:{free_port()}/key?X-Secret=1"))
    assert re.search(r"no connection to 127.0.0.1:\d+ .*refused", text)
    for word in ("host=", "X-Secret", " at 0x"):
        assert word not in text


def test_a_closed_client_leaves_no_thread_behind(server, open_client):
    before = set(threading.enumerate())
    client = open_client()
    server.answer(body=b"data")
    get(client, server.url, 4)
    (watch,) = [
        thread
        for thread in set(threading.enumerate()) - before
        if thread.name.startswith("cloudckpt")
    ]
    client.close()
    watch.join(10)
    assert not watch.is_alive()


# proxies and TLS


@pytest.mark.parametrize(
    "proxy",
    [
        "socks5://user:SECRET@127.0.0.1:1080",
        "http://user:SECRET@127.0.0.1:no-port",
        "http://user:SECRET@",
    ],
)
def test_a_proxy_that_can_not_be_used_is_named_without_its_password(open_client, proxy):
    with pytest.raises(ConfigError, match="HTTPS_PROXY") as caught:
        open_client(proxy=proxy)
    assert "SECRET" not in f"{caught.value!r} {caught.value} {caught.value.__cause__!r}"


@contextlib.contextmanager
def listening(serve, times=1):
    """The port of a server that does something with each of its connections, one at a time.

    It has done so `times` times at the end.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept():
            for _ in range(times):
                connection, _ = listener.accept()
                with connection:
                    serve(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(30)
        assert not thread.is_alive()


def test_a_proxy_that_drips_its_answer_is_given_up(open_client):
    over = threading.Event()

    def drip(connection):
        with contextlib.suppress(OSError):
            while not over.wait(0.05):
                connection.sendall(b"H")

    with listening(drip) as port, contextlib.ExitStack() as stack:
        stack.callback(over.set)
        client = open_client(proxy=f"http://127.0.0.1:{port}", connect_timeout=0.2)
        failure(client, "https://bucket.example/key", match="connect_timeout")


def ask_first(client, url, progress=None):
    """Sends 2 MiB, which the server must ask for."""
    headers = {"Content-Length": str(2 * MIB), **EXPECT}
    with client.send("PUT", url, headers, [memoryview(bytes(2 * MIB))], progress) as reply:
        return reply.status


def test_a_tunnel_that_was_closed_after_an_upload_is_made_again(open_client, tls_context):
    closed = threading.Semaphore(0)

    def tunnel(connection):
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        with tls_context.wrap_socket(connection, server_side=True) as store:
            store.recv(65536)
            store.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            left = 2 * MIB
            while left:
                left -= len(store.recv(left))
            store.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        closed.release()

    with listening(tunnel, times=2) as port:
        client = open_client(proxy=f"http://127.0.0.1:{port}")
        for _ in range(2):
            assert ask_first(client, "https://127.0.0.1:1/key") == 200
            closed.acquire()


def test_a_connection_is_closed_at_once_when_a_body_that_was_asked_for_can_not_be_sent(client):
    def agree(connection):
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(65536):
                pass

    with listening(agree) as port, pytest.raises(ZeroDivisionError) as caught:
        ask_first(client, f"http://127.0.0.1:{port}/key", lambda count: 1 / 0)
    assert caught  # and with it what was under way: the collector can't have closed the connection


@pytest.mark.parametrize(
    "content", [None, b"", b"no certificate", b"-----BEGIN CERTIFICATE-----\nAAAA\n"]
)
def test_certificates_of_authorities_that_can_not_be_read_are_named_at_once(
    tls_server, open_client, tmp_path, content
):
    bundle = tmp_path / "bundle.pem"
    if content is not None:
        bundle.write_bytes(content)
    client = open_client(ca_bundle=str(bundle))
    error = failure(client, tls_server.url, TLSError, "AWS_CA_BUNDLE")
    assert error.certain
    assert str(bundle) in error.message
    assert tls_server.requests == []


def test_a_server_without_tls_is_told_from_one_that_is_lost(server, client):
    url = server.url.replace("http://", "https://")
    failure(client, url, TLSError, "does not speak TLS")


# connections that failed: all are closed at once, and none is left to the garbage collector


def test_signatures_are_not_in_the_log_of_what_is_sent(client, server, caplog):
    server.answer(body=b"data")
    signed = (
        "/object?X-Amz-Expires=60&X-Amz-Signature=SECRETSIGNATURE&X-Amz-Security-Token=SECRETTOKEN"
    )
    with caplog.at_level(logging.DEBUG), client.send("GET", server.url + signed, {}) as reply:
        assert reply.read_all() == b"data"
    assert "/object?X-Amz-Expires=60" in caplog.text
    assert "SECRET" not in caplog.text
