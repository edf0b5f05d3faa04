"""What holds for credentials from every source: used, looked for anew, waited for, believed."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import botocore.utils
import pytest
from google.auth.compute_engine import _metadata

from cloudckpt import AzureOptions, Config, GCSOptions, RetryPolicy, S3Options
from cloudckpt.errors import (
    ClockError,
    ConnectionLostError,
    CredentialsError,
    ExpiredCredentialsError,
)
from cloudckpt.stores.azure.store import AzureStore
from cloudckpt.stores.gcs.store import GCSStore
from cloudckpt.stores.s3.store import S3Store
from cloudckpt.transfer.retry import Retrier
from support.dialects import DIALECTS, at_once, error_json, error_xml

PATIENT = RetryPolicy(base=0.01, cap=0.05, deadline=20.0)
LATE = 4  # refusals before the new credentials come
SECRETS = ("secret-of-it", "token-of-it", "FIRST", "SECOND")
ROLE = "arn:aws:iam::123456789012:role/trainer"
FOREVER = "2099-01-01T00:00:00Z"
IN_AN_HOUR = {"expires_in": 3600, "token_type": "Bearer"}


@dataclass
class Here:
    """Where credentials are looked for: variables, files, and a service that gives them out."""

    patch: pytest.MonkeyPatch
    folder: object
    service: object
    account: Callable[..., object]
    answer: Callable[[object], object] | None = None
    failing: list = field(default_factory=list)

    def __post_init__(self):
        self.url = self.service.url
        self.service.respond(lambda request: (self.failing or [None])[0] or self.answer(request))

    def set(self, **variables):
        for name, value in variables.items():
            self.patch.setenv(name, value)

    def file(self, name, text):
        (self.folder / name).write_text(text if isinstance(text, str) else json.dumps(text))
        return str(self.folder / name)

    def gives(self, *documents, headers=(), **by_end_of_path):
        """The service answers with a document; or by what the path ends in."""

        def answer(request):
            path = urlsplit(request.target).path
            found = [text for end, text in by_end_of_path.items() if path.endswith(end)]
            text = (found or [*documents])[0]
            body = (text if isinstance(text, str) else json.dumps(text)).encode()
            kind = "application/json" if body.startswith(b"{") else "application/text"
            return self.service.Answer(headers={"Content-Type": kind, **dict(headers)}, body=body)

        self.answer = answer


def aws_environment(here, name):
    here.set(AWS_ACCESS_KEY_ID=name, AWS_SECRET_ACCESS_KEY="secret-of-it")


def aws_file(here, name):
    text = f"[default]\naws_access_key_id = {name}\naws_secret_access_key = secret-of-it\n"
    here.set(AWS_SHARED_CREDENTIALS_FILE=here.file("credentials", text))


def aws_process(here, name):
    said = {"Version": 1, "AccessKeyId": name, "SecretAccessKey": "secret-of-it"}
    program = f"[default]\ncredential_process = cat {here.file('said', said)}\n"
    here.set(AWS_CONFIG_FILE=here.file("config", program))


def of_sts(action, name):
    return (
        f"<{action}Response><{action}Result><Credentials><AccessKeyId>{name}</AccessKeyId>"
        "<SecretAccessKey>secret-of-it</SecretAccessKey><SessionToken>token-of-it</SessionToken>"
        f"<Expiration>{FOREVER}</Expiration></Credentials></{action}Result></{action}Response>"
    )


def aws_role(here, name):
    user = "[user]\naws_access_key_id = USER\naws_secret_access_key = its\n"
    role = f"[default]\nrole_arn = {ROLE}\nsource_profile = user\n"
    here.set(
        AWS_CONFIG_FILE=here.file("config", role),
        AWS_SHARED_CREDENTIALS_FILE=here.file("credentials", user),
        AWS_ENDPOINT_URL_STS=here.url,
    )
    here.gives(of_sts("AssumeRole", name))


def aws_web_identity(here, name):
    here.set(
        AWS_WEB_IDENTITY_TOKEN_FILE=here.file("token", "a-token"),
        AWS_ROLE_ARN=ROLE,
        AWS_ENDPOINT_URL_STS=here.url,
    )
    here.gives(of_sts("AssumeRoleWithWebIdentity", name))


def given_by_aws(name):
    keys = {"AccessKeyId": name, "SecretAccessKey": "secret-of-it", "Token": "token-of-it"}
    return {"Code": "Success", "Expiration": FOREVER, **keys}


def aws_container(here, name):
    here.set(AWS_CONTAINER_CREDENTIALS_FULL_URI=f"{here.url}/of-the-task")
    here.gives(given_by_aws(name))


def aws_instance(here, name):
    here.patch.delenv("AWS_EC2_METADATA_DISABLED", raising=False)
    here.set(AWS_EC2_METADATA_SERVICE_ENDPOINT=here.url)
    roles = {"security-credentials/": "role", "api/token": "token"}
    here.gives(given_by_aws(name), **roles)


def google_token(name):
    return {"access_token": name, **IN_AN_HOUR}


def google_account(here, name, kind="service_account"):
    here.account(kind, here.url)
    here.gives(google_token(name))


def google_workload(here, name):
    google_account(here, name, "external_account")


def google_machine(here, name):
    """https://cloud.google.com/compute/docs/metadata/querying-metadata."""
    here.set(GCE_METADATA_IP=here.url.removeprefix("http://"))
    here.patch.setattr(_metadata, "_GCE_METADATA_HOST", here.url.removeprefix("http://"))
    here.patch.setattr(_metadata, "_NO_GCE_CHECK", False, raising=False)
    here.patch.delenv("NO_GCE_CHECK", raising=False)
    account = {"email": "job@project.iam.gserviceaccount.com", "scopes": []}
    here.gives(
        account,
        headers={"Metadata-Flavor": "Google"},
        **{"/token": google_token(name), "project-id": "project", "v1/": "computeMetadata/\n"},
        **{"universe-domain": "googleapis.com"},
    )


