"""Stubs of the stores with S3's API: moto, with what their vendors document to be otherwise.

They are made of the documentation that ``cloudckpt.stores.s3.dialects`` names, not of the stores.
Where it says nothing, they do what is worst for a client: they ignore a condition.
"""

import datetime
import hashlib
import http.client
import re
import secrets
import time
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

_HOP = ("host", "connection", "content-length", "transfer-encoding", "accept-encoding")
_CONDITIONS = ("If-Match", "If-None-Match")


def error(status, code):
    return status, {}, f"<Error><Code>{code}</Code><Message>stub</Message></Error>".encode()


class Asked:
    """A request, by what it is about."""

    def __init__(self, request, path):
        parts = urlsplit(path)
        self.path, self.query = parts.path, parse_qs(parts.query, keep_blank_values=True)
        self.target = path
        self.headers = {
            name: value for name, value in request.headers.items() if name.lower() not in _HOP
        }
        self.body, self.method = request.body, request.method

    @property
    def key(self):
        return self.path.lstrip("/").partition("/")[2]

    @property
    def operation(self):
        query, method = self.query, self.method
        copies = self.header("x-amz-copy-source") is not None
        if not self.key:
            return "ListUploads" if "uploads" in query else "List"
        if method == "POST":
            return "CreateUpload" if "uploads" in query else "Complete"
        if method == "PUT" and "partNumber" in query:
            return "CopyPart" if copies else "PutPart"
        if method == "PUT":
            return "Copy" if copies else "Put"
        return {"GET": "Get", "HEAD": "Head", "DELETE": "Abort" if query else "Delete"}[method]

    def header(self, name):
        return next((v for n, v in self.headers.items() if n.lower() == name.lower()), None)

    def only(self, *names):
        return {name: self.header(name) for name in names if self.header(name) is not None}

    def without(self, *names):
        lower = {name.lower() for name in names}
        self.headers = {n: v for n, v in self.headers.items() if n.lower() not in lower}


class VendorStub:
    """Stands before moto.

    Attributes:
        deletes_on_condition: Whether DeleteObject honours If-Match.
        ignored: The conditions that are ignored, by operation.
        unknown: Operations that are answered with 501.
        log: The operations, in order, each with the request as it came.
    """

    deletes_on_condition = False
    ignored: ClassVar = {"Complete": _CONDITIONS, "Copy": _CONDITIONS}
    unknown = ()

    def __init__(self, server, moto_url):
        self.server, self._moto = server, urlsplit(moto_url).netloc
        self.log = []
        server.respond(self)

    def __call__(self, request):
        asked = Asked(request, self.path_of(request))
        self.log.append((asked.operation, request))
        status, headers, body = self.answer(asked)
        headers = {n: v for n, v in headers.items() if n.lower() not in (*_HOP, "server", "date")}
        size = int(headers.pop("size")) if "size" in headers else None
        return self.server.Answer(status, headers, body, size=size)

    def path_of(self, request):
        return request.target

    def operations(self):
        return [operation for operation, _ in self.log]

    def answer(self, asked):
        operation = asked.operation
        if operation in self.unknown:
            return error(501, "NotImplemented")
        if operation == "Delete":
            wanted = asked.header("If-Match") if self.deletes_on_condition else None
            if wanted is not None:
                status, found, _ = self.forward("HEAD", asked.path, asked.only("Authorization"))
                if status == 200 and found["ETag"] != wanted:
                    return error(412, "PreconditionFailed")
            asked.without("If-Match")
        asked.without(*self.ignored.get(operation, ()))
        return self.forward(asked.method, asked.target, asked.headers, asked.body)

    def forward(self, method, target, headers, body=b""):
        connection = http.client.HTTPConnection(self._moto, timeout=60)
        try:
            connection.request(method, target, body=body or None, headers=headers)
            answer = connection.getresponse()
            given = dict(answer.getheaders())
            if method == "HEAD":
                given["size"] = given.get("Content-Length", "0")
            return answer.status, given, answer.read()
        finally:
            connection.close()


class AwsStub(VendorStub):
    deletes_on_condition = True
    ignored: ClassVar = {}


