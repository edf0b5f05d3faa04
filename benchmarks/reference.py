"""The reference: what moving and checksumming the bytes costs when nothing else is done.

A thread for each connection, plain sockets, 16 MiB parts; no SDK, no signing, no serialisation.
Under TLS the sockets are a few lines of C. Each part is checksummed and then sent from, or received
into, the tensor's own memory. No client that reads every byte and checks it can use less CPU than
about this.
"""

from __future__ import annotations

import queue
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from awscrt import checksums

from benchmarks.places import Place
from benchmarks.reference_tls import TlsSocket

PART_SIZE = 16 * 1024 * 1024
_TIMEOUT = 120.0


@dataclass(frozen=True)
class Part:
    """One request's share: where its bytes are, and where they stand in the object."""

    number: int
    offset: int
    view: memoryview


class Reference:
    """Saves all tensors into one object by multipart upload; loads it by ranged GETs."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._bucket = place.bucket
        self._connections = place.connections
        self._checksums: dict[tuple[str, int], int] = {}

    def save(self, state_dict: Mapping[str, torch.Tensor], name: str) -> None:
        """Uploads `state_dict` as one object."""
        path = f"/{self._bucket}/{name}/data"
        with _Connection(self._place) as control:
            started = control.request("POST", f"{path}?uploads")
            found = re.search(rb"<UploadId>(.*?)</UploadId>", started)
            assert found is not None
            upload = found.group(1).decode()
            etags: dict[int, str] = {}

            def send(connection: _Connection, part: Part) -> None:
                target = f"{path}?partNumber={part.number}&uploadId={upload}"
                checksum = checksums.crc32c(part.view)
                etags[part.number] = connection.put(target, part.view, checksum)

            self._for_each_part(state_dict, send)
            rows = "".join(
                f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>"
                for number, etag in sorted(etags.items())
            )
            document = f"<CompleteMultipartUpload>{rows}</CompleteMultipartUpload>"
            control.request("POST", f"{path}?uploadId={upload}", document.encode())

    def load(self, state_dict: Mapping[str, torch.Tensor], name: str) -> None:
        """Fills `state_dict` in place, checksumming each part."""
        path = f"/{self._bucket}/{name}/data"

        def receive(connection: _Connection, part: Part) -> None:
            connection.get(path, part)
            self._checksums[name, part.number] = checksums.crc32c(part.view)

        self._for_each_part(state_dict, receive)

    def _for_each_part(
        self, state_dict: Mapping[str, torch.Tensor], action: Callable[[_Connection, Part], None]
    ) -> None:
        waiting: queue.SimpleQueue[Part] = queue.SimpleQueue()
        for part in parts(state_dict):
            waiting.put(part)
        failures: list[BaseException] = []

        def work() -> None:
            try:
                with _Connection(self._place) as connection, suppress(queue.Empty):
                    while not failures:
                        action(connection, waiting.get_nowait())
            except BaseException as failure:  # noqa: BLE001 - raised below, in the caller
                failures.append(failure)

        threads = [threading.Thread(target=work) for _ in range(self._connections)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


class _Connection:
    """One kept-alive HTTP connection, with just enough HTTP."""

    def __init__(self, place: Place) -> None:
        sock = socket.create_connection(("127.0.0.1", place.port), timeout=_TIMEOUT)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket: socket.socket | TlsSocket = sock
        if place.bundle is not None and place.library is not None:
            self._socket = TlsSocket(sock, place.library, place.bundle)

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def request(self, method: str, target: str, body: bytes = b"") -> bytes:
        """Sends a small request and returns the answer's body."""
        self._send_head(method, target, f"Content-Length: {len(body)}\r\n")
        self._socket.sendall(body)
        head, rest = self._read_head()
        return rest + self._read(_length(head) - len(rest))

    def put(self, target: str, view: memoryview, checksum: int) -> str:
        """Sends `view` from where it lies and returns the ETag."""
        extra = f"Content-Length: {len(view)}\r\nx-bench-crc32c: {checksum:08x}\r\n"
        self._send_head("PUT", target, extra)
        self._socket.sendall(view)
        head, _ = self._read_head()
        found = re.search(rb"ETag: (.*?)\r\n", head)
        assert found is not None
        return found.group(1).decode()

    def get(self, target: str, part: Part) -> None:
        """Receives a range into the part's memory."""
        last = part.offset + len(part.view) - 1
        self._send_head("GET", target, f"Range: bytes={part.offset}-{last}\r\n")
        head, rest = self._read_head()
        assert _length(head) == len(part.view), head
        part.view[: len(rest)] = rest
        done = len(rest)
        while done < len(part.view):
            count = self._socket.recv_into(part.view[done:])
            if count == 0:
                raise ConnectionError("the server closed the connection")
            done += count

    def _send_head(self, method: str, target: str, extra: str) -> None:
        head = f"{method} {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n{extra}\r\n"
        self._socket.sendall(head.encode())

    def _read_head(self) -> tuple[bytes, bytes]:
        data = b""
        while b"\r\n\r\n" not in data:
            piece = self._socket.recv(8192)
            if not piece:
                raise ConnectionError("the server closed the connection")
            data += piece
        head, _, rest = data.partition(b"\r\n\r\n")
        if not head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 206")):
            raise ConnectionError(head.decode("latin-1"))
        return head + b"\r\n", rest

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self._socket.recv(count - len(data))
            if not piece:
                raise ConnectionError("the server closed the connection")
            data += piece
        return data


def _length(head: bytes) -> int:
    found = re.search(rb"Content-Length: (\d+)", head)
    return int(found.group(1)) if found else 0


def parts(state_dict: Mapping[str, torch.Tensor]) -> Iterator[Part]:
    """The bytes of all tensors in pieces of 16 MiB, without a copy."""
    offset, number = 0, 0
    for tensor in state_dict.values():
        view = memoryview(tensor.view(torch.uint8).numpy().data)
        for start in range(0, len(view), PART_SIZE):
            piece = view[start : start + PART_SIZE]
            number += 1
            yield Part(number, offset, piece)
            offset += len(piece)
