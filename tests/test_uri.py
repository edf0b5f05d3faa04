"""Where a checkpoint lives: what is understood, what is refused, and what comes back."""

import enum
import os
import pickle
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.errors import InvalidURIError
from cloudckpt.uri import CheckpointURI, unfolded

SEGMENT = st.text(
    st.characters(blacklist_characters="/?#@", blacklist_categories=("Cc", "Cs")), min_size=1
).filter(lambda text: text not in (".", "..") and text.strip())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket/run/step-1", ("s3", "bucket", "run/step-1")),
        ("s3://bucket/run/step-1/", ("s3", "bucket", "run/step-1")),
        ("s3://bucket", ("s3", "bucket", "")),
        ("S3://Bucket/Run", ("s3", "Bucket", "Run")),
        ("gs://bucket/run", ("gs", "bucket", "run")),
        ("az://container/run", ("az", "container", "run")),
        ("abfss://container/run", ("az", "container", "run")),
        ("s3://bucket/a%2Fb c+d", ("s3", "bucket", "a%2Fb c+d")),
        ("s3://bucket/größe/重み", ("s3", "bucket", "größe/重み")),
        ("file:///data/run", ("file", "", "/data/run")),
        ("file://localhost/data/run", ("file", "", "/data/run")),
        ("file:///data/a%20b", ("file", "", "/data/a b")),
        ("/data/run", ("file", "", "/data/run")),
        ("/data/run/", ("file", "", "/data/run")),
        ("/data/x/../run", ("file", "", "/data/run")),
        ("/data/a%20b", ("file", "", "/data/a%20b")),
    ],
)
def test_a_location_is_understood(text, expected):
    uri = CheckpointURI.parse(text)
    assert (uri.scheme, uri.bucket, uri.prefix) == expected


@pytest.mark.parametrize(
    ("text", "container", "prefix", "host"),
    [
        ("abfss://c@acc.dfs.core.windows.net/run/a", "c", "run/a", "acc.blob.core.windows.net"),
        ("abfs://c@acc.dfs.core.windows.net/run", "c", "run", "acc.blob.core.windows.net"),
        ("abfss://c@acc.blob.core.windows.net/run", "c", "run", "acc.blob.core.windows.net"),
        ("abfss://c@acc.dfs.core.windows.net", "c", "", "acc.blob.core.windows.net"),
        ("abfss://c@acc.dfs.core.windows.net/a%20b", "c", "a%20b", "acc.blob.core.windows.net"),
        ("abfss://c@acc.dfs.core.windows.net/a@b", "c", "a@b", "acc.blob.core.windows.net"),
        ("https://acc.blob.core.windows.net/c/run/", "c", "run", "acc.blob.core.windows.net"),
        ("https://acc.blob.core.windows.net/c", "c", "", "acc.blob.core.windows.net"),
        ("https://acc.blob.core.windows.net/c/a%20b", "c", "a b", "acc.blob.core.windows.net"),
        ("https://ACC.Blob.Core.Windows.Net/c/Run", "c", "Run", "acc.blob.core.windows.net"),
        (
            "https://acc.blob.core.chinacloudapi.cn/c/run",
            "c",
            "run",
            "acc.blob.core.chinacloudapi.cn",
        ),
        (
            "abfss://c@acc.dfs.core.usgovcloudapi.net/run",
            "c",
            "run",
            "acc.blob.core.usgovcloudapi.net",
        ),
        (
            "https://acc.z07.blob.storage.azure.net/c/run",
            "c",
            "run",
            "acc.z07.blob.storage.azure.net",
        ),
        *(
            (f"abfss://c@{name}dfs.{cloud}/run", "c", "run", f"{name}blob.{cloud}")
            for name, cloud in (
                ("acc-secondary.", "core.windows.net"),
                ("acc-ipv6.", "core.windows.net"),
                ("acc-dualstack.", "core.usgovcloudapi.net"),
                ("acc-secondary-ipv6.", "core.windows.net"),
                ("acc-dualstack.z07.", "storage.azure.net"),
                ("acc.privatelink.", "core.chinacloudapi.cn"),
                ("acc.z07.privatelink.", "storage.azure.net"),
            )
        ),
    ],
)
def test_a_location_may_name_the_storage_account(text, container, prefix, host):
    uri = CheckpointURI.parse(text)
    assert uri == CheckpointURI("az", container, prefix, host)
    assert CheckpointURI.parse(str(uri)) == uri
    assert uri.is_cloud