class R2Stub(VendorStub):
    """https://developers.cloudflare.com/r2/api/s3/api/: CRC32C of parts only; parts of one size."""

    ignored: ClassVar = {"Copy": _CONDITIONS}  # which are called cf-copy-destination-if-match there

    def __init__(self, *given):
        super().__init__(*given)
        self._sizes = {}

    def answer(self, asked):
        if asked.header("x-amz-checksum-type") == "FULL_OBJECT":
            return error(400, "InvalidRequest")
        if asked.operation == "PutPart":
            sizes = self._sizes.setdefault(asked.query["uploadId"][0], {})
            sizes[int(asked.query["partNumber"][0])] = len(asked.body)
        if asked.operation == "Complete":
            sizes = self._sizes.pop(asked.query["uploadId"][0], {})
            before = [size for _, size in sorted(sizes.items())[:-1]]
            if len(set(before)) > 1:
                return error(400, "InvalidPart")
        if asked.operation == "Delete" and asked.header("If-Match"):
            return error(501, "NotImplemented")
        return super().answer(asked)


class MinioStub(VendorStub):
    """Its conditions of PutObject are documented; that of DeleteObject is ignored."""


class CoreWeaveStub(AwsStub):
    """Requests come by a proxy, to the host that is the bucket's: no other style is served."""

    deletes_on_condition = False

    def path_of(self, request):
        url = urlsplit(request.target)
        bucket, dot, rest = url.netloc.partition(".")
        assert (dot, rest) == (".", "cwlota.com"), url.netloc
        return f"/{bucket}{url.path}" + (f"?{url.query}" if url.query else "")


class OtherStub(VendorStub):
    """If-None-Match only."""

    ignored: ClassVar = {**VendorStub.ignored, "Put": ("If-Match",)}


class ExpressStub(AwsStub):
    """A directory bucket.

    https://docs.aws.amazon.com/AmazonS3/latest/userguide/s3-express-differences.html: sessions;
    listings in no order, of prefixes that end in a slash; ETags that are no MD5; consecutive parts;
    neither tags nor ACLs nor classes. Copies are signed by the AWS credentials.
    """

    lifetime = 300.0  # seconds of a session
    suffix = "--use1-az4--x-s3"  # which moto's bucket lacks: boto3 would ask moto for a session

    def __init__(self, *given):
        super().__init__(*given)
        self.sessions = {}  # token: (access key, until)
        self.refused = []

    def path_of(self, request):
        return request.target.replace(self.suffix, "", 1)

    def begin(self):
        token, key = f"token{secrets.token_hex(12)}", f"ASIA{secrets.token_hex(8).upper()}"
        self.sessions[token] = key, time.time() + self.lifetime
        ends = datetime.datetime.fromtimestamp(time.time() + self.lifetime, datetime.timezone.utc)
        body = (
            "<CreateSessionResult><Credentials>"
            f"<AccessKeyId>{key}</AccessKeyId><SecretAccessKey>secret</SecretAccessKey>"
            f"<SessionToken>{token}</SessionToken>"
            f"<Expiration>{ends.strftime('%Y-%m-%dT%H:%M:%SZ')}</Expiration>"
            "</Credentials></CreateSessionResult>"
        )
        return 200, {"Content-Type": "application/xml"}, body.encode()

    def answer(self, asked):
        given = asked.header("Authorization") or ""
        if "/s3express/aws4_request" not in given:
            return error(403, "AccessDenied")
        if "session" in asked.query:
            return self.begin()
        token = asked.header("x-amz-s3session-token")
        if asked.operation in ("Copy", "CopyPart"):
            if token is not None or "Credential=testing/" not in given:
                return error(403, "AccessDenied")
        else:
            key, until = self.sessions.get(token, ("", 0.0))
            if time.time() > until:
                self.refused.append(asked.operation)
                return error(400, "ExpiredToken")
            if f"Credential={key}/" not in given or asked.header("x-amz-security-token"):
                return error(403, "SignatureDoesNotMatch")
        for name in ("x-amz-tagging", "x-amz-acl", "x-amz-storage-class"):
            if asked.header(name):
                return error(501, "NotImplemented")
        prefix = asked.query.get("prefix", [""])[0]
        if (prefix and not prefix.endswith("/")) or "start-after" in asked.query:
            return error(400, "InvalidRequest")
        if "upload-id-marker" in asked.query:
            return error(501, "NotImplemented")
        self._translate(asked)
        status, headers, body = super().answer(asked)
        if asked.operation in ("List", "ListUploads"):
            body = self._shuffled(body)
        if asked.operation != "Get" or status >= 300:
            body = re.sub(rb"([0-9a-f]{32})((?:-\d+)?(?:&quot;|\"|<))", rb"r\1r\2", body)
        if "ETag" in headers:
            headers["ETag"] = re.sub(r"([0-9a-f]{32})", r"r\1r", headers["ETag"])
        return status, headers, body

    @staticmethod
    def _translate(asked):
        """ETags as moto knows them: outside they are no MD5."""
        for name in ("If-Match", "x-amz-copy-source-if-match"):
            if (value := asked.header(name)) is not None:
                asked.without(name)
                asked.headers[name] = re.sub(r"r([0-9a-f]{32})r", r"\1", value)
        if (source := asked.header("x-amz-copy-source")) is not None:
            asked.without("x-amz-copy-source")
            asked.headers["x-amz-copy-source"] = source.replace(ExpressStub.suffix, "", 1)
        if asked.operation == "Complete":
            asked.body = re.sub(rb"r([0-9a-f]{32})r", rb"\1", asked.body)

    @staticmethod
    def _shuffled(body):
        """The entries of a page, the last first."""
        for tag in (b"Contents", b"CommonPrefixes", b"Upload"):
            entries = re.findall(rb"<%s>.*?</%s>" % (tag, tag), body, re.DOTALL)
            if entries:
                first = body.index(entries[0])
                for entry in entries:
                    body = body.replace(entry, b"", 1)
                body = body[:first] + b"".join(reversed(entries)) + body[first:]
        return body


