"""Bodies by TLS, read by whole buffers without the GIL and record by record, are the same.

The peer speaks TLS as a test tells it to, down to the single record.
"""

import contextlib
import ctypes
import gc
import logging
import os
import random
import socket
import ssl
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from cloudckpt.errors import ConnectionLostError, TLSError
from cloudckpt.stores.http import client as module
from cloudckpt.stores.http import native_tls as long_reads
from dcp.children import in_a_child
from support.forwarding import forward_proxy
from support.reading import get, lost

MIB = 1024 * 1024
STEP = MIB
BODY = random.Random(0).randbytes(3 * STEP + 12_345)
NOISE = Path(__file__).parents[1] / "support" / "stubs" / "noise.py"
ROUNDS = os.environ.get("CLOUDCKPT_TEST_NOISE", "150")
NATIVE = long_reads.is_available()
BOTH = pytest.mark.parametrize("native", [True, False], ids=["native", "plain"])
pytestmark = BOTH


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(module, "STEP", STEP)


class Peer:
    """A server for one connection after the other; ``script`` is what it does behind a request."""

    def __init__(self, context, script):
        self._context = context
        self._script = script
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self.over = threading.Event()
        self.accepted = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while True:
            with contextlib.suppress(ssl.SSLError, ConnectionError):
                raw, _ = self._listener.accept()
                with raw:
                    if self.over.is_set():
                        return
                    self.accepted += 1
                    self._script(Conversation(raw, self._context, self.over))

    def close(self):
        self.over.set()
        with contextlib.suppress(OSError):
            socket.create_connection(self._listener.getsockname()).close()
        self._thread.join(20)
        assert not self._thread.is_alive()
        self._listener.close()