def test_a_relative_path_starts_where_the_process_is(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert CheckpointURI.parse("run").prefix == f"{tmp_path}/run"


def test_a_tilde_is_the_home_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert CheckpointURI.parse("~/run").prefix == f"{tmp_path}/run"


def test_a_folder_whose_name_is_no_text_is_the_same_one_as_a_uri():
    uri = CheckpointURI.parse(os.fsdecode(b"/data/\xff/run"))
    assert CheckpointURI.parse(str(uri)) == uri


@pytest.mark.parametrize("name", [" run", "a s3", "s3", "'run'", "az.c:x", "run:1", "s3-x:1"])
def test_names_of_folders_that_are_no_uri_are_left_alone(name):
    assert CheckpointURI.parse(name).prefix.endswith(f"/{name}")


def test_what_was_parsed_is_parsed_again():
    uri = CheckpointURI.parse("s3://bucket/run")
    assert CheckpointURI.parse(uri) is uri


ARN = "arn:aws:s3:eu-west-1:123456789012:accesspoint"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"s3://{ARN}/point/run/step-1", ("s3", f"{ARN}/point", "run/step-1")),
        (f"s3://{ARN}:point/run", ("s3", f"{ARN}/point", "run")),
        (f"s3://{ARN}/point", ("s3", f"{ARN}/point", "")),
        (f"s3://{ARN}/point/", ("s3", f"{ARN}/point", "")),
        (
            f"s3://{ARN.replace('aws', 'aws-us-gov', 1)}/point/run",
            ("s3", f"{ARN.replace('aws', 'aws-us-gov', 1)}/point", "run"),
        ),
        (
            "s3://point-abcdefghijklmnopqrstuvwxyz-s3alias/run",
            ("s3", "point-abcdefghijklmnopqrstuvwxyz-s3alias", "run"),
        ),
    ],
)
def test_an_access_point_of_s3_stands_for_its_bucket(text, parts):
    uri = CheckpointURI.parse(text)
    assert (uri.scheme, uri.bucket, uri.prefix) == parts
    assert CheckpointURI.parse(str(uri)) == uri
    assert uri.join("below").bucket == uri.bucket
    assert uri.join("below").key("x") == uri.key("below/x")


@pytest.mark.parametrize(
    "place",
    [
        "point--usw2-az1--xa-s3",
        "mfzwi23gnjvgw.mrap",
        "arn:aws:s3::123456789012:accesspoint/mfzwi23gnjvgw.mrap",
        "changer-abc--ol-s3",
        "point-abc--op-s3",
        "rows--table-s3",
        "arn:aws:s3:::bucket",
        "arn:aws:s3:us-west-2:12:accesspoint/point",
    ],
)
@pytest.mark.parametrize("rest", ["", "/", "/run/step-1"])
def test_what_is_no_general_purpose_bucket_of_s3_is_refused(place, rest):
    with pytest.raises(InvalidURIError) as caught:
        CheckpointURI.parse(f"s3://{place}{rest}")
    assert "s3://bucket/path" in str(caught.value)
    assert "credentials" not in str(caught.value)


@pytest.mark.parametrize("rest", ["", "/", "/run/step-1"])
def test_a_storage_bucket_has_its_namespace(rest):
    uri = CheckpointURI.parse(f"hf://buckets/my-org/models.v2{rest}")
    assert (uri.scheme, uri.bucket, uri.prefix) == ("hf", "buckets/my-org/models.v2", rest[1:])
    assert uri.is_cloud
    assert uri.root == "hf://buckets/my-org/models.v2"
    assert CheckpointURI.parse(str(uri)) == uri
    assert str(uri.join("below")) == f"{uri!s}/below"
    assert uri.parent.root == uri.root


