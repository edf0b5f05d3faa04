"""An HTTP server that answers as the test tells it, for what moto does not do."""

import contextlib
import functools
import http.server
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from cloudckpt import AzureOptions, Config, GCSOptions, S3Options
from cloudckpt.stores.azure.store import AzureStore
from cloudckpt.stores.gcs.store import GCSStore
from cloudckpt.stores.http import native_tls
from cloudckpt.stores.http.client import HttpClient
from cloudckpt.stores.http.options import HttpOptions
from cloudckpt.stores.s3.store import S3Store
from cloudckpt.uri import CheckpointURI
from support.dialects import AZURE_KEY

pytest.register_assert_rewrite("support.contract")

CHUNK = 1 << 20


@dataclass
class Request:
    """What arrived; ``port`` is the client's and tells connections apart."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    port: int


@dataclass(frozen=True)
class Answer:
    """What is sent back.

    Attributes:
        status: Of the answer.
        headers: Besides Content-Length.
        body: What is sent of the body.
        size: Content-Length, if it is not that of ``body``.
        repeat: How often ``body`` is sent.
        hang_up: Close the connection behind the body, without having said so.
        reset: Break the connection behind the body.
        drip: Send the body byte by byte, until the client has enough of it.
        mute: Close the connection instead of answering.
        silent: Do not answer until the test is over.
        deaf: Do not read the body of the request either.
        hasty: Answer without having read the body of the request, and close the connection.
        framing: ``length``, ``chunked``, or ``none``: the body ends with the connection.
        unfinished: Do not send the end of a chunked body.
    """

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    size: int | None = None
    repeat: int = 1
    hang_up: bool = False
    reset: bool = False
    drip: bool = False
    mute: bool = False
    silent: bool = False
    deaf: bool = False
    hasty: bool = False
    framing: str = "length"
    unfinished: bool = False


class ScriptedServer(http.server.ThreadingHTTPServer):
    """A stub: answers with what :meth:`answer` has queued, and remembers all requests."""

    Answer = Answer
    daemon_threads = True
    block_on_close = False

    def __init__(self, tls=None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.scheme = "http"
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
            self.scheme = "https"
        self.is_over = threading.Event()
        self.reset_script()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_port}"

    def reset_script(self) -> None:
        self.requests: list[Request] = []
        self.hung_up = threading.Event()
        self.keep_bodies = True
        self._queue: list[Answer] = []
        self._respond: Callable[[Request], Answer] | None = None
        self._lock = threading.Lock()

    def answer(self, *answers: Answer, **single) -> None:
        """Queues answers; or one, given by its fields."""
        self._queue.extend(answers or [Answer(**single)])

    def respond(self, function: Callable[[Request], Answer]) -> None:
        """Answers all further requests by a function."""
        self._respond = function

    def next_answer(self, request: Request) -> Answer:
        with self._lock:
            self.requests.append(request)
            if self._queue:
                return self._queue.pop(0)
        if self._respond is not None:
            return self._respond(request)
        return Answer(599, body=b"the test did not expect this request")

    def peek(self) -> Answer | None:
        with self._lock:
            return self._queue[0] if self._queue else None

    def handle_error(self, request, client_address) -> None:
        """A client that goes away is part of the test."""

    def stop(self) -> None:
        self.is_over.set()
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: ScriptedServer

    def handle_any(self) -> None:
        upcoming = self.server.peek()
        if upcoming is not None and upcoming.deaf:
            self.server.next_answer(self._request(b""))
            self.server.is_over.wait()
            self.close_connection = True
            return
        hasty = upcoming is not None and upcoming.hasty
        answer = self.server.next_answer(self._request(b"" if hasty else self._body()))
        if answer.silent or answer.mute:
            if answer.silent:
                self.server.is_over.wait()
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        size = len(answer.body) * answer.repeat if answer.size is None else answer.size
        if answer.framing == "length":
            self.send_header("Content-Length", str(size))
        elif answer.framing == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.close_connection = True
        if answer.headers.get("Connection") == "close":
            self.close_connection = True
        self.end_headers()
        if self.command != "HEAD":
            self._send(answer)
        if hasty:
            self.server.is_over.wait(0.3)
            self.close_connection = True
        if answer.reset:
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        if answer.hang_up or answer.reset:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            self.connection.close()
            self.server.hung_up.set()

    def __getattr__(self, name: str):
        if name.startswith("do_"):
            return self.handle_any
        raise AttributeError(name)

    def _request(self, body: bytes) -> Request:
        return Request(self.command, self.path, self.headers, body, self.client_address[1])

    def _body(self) -> bytes:
        left = int(self.headers.get("Content-Length", 0))
        if self.headers.get("Expect") == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        kept, memory = bytearray(), memoryview(bytearray(CHUNK))
        while left:
            count = self.rfile.readinto1(memory[: min(left, CHUNK)])
            if not count:
                raise ConnectionResetError
            if self.server.keep_bodies:
                kept += memory[:count]
            left -= count
        return bytes(kept)

    def _send(self, answer: Answer) -> None:
        size = 1 if answer.drip else 1000
        if answer.framing == "chunked":
            for at in range(0, len(answer.body), size):
                piece = answer.body[at : at + size]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                if answer.drip and self.server.is_over.wait(0.02):
                    return
            if not answer.unfinished:
                self.wfile.write(b"0\r\n\r\n")
        elif answer.drip:
            for at in range(len(answer.body)):
                self.wfile.write(answer.body[at : at + 1])
                if self.server.is_over.wait(0.02):
                    return
        else:
            for _ in range(answer.repeat):
                self.wfile.write(answer.body)

    def log_message(self, *arguments) -> None:
        """Nothing is printed."""


@pytest.fixture(scope="session")
def stub_server():
    """Makes servers, as a context manager."""

    @contextlib.contextmanager
    def run(tls=None):
        server = ScriptedServer(tls)
        yield server
        server.stop()

    return run


@pytest.fixture
def stub(stub_server):
    """A server for each test: what the one before has left under way does not arrive here."""
    with stub_server() as stub:
        yield stub


@pytest.fixture
def server(stub):
    stub.reset_script()
    return stub


@pytest.fixture(scope="session")
def tls_context(authority):
    return authority.server()


@pytest.fixture
def tls_server(stub_server, tls_context):
    with stub_server(tls_context) as server:
        yield server


@functools.cache
def out_of_reach():
    raise native_tls._UnfitError("out of reach")


@pytest.fixture
def tls_of(tls_context, monkeypatch):
    """The server's side of a wire: ``plain``, ``tls``, or ``python's tls``, read by records."""

    def context(wire):
        if wire == "python's tls":
            monkeypatch.setattr(native_tls, "_openssl", out_of_reach)
        return None if wire == "plain" else tls_context

    return context


@pytest.fixture
def open_client(opened, authority):
    """Opens clients, which trust the servers here."""
    usual = {"connect_timeout": 10.0, "read_timeout": 30.0, "stall_timeout": 30.0}

    def open_one(*, proxy=None, ca_bundle=authority.bundle, **limits):
        config = Config(connections=4, **{**usual, **limits})
        return opened(HttpClient(HttpOptions(config=config, proxy=proxy, ca_bundle=ca_bundle)))

    return open_one


# stores, which are closed at the end of the test


@pytest.fixture
def opened():
    """Takes a store, and closes it."""
    with contextlib.ExitStack() as stack:
        yield lambda store: stack.enter_context(contextlib.closing(store))


@pytest.fixture
def open_s3(server, opened):
    """Opens stores of S3: at the stub, unless another endpoint is given."""

    def open_one(bucket="bucket", *, stall_timeout=30.0, checksum="auto", **options):
        if "endpoint_url" not in options:
            options = {"endpoint_url": server.url, "addressing_style": "path", **options}
        limits = {"connections": 2, "stall_timeout": stall_timeout, "checksum": checksum}
        return opened(S3Store(bucket, Config(s3=S3Options(**options), **limits)))

    return open_one


@pytest.fixture
def open_gcs(server, opened):
    """Opens stores of Google's: at the stub, unless another endpoint is given."""

    def open_one(*, checksum="auto", **options):
        options = GCSOptions(**{"endpoint_url": server.url, **options})
        return opened(GCSStore("bucket", Config(gcs=options, connections=2, checksum=checksum)))

    return open_one