def azure_signature(here, name):
    here.set(AZURE_STORAGE_SAS_TOKEN=f"sv=1&se=2099-01-01&sig={name}")


def azure_connection_string(here, name):
    text = f"AccountName=account;SharedAccessSignature=sv=1&sig={name}"
    here.set(AZURE_STORAGE_CONNECTION_STRING=text)


def azure_machine(here, name):
    """https://learn.microsoft.com/entra/identity/managed-identities-azure-resources."""
    here.set(AZURE_POD_IDENTITY_AUTHORITY_HOST=here.url)
    ends = str(int(time.time()) + 86400)
    token = {"access_token": name, "token_type": "Bearer", "expires_on": ends}
    here.gives({**token, "expires_in": "86400", "resource": "https://storage.azure.com"})


def azure_cli(here, name):
    here.set(AZURE_TOKEN_CREDENTIALS="AzureCliCredential", PATH=f"{here.folder}:/bin:/usr/bin")
    said = {"accessToken": name, "expires_on": 9999999999}
    script = here.file("az", f"#!/bin/sh\necho '{json.dumps(said)}'\n")
    (here.folder / "az").chmod(0o755)
    assert script


SERVICES = [
    *(aws_role, aws_web_identity, aws_container, aws_instance),
    *(google_account, google_workload, google_machine, azure_machine),
]
NO_HURRY = (aws_instance, google_machine, azure_machine)
"""Where nobody answers, a machine may be one of another vendor's."""
ALL = [
    *(aws_environment, aws_file, aws_process, aws_role, aws_web_identity, aws_container),
    *(aws_instance, google_account, google_workload, google_machine),
    *(azure_signature, azure_connection_string, azure_machine, azure_cli),
]


