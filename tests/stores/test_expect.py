"""While a store throttles, the body of a part is sent when the server has said to go on."""

import socketserver
import threading
import time

import pytest

from cloudckpt.config import MIB
from cloudckpt.errors import ThrottledError
from cloudckpt.stores import rest
from support.dialects import DIALECTS

BODY = bytes(range(256)) * (4 * MIB // 256)
BUSY = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n"
DONE = b'HTTP/1.1 201 Created\r\nETag: "tag"\r\nContent-Length: 0\r\n\r\n'
GO_ON = b"HTTP/1.1 100 Continue\r\n\r\n"
INTERIM = b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
UNKNOWN = b"HTTP/1.1 417 Expectation Failed\r\nContent-Length: 0\r\n\r\n"


class Server(socketserver.ThreadingTCPServer):
    """Answers a request by its headers, then reads on: what it gets of a body is counted.

    Attributes:
        at_once: What is sent behind the headers.
        alone: The bytes of it that are sent before the rest.
        at_last: What is sent behind the body.
        expected: The value of Expect of each request.
        received: The bytes of each body.
    """

    allow_reuse_address = daemon_threads = True
    block_on_close = False

    def __init__(self, tls=None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.tls = tls
        self.at_once, self.at_last, self.alone = b"", DONE, 0
        self.expected: list[str] = []
        self.received: list[int] = []
        self.heard = threading.Condition()
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self.server_address[1]}"

    def get_request(self):
        connection, address = super().get_request()
        return (
            self.tls.wrap_socket(connection, server_side=True) if self.tls else connection
        ), address

    def counted(self, number):
        """The bytes of bodies, once that many requests have ended."""
        with self.heard:
            assert self.heard.wait_for(lambda: len(self.received) >= number, 30)
            return self.received[:]

    def handle_error(self, request, client_address) -> None:
        """A client that goes away is part of the test."""


class Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        while self.rfile.readline():
            headers = {}
            while line := self.rfile.readline().strip():
                name, _, value = line.decode().partition(": ")
                headers[name.lower()] = value
            self.server.expected.append(headers.get("expect", ""))
            said = self.server.at_once if headers.get("expect") else b""
            said = BUSY if self.server.at_once == BUSY else said
            if self.server.alone:
                self.wfile.write(said[: self.server.alone])
                time.sleep(0.1)
            self.wfile.write(said[self.server.alone :])
            left, count = int(headers.get("content-length", 0)), 0
            while left and (data := self.rfile.read1(min(left, 65536))):
                left, count = left - len(data), count + len(data)
            with self.server.heard:
                self.server.received.append(count)
                self.server.heard.notify_all()
            if left:
                return
            if said not in (BUSY, UNKNOWN):
                self.wfile.write(self.server.at_last)


WAYS = [("s3", "plain"), ("s3", "tls"), ("s3", "python's tls"), ("google", "plain")]
WAYS += [("azure", "plain")]


in_all_ways = pytest.mark.parametrize("way", WAYS, ids="-".join, indirect=True)


@pytest.fixture
def way(request):
    """A dialect, and what it is spoken over."""
    return getattr(request, "param", WAYS[0])


@pytest.fixture
def served(way, tls_of, authority, monkeypatch):
    monkeypatch.setenv("AWS_CA_BUNDLE", authority.bundle)
    with Server(tls_of(way[1])) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def send(way, served):
    """Sends a part."""
    dialect = DIALECTS[way[0]]
    store = dialect.open(served.url)
    body = [memoryview(BODY)]
    checksum = store.capabilities.checksum.of(BODY)
    yield lambda: store.put_part(dialect.upload, 1, body, checksum=checksum)
    store.close()


@pytest.fixture
def busy_send(send, served):
    """The same, after an answer that asks to slow down."""
    served.at_once = BUSY
    with pytest.raises(ThrottledError):
        send()
    served.counted(1)
    return send


@pytest.mark.parametrize("interim", [b"", INTERIM], ids=["at once", "after interim answers"])
def test_in_good_weather_nothing_is_asked(send, served, interim):
    served.at_last = interim + DONE
    for _ in range(2):
        assert send().size == len(BODY)
    assert served.expected == ["", ""]


@in_all_ways
def test_a_part_that_is_refused_by_its_headers_is_not_sent(busy_send, served):
    for _ in range(3):
        with pytest.raises(ThrottledError):
            busy_send()
    assert served.counted(4)[1:] == [0, 0, 0]
    assert served.expected == ["", *["100-continue"] * 3]


@in_all_ways
@pytest.mark.parametrize(
    ("go_on", "alone"),
    [(GO_ON, 0), (GO_ON, 1), (INTERIM + GO_ON, 0), (INTERIM + GO_ON, 70)],
    ids=["whole", "in pieces", "after others", "after others, in pieces"],
)
def test_a_part_is_sent_when_the_server_says_so(busy_send, served, go_on, alone):
    served.at_once, served.alone = go_on, alone
    for _ in range(2):
        assert busy_send().size == len(BODY)
    assert served.counted(3)[1:] == [len(BODY)] * 2


def test_a_server_that_does_not_say_so_is_sent_the_body_soon(busy_send, served):
    served.at_once = b""
    began = time.monotonic()
    assert busy_send().size == len(BODY)
    assert 0.9 < time.monotonic() - began < 20
    assert served.counted(2)[1] == len(BODY)


def test_a_server_that_knows_no_expectations_is_not_asked_again(busy_send, served):
    served.at_once = UNKNOWN
    for _ in range(2):
        assert busy_send().size == len(BODY)
    assert served.expected[1:] == ["100-continue", "", ""]


def test_the_weather_gets_better(busy_send, served, monkeypatch):
    monkeypatch.setattr(rest.time, "monotonic", lambda now=time.monotonic: now() + 61)
    served.at_once = b""
    assert busy_send().size == len(BODY)
    assert served.expected == ["", ""]