class Conversation:
    """The server's side of one connection, whose ciphertext goes through the test's hands."""

    def __init__(self, raw, context, over):
        self.raw, self.over = raw, over
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._in, self._out, server_side=True)
        self._do(self.tls.do_handshake)

    def request(self):
        """Reads the head of a request; None at the end."""
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            try:
                piece = self._do(lambda: self.tls.read(1))
            except ssl.SSLError:
                return None
            if not piece:
                return None
            head += piece
        return head

    def sealed(self, data):
        """The records of some bytes."""
        self.tls.write(data)
        return self._out.read()

    def send(self, data):
        self.raw.sendall(self.sealed(data))

    def promise(self, size, extra=""):
        self.send(f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n{extra}\r\n".encode())

    def say_goodbye(self):
        with contextlib.suppress(ssl.SSLWantReadError):
            self.tls.unwrap()
        self.raw.sendall(self._out.read())

    def _do(self, step):
        while True:
            try:
                result = step()
            except ssl.SSLWantReadError:
                self._flush()
                data = self.raw.recv(65536)
                if data:
                    self._in.write(data)
                else:
                    self._in.write_eof()
                continue
            self._flush()
            return result

    def _flush(self):
        self.raw.sendall(self._out.read())


@pytest.fixture(autouse=True)
def way(native, tls_of):
    """Keeps OpenSSL out of reach if reads are to go record by record."""
    tls_of("tls" if native else "python's tls")


@pytest.fixture
def talk(authority, open_client):
    """Starts a peer, and a client for it."""
    with contextlib.ExitStack() as stack:

        def start(script, context=None, **changes):
            peer = Peer(context or authority.server(), script)
            stack.callback(peer.close)
            client = open_client(**changes)
            stack.callback(client.close)
            return peer, client

        yield start


def answering(body):
    """A script: keep-alive, each request gets ``body``."""

    def script(peer):
        while peer.request() is not None:
            peer.promise(len(body))
            peer.send(body)

    return script


def beginning(sent, then):
    """A script: one request gets the beginning of ``BODY``, and what follows."""

    def script(peer):
        peer.request()
        peer.promise(len(BODY))
        peer.send(BODY[:sent])
        then(peer)

    return script


def read_whole(reply):
    memory = bytearray(len(BODY))
    reply.read_into([memoryview(memory)])
    return memory


needs_native = pytest.mark.skipif(not NATIVE, reason="OpenSSL is out of reach")


def has_chain(reply):
    return getattr(reply._sock, "_chain", None) is not None


# what comes


def test_the_way_is_the_one_that_was_chosen(talk, native, caplog):
    caplog.set_level(logging.DEBUG, "cloudckpt")
    peer, client = talk(answering(BODY))
    with client.send("GET", peer.url, {}) as reply:
        read_whole(reply)
        assert has_chain(reply) == (native and NATIVE)
    assert ("without the GIL" in caplog.text) == (native and NATIVE)


@pytest.mark.parametrize("version", ["TLSv1_2", "TLSv1_3"])
def test_views_of_any_sizes_get_the_bytes_in_order(talk, authority, native, version):
    context = authority.server()
    context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
    peer, client = talk(answering(BODY), context)

    def cut(whole):
        pieces, at, dice = [], 0, random.Random(1)
        while at < len(whole):
            size = dice.choice([0, 1, 100, 4096, 16_384, 65_535, 65_536, 65_537, 200_000, 2 * MIB])
            pieces.append(whole[at : at + size])
            at += size
        return pieces

    for _ in range(3):
        assert get(client, peer.url, len(BODY), views=cut) == BODY
        assert get(client, peer.url, len(BODY)) == BODY
    assert peer.accepted == 1


def test_records_of_any_sizes_are_put_together(talk, native):
    def script(peer):
        dice = random.Random(2)
        while peer.request() is not None:
            peer.promise(len(BODY))
            at = 0
            while at < len(BODY):
                size = dice.choice([1, 5, 1000, 16_384, 100_000])
                peer.send(BODY[at : at + size])
                at += size

    peer, client = talk(script)
    for _ in range(2):
        assert get(client, peer.url, len(BODY)) == BODY


def libssl():
    import _ssl

    return ctypes.PyDLL(_ssl.__file__)


def ssl_of_server(sslobj):
    """The ``SSL*`` of an SSLObject: behind the socket, which it has not."""
    before, found, behind = (ctypes.c_size_t * 3).from_address(id(sslobj) + object.__basicsize__)
    assert before == 0
    assert behind == id(sslobj.context)
    return ctypes.c_void_p(found)


@needs_native
@pytest.mark.parametrize("message", ["key update", "key update that is to be answered", "ticket"])
def test_messages_of_tls_in_the_middle_of_a_body_are_no_part_of_it(talk, native, message):
    library = libssl()

    def script(peer):
        found = ssl_of_server(peer.tls._sslobj)
        while peer.request() is not None:
            peer.promise(len(BODY))
            for at in range(0, len(BODY), 100_000):
                if message == "ticket":
                    assert library.SSL_new_session_ticket(found) == 1
                else:
                    assert library.SSL_key_update(found, int("answered" in message)) == 1
                assert library.SSL_do_handshake(found) == 1
                peer.send(BODY[at : at + 100_000])

    peer, client = talk(script)
    for _ in range(2):
        assert get(client, peer.url, len(BODY)) == BODY
    assert peer.accepted == 1


FORGED = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged"


# whole records, few enough for one call, before those beyond the promise
@pytest.mark.parametrize(
    ("size", "apart"), [(len(BODY), False), (MIB + 4 * 16_384, True)], ids=["bytes", "records"]
)
def test_what_comes_beyond_the_promise_is_not_taken_for_the_next_answer(talk, native, size, apart):
    def script(peer):
        while peer.request() is not None:
            peer.promise(size)
            peer.send(BODY[:MIB])
            rest = BODY[MIB:size]
            both = peer.sealed(rest) + peer.sealed(FORGED) if apart else peer.sealed(rest + FORGED)
            peer.raw.sendall(both)

    peer, client = talk(script)
    for _ in range(3):
        assert get(client, peer.url, size) == BODY[:size]


# what ends


NO_DATA = {
    "goodbye": lambda peer: peer.say_goodbye(),
    "record cut short": lambda peer: peer.raw.sendall(peer.sealed(BODY[MIB : MIB + 16_384])[:-1]),
}


@pytest.mark.parametrize("end", NO_DATA)
def test_what_ends_a_body_early_is_no_data(talk, native, end):
    peer, client = talk(beginning(MIB, NO_DATA[end]))
    assert lost(client, peer.url, len(BODY))[1] == BODY[:MIB]


def test_a_record_that_was_changed_on_its_way_is_named_and_is_no_data(talk, native):
    def change(peer):
        record = bytearray(peer.sealed(BODY[MIB : MIB + 16_384]))
        record[1000] ^= 1
        peer.raw.sendall(record)
        peer.over.wait(20)

    peer, client = talk(beginning(MIB, change))
    error, data = lost(client, peer.url, len(BODY))
    assert BODY[:MIB].startswith(data)
    # OpenSSL 3.0 and 3.6
    assert "BAD_RECORD_MAC" in str(error) or "RECORD_LAYER_FAILURE" in str(error)
    peer.over.set()


def test_a_failure_of_tls_does_not_follow_its_thread_to_the_next_connection(talk, native):
    def script(peer):
        peer.request()
        if not spoiled:
            spoiled.append(True)
            peer.promise(len(BODY))
            peer.send(BODY[:MIB])
            peer.raw.sendall(b"\x17\x03\x03\x00\x30" + bytes(48))
            return
        peer.promise(len(BODY))
        peer.send(BODY)

    def stop(count):
        raise LookupError

    spoiled = []
    peer, client = talk(script)
    with pytest.raises((LookupError, ConnectionLostError)):
        get(client, peer.url, len(BODY), progress=stop)
    assert get(client, peer.url, len(BODY)) == BODY


def test_a_socket_that_another_thread_closes_under_a_read_ends_it(talk, native):
    sent, begun, replies, outcome = threading.Event(), threading.Event(), [], []

    def wait(peer):
        sent.set()
        peer.over.wait(60)

    peer, client = talk(beginning(MIB, wait), stall_timeout=3600.0)

    def read():
        with client.send("GET", peer.url, {}) as reply:
            replies.append(reply)
            begun.set()
            try:
                read_whole(reply)
            except ConnectionLostError as error:
                outcome.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(20)
    assert sent.wait(20)
    sock = replies[0]._sock
    socket.socket.shutdown(sock, socket.SHUT_RDWR)
    sock._real_close()
    gc.collect()
    thread.join(20)
    peer.over.set()
    assert len(outcome) == 1


def test_a_connection_that_closes_frees_what_it_had(talk, native):
    peer, client = talk(answering(BODY))
    with client.send("GET", peer.url, {}) as reply:
        read_whole(reply)
        chain = reply._sock._chain if has_chain(reply) else None
        kept = weakref.ref(chain) if chain is not None else lambda: None
        sock = reply._sock
    del chain, reply
    client.close()
    gc.collect()
    assert kept() is None
    assert sock._sslobj is None


# children


def test_a_forked_child_that_drops_a_connection_does_not_end_it(talk, native):
    def go_on(peer):
        assert forked.wait(20)
        peer.send(BODY[2 * STEP :])

    forked = threading.Event()
    peer, client = talk(beginning(2 * STEP, go_on))
    memory = bytearray(len(BODY))
    with client.send("GET", peer.url, {}) as reply:
        reply.read_into([memoryview(memory)[: 2 * STEP]])
        in_a_child("fork", reply._sock._real_close)
        forked.set()
        reply.read_into([memoryview(memory)[2 * STEP :]])
    assert memory == BODY


# certificates and proxies


@pytest.mark.parametrize("wrong", ["authority", "host", "expired"])
def test_a_wrong_certificate_is_refused(talk, authority, native, wrong):
    shown = {"host": {"host": "elsewhere.example"}, "expired": {"expired": True}}.get(wrong, {})
    trusted = {"ca_bundle": None} if wrong == "authority" else {}  # that is none of this machine's
    peer, client = talk(answering(b"data"), authority.server(authority.issue(**shown)), **trusted)
    with pytest.raises(TLSError, match="not trusted"), client.send("GET", peer.url, {}):
        pass


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_body_comes_through_a_proxy(talk, authority, native, scheme):
    with forward_proxy(authority.server() if scheme == "https" else None) as proxy:
        peer, client = talk(answering(BODY), proxy=proxy.url)
        assert get(client, peer.url, len(BODY)) == BODY
        assert get(client, peer.url, len(BODY)) == BODY
        client.close()
    assert len(proxy.tunnels) == 1


# the proof


@needs_native
def test_an_object_that_is_not_what_it_should_be_is_not_believed(talk, authority, native):
    if not native:
        pytest.skip("there is nothing to prove")
    peer, client = talk(answering(BODY))
    library = long_reads._openssl().with_gil
    with client.send("GET", peer.url, {}) as reply:
        sock = reply._sock
        assert long_reads._ssl_of(sock, sock._sslobj, library)
        for other in (object(), ssl.MemoryBIO(), sock.context, [1, 2, 3, 4]):
            with pytest.raises((long_reads._UnfitError, AttributeError)):
                long_reads._ssl_of(sock, other, library)
        another = ssl.SSLSocket.__new__(ssl.SSLSocket)
        with pytest.raises(long_reads._UnfitError):
            long_reads._ssl_of(another, sock._sslobj, library)


def test_where_the_proof_fails_bodies_come_the_plain_way(talk, native, monkeypatch, caplog):
    def refuse(*_):
        raise long_reads._UnfitError("another one")

    caplog.set_level(logging.DEBUG, "cloudckpt")
    monkeypatch.setattr(long_reads, "_ssl_of", refuse)
    peer, client = talk(answering(BODY))
    assert get(client, peer.url, len(BODY)) == BODY
    assert ("record by record, which is slower: another one" in caplog.text) == native


@pytest.fixture
def another_interpreter():
    long_reads._openssl.cache_clear()
    yield
    long_reads._openssl.cache_clear()


def test_in_a_version_that_nobody_knows_bodies_come_the_plain_way(
    talk, native, monkeypatch, another_interpreter
):
    monkeypatch.setattr(long_reads.sys, "version_info", (3, 99, 0))
    peer, client = talk(answering(BODY))
    with client.send("GET", peer.url, {}) as reply:
        assert read_whole(reply) == BODY
        assert not has_chain(reply)


# any peer


def test_no_peer_crashes_the_interpreter(native, authority):
    """In a process of its own, which the peer's noise must not end."""
    ended = subprocess.run(
        [sys.executable, str(NOISE), authority.bundle, authority.issue(), str(int(native)), ROUNDS],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [ROUNDS]
