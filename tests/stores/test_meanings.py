"""What the answers of failure mean: which error, and whether it is the store's own word for it."""

import pickle

import pytest

from cloudckpt import errors
from cloudckpt.stores.azure import errors as azure_errors
from cloudckpt.stores.gcs import errors as gcs_errors
from cloudckpt.stores.s3 import errors as s3_errors
from cloudckpt.stores.s3.access import BucketAccess
from support.dialects import DIALECTS, NAMESPACE, answers_of, error_json, error_xml, put, xml_of

WORDS = "the vendor's words"
URI = "x://bucket/run/object"

S3_CODES = {
    errors.ObjectNotFoundError: "404 NoSuchKey, 404 NoSuchUpload, 404",
    errors.BucketNotFoundError: "404 NoSuchBucket, 404 NoSuchAccessPoint",
    errors.AccessDeniedError: (
        "403 AccessDenied, 403 AllAccessDisabled, 403, 403 NotSignedUp, 400 "
        "KMS.AccessDeniedException"
    ),
    errors.CredentialsError: (
        "403 InvalidAccessKeyId, 403 SignatureDoesNotMatch, 403 ExpiredToken, 400 ExpiredToken, "
        "400 InvalidToken, 401, 403 InvalidSecurity"
    ),
    errors.ClockError: "403 RequestTimeTooSkewed, 403 RequestExpired",
    errors.WrongRegionError: (
        "301 PermanentRedirect, 307 TemporaryRedirect, 400 AuthorizationHeaderMalformed, 400 "
        "IllegalLocationConstraintException, 301"
    ),
    errors.PreconditionFailedError: "412 PreconditionFailed, 412",
    errors.ThrottledError: (
        "400 PriorRequestNotComplete, 400 ThrottledException, 400 RequestThrottledException, 400 "
        "BandwidthLimitExceeded, 400 KMS.ThrottlingException, 503 SlowDown, 503 "
        "ServiceUnavailable, 503, 429 TooManyRequests, 429 QuotaExceeded, 429 AccessDenied, 400 "
        "ThrottlingException"
    ),
    errors.ServerError: (
        "400 RequestTimeoutException, 500 InternalFailure, 400 XAmzContentSHA256Mismatch, 500 "
        "KMS.KMSInternalException, 500 KMS.KeyUnavailableException, 503 "
        "KMS.DependencyTimeoutException, 409 ConditionalRequestConflict, 409 OperationAborted, "
        "400 BadDigest, 400 RequestTimeout, 400 IncompleteBody, 500 InternalError, 502, 504"
    ),
    errors.InvalidRequestError: (
        "400 KMS.DisabledException, 400 KMS.InvalidKeyUsageException, 400 "
        "KMS.KMSInvalidStateException, 400 KMS.NotFoundException, 400 EntityTooLarge, 400 "
        "InvalidPart, 400 SomethingNew, 405 MethodNotAllowed, 501 NotImplemented, 403 "
        "InvalidObjectState"
    ),
    errors.RangeNotSatisfiableError: "416 InvalidRange, 416",
    errors.StorageFullError: "507 XMinioStorageFull, 403 QuotaExceeded",
}
GOOGLE_REASONS = {
    errors.ServerError: (
        "400 badDigest, 408, 408 uploadBrokenConnection, 409 conflict, 500 backendError"
    ),
    errors.InvalidRequestError: "400 invalid, 400 somethingNew, 400 userProjectMissing, 410 gone",
    errors.CredentialsError: "401, 401 authError",
    errors.AccessDeniedError: (
        "403, 403 forbidden, 403 retentionPolicyNotMet, 403 userProjectAccessDenied, "
        "412 orgPolicyConstraintFailed"
    ),
    errors.StorageFullError: "403 quotaExceeded",
    errors.ThrottledError: (
        "403 userRateLimitExceeded, 429, 429 orgPolicyConstraintFailed, 429 quotaExceeded, 503, "
        "503 backendError"
    ),
    errors.ObjectNotFoundError: "404, 404 notFound",
    errors.PreconditionFailedError: "412, 412 conditionNotMet",
    errors.RangeNotSatisfiableError: "416, 416 requestedRangeNotSatisfiable",
}
GOOGLE_CODES = {
    errors.ServerError: "400 CrcMismatch, 408 RequestTimeout, 500 InternalError",
    errors.InvalidRequestError: "400 EntityTooSmall, 400 UserProjectMissing, 501 NotImplemented",
    errors.CredentialsError: "401 AuthenticationRequired",
    errors.AccessDeniedError: "403 AccessDenied, 403 RetentionPolicyNotMet",
    errors.BucketNotFoundError: "404 NoSuchBucket",
    errors.ObjectNotFoundError: "404 NoSuchKey, 404 NoSuchUpload",
    errors.PreconditionFailedError: "412 PreconditionFailed",
    errors.ThrottledError: "429 QuotaExceeded, 503 ServiceUnavailable",
}
AZURE_CODES = {
    errors.ObjectNotFoundError: "400 InvalidBlockList, 404 BlobNotFound",
    errors.BucketNotFoundError: "404 ContainerNotFound",
    errors.AccessDeniedError: (
        "403, 403 AuthorizationSourceIPMismatch, 403 KeyVaultSomethingNew, "
        "404 KeyVaultVaultNotFound, "
        "403 UnauthorizedBlobOverwrite, 403 RequestForbiddenByContainerEncryptionPolicy, "
        "409 BlobImmutableDueToLegalHold, 409 ContainerImmutabilityPolicyLocked, "
        "409 PublicAccessNotPermitted"
    ),
    errors.CredentialsError: (
        "400 InvalidAuthenticationInfo, 401, 401 NoAuthenticationInformation, "
        "403 AuthenticationFailed, 403 KeyBasedAuthenticationNotPermitted"
    ),
    errors.PreconditionFailedError: "409 BlobAlreadyExists, 412, 412 ConditionNotMet",
    errors.InvalidRequestError: (
        "400 BlobApiNotYetSupportedForHierarchicalNamespaceAccounts, 400 InvalidBlobTier, "
        "400 InvalidHeaderValue, 409, 409 BlobArchived, 409 BlobOperationNotSupported, "
        "409 LeaseAlreadyPresent, 409 SomethingNew, 412 LeaseIdMissing, 413 RequestBodyTooLarge"
    ),
    errors.ThrottledError: (
        "429, 429 KeyVaultSomethingNew, 500 ServerBusy, 503, 503 KeyVaultSomethingNew"
    ),
    errors.ServerError: (
        "400 Crc64Mismatch, 408, 409 ContainerBeingDeleted, 500 InternalError, "
        "500 KeyVaultSomethingNew, 500 OperationTimedOut, 502"
    ),
    errors.TLSError: "400 TlsVersionNotPermitted",
    errors.RangeNotSatisfiableError: "416, 416 InvalidRange",
}