@pytest.mark.parametrize(
    "place",
    ["me/model", "buckets", "buckets/me", "buckets/me/", "datasets/me/data", "buckets/me/.x/run"],
)
def test_repositories_take_no_checkpoints(place):
    with pytest.raises(InvalidURIError, match="hf://buckets/namespace/name/path"):
        CheckpointURI.parse(f"hf://{place}")


@pytest.mark.parametrize("path", ["hf:/buckets/me/b/run", "/home/me/hf:/buckets/me/b/run"])
def test_a_storage_bucket_that_lost_a_slash_is_no_folder(path):
    with pytest.raises(InvalidURIError, match=r'pass the string "hf://buckets/me/b/run" instead'):
        CheckpointURI.parse(path)
    assert CheckpointURI.parse("/home/me/hf:/model").scheme == "file"  # torch's own folders


@pytest.mark.parametrize(
    "bucket", ["x-s3", "my.mrap.bucket", "table-s3", "a--x-s3b", "fast--usw2-az1--x-s3"]
)
def test_other_names_of_buckets_are_left_alone(bucket):
    assert CheckpointURI.parse(f"s3://{bucket}/a--x-s3/run").bucket == bucket
    assert CheckpointURI.parse("gs://a--x-s3/run").bucket == "a--x-s3"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (" s3://bucket/run", "mistyped URI"),
        ('"s3://bucket/run"', "mistyped URI"),
        ("s3:bucket/run", "mistyped URI"),
        ("", "empty"),
        ("s3:/bucket/run", '"s3://bucket/run"'),
        ("s3:///run", "names no bucket"),
        ("s3://bucket//run", "empty path segment"),
        ("s3://bucket/./run", "'.' or '..'"),
        ("s3://bucket/run?versionId=7", "a query or a fragment"),
        ("s3://bucket/run\n", "control character"),
        ("s3://bucket/\x00", "control character"),
        ("s3://key:secret@bucket/run", "contains credentials"),
        ("http://bucket/run", "unknown scheme 'http'"),
        ("gcs://bucket/run", "write gs://bucket/path"),
        (Path("minio://bucket/run"), "write s3://bucket/path"),
        ("s3a://bucket/run", "write s3://bucket/path"),
        ("azure://container/run", "write az://container/path"),
        ("wasb://container/run", "write abfss://container@account.dfs.core.windows.net/path"),
        ("wasbs://c@acc.blob.core.windows.net/run?sig=x", "run?***"),
        ("wasbs://c@acc/run", "write abfss://container@account.dfs.core.windows.net/path"),
        ("oss://bucket/run", "write s3://bucket/path"),
        ("hdfs://node:9000/run", "mount it"),
        ("dbfs:/run", "/dbfs/path"),
        ("local:///data/run", "write file:///path"),
        ("s4://bucket/run", "unknown scheme 's4'"),
        ("https:/acc.blob.core.windows.net/c/run", '"https://acc.blob'),
        ("https://example.com/c/run", "endpoint_url"),
        ("https://minio.example.com:9000/bucket/run", "s3://bucket/path"),
        ("https://blob.core.windows.net/c/run", "account.blob.core.windows.net"),
        ("https://acc.blob.core.windows.net.example.com/c/run", "not a location in Azure"),
        ("https://acc.blob.core.windows.net", "names no bucket"),
        ("https://acc.blob.core.windows.net/c/a%2F%2Fb", "empty path segment"),
        ("https://acc.blob.core.windows.net/c/%2E%2E/b", "'.' or '..'"),
        ("https://acc.blob.core.windows.net/c/a%3Fb", "a query or a fragment"),
        ("https://acc.blob.core.windows.net/c/a%00b", "control character"),
        ("https://acc.blob.core.windows.net/c/100%", "write %25"),
        ("https://acc.blob.core.windows.net/c/a%FFb", "not percent-encoded UTF-8"),
        ("s3://bucket/a\ud83db", "half of a surrogate pair"),
        ("/data/a\ud83db", "half of a surrogate pair"),
        ("file:///data/a%00b", "control character"),
        ("https://acc.blob.core.windows.net/c/run?sv=1&sig=x", "AZURE_STORAGE_SAS_TOKEN"),
        ("https://acc.blob.core.windows.net/c/run?comp=list", "a query or a fragment"),
        ("abfss://c@acc/run", "abfss://container@account.dfs.core.windows.net/path"),
        ("abfss://@acc.dfs.core.windows.net/run", "names no bucket"),
        ("abfss://c@acc-primary.dfs.core.windows.net/run", "abfss://container@account"),
        ("https://acc.z7.evil.blob.storage.azure.net/c/run", "abfss://container@account"),
        ("file://host/run", "file:///absolute/path"),
        ("file://run\u2100/step", "file:///absolute/path"),
        (7, "not int"),
        (None, "not NoneType"),
        (b"s3://bucket/run", "not bytes"),
    ],
)
def test_what_is_no_location_is_refused_with_a_hint(text, hint):
    with pytest.raises(InvalidURIError) as caught:
        CheckpointURI.parse(text)
    assert hint in str(caught.value)
    str(caught.value).encode()  # it can be printed
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "text",
    [
        "s3://KEY:SECRET@bucket/run",
        "s4://KEY:SECRET@bucket/run",
        "gcs:/KEY:SECRET@bucket/run",
        "r2://KEY:SECRET@bucket/run?token=SECRET",
        "wasbs://c:SECRET@acc.blob.core.windows.net/run",
        "hdfs://KEY:SECRET@node/run?x=SECRET",
        "s3://arn:SECRET@bucket/run",
        "s3://bucket/run?X-Amz-Signature=SECRET",
        "s3:/KEY:SECRET@bucket/run",
        "file://KEY:SECRET@host/run",
        "s3://KEY:SECRET@bucket/\x07",
        "https://acc:SECRET@acc.blob.core.windows.net/c/run",
        "https://acc.blob.core.windows.net/c/run?sv=1&sig=SECRET",
        "abfss://c@acc.dfs.core.windows.net/run?sig=SECRET",
    ],
)
def test_no_secret_is_in_a_message(text):
    with pytest.raises(InvalidURIError) as caught:
        CheckpointURI.parse(text)
    assert "SECRET" not in str(caught.value)
    assert caught.value.__cause__ is None


