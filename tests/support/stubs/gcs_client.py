"""Requests to the stub of Cloud Storage, as its own tests send them."""

import json
import xml.etree.ElementTree as ElementTree
from urllib.parse import quote, urlencode

import urllib3
from awscrt.checksums import crc32c

from cloudckpt.checksum import to_base64

from .gcs import GcsStub


class Client:
    """Requests to the stub, by one pool of connections."""

    def __init__(self, stub: GcsStub) -> None:
        self.stub, self.state = stub, stub.state
        self._pool = urllib3.PoolManager(retries=False)

    def send(self, method, path, query=None, headers=None, body=None):
        url = f"{self.stub.url}{path}" + (f"?{urlencode(query)}" if query else "")
        return self._pool.request(method, url, headers=headers, body=body)

    def insert(self, key, body=b"", headers=None, **query):
        query = {"uploadType": "media", "name": key, **query}
        return self.send("POST", "/upload/storage/v1/b/bucket/o", query, headers, body)

    def related(self, described, body, **query):
        head = json.dumps(described).encode()
        pieces = [b"--cut", b"Content-Type: application/json", b"", head]
        pieces += [b"--cut", b"Content-Type: x/y", b"", body, b"--cut--"]
        kind = {"Content-Type": 'multipart/related; boundary="cut"'}
        query = {"uploadType": "multipart", **query}
        path = "/upload/storage/v1/b/bucket/o"
        return self.send("POST", path, query, kind, b"\r\n".join(pieces))

    def object(self, method, key, headers=None, **query):
        root = "/download" if query.get("alt") == "media" else ""
        path = f"{root}/storage/v1/b/bucket/o/{quote(key, safe='')}"
        return self.send(method, path, query, headers)

    def xml(self, method, key, query=None, headers=None, body=None):
        return self.send(method, f"/bucket/{quote(key)}", query, headers, body)

    def begin(self, key, **headers):
        answer = self.xml("POST", key, {"uploads": ""}, headers)
        return ElementTree.fromstring(answer.data).findtext("{*}UploadId")

    def part(self, key, upload_id, number, body):
        query = {"partNumber": str(number), "uploadId": upload_id}
        return self.xml("PUT", key, query, {"x-goog-hash": hash_of(body)}, body)

    def complete(self, key, upload_id, tags):
        inner = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{tag}</ETag></Part>"
            for number, tag in tags
        )
        body = f"<CompleteMultipartUpload>{inner}</CompleteMultipartUpload>"
        return self.xml("POST", key, {"uploadId": upload_id}, body=body)

    def close(self):
        self._pool.clear()


def hash_of(body: bytes) -> str:
    return f"crc32c={to_base64(crc32c(body))}"


def reason(answer) -> str:
    return answer.json()["error"]["errors"][0]["reason"]


def code(answer) -> str:
    return ElementTree.fromstring(answer.data).findtext("Code")


def texts(answer, path) -> list[str]:
    names = "/".join(f"{{*}}{name}" for name in path.split("/"))
    return [element.text for element in ElementTree.fromstring(answer.data).iterfind(names)]
