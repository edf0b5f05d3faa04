"""Each way in which README and the options set anything on S3 works with nothing else set."""

import datetime
import hashlib
import json
import os
import re
from urllib.parse import urlsplit

import botocore.credentials
import pytest

from cloudckpt import Config, S3Options
from cloudckpt.checksum import CRC32C, to_base64
from cloudckpt.errors import ConfigError, StoreError
from cloudckpt.stores.s3.store import S3Store
from support.dialects import put
from support.stubs.aws_services import AwsServices

KEYS = {"AWS_ACCESS_KEY_ID": "ENVKEY", "AWS_SECRET_ACCESS_KEY": "env-secret"}


@pytest.fixture
def setting(monkeypatch, tmp_path):
    """Sets variables and files of ``~/.aws`` where nothing else is set."""
    prefixes = ("AWS_", "CLOUDCKPT_", "HTTP", "http", "NO_PROXY", "no_proxy", "REQUESTS_")
    for name in list(os.environ):
        if name.startswith(prefixes):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".aws"
    folder.mkdir()

    def put(variables=None, config="", credentials=""):
        for name, value in (variables or {}).items():
            monkeypatch.setenv(name, value)
        (folder / "config").write_text(config)
        (folder / "credentials").write_text(credentials)
        return folder

    return put


@pytest.fixture
def services(server):
    return AwsServices(server)


@pytest.fixture
def open_store(opened):
    return lambda **options: opened(S3Store("bucket", Config(s3=S3Options(**options))))


def signed(request):
    """Access key and region of the signature."""
    found = re.search(r"Credential=([^/]+)/\d+/([^/]+)/s3/", request.headers["Authorization"])
    return found.groups()


# the region

REGIONS = {  # each beats those after it
    "S3Options": {"options": {"region": "af-south-1"}},
    "CLOUDCKPT_S3_REGION": {"variables": {"CLOUDCKPT_S3_REGION": "ap-east-1"}},
    "AWS_REGION": {"variables": {"AWS_REGION": "ca-west-1"}},
    "AWS_DEFAULT_REGION": {"variables": {"AWS_DEFAULT_REGION": "eu-west-3"}},
    "the profile": {"config": "[default]\nregion = sa-east-1\n"},
}
WANTED = ["af-south-1", "ap-east-1", "ca-west-1", "eu-west-3", "sa-east-1"]


def merged(settings):
    """Several settings at once."""
    variables, options, config = dict(KEYS), {}, ""
    for one in settings:
        variables |= one.get("variables", {})
        options |= one.get("options", {})
        config += one.get("config", "")
    return variables, config, options


@pytest.mark.parametrize(("name", "region"), list(zip(REGIONS, WANTED, strict=True)))
def test_each_way_to_set_the_region_works_alone(
    setting, server, services, open_store, name, region
):
    variables, config, options = merged([REGIONS[name]])
    setting(variables, config)
    address = open_store(**options).object_url("run/object")
    assert address == f"https://bucket.s3.{region}.amazonaws.com/run/object"
    put(open_store(endpoint_url=server.url, **options))
    assert signed(server.requests[-1]) == ("ENVKEY", region)


@pytest.mark.parametrize("first", range(len(WANTED) - 1))
def test_the_first_of_several_regions_counts(setting, server, services, open_store, first):
    variables, config, options = merged(list(REGIONS.values())[first:])
    setting(variables, config)
    put(open_store(endpoint_url=server.url, **options))
    assert signed(server.requests[-1]) == ("ENVKEY", WANTED[first])


@pytest.mark.parametrize("empty", ["AWS_REGION", "AWS_DEFAULT_REGION", "CLOUDCKPT_S3_REGION"])
def test_an_empty_variable_sets_no_region(setting, server, services, open_store, empty):
    setting(KEYS | {empty: ""}, "[default]\nregion = sa-east-1\n")
    put(open_store(endpoint_url=server.url))
    assert signed(server.requests[-1]) == ("ENVKEY", "sa-east-1")


def test_the_region_is_that_of_sts_too(setting, server, services, open_store, tmp_path):
    (tmp_path / "token").write_text("web-identity")
    setting(
        {
            "AWS_REGION": "ca-west-1",
            "AWS_ROLE_ARN": "arn:aws:iam::1:role/r",
            "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
            "HTTPS_PROXY": server.url,  # it is told whom to connect to
            "AWS_MAX_ATTEMPTS": "1",
        }
    )
    server.answer(status=502)
    with pytest.raises(StoreError):
        put(open_store(endpoint_url=server.url))
    assert server.requests[0].target == "sts.ca-west-1.amazonaws.com:443"


# the endpoint, and how the bucket is written


@pytest.mark.parametrize(
    "way",
    [
        "AWS_ENDPOINT_URL_S3",
        "AWS_ENDPOINT_URL",
        "CLOUDCKPT_S3_ENDPOINT_URL",
        "the profile",
        "S3Options",
    ],
)
def test_each_way_to_set_the_endpoint_works_alone(
    setting, server, services, open_store, monkeypatch, way
):
    config, options = "", {}
    if way == "the profile":
        config = f"[default]\nendpoint_url = {server.url}\n"
    elif way == "S3Options":
        options = {"endpoint_url": server.url}
    else:
        monkeypatch.setenv(way, server.url)
    setting(KEYS, config)
    put(open_store(**options))
    assert server.requests[-1].target == "/bucket/run/object"