@pytest.fixture
def here(request, monkeypatch, tmp_path, stub_server):
    """Nothing is found, and nobody pauses between attempts."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "account")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(botocore.utils.ContainerMetadataFetcher, "SLEEP_TIME", 0)
    monkeypatch.setattr("google.auth._exponential_backoff.time.sleep", lambda seconds: None)
    monkeypatch.setattr("azure.core.pipeline.policies.RetryPolicy.sleep", lambda *_, **__: None)
    with stub_server() as service:
        account = request.getfixturevalue("google_account")
        yield Here(monkeypatch, tmp_path, service, account)


STORES = {
    "aws": ("s3", lambda url: S3Store("b", Config(s3=S3Options(endpoint_url=url)))),
    "google": ("google", lambda url: GCSStore("b", Config(gcs=GCSOptions(endpoint_url=url)))),
    "azure": ("azure", lambda url: AzureStore("b", Config(azure=AzureOptions(endpoint_url=url)))),
}


@pytest.fixture
def storage(tls_server, authority, monkeypatch):
    """What all stores here are opened at."""
    for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.setenv(name, authority.bundle)
    return tls_server


class Job:
    """A store with credentials from a source, and a vendor that knows one name at a time."""

    def __init__(self, source, here, storage, opened):
        self.source, self.here, self.storage, self.opened = source, here, storage, opened
        self.vendor = source.__name__.partition("_")[0]
        name, self.open_at = STORES[self.vendor]
        self.dialect = DIALECTS[name]
        self.valid, self.refusals, self.rotates_after = "FIRST", 0, None
        storage.respond(self.respond)
        source(here, "FIRST")

    def open(self):
        return self.opened(self.open_at(self.storage.url))

    def read(self, store):
        return self.dialect.verbs["get"](store)

    def respond(self, request):
        if self.valid in request.headers.get("Authorization", "") + request.target:
            return self.storage.Answer(**self.dialect.answers["get"])
        self.refusals += 1
        if self.refusals == self.rotates_after:
            self.source(self.here, self.valid)
        return self.refused()

    def refused(self):
        if self.vendor == "aws":
            return self.storage.Answer(403, body=error_xml("ExpiredToken"))
        if self.vendor == "google":
            return self.storage.Answer(401, body=error_json(401, "authError", "its words"))
        status, code = 403, "AuthenticationFailed"
        if self.source in (azure_machine, azure_cli):
            status, code = 401, "InvalidAuthenticationInfo"
        return self.storage.Answer(status, {"x-ms-error-code": code}, error_xml(code))

    def sent(self):
        names = ("FIRST", "SECOND")
        texts = [r.headers.get("Authorization", "") + r.target for r in self.storage.requests]
        return [name for text in texts for name in names if name in text]


@pytest.fixture
def job(request, here, storage, opened):
    return Job(request.param, here, storage, opened)


of_each = pytest.mark.parametrize("job", ALL, indirect=True, ids=lambda s: s.__name__)


@of_each
def test_credentials_of_each_source_are_used_and_their_origin_is_told(job):
    store = job.open()
    job.read(store)
    assert set(job.sent()) == {"FIRST"}
    origin = store.origin()
    assert origin.source
    assert origin.ends is None or origin.ends > time.time()
    assert not [secret for secret in SECRETS if secret in repr(origin)]
    assert not [secret for secret in SECRETS if secret in repr(vars(store))]


@of_each
def test_credentials_that_are_refused_are_looked_for_anew_within_the_request(job):
    store = job.open()
    job.read(store)
    job.valid = "SECOND"
    job.source(job.here, "SECOND")
    del job.storage.requests[:]
    job.read(store)
    assert (job.sent()[0], job.sent()[-1], job.refusals) == ("FIRST", "SECOND", 1)


@of_each
def test_credentials_that_come_late_are_waited_for(job):
    store = job.open()
    job.read(store)
    job.valid, job.rotates_after = "SECOND", LATE
    Retrier(PATIENT).call(lambda: job.read(store))
    assert job.refusals >= LATE


@of_each
def test_credentials_that_never_worked_are_refused_at_once(job):
    job.valid = "ANOTHER"
    store = job.open()
    with pytest.raises(CredentialsError) as caught:
        Retrier(PATIENT).call(lambda: job.read(store))
    assert not isinstance(caught.value, ExpiredCredentialsError)
    assert len(job.storage.requests) <= 2
    assert not [secret for secret in SECRETS if secret in f"{caught.value} {vars(caught.value)}"]


@of_each
def test_credentials_that_do_not_come_are_given_up_at_the_deadline(job):
    store = job.open()
    job.read(store)
    job.valid = "ANOTHER"
    policy = RetryPolicy(base=0.01, cap=0.05, deadline=0.2)
    with pytest.raises(ExpiredCredentialsError):
        Retrier(policy).call(lambda: job.read(store))


THROTTLED = b"<ErrorResponse><Error><Code>Throttling</Code></Error></ErrorResponse>"


@pytest.mark.parametrize(
    ("job", "status", "body"),
    [
        *((source, 503, b"") for source in SERVICES if source not in NO_HURRY),
        (aws_web_identity, 400, THROTTLED),
        (google_account, 429, b""),
        (google_workload, 429, b""),
    ],
    indirect=["job"],
)
def test_a_service_that_fails_for_the_moment_is_asked_again(job, status, body):
    job.here.failing = [job.here.service.Answer(status, body=body)]
    with pytest.raises(ConnectionLostError) as caught:
        job.read(job.open())
    assert caught.value.certain  # nothing was sent to the store
    job.here.failing = []
    job.read(job.open())
    assert set(job.sent()) == {"FIRST"}


@pytest.mark.parametrize(
    "job",
    [source for source in SERVICES if source is not aws_container],  # botocore tells no status
    indirect=True,
    ids=lambda s: s.__name__,
)
def test_a_service_that_refuses_is_believed(job):
    job.here.failing = [job.here.service.Answer(400, body=b'{"error": "invalid_grant"}')]
    with pytest.raises(CredentialsError) as caught:
        job.read(job.open())
    assert caught.value.certain
    assert job.storage.requests == []


@pytest.mark.parametrize("vendor", STORES)
def test_where_no_credentials_are_found_each_place_is_named(here, storage, opened, vendor):
    here.set(AZURE_TOKEN_CREDENTIALS="EnvironmentCredential")
    places = {
        "aws": ["AWS_ACCESS_KEY_ID"],
        "google": ["GOOGLE_APPLICATION_CREDENTIALS", "gcloud auth application-default login"],
        "azure": ["AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN", "az login"],
    }
    name, open_at = STORES[vendor]
    with pytest.raises(CredentialsError) as caught:
        DIALECTS[name].verbs["get"](opened(open_at(storage.url)))
    for place in places[vendor]:
        assert place in str(caught.value)
    assert caught.value.uri.partition("://")[2].startswith("b")
    assert storage.requests == []


@pytest.mark.parametrize(
    "job", [aws_container, google_machine, azure_machine], indirect=True, ids=lambda s: s.__name__
)
def test_many_threads_that_want_credentials_at_once_look_once(job):
    """At first, and after a refusal."""
    store = job.open()
    for name in ("FIRST", "SECOND"):
        job.valid = name
        job.source(job.here, name)
        before = len(job.here.service.requests)
        assert at_once(8, lambda: job.read(store) is not None) == [True] * 8
        asked = [urlsplit(r.target).path for r in job.here.service.requests[before:]]
        assert all(asked.count(path) == 1 for path in asked if path.endswith(("token", "task")))


@pytest.mark.parametrize("job", [aws_web_identity], indirect=True, ids=lambda s: s.__name__)
def test_many_threads_share_the_failure_of_a_slow_service(job):
    """One after the other, the last would wait for as many failures as there are threads."""
    store = job.open()
    job.here.answer = lambda request: time.sleep(1.0) or job.here.service.Answer(503)
    assert {type(one) for one in at_once(8, lambda: job.read(store))} == {ConnectionLostError}
    assert len(job.here.service.requests) < 8


# the time of a signature


def skewed(job, date):
    headers = {"Date": time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(date))}
    if job.vendor == "aws":
        return job.storage.Answer(403, headers, error_xml("RequestTimeTooSkewed"))
    detail = "Request date header too old: 'Fri, 27 Nov 2026 07:00:00 GMT'"
    body = error_xml("AuthenticationFailed", AuthenticationErrorDetail=detail)
    return job.storage.Answer(403, {**headers, "x-ms-error-code": "AuthenticationFailed"}, body)


def azure_key(here, name):
    here.set(AZURE_STORAGE_KEY="U0VDUkVUS0VZU0VDUkVUS0VZU0VDUkVUS0VZ")


of_clocks = pytest.mark.parametrize(
    "job", [aws_environment, azure_key], indirect=True, ids=lambda s: s.__name__
)


@of_clocks
def test_a_request_that_arrived_late_is_signed_anew(job):
    store = job.open()
    job.storage.answer(skewed(job, time.time()))
    job.storage.answer(**job.dialect.answers["get"])
    job.read(store)
    assert len(job.storage.requests) == 2


@of_clocks
@pytest.mark.parametrize("minutes", [-30, 30])
def test_a_clock_that_is_wrong_by_minutes_is_named_at_once(job, minutes):
    job.storage.respond(lambda request: skewed(job, time.time() + 60 * minutes))
    with pytest.raises(ClockError, match="30 min"):
        Retrier(PATIENT).call(lambda: job.read(job.open()))
    assert len(job.storage.requests) == 1