@given(
    scheme=st.sampled_from(["s3", "gs", "az"]),
    bucket=st.from_regex(r"[a-z0-9][a-z0-9.\-]{1,30}", fullmatch=True),
    segments=st.lists(SEGMENT, max_size=4),
)
def test_a_cloud_uri_comes_back_from_its_text(scheme, bucket, segments):
    text = "/".join([f"{scheme}://{bucket}", *segments])
    uri = CheckpointURI.parse(text)
    assert str(uri) == text
    assert (uri.scheme, uri.bucket, uri.prefix) == (scheme, bucket, "/".join(segments))
    assert CheckpointURI.parse(str(uri)) == uri
    assert uri.is_cloud
    assert uri.root == f"{scheme}://{bucket}"


@given(
    account=st.from_regex(r"[a-z0-9]{3,24}", fullmatch=True),
    container=st.from_regex(r"[a-z0-9][a-z0-9\-]{1,30}", fullmatch=True),
    segments=st.lists(SEGMENT, max_size=4),
)
def test_a_uri_with_an_account_comes_back_from_its_text(account, container, segments):
    host, path = f"{account}.blob.core.windows.net", "/".join(segments)
    uri = CheckpointURI.parse("/".join([f"abfss://{container}@{host}", *segments]))
    assert uri == CheckpointURI("az", container, path, host)
    assert CheckpointURI.parse(str(uri)) == uri
    assert CheckpointURI.parse(f"https://{host}/{container}/{quote(path)}") == uri
    assert str(uri.join("step-1")) == f"{str(uri).rstrip('/')}/step-1"
    assert uri.join("step-1").root == uri.root


@given(segments=st.lists(SEGMENT, min_size=1, max_size=4))
def test_a_local_path_comes_back_from_its_uri(segments):
    path = "/" + "/".join(segments)
    uri = CheckpointURI.parse(path)
    assert (uri.scheme, uri.prefix) == ("file", path)
    assert str(uri).startswith("file:///")
    assert CheckpointURI.parse(str(uri)) == uri
    assert not uri.is_cloud


