"""How the proxy names requests: the same in every dialect."""

import pytest

import cloudckpt
from wire.naming import azure_naming, google_naming

from .selection import everywhere
from .states import BIG, filled, load_step

GOOGLE = [
    ("POST", "/upload/storage/v1/b/bucket/o?uploadType=multipart&name=a%2Fb", "PutObject"),
    ("GET", "/storage/v1/b/bucket/o/a%2Fb?fields=size", "HeadObject"),
    ("GET", "/storage/v1/b/bucket/o/a%2Fb?alt=media", "GetObject"),
    ("GET", "/download/storage/v1/b/bucket/o/a%2Fb?alt=media", "GetObject"),
    ("DELETE", "/storage/v1/b/bucket/o/a%2Fb", "DeleteObject"),
    ("POST", "/bucket/a/b?uploads", "CreateMultipartUpload"),
    ("PUT", "/bucket/a/b?partNumber=1&uploadId=x", "UploadPart"),
    ("POST", "/bucket/a/b?uploadId=x", "CompleteMultipartUpload"),
    ("DELETE", "/bucket/a/b?uploadId=x", "AbortMultipartUpload"),
]
AZURE = [
    ("PUT", "/account/bucket/a/b?sig=x", "PutObject"),
    ("PUT", "/account/bucket/a/b?comp=block&blockid=x&sig=x", "UploadPart"),
    ("PUT", "/account/bucket/a/b?comp=blocklist", "CompleteMultipartUpload"),
    ("GET", "/account/bucket/a/b?comp=blocklist&blocklisttype=uncommitted", "ListParts"),
    ("GET", "/account/bucket/a/b", "GetObject"),
    ("HEAD", "/account/bucket/a/b", "HeadObject"),
    ("DELETE", "/account/bucket/a/b", "DeleteObject"),
]


@pytest.mark.parametrize(("method", "target", "operation"), GOOGLE)
def test_google_calls_it_otherwise(method, target, operation):
    assert google_naming(method, target) == (operation, "/bucket/a/b")


@pytest.mark.parametrize(("method", "target", "operation"), AZURE)
def test_azure_calls_it_otherwise(method, target, operation):
    assert azure_naming(method, target) == (operation, "/bucket/a/b")


@pytest.mark.parametrize(
    ("naming", "method", "target", "operation", "path"),
    [
        (google_naming, "GET", "/storage/v1/b/bucket/o?prefix=a", "ListObjectsV2", "/bucket"),
        (google_naming, "GET", "/bucket?uploads&prefix=a", "ListMultipartUploads", "/bucket"),
        (google_naming, "POST", "/batch/storage/v1", "DeleteObjects", "/"),
        (azure_naming, "GET", "/account/bucket?comp=list", "ListObjectsV2", "/bucket"),
        (
            azure_naming,
            "GET",
            "/account/bucket?comp=list&include=uncommittedblobs",
            "ListMultipartUploads",
            "/bucket",
        ),
        (azure_naming, "POST", "/account/bucket?comp=batch", "DeleteObjects", "/bucket"),
    ],
)
def test_what_is_asked_of_a_bucket_has_a_name_too(naming, method, target, operation, path):
    assert naming(method, target) == (operation, path)


@everywhere()
def test_every_request_of_a_save_a_load_and_a_listing_has_a_name(dialect, store, proxy, shaky):
    for step in (1, 2):
        cloudckpt.save(filled(step), checkpoint_id=store.uri("run"), config=shaky)
    assert load_step(store.uri("run"), shaky, BIG) == 2
    assert len(cloudckpt.list_checkpoints(store.uri(""), config=shaky)) == 1
    names = {request.operation for request in proxy.requests()}
    begun = set() if dialect == "azure" else {"CreateMultipartUpload"}
    assert names == begun | {
        "HeadObject", "UploadPart", "CompleteMultipartUpload", "PutObject", "GetObject",
        "DeleteObject", "ListObjectsV2",
    }  # fmt: skip
