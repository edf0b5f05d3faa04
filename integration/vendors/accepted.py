"""The differences that are right, each with its reason.

A row names operations, field, value of the vendor's client and ours, as patterns, and stands for a
difference that occurs: one that no longer does has to go. None: the request has no such field.
"""

from __future__ import annotations

from .differences import Accepted

__all__ = ["BY_CLOUD", "EVERYWHERE"]

_URL = "run%2Fa%20b%2Fgr%C3%B6%C3%9Fe%2B%252F%26%3D%3B%231~.metadata"  # of the key

# The names of these headers, and whether there are any, are a matter of the client's version.
EVERYWHERE = [
    Accepted("*", "header user-agent", "*", "cloudckpt/*", "each client tells its own name"),
    Accepted("*", "header content-length", "(that of the body)", None,
             "of a DELETE without a body: HTTP wants none"),
]  # fmt: skip

_ABOUT_ANSWERS = [
    Accepted("*", "header connection", "keep-alive", None, "the default of HTTP/1.1"),
    Accepted("*", "header accept", "*", None, "each kind of answer is known in one form only"),
    Accepted("*", "header accept-encoding", "*", "identity",
             "objects are wanted as they are stored"),
]  # fmt: skip

_DECLARATION = Accepted(
    "*", "body xml declaration", None, "<?xml version='1.0' encoding='utf-8'?>",
    "the default of XML, said aloud",
)  # fmt: skip

_UNKNOWN = "s3, another vendor: delete, pinned"

_S3 = [
    _DECLARATION,
    Accepted(_UNKNOWN, "method", "DELETE", "HEAD",
             "a vendor who does not document conditions of deletions may ignore them: the version "
             "is compared before"),
    Accepted(_UNKNOWN, "header if-match", "*", None, "goes with the method"),
    Accepted(_UNKNOWN, "signed if-match", "yes", None, "goes with the method"),
    Accepted(_UNKNOWN, "request 2", None, "DELETE *", "once the version has been compared"),
    Accepted("s3*", "header amz-sdk-*", "*", None, "botocore's count of its tries; not for S3"),
    Accepted("s3*", "header expect", "100-continue", None,
             "it costs a round trip; it is sent after an answer that asks to slow down only"),
    Accepted("s3*: part, large", "header x-amz-content-sha256", "*", "UNSIGNED-PAYLOAD",
             "TLS and CRC32C guard the payload; S3 documents that it may be unsigned over https"),
    Accepted("s3*: completion", "header x-amz-content-sha256", "*", "*", "that of the body"),
    Accepted("s3*", "body xmlns", "http://s3.amazonaws.com/doc/2006-03-01/", None,
             "S3 and others take the elements without their namespace, as older clients send them"),
    Accepted("s3*", "header content-type", None, "application/xml", "the type of the body"),
    Accepted("s3*", "signed content-type", None, "yes", "SigV4 wants it signed where it is sent"),
    Accepted("s3*", "header x-amz-checksum-mode", "ENABLED", None,
             "asks for the checksum of the whole object; our own of each block is compared"),
    Accepted("s3*", "signed x-amz-checksum-mode", "yes", None, "goes with the header"),
    Accepted("s3*: create upload", "header x-amz-meta-cloudckptattempt", "*", "*",
             "each upload draws its own name"),
    Accepted("s3*: list uploads", "query encoding-type", None, "=url",
             "a key may have characters that XML does not have"),
    Accepted("s3, us-east-1: *", "host", "bucket.s3.amazonaws.com",
             "bucket.s3.us-east-1.amazonaws.com",
             "the global endpoint is boto3's default for compatibility only; AWS advises the "
             "regional one"),
    Accepted("s3, us-east-1: *", "header host", "bucket.s3.amazonaws.com",
             "bucket.s3.us-east-1.amazonaws.com", "goes with the host"),
]  # fmt: skip