@pytest.mark.parametrize(
    ("base", "names", "expected"),
    [
        ("s3://bucket/run", ["step-1"], "s3://bucket/run/step-1"),
        ("s3://bucket/run/", ["/step-1/"], "s3://bucket/run/step-1"),
        ("s3://bucket", ["run", "step-1"], "s3://bucket/run/step-1"),
        ("file:///data", ["run", "step-1"], "file:///data/run/step-1"),
        ("/data/a b", ["run"], "file:///data/a%20b/run"),
        ("/data", ["50%25"], "file:///data/50%2525"),
        ("/data", ["run#7"], "file:///data/run%237"),
    ],
)
def test_join_goes_beneath(base, names, expected):
    assert str(CheckpointURI.parse(base).join(*names)) == expected


@pytest.mark.parametrize("name", ["..", "a/../../other", "a//b", "a?b"])
def test_join_refuses_what_is_no_location(name):
    with pytest.raises(InvalidURIError):
        CheckpointURI.parse("s3://bucket/run").join(name)


def test_it_is_a_value():
    uri = CheckpointURI.parse("s3://bucket/run")
    assert uri == CheckpointURI("s3", "bucket", "run")
    assert hash(uri) == hash(CheckpointURI("s3", "bucket", "run"))
    assert pickle.loads(pickle.dumps(uri)) == uri
    with pytest.raises(AttributeError):
        uri.prefix = "other"


class _Universal:
    """As ``upath.UPath``: its text is a URI, and it has no path."""

    def __str__(self):
        return "s3://bucket/run"


class _Caching(_Universal):
    """As ``cloudpathlib.S3Path``: its path is that of a local copy."""

    def __fspath__(self):
        return "/tmp/cached/run"


class _Named(str, enum.Enum):
    RUN = "s3://bucket/run"


@pytest.mark.parametrize("location", [_Universal(), _Caching(), _Named.RUN])
def test_an_object_that_says_a_uri_is_taken_at_its_word(location):
    assert CheckpointURI.parse(location) == CheckpointURI("s3", "bucket", "run")


@pytest.mark.parametrize(
    ("uri", "given"),
    [
        ("s3://bucket/run", Path("/folder/s3:/bucket/run").as_uri()),
        ("gs://bucket/run", "~/gs:/bucket/run"),
        ("abfss://c@acc.dfs.core.windows.net/run", Path("abfss://c@acc.dfs.core.windows.net/run")),
        ("https://acc.blob.core.windows.net/c/run", "/w/https:/acc.blob.core.windows.net/c/run"),
        ("s3a://bucket/run", "/folder/s3a:/bucket/run"),
    ],
)
def test_a_folded_uri_is_refused_in_every_place_of_a_path(uri, given):
    with pytest.raises(InvalidURIError, match="lost a slash") as caught:
        CheckpointURI.parse(given)
    assert f'"{uri}"' in str(caught.value)


def test_a_folded_uri_is_refused_without_its_credentials():
    with pytest.raises(InvalidURIError) as caught:
        CheckpointURI.parse("/folder/s3:/key:hidden@bucket/run")
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("text", ["/data/s3/run", "/data/s3:run", "/data/xs3:/run", "/c:/run"])
def test_a_folder_that_only_resembles_a_scheme_is_a_folder(text):
    assert CheckpointURI.parse(text).prefix == text


@given(st.lists(SEGMENT, max_size=3), st.sampled_from(["s3", "gs", "az"]))
def test_whatever_a_path_makes_of_a_uri_is_refused(segments, scheme):
    uri = "/".join([f"{scheme}://bucket", *segments])
    for folded in (Path(uri), Path(uri).absolute(), os.path.join("runs", uri)):
        assert unfolded(str(folded)) is not None
        assert not CheckpointURI.accepts(folded)


def test_a_relative_path_where_the_working_directory_is_gone_is_refused(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(InvalidURIError, match="working directory, which no longer exists"):
        CheckpointURI.parse("run/step-1")
    assert CheckpointURI.parse(f"{tmp_path}/run").prefix == f"{tmp_path}/run"