def in_xml(status, code):
    return {}, error_xml(code, WORDS)


def in_google_xml(status, code):
    return {}, xml_of("Error", NAMESPACE, Code=code, Message=WORDS)


def in_json(status, code):
    return {}, error_json(status, code, WORDS)


def in_azure_xml(status, code):
    return {}, "\ufeff".encode() + error_xml(code, WORDS.replace(" ", "\n"))


def in_a_header(status, code):
    return {"x-ms-error-code": code}, b""


SAID = {
    in_xml: ("s3", S3_CODES),
    in_json: ("google", GOOGLE_REASONS),
    in_google_xml: ("google", GOOGLE_CODES),
    in_azure_xml: ("azure", AZURE_CODES),
    in_a_header: ("azure", AZURE_CODES),
}


@pytest.fixture(scope="module")
def stores():
    stores = {name: dialect.open("http://127.0.0.1:9") for name, dialect in DIALECTS.items()}
    yield stores
    for store in stores.values():
        store.close()


@pytest.mark.parametrize(
    ("said", "status", "code", "expected"),
    [(said, *answer) for said, (_, table) in SAID.items() for answer in answers_of(table)],
)
def test_an_answer_of_failure_has_a_name(stores, said, status, code, expected):
    headers, body = said(status, code) if code else ({}, b"")
    headers = {"x-amz-bucket-region": "eu-west-3", **headers}
    error = stores[SAID[said][0]].failure(status, headers, body, "PUT", URI)
    assert type(error) is expected
    assert error.uri == URI
    assert f"HTTP {status}" in str(error)
    assert code in str(error)
    assert (WORDS in str(error)) is bool(body)


# what is certain

HTML = b"<html><head><title>Access Denied</title></head><body><h1>Denied</h1></body></html>"