class HuggingFaceStub(VendorStub):
    """The gateway of Storage Buckets; :attr:`cdn` is the host that reads are sent on to.

    https://huggingface.co/docs/hub/storage-buckets-s3: the namespace is in the endpoint's path;
    GetObject is answered by 302 and ignores conditions; no UploadPartCopy; no metadata.
    """

    unknown = ("CopyPart",)
    lifetime = 60.0  # seconds of a signed URL

    def __init__(self, server, moto_url, cdn, namespace="me"):
        super().__init__(server, moto_url)
        self._namespace, self.cdn = f"/{namespace}/", cdn
        self.signed = {}  # path: (content, until)
        self.read, self.expired = [], []
        self.is_behind = False  # the CDN does not have what the store has
        cdn.respond(self._from_cdn)

    def path_of(self, request):
        assert request.target.startswith(self._namespace), request.target
        return request.target[len(self._namespace) - 1 :]

    def answer(self, asked):
        asked.without(*(name for name in asked.headers if name.lower().startswith("x-amz-meta-")))
        if asked.operation != "Get":
            return super().answer(asked)
        status, headers, body = self.forward("GET", asked.path, asked.only("Authorization"))
        if status != 200:
            return status, headers, body
        path, until = f"/xet/{secrets.token_hex(8)}", time.time() + self.lifetime
        self.signed[path] = body, until
        return 302, {"Location": f"{self.cdn.url}{path}?Expires={until}&Signature=SIGNED"}, b""

    def _from_cdn(self, request):
        """Content of Xet, by its own ETag, and for nobody who shows more than the URL."""
        self.read.append(request)
        answer = self.server.Answer
        given = {name.lower() for name in request.headers}
        if any(n == "authorization" or n == "if-match" or n.startswith("x-amz") for n in given):
            return answer(400, body=b"only one way of authorization, please")
        path = urlsplit(request.target).path
        if self.is_behind:
            return answer(404)
        content, until = self.signed[path]
        if time.time() > until:
            self.expired.append(request)
            return answer(403, body=b"<Error><Code>AccessDenied</Code></Error>")
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        span = request.headers.get("Range")
        if span is None:
            return answer(200, headers, content)
        first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", span).groups())
        if first >= len(content):
            return answer(416, headers)
        last = min(last, len(content) - 1)
        headers["content-range"] = f"bytes {first}-{last}/{len(content)}"  # as many servers write
        return answer(206, headers, content[first : last + 1])


STUBS = {
    "aws": AwsStub,
    "r2": R2Stub,
    "coreweave": CoreWeaveStub,
    "minio": MinioStub,
    "express": ExpressStub,
    "huggingface": HuggingFaceStub,
    "other": OtherStub,
}
