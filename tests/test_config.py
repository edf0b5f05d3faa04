"""Options: from arguments, from the environment, checked, and values at that."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch

from cloudckpt import AzureOptions, BackgroundOptions, Config, GCSOptions, RetryPolicy, S3Options
from cloudckpt.config import MIB, documented_options
from cloudckpt.errors import ConfigError

CLASSES = [Config, RetryPolicy, BackgroundOptions, S3Options, GCSOptions, AzureOptions]
DOCUMENTED = [(cls, *row) for cls in CLASSES for row in documented_options(cls)]


@pytest.mark.parametrize("number", [np.int64, np.uint8, torch.tensor])
def test_numbers_of_numpy_and_torch_are_numbers(number):
    made = Config(connections=number(7), read_timeout=number(90))
    assert (made.connections, made.read_timeout) == (7, 90)
    assert {type(made.connections), type(made.read_timeout)} == {int}
    fractional = Config(stall_timeout=np.float32(1.5))
    assert (type(fractional.stall_timeout), fractional.stall_timeout) == (float, 1.5)
    assert hash(made) == hash(Config(connections=7, read_timeout=90))


def test_a_misspelt_variable_is_named_once_with_what_was_meant(monkeypatch, caplog):
    monkeypatch.setenv("CLOUDCKPT_PARTSIZE", "64MiB")
    monkeypatch.setenv("CLOUDCKPT_S3_REGION_OF_NOWHERE_AT_ALL", "x")
    monkeypatch.setenv("CLOUDCKPT_TEST_S3_URI", "s3://bucket")
    monkeypatch.setenv("CLOUDCKPT_VERIFY", "1")
    Config()
    Config()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2, told
    assert "CLOUDCKPT_PARTSIZE is not an option" in told[0]
    assert "did you mean CLOUDCKPT_PART_SIZE?" in told[0]
    assert "NOWHERE_AT_ALL is not an option" in told[1]


TAGS = (("a", "1"), ("b", "x=y"), ("c", ""))
# (class, option, variable, what is written there, what it means)
FROM_ENVIRONMENT = [
    (Config, "connections", "CLOUDCKPT_CONNECTIONS", "7", 7),
    (Config, "part_size", "CLOUDCKPT_PART_SIZE", " 1 GiB ", 1024 * MIB),
    (Config, "memory_budget", "CLOUDCKPT_MEMORY_BUDGET", "128mib", 128 * MIB),
    (Config, "verify", "CLOUDCKPT_VERIFY", "True", True),
    (Config, "overwrite", "CLOUDCKPT_OVERWRITE", "off", False),
    (Config, "connect_timeout", "CLOUDCKPT_CONNECT_TIMEOUT", "1.5", 1.5),
    (RetryPolicy, "deadline", "CLOUDCKPT_RETRY_DEADLINE", "60", 60.0),
    (S3Options, "endpoint_url", "CLOUDCKPT_S3_ENDPOINT_URL", "http://x:9", "http://x:9"),
    (S3Options, "sse", "CLOUDCKPT_S3_SSE", "AES256", "AES256"),
    (S3Options, "tags", "CLOUDCKPT_S3_TAGS", "a=1, b = x=y ,c=", TAGS),
    (AzureOptions, "anonymous", "CLOUDCKPT_AZURE_ANONYMOUS", "1", True),
    (BackgroundOptions, "when_busy", "CLOUDCKPT_ASYNC_WHEN_BUSY", "skip", "skip"),
]


@pytest.mark.parametrize(("cls", "option", "variable", "text", "value"), FROM_ENVIRONMENT)
def test_an_option_is_read_from_its_variable(monkeypatch, cls, option, variable, text, value):
    default = getattr(cls(), option)
    monkeypatch.setenv(variable, text)
    found = getattr(cls(), option)
    assert (found, type(found)) == (value, type(value))
    assert getattr(cls(**{option: default}), option) == default  # an argument wins
    monkeypatch.setenv(variable, "")
    assert getattr(cls(), option) == default


def test_nested_options_are_read_when_the_config_is_made(monkeypatch):
    before = Config()
    monkeypatch.setenv("CLOUDCKPT_RETRY_DEADLINE", "2")
    monkeypatch.setenv("CLOUDCKPT_S3_REGION", "eu-west-1")
    assert (Config().retry.deadline, Config().s3.region) == (2.0, "eu-west-1")
    assert before.s3.region is None


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("CLOUDCKPT_CONNECTIONS", "many"),
        ("CLOUDCKPT_PART_SIZE", "16 MB"),
        ("CLOUDCKPT_VERIFY", "maybe"),
        ("CLOUDCKPT_READ_TIMEOUT", "soon"),
        ("CLOUDCKPT_RETRY_DEADLINE", "nan"),
        ("CLOUDCKPT_S3_SSE", "rot13"),
    ],
)
def test_a_variable_that_can_not_work_is_refused_with_its_text(monkeypatch, variable, text):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError) as caught:
        Config()
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("cls", "options", "named"),
    [
        (Config, {"connections": 0}, "connections=0"),
        (Config, {"part_size": 5 * MIB - 1}, "5 MiB to 5 GiB"),
        (Config, {"memory_budget": 32 * MIB - 1}, "memory_budget"),
        (Config, {"connect_timeout": 0}, "connect_timeout=0"),
        (Config, {"stall_timeout": float("nan")}, "stall_timeout=nan"),
        (Config, {"conditional_writes": "yes"}, "'auto', 'on' or 'off'"),
        (RetryPolicy, {"attempts": 0}, "attempts=0"),
        (RetryPolicy, {"base": 2.0, "cap": 1.0}, "base=2.0, cap=1.0"),
        (S3Options, {"addressing_style": "host"}, "'auto', 'path' or 'virtual'"),
        (S3Options, {"kms_key_id": "key"}, "sse='aws:kms'"),
        (S3Options, {"anonymous": True, "profile": "work"}, "anonymous"),
        (S3Options, {"anonymous": True, "requester_pays": True}, "anonymous"),
        (BackgroundOptions, {"when_busy": "queue"}, "'wait', 'skip' or 'auto'"),
        (AzureOptions, {"access_tier": "Archive"}, "can't be loaded"),
        (AzureOptions, {"access_tier": "Cool\r\nx-ms-tags: a"}, "access_tier"),
    ],
)
def test_a_value_that_can_not_work_is_refused_with_its_name(cls, options, named):
    with pytest.raises(ConfigError) as caught:
        cls(**options)
    assert named in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (Config, {"connections": 1, "part_size": 5 * MIB}),
        (Config, {"connections": 512, "part_size": 5 * 1024 * MIB, "memory_budget": 32 * MIB}),
        (RetryPolicy, {"attempts": 1, "deadline": 0, "base": 0, "cap": 0}),
        (S3Options, {"sse": "aws:kms:dsse", "kms_key_id": "key"}),
    ],
)
def test_the_ends_of_what_works_are_accepted(cls, options):
    made = cls(**options)
    assert {name: getattr(made, name) for name in options} == options


@pytest.mark.parametrize(
    "options",
    [
        {"connections": "16"},
        *({"connections": number} for number in (np.float32(7), torch.tensor(7.0))),
        *({"connections": truth} for truth in (np.bool_(True), torch.tensor(True))),
        {"read_timeout": None},
        {"verify": 1},
        {"retry": 3},
        {"s3": {"region": "eu-west-1"}},
    ],
)
def test_a_value_of_another_type_is_refused_with_its_name(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        Config(**options)


@pytest.mark.parametrize("cls", CLASSES)
def test_options_are_values(cls):
    one, other = cls(), cls()
    assert one == other
    assert hash(one) == hash(other)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.connections = 3
    with pytest.raises(TypeError):
        cls(1)  # keywords only


def full_config():
    return Config(
        connections=3,
        retry=RetryPolicy(attempts=2),
        s3=S3Options(tags={"team": "nlp"}, sse="aws:kms", kms_key_id="key", profile="work"),
    )


def test_options_travel_to_another_process_as_they_are(monkeypatch):
    monkeypatch.setenv("CLOUDCKPT_READ_TIMEOUT", "17")
    packed = pickle.dumps(full_config())
    monkeypatch.setenv("CLOUDCKPT_READ_TIMEOUT", "18")
    back = pickle.loads(packed)
    assert back == dataclasses.replace(full_config(), read_timeout=17.0)
    assert hash(back) == hash(dataclasses.replace(full_config(), read_timeout=17.0))


def test_options_can_be_copied_with_changes():
    assert full_config().s3.tags == (("team", "nlp"),)  # which were given as a mapping
    assert copy.deepcopy(full_config()) == full_config()
    changed = dataclasses.replace(full_config(), connections=5)
    assert (changed.connections, changed.retry.attempts) == (5, 2)
    with pytest.raises(ConfigError):
        dataclasses.replace(full_config(), connections=0)


def test_every_option_is_documented_and_has_a_variable_of_its_own():
    variables = [variable for _, _, variable, _, _ in DOCUMENTED]
    assert len(set(variables)) == len(variables)
    assert all(variable.startswith("CLOUDCKPT_") for variable in variables)
    assert all(meaning for *_, meaning in DOCUMENTED)
    assert [getattr(cls(), name) for cls, name, *_ in DOCUMENTED] == [row[3] for row in DOCUMENTED]
    for cls in CLASSES:
        named = {name for found, name, *_ in DOCUMENTED if found is cls}
        nested = {"retry", "s3", "gcs", "azure", "background"} if cls is Config else set()
        of_programs = {"attempts", "base", "cap"} if cls is RetryPolicy else set()
        assert named | nested | of_programs == {field.name for field in dataclasses.fields(cls)}


@pytest.mark.parametrize(
    "url",
    [
        *("nonsense", "", "127.0.0.1:9000", "ftp://host", "http://", " http://host"),
        *("http://ho st", "http://[::1", "https://host:port", "http://host:99999"),
    ],
)
@pytest.mark.parametrize("options", [S3Options, GCSOptions, AzureOptions])
def test_an_endpoint_that_can_not_be_one_is_refused_by_its_name(options, url):
    with pytest.raises(ConfigError, match="endpoint_url"):
        options(endpoint_url=url)
