"""What emulators of Google's store lack, in front of one.

Multipart uploads of the XML API are those of the project's stub (``tests/support/stubs``) until
they are completed: then the object is written to the emulator, in one request. Content is given the
generation of its object. All else is the emulator's own.

To try ``gs://`` without an account, run gcp-storage-emulator behind it, until it is interrupted::

    PYTHONPATH=tests python integration/gcs_front.py bucket --port 4443
"""

from __future__ import annotations

import argparse
import contextlib
import json
import threading
import time
from typing import Any
from urllib.parse import quote, unquote, urlencode

import urllib3

from support.emulators import gcs_emulator
from support.stubs import gcs_json, gcs_xml
from support.stubs.gcs import GcsStub
from support.stubs.gcs_answers import Answer, Call
from support.stubs.gcs_state import Attributes, State, StoredObject

__all__ = ["GcsFront"]

_OF_THE_CONNECTION = {"connection", "content-length", "host", "transfer-encoding"}


class GcsFront(GcsStub):
    """A server in front of the emulator at a URL; a context manager."""

    def __init__(self, emulator: str, port: int = 0) -> None:
        super().__init__(port=port)
        self._emulator = _Emulator(emulator)
        self.state = _Uploads(self._emulator)

    def _own_answer(self, call: Call) -> Answer:
        request = call.request
        is_upload = "uploads" in request.query or "uploadId" in request.query
        if is_upload and not gcs_json.is_json_api(request.path):
            bucket = unquote(request.path).removeprefix("/").partition("/")[0]
            self.state.buckets.add(bucket)  # whether it is there, the emulator says in the end
            return gcs_xml.answer(self.state, call)
        target = request.path + (f"?{urlencode(request.query)}" if request.query else "")
        answer = self._emulator.send(request.method, target, dict(request.headers), call.body)
        if answer.status in (200, 206) and request.query.get("alt") == "media":
            return self._with_generation(answer, request.path.removeprefix("/download"))
        return answer

    def _with_generation(self, answer: Answer, path: str) -> Answer:
        """The answer to a read of content; gcp-storage-emulator leaves the generation out."""
        if any(name.lower() == "x-goog-generation" for name, _ in answer.headers):
            return answer
        resource = json.loads(self._emulator.send("GET", path, {}, b"").body)
        generation = ("x-goog-generation", str(resource["generation"]))
        return Answer(answer.status, [*answer.headers, generation], answer.body)


class _Emulator:
    def __init__(self, url: str) -> None:
        self._url = url
        self._pool = urllib3.PoolManager(retries=False)

    def send(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        kept = {name: value for name, value in headers.items() if name not in _OF_THE_CONNECTION}
        reply = self._pool.request(
            method, self._url + target, body=body, headers=kept, decode_content=False, timeout=120
        )
        fields = [
            field for field in reply.headers.items() if field[0].lower() not in _OF_THE_CONNECTION
        ]
        return Answer(reply.status, fields, reply.data)


class _Uploads(State):
    """The open uploads; what becomes of them is put into the emulator."""

    def __init__(self, emulator: _Emulator) -> None:
        super().__init__()
        self._emulator = emulator

    def put(
        self, bucket: str, key: str, data: bytes, attributes: Attributes, **_: Any
    ) -> StoredObject:
        """Writes an object that was sent in parts."""
        described = {"name": key, "metadata": dict(attributes.metadata)}
        body = (
            b"--cut\r\nContent-Type: application/json\r\n\r\n"
            + json.dumps(described).encode()
            + b"\r\n--cut\r\nContent-Type: application/octet-stream\r\n\r\n"
            + data
            + b"\r\n--cut--\r\n"
        )
        target = f"/upload/storage/v1/b/{quote(bucket)}/o?uploadType=multipart"
        headers = {"content-type": "multipart/related; boundary=cut"}
        answer = self._emulator.send("POST", target, headers, body)
        if answer.status != 200:
            raise RuntimeError(f"the emulator answered {answer.status}")
        return StoredObject(
            bucket=bucket,
            key=key,
            data=data,
            generation=int(json.loads(answer.body)["generation"]),
            attributes=attributes,
            created=time.time(),
        )


def main() -> None:
    """Runs gcp-storage-emulator, in memory, with a front and an empty bucket, until Ctrl-C."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("bucket")
    parser.add_argument("--port", type=int, default=4443, help="0: any free port")
    wanted = parser.parse_args()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        front = stack.enter_context(GcsFront(stack.enter_context(gcs_emulator()), wanted.port))
        buckets = f"{front.url}/storage/v1/b?project=test"
        made = urllib3.request("POST", buckets, json={"name": wanted.bucket})
        assert made.status == 200, made.data
        print(f"export STORAGE_EMULATOR_HOST={front.url} CLOUDCKPT_CONDITIONAL_WRITES=off")
        print(f"gs://{wanted.bucket} is there until Ctrl-C ends this server", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