S3, GCS, AZURE = s3_errors.from_answer, gcs_errors.from_answer, azure_errors.from_answer
READERS = {
    in_xml: S3,
    in_google_xml: GCS,
    in_json: GCS,
    in_azure_xml: AZURE,
    in_a_header: AZURE,
}
CERTAIN = {
    in_xml: (
        "412 PreconditionFailed, 403 AccessDenied, 404 NoSuchBucket, 400 BadDigest, "
        "409 ConditionalRequestConflict, 400 KMS.DisabledException, 301 PermanentRedirect, "
        "503 SlowDown, 503 ServiceUnavailable, 429 TooManyRequests, 507 XMinioStorageFull, "
        "501 NotImplemented"
    ),
    in_json: "412 conditionNotMet, 403 forbidden, 429 rateLimitExceeded, 503 backendError",
    in_google_xml: "412 PreconditionFailed, 503 ServiceUnavailable",
    in_azure_xml: "409 BlobAlreadyExists",
    in_a_header: "412 ConditionNotMet, 403 AuthorizationFailure, 503 ServerBusy, 409 SomethingNew",
}
UNCERTAIN = {
    in_xml: (
        "500 InternalError, 400 RequestTimeout, 400 RequestTimeoutException, 503 SomethingNew, "
        "403 403, 403"
    ),
    in_json: "500 backendError, 408 requestTimeout",
    in_a_header: "500 OperationTimedOut, 503 OperationTimedOut, 500 InternalError, 409 409",
}
FAILED = b'{"error": {"code": 412, "message": "text", "status": "FAILED_PRECONDITION"}}'
ODD_ANSWERS = [
    (GCS, 412, {}, FAILED, True),
    (AZURE, 403, {"x-ms-error-code": "AuthorizationFailure"}, HTML, True),
    (S3, 503, {}, b"upstream connect error or disconnect/reset before headers", False),
    *((S3, status, {}, HTML, False) for status in (502, 403, 412)),
    *((S3, status, {}, b"", False) for status in (503, 412)),
    (S3, 503, {}, xml_of("fault", Code="SlowDown"), False),
    (S3, 503, {}, error_xml("SlowDown")[:-4], False),
    (S3, 503, {"x-ms-error-code": "ServerBusy"}, b"", False),
    (S3, 429, {}, error_json(429, "rateLimitExceeded"), False),
    (GCS, 503, {}, b'{"code": 503, "message": "no healthy upstream"}', False),
    (GCS, 503, {}, b'{"error": "rateLimitExceeded"}', False),
    (GCS, 429, {}, b"rateLimitExceeded", False),
    (GCS, 503, {}, HTML, False),
    (GCS, 412, {}, b"Precondition Failed", False),
    (AZURE, 503, {}, HTML, False),
    (AZURE, 412, {}, b"", False),
]
WORDED = [
    (READERS[said], status, *said(status, code), certain)
    for certain, table in ((True, CERTAIN), (False, UNCERTAIN))
    for said, codes in table.items()
    for status, code, _ in answers_of({None: codes})
]


@pytest.mark.parametrize(("read", "status", "headers", "body", "certain"), [*WORDED, *ODD_ANSWERS])
def test_a_refusal_in_the_vendors_words_is_certain_and_a_gateways_is_not(
    read, status, headers, body, certain
):
    """Nor what has begun, and may end well."""
    error = read(status, headers, body, "PUT", "x://bucket/key")
    assert error.certain is certain
    assert pickle.loads(pickle.dumps(error)).certain is certain


@pytest.mark.parametrize("read", [S3, GCS, AZURE])
@pytest.mark.parametrize("status", [408, 421, 425, 499, 500, 502, 504])
def test_what_a_gateway_says_of_its_own_troubles_is_tried_again(read, status):
    error = read(status, {}, HTML, "PUT", "s3://bucket/key")
    assert isinstance(error, errors.TransientStoreError)
    assert not error.certain


@pytest.mark.parametrize("read", [S3, GCS, AZURE])
def test_a_proxy_that_asks_for_a_password_is_named(read):
    error = read(407, {}, HTML, "PUT", "s3://bucket/key")
    assert not isinstance(error, errors.TransientStoreError)
    assert "a proxy requires a user" in str(error)


def test_what_could_not_be_signed_is_certain(open_s3, server, monkeypatch):
    """Credentials that were there at first could not be renewed."""

    def sign(*_):
        raise errors.CredentialsError("they have expired")

    monkeypatch.setattr(BucketAccess, "authorize", sign)
    with pytest.raises(errors.CredentialsError) as caught:
        put(open_s3())
    assert caught.value.certain
    assert server.requests == []
