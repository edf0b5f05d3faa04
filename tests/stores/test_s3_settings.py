"""Which of the options, variables and profiles that set something on S3 counts."""

import hashlib
import os
import re

import pytest

from cloudckpt import Config, S3Options
from cloudckpt.checksum import CRC32C
from cloudckpt.stores.s3.store import S3Store
from support.dialects import put

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

    def put(variables, config=""):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        (folder / "config").write_text(config)

    return put


@pytest.fixture
def open_store(server, opened):
    server.respond(lambda request: server.Answer(headers={"ETag": '"tag"'}))
    return lambda **options: opened(S3Store("bucket", Config(s3=S3Options(**options))))


# the region: each beats those after it

REGIONS = [
    ("af-south-1", {}, {"region": "af-south-1"}),
    ("ap-east-1", {"CLOUDCKPT_S3_REGION": "ap-east-1"}, {}),
    ("ca-west-1", {"AWS_REGION": "ca-west-1"}, {}),
    ("eu-west-3", {"AWS_DEFAULT_REGION": "eu-west-3"}, {}),
    ("sa-east-1", {}, {}),  # of the profile
]


@pytest.mark.parametrize("first", range(len(REGIONS)))
def test_the_first_of_several_regions_counts(setting, server, open_store, first):
    variables, options = dict(KEYS), {}
    for _, variable, option in REGIONS[first:]:
        variables |= variable
        options |= option
    setting(variables, "[default]\nregion = sa-east-1\n")
    put(open_store(endpoint_url=server.url, **options))
    scope = re.search(
        r"Credential=([^/]+)/\d+/([^/]+)/s3/", server.requests[-1].headers["Authorization"]
    )
    assert scope.groups() == ("ENVKEY", REGIONS[first][0])


# the endpoint, and how the bucket is written


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


# signed and unsigned bodies

LARGE = bytes(range(256)) * 4097  # a little more than 1 MiB
UNSIGNED = "UNSIGNED-PAYLOAD"
SIGNED = hashlib.sha256(LARGE).hexdigest()


@pytest.mark.parametrize(
    ("config", "sent"),
    [
        ("", UNSIGNED),
        ("s3 =\n  payload_signing_enabled = true\n", SIGNED),
        ("s3 =\n  payload_signing_enabled = false\n", UNSIGNED),
    ],
)
def test_large_bodies_are_signed_if_the_profile_says_so(setting, server, open_store, config, sent):
    setting(KEYS, "[default]\n" + config)
    store = open_store(endpoint_url=server.url)
    views = [memoryview(LARGE)[:7], memoryview(LARGE)[7:]]
    store.put("run/object", views, checksum=CRC32C.of(LARGE))
    assert server.requests[-1].headers["x-amz-content-sha256"] == sent