PATH = "https://s3.eu-west-3.amazonaws.com/bucket/run/object"
VIRTUAL = "https://bucket.s3.eu-west-3.amazonaws.com/run/object"


@pytest.mark.parametrize(
    ("variables", "config", "options", "address"),
    [
        ({}, "", {}, VIRTUAL),
        ({}, "", {"addressing_style": "path"}, PATH),
        ({"CLOUDCKPT_S3_ADDRESSING_STYLE": "path"}, "", {}, PATH),
        ({}, "s3 =\n  addressing_style = path\n", {}, PATH),
        ({}, "s3 =\n  addressing_style = virtual\n", {}, VIRTUAL),
        ({}, "s3 =\n  addressing_style = path\n", {"addressing_style": "virtual"}, VIRTUAL),
        ({}, "s3 =\n  addressing_style = path\n", {"addressing_style": "auto"}, VIRTUAL),
    ],
)
def test_the_addressing_style_is_the_options_or_else_the_profiles(
    setting, open_store, variables, config, options, address
):
    setting(KEYS | variables | {"AWS_REGION": "eu-west-3"}, "[default]\n" + config)
    assert open_store(**options).object_url("run/object") == address


def test_an_addressing_style_that_is_none_is_named(setting, open_store):
    setting(KEYS, "[default]\ns3 =\n  addressing_style = sideways\n")
    with pytest.raises(ConfigError, match="sideways"):
        open_store()


# credentials


def profile_of(name, **entries):
    lines = "".join(f"{key} = {value}\n" for key, value in entries.items())
    return f"[{name}]\n{lines}"


FILE = {"aws_access_key_id": "FILE", "aws_secret_access_key": "s"}


def by_variables(setting, services):
    setting(KEYS)
    return "ENVKEY", {}


def by_the_default_profile(setting, services):
    setting({}, "", profile_of("default", **FILE))
    return "FILE", {}


def by_aws_profile(setting, services):
    setting({"AWS_PROFILE": "work"}, "", profile_of("work", **FILE))
    return "FILE", {}


def by_option_profile(setting, services):
    setting({}, "", profile_of("work", **FILE))
    return "FILE", {"profile": "work"}


def by_variable_profile(setting, services):
    setting({"CLOUDCKPT_S3_PROFILE": "work"}, "", profile_of("work", **FILE))
    return "FILE", {}


def by_web_identity(setting, services):
    folder = setting({})
    (folder / "token").write_text("web-identity")
    setting(
        {
            "AWS_ROLE_ARN": "arn:aws:iam::1:role/r",
            "AWS_WEB_IDENTITY_TOKEN_FILE": str(folder / "token"),
            "AWS_ENDPOINT_URL_STS": services.url,
        }
    )
    return "STSKEY", {}


def by_a_role_of_a_profile(setting, services):
    setting(
        {"AWS_ENDPOINT_URL_STS": services.url, "AWS_REGION": "us-east-1"},  # STS wants a region
        profile_of("default", role_arn="arn:aws:iam::1:role/r", source_profile="own"),
        profile_of("own", aws_access_key_id="OWN", aws_secret_access_key="s"),
    )
    return "STSKEY", {}


def by_sso(setting, services):
    start = "https://example.awsapps.com/start"
    folder = setting(
        {"AWS_ENDPOINT_URL_SSO": services.url},
        profile_of(
            "default",
            sso_start_url=start,
            sso_region="eu-west-1",
            sso_account_id="1",
            sso_role_name="r",
        ),
    )
    tomorrow = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=1)
    token = {"accessToken": "sso-login", "expiresAt": tomorrow.strftime("%Y-%m-%dT%H:%M:%SZ")}
    name = hashlib.sha1(start.encode(), usedforsecurity=False).hexdigest()
    (folder / f"{name}.json").write_text(json.dumps(token))
    return "SSOKEY", {"cache": folder}


def by_the_container(setting, services):
    setting({"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{services.url}/container"})
    return "CONTAINERKEY", {}


def by_the_instance(setting, services):
    setting({"AWS_EC2_METADATA_SERVICE_ENDPOINT": services.url})
    return "INSTANCEKEY", {}


WAYS = [
    by_variables,
    by_the_default_profile,
    by_aws_profile,
    by_option_profile,
    by_variable_profile,
    by_web_identity,
    by_a_role_of_a_profile,
    by_sso,
    by_the_container,
    by_the_instance,
]


@pytest.mark.parametrize("way", WAYS)
def test_each_source_of_credentials_works_alone(
    setting, server, services, open_store, monkeypatch, way
):
    key, options = way(setting, services)
    if cache := options.pop("cache", None):  # botocore has asked for the home folder before
        monkeypatch.setattr(botocore.credentials.SSOProvider, "_SSO_TOKEN_CACHE_DIR", str(cache))
    put(open_store(endpoint_url=server.url, **options))
    assert signed(server.requests[-1]) == (key, "us-east-1")


