"""Which S3 operation a request is, and who carries it out."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.server import listing, multipart, single
from benchmarks.server.answers import NAMESPACE, error, xml
from benchmarks.server.call import Call, Handler
from benchmarks.server.message import Answer, Body, Request
from benchmarks.server.objects import Buckets


def call_of(request: Request) -> Call:
    """Returns what `request` calls for."""
    operation = _operation_of(request)
    return Call(operation, request, _HANDLERS.get(operation, _unknown))


def _operation_of(request: Request) -> str:
    method, query = request.method, request.query
    if not request.key:
        return _bucket_operation(method, query)
    if method == "PUT":
        if "partNumber" in query:
            return "UploadPart"
        return "CopyObject" if "x-amz-copy-source" in request.headers else "PutObject"
    if method == "POST" and "uploads" in query:
        return "CreateMultipartUpload"
    if "uploadId" in query:
        names = {"POST": "CompleteMultipartUpload", "DELETE": "AbortMultipartUpload"}
        return names.get(method, "Unknown")
    return {"GET": "GetObject", "HEAD": "HeadObject", "DELETE": "DeleteObject"}.get(
        method, "Unknown"
    )


def _bucket_operation(method: str, query: Mapping[str, str]) -> str:
    if method == "GET":
        if "location" in query:
            return "GetBucketLocation"
        return "ListMultipartUploads" if "uploads" in query else "ListObjectsV2"
    if method == "POST" and "delete" in query:
        return "DeleteObjects"
    return {"HEAD": "HeadBucket", "PUT": "CreateBucket", "DELETE": "DeleteBucket"}.get(
        method, "Unknown"
    )


def _location(_buckets: Buckets, _request: Request, body: Body) -> Answer:
    body.read()
    return xml(f"<LocationConstraint {NAMESPACE}/>")


def _yes(_buckets: Buckets, _request: Request, body: Body) -> Answer:
    body.read()
    return Answer(200, {"x-amz-bucket-region": "us-east-1"})


def _delete_bucket(buckets: Buckets, request: Request, body: Body) -> Answer:
    body.read()
    buckets.clear(request.bucket)
    return Answer(204)


def _unknown(_buckets: Buckets, request: Request, body: Body) -> Answer:
    body.read()
    return error(501, "NotImplemented", f"{request.method} {sorted(request.query)}")


_HANDLERS: dict[str, Handler] = {
    "PutObject": single.put_object,
    "CopyObject": single.copy_object,
    "GetObject": single.get_object,
    "HeadObject": single.head_object,
    "DeleteObject": single.delete_object,
    "DeleteObjects": single.delete_objects,
    "CreateMultipartUpload": multipart.create_upload,
    "UploadPart": multipart.upload_part,
    "CompleteMultipartUpload": multipart.complete_upload,
    "AbortMultipartUpload": multipart.abort_upload,
    "ListMultipartUploads": listing.list_uploads,
    "ListObjectsV2": listing.list_objects,
    "GetBucketLocation": _location,
    "HeadBucket": _yes,
    "CreateBucket": _yes,
    "DeleteBucket": _delete_bucket,
}