_GCS = [
    *_ABOUT_ANSWERS,
    _DECLARATION,
    Accepted("gcs*", "header x-goog-api-client", "*", "cred-type/sa",
             "the client's count of its own use; ours is google-auth's"),
    Accepted("gcs, anonymous: *", "header x-goog-api-client", "*", None,
             "the client's count of its own use"),
    Accepted("gcs*", "header x-upload-content-type", "*", None,
             "for resumable uploads; the client sends it with everything"),
    Accepted("gcs*: put*", "body part 1 name", "*", None, "in the query: documented for both"),
    Accepted("gcs*: put*", "query name", None, "*", "instead of the metadata: documented for both"),
    Accepted("gcs*: put*", "body part 1 contentType", None, '"application/octet-stream"',
             "the same as the type of the second part, which counts where it is left out"),
    Accepted("gcs*", "query fields", None, "*", "the answer shall have no more than we read"),
    Accepted("gcs*", "query ifMetagenerationNotMatch", None, "*",
             "caches know public content by the whole URL: a new one has the current object"),
    Accepted("gcs, all options: *", "header x-goog-user-project", None, "payer",
             "Google's system parameter for the project that pays, in both APIs"),
    Accepted("gcs*", "path", f"/bucket/{_URL}", f"/bucket/{_URL.replace('%2F', '/')}",
             "in the XML API a slash of the key may stand as it is"),
    Accepted("gcs*: part", "header content-type", "application/octet-stream", None,
             "the upload has been told; that of a part does not count"),
    Accepted("gcs*: completion", "header content-type", "application/octet-stream",
             "application/xml", "the type of the body"),
    *(
        Accepted(f"gcs, all options: {operation}", f"header {header}", "*", None,
                 "the upload has been told when it began")
        for operation in ("part", "completion")
        for header in (
            "x-goog-storage-class",
            "x-goog-encryption-kms-key-name",
        )
    ),
    *(
        Accepted(f"gcs*: {operation}", f"header {header}", "*", None,
                 "the upload has been told when it began")
        for operation in ("part", "completion")
        for header in ("cache-control", "x-goog-meta-cloudckptattempt")
    ),
    Accepted("gcs*: create upload", "header x-goog-meta-cloudckptattempt", "*", "*",
             "each upload draws its own name"),
    Accepted("gcs*", "header content-type", "application/json; charset=UTF-8", None,
             "of a GET without a body"),
    Accepted("gcs*", "query projection", "=noAcl", None, "the default"),
    Accepted("gcs*", "query prefix", "=run%2Fa+b%2B%C3%BC%2F", "=run%2Fa%20b%2B%C3%BC%2F",
             "the same space, written as in paths"),
    Accepted("gcs*", "query prettyPrint", "=false", None,
             "a few spaces in answers of four fields"),
]  # fmt: skip

_AZURE = [
    *_ABOUT_ANSWERS,
    Accepted("azure*", "header x-ms-client-request-id", "*", None, "the client's own number"),
    Accepted("azure*", "header x-ms-version", "*", "2021-12-02",
             "the version that requests were written for, which Azure keeps"),
    Accepted("azure*", "header content-type", "application/octet-stream", None, "the default"),
    Accepted("azure*", "header x-ms-content-crc64", None, "*",
             "Azure compares it; the client sends a checksum on demand only"),
    Accepted("azure*: completion", "body /BlockList/Latest[[]?]", "*", None,
             "a block of this upload is uncommitted: a committed one of its name is not ours"),
    Accepted("azure*: completion", "body /BlockList/Uncommitted[[]?]", None, "*",
             "a block of this upload is uncommitted: a committed one of its name is not ours"),
    Accepted("azure*: cop*", "header x-ms-copy-source", "*[?]a=signature", "*",
             "callers of the client bring what authorizes the source; we sign it or send a token"),
    Accepted("azure, token*: cop*", "header x-ms-copy-source-authorization", None, "Bearer token",
             "what authorizes the source"),
    Accepted("azure*: copied part", "header x-ms-source-if-match", None, "*",
             "documented; the client has no option for it"),
    Accepted("azure*: get", "header x-ms-range", "bytes=0-33554431", None,
             "the client fetches large blobs piece by piece; we know the size"),
    Accepted("azure*: range*", "header x-ms-range", "bytes=2-4", None, "the same, as Range"),
    Accepted("azure*: range*", "header range", None, "bytes=2-4",
             "documented: either header; x-ms-range wins if both are there"),
]  # fmt: skip

BY_CLOUD = {"s3": _S3, "gcs": _GCS, "azure": _AZURE}