@pytest.mark.parametrize("way", [by_web_identity, by_a_role_of_a_profile, by_sso, by_the_instance])
def test_boto3_says_in_whose_name_it_asks_for_credentials(
    setting, server, services, open_store, monkeypatch, way
):
    _, options = way(setting, services)
    if cache := options.pop("cache", None):
        monkeypatch.setattr(botocore.credentials.SSOProvider, "_SSO_TOKEN_CACHE_DIR", str(cache))
    put(open_store(endpoint_url=server.url, **options))
    assert len(services.agents) > 1
    for name, agent in services.agents.items():
        assert re.search(r"cloudckpt/\d", agent), name


@pytest.mark.parametrize("way", ["option", "variable"])
def test_anonymous_needs_nothing_else(setting, server, services, open_store, way):
    setting({"CLOUDCKPT_S3_ANONYMOUS": "1"} if way == "variable" else {})
    options = {"anonymous": True} if way == "option" else {}
    put(open_store(endpoint_url=server.url, **options))
    assert services.asked == ["s3"]
    names = {name.lower() for name in server.requests[0].headers}
    assert not names & {"authorization", "x-amz-content-sha256", "x-amz-date"}


# what is sent with objects, and how

HEADERS = [
    ("CLOUDCKPT_S3_SSE", "AES256", "x-amz-server-side-encryption", "AES256"),
    ("CLOUDCKPT_S3_SSE", "aws:kms", "x-amz-server-side-encryption", "aws:kms"),
    ("CLOUDCKPT_S3_STORAGE_CLASS", "STANDARD_IA", "x-amz-storage-class", "STANDARD_IA"),
    ("CLOUDCKPT_S3_TAGS", "team=nlp", "x-amz-tagging", "team=nlp"),
    ("CLOUDCKPT_S3_REQUESTER_PAYS", "1", "x-amz-request-payer", "requester"),
    ("CLOUDCKPT_S3_CHECKSUM", "on", "x-amz-checksum-crc32c", to_base64(CRC32C.of(b"data"))),
]


@pytest.mark.parametrize(("variable", "value", "header", "sent"), HEADERS)
def test_each_variable_about_objects_works_alone(
    setting, server, services, open_store, variable, value, header, sent
):
    setting(KEYS | {variable: value})
    store = open_store(endpoint_url=server.url)
    put(store)
    assert server.requests[-1].headers[header] == sent


def test_the_proxy_of_the_environment_is_used(setting, server, services, open_store):
    setting(KEYS | {"HTTP_PROXY": server.url})
    put(open_store(endpoint_url="http://store.example", addressing_style="path"))
    assert urlsplit(server.requests[-1].target).netloc == "store.example"


@pytest.mark.parametrize("way", ["AWS_CA_BUNDLE", "the profile"])
def test_the_authority_of_the_environment_or_the_profile_is_trusted(
    setting, tls_server, tls_files, open_store, way
):
    services = AwsServices(tls_server)
    variables, config = {"AWS_CA_BUNDLE": tls_files[0]}, ""
    if way == "the profile":
        variables, config = {}, f"[default]\nca_bundle = {tls_files[0]}\n"
    setting(KEYS | variables, config)
    put(open_store(endpoint_url=tls_server.url))
    assert services.asked == ["s3"]


# signed and unsigned bodies

LARGE = bytes(range(256)) * 4097  # a little more than 1 MiB
UNSIGNED = "UNSIGNED-PAYLOAD"
SIGNED = hashlib.sha256(LARGE).hexdigest()


@pytest.mark.parametrize(
    ("variables", "config", "options", "sent"),
    [
        ({}, "", {}, UNSIGNED),
        ({}, "", {"payload_signing": "on"}, SIGNED),
        ({"CLOUDCKPT_S3_PAYLOAD_SIGNING": "on"}, "", {}, SIGNED),
        ({}, "s3 =\n  payload_signing_enabled = true\n", {}, SIGNED),
        ({}, "s3 =\n  payload_signing_enabled = false\n", {}, UNSIGNED),
        ({}, "s3 =\n  payload_signing_enabled = false\n", {"payload_signing": "on"}, SIGNED),
    ],
)
def test_large_bodies_are_signed_if_the_options_or_the_profile_say_so(
    setting, server, services, open_store, variables, config, options, sent
):
    setting(KEYS | variables, "[default]\n" + config)
    store = open_store(endpoint_url=server.url, **options)
    views = [memoryview(LARGE)[:7], memoryview(LARGE)[7:]]
    store.put("run/object", views, checksum=CRC32C.of(LARGE))
    assert server.requests[-1].headers["x-amz-content-sha256"] == sent


def test_a_profile_can_forbid_to_sign_even_small_bodies(setting, server, services, open_store):
    setting(KEYS, "[default]\ns3 =\n  payload_signing_enabled = false\n")
    put(open_store(endpoint_url=server.url))
    assert server.requests[-1].headers["x-amz-content-sha256"] == UNSIGNED