@pytest.fixture
def azure_key(monkeypatch):
    """The key of an account, and no other credentials of Azure."""
    for name in list(os.environ):
        if name.startswith(("AZURE_", "IDENTITY_", "MSI_", "REQUESTS_CA_", "CURL_CA_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "account")
    monkeypatch.setenv("AZURE_STORAGE_KEY", AZURE_KEY)
    return AZURE_KEY


@pytest.fixture
def open_azure(server, opened, azure_key):
    """Opens stores of Azure: at the stub, unless another endpoint is given."""

    def open_one(*, uri="az://container/run", checksum="auto", **options):
        place = CheckpointURI.parse(uri)
        options = AzureOptions(**{"endpoint_url": server.url, **options})
        config = Config(azure=options, checksum=checksum)
        return opened(AzureStore(place.bucket, config, place.account, place.root))

    return open_one


# accounts of Google's


@pytest.fixture(scope="session")
def private_key():
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem, kind = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(pem, kind, serialization.NoEncryption()).decode()


@pytest.fixture
def google_account(tmp_path, monkeypatch, private_key):
    """Writes the file of an account whose tokens come from a URL, and names it to google-auth."""
    subject, path = tmp_path / "subject", tmp_path / "account.json"
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
    monkeypatch.setenv("NO_GCE_CHECK", "true")

    def write(kind, url, **more):
        subject.write_text("subject-token-of-this-test")
        fields = {
            "service_account": {
                "client_email": "job@project.iam.gserviceaccount.com",
                "private_key_id": "1",
                "private_key": private_key,
                "token_uri": f"{url}/token",
            },
            "external_account": {
                "audience": "//iam.googleapis.com/projects/1/locations/global/"
                "workloadIdentityPools/p/providers/q",
                "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
                "token_url": f"{url}/sts",
                "credential_source": {"file": str(subject)},
            },
        }
        path.write_text(json.dumps({"type": kind, **fields[kind], **more}))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
        return subject

    return write
