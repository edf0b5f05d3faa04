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

# all of ASCII that a segment may have, and letters that encoders, file systems and spaces trip over
_LETTERS = (
    "".join(chr(n) for n in range(32, 127) if chr(n) not in "/?#@") + "ße\u0301重\xa0\u2028\u202e😀"
)
SEGMENT = st.text(_LETTERS, min_size=1).filter(
    lambda text: text not in (".", "..") and text.strip() and not text.endswith(":")  # a scheme
)
ARN = "arn:aws:s3:eu-west-1:123456789012:accesspoint"
GOV = ARN.replace("aws", "aws-us-gov", 1)
ALIAS = "point-abcdefghijklmnopqrstuvwxyz-s3alias"
HOST = "acc.blob.core.windows.net"
REPOSITORIES = ("me/model", "buckets", "buckets/me", "datasets/a/b", "buckets/a/.x/b")
PLAIN_BUCKETS = ("x-s3", "my.mrap.bucket", "table-s3", "a--x-s3b", "fast--usw2-az1--x-s3")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket/run/step-1/", ("s3", "bucket", "run/step-1")),
        ("s3://bucket", ("s3", "bucket", "")),
        ("S3://Bucket/Run", ("s3", "Bucket", "Run")),
        ("abfss://container/run", ("az", "container", "run")),
        ("file:///data/run", ("file", "", "/data/run")),
        ("file://localhost/data/run", ("file", "", "/data/run")),
        ("file:///data/a%20b", ("file", "", "/data/a b")),
        ("/run/", ("file", "", "/run")),
        ("/data/x/../run", ("file", "", "/data/run")),
        (os.fsdecode(b"/data/\xff/run"), ("file", "", os.fsdecode(b"/data/\xff/run"))),
        ("/home/me/hf:/model", ("file", "", "/home/me/hf:/model")),  # torch's own folders
        *(
            (text, ("file", "", text))
            for text in ("/data/s3/run", "/data/s3:run", "/data/xs3:/run")
        ),
        ("/c:/run", ("file", "", "/c:/run")),
        # buckets whose names resemble others
        *((f"s3://{name}/a--x-s3/run", ("s3", name, "a--x-s3/run")) for name in PLAIN_BUCKETS),
        ("gs://a--x-s3/run", ("gs", "a--x-s3", "run")),
        # access points
        (f"s3://{ARN}/point/run/step-1", ("s3", f"{ARN}/point", "run/step-1")),
        (f"s3://{ARN}:point/run", ("s3", f"{ARN}/point", "run")),
        (f"s3://{ARN}/point", ("s3", f"{ARN}/point", "")),
        (f"s3://{GOV}/point/run", ("s3", f"{GOV}/point", "run")),
        (f"s3://{ALIAS}/run", ("s3", ALIAS, "run")),
        # storage buckets
        ("hf://buckets/my-org/models.v2", ("hf", "buckets/my-org/models.v2", "")),
        ("hf://buckets/my-org/models.v2/", ("hf", "buckets/my-org/models.v2", "")),
        ("hf://buckets/my-org/models.v2/run/a", ("hf", "buckets/my-org/models.v2", "run/a")),
        # storage accounts
        ("abfss://c@acc.dfs.core.windows.net/run/a", ("az", "c", "run/a", HOST)),
        ("abfs://c@acc.dfs.core.windows.net/run", ("az", "c", "run", HOST)),
        ("abfss://c@acc.dfs.core.windows.net", ("az", "c", "", HOST)),
        ("abfss://c@acc.dfs.core.windows.net/a@b", ("az", "c", "a@b", HOST)),
        (f"https://{HOST}/c/run/", ("az", "c", "run", HOST)),
        (f"https://{HOST}/c", ("az", "c", "", HOST)),
        ("https://ACC.Blob.Core.Windows.Net/c/Run", ("az", "c", "Run", HOST)),
        *(
            (f"{scheme}{host}/{path}", ("az", "c", "run", host.replace("dfs", "blob")))
            for scheme, host, path in (
                ("https://", "acc.blob.core.chinacloudapi.cn", "c/run"),
                ("https://", "acc.z07.blob.storage.azure.net", "c/run"),
                ("abfss://c@", "acc.dfs.core.usgovcloudapi.net", "run"),
                ("abfss://c@", "acc-secondary.dfs.core.windows.net", "run"),
                ("abfss://c@", "acc-ipv6.dfs.core.windows.net", "run"),
                ("abfss://c@", "acc-dualstack.dfs.core.usgovcloudapi.net", "run"),
                ("abfss://c@", "acc-secondary-ipv6.dfs.core.windows.net", "run"),
                ("abfss://c@", "acc-dualstack.z07.dfs.storage.azure.net", "run"),
                ("abfss://c@", "acc.privatelink.dfs.core.chinacloudapi.cn", "run"),
                ("abfss://c@", "acc.z07.privatelink.dfs.storage.azure.net", "run"),
            )
        ),
    ],
)
def test_a_location_is_understood_and_comes_back_from_its_text(text, expected):
    uri = CheckpointURI.parse(text)
    assert uri == CheckpointURI(*expected)
    assert uri.is_cloud == (uri.scheme != "file")
    assert [CheckpointURI.parse(str(one)) for one in (uri, uri.parent)] == [uri, uri.parent]
    below = uri.join("below")
    assert (below.root, below.bucket, below.parent) == (uri.root, uri.bucket, uri)
    assert below.key("x") == uri.key("below/x")


def test_a_relative_path_starts_where_the_process_is(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert CheckpointURI.parse("run").prefix == f"{tmp_path}/run"


def test_a_tilde_is_the_home_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert CheckpointURI.parse("~/run").prefix == f"{tmp_path}/run"


@pytest.mark.parametrize("name", [" run", "a s3", "s3", "'run'", "az.c:x", "run:1", "s3-x:1"])
def test_names_of_folders_that_are_no_uri_are_left_alone(name):
    assert CheckpointURI.parse(name).prefix.endswith(f"/{name}")


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


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (" s3://bucket/run", "mistyped URI"),
        ('"s3://bucket/run"', "mistyped URI"),
        ("s3:bucket/run", "mistyped URI"),
        ("s3//bucket/run", "mistyped URI"),
        ("gs ://bucket/run", "mistyped URI"),
        ("", "empty"),
        ("s3:/bucket/run", '"s3://bucket/run"'),
        ("s3:///run", "names no bucket"),
        ("s3://bucket//run", "empty path segment"),
        ("s3://bucket/./run", "'.' or '..'"),
        ("s3://bucket/run?versionId=7", "a query or a fragment"),
        ("s3://bucket/run\n", "control character"),
        ("file:/run", '"file:///run"'),
        ("s3://KEY:SECRET@bucket/run", "has credentials"),
        ("s3://KEY:SECRET@bucket/\x07", "control character"),
        ("s3://arn:SECRET@bucket/run", "has credentials"),
        ("s3://bucket/run?X-Amz-Signature=SECRET", "a query or a fragment"),
        ("s3:/KEY:SECRET@bucket/run", "s3://"),
        ("/folder/s3:/key:SECRET@bucket/run", "s3://"),
        ("s4://KEY:SECRET@bucket/run", "unknown scheme 's4'"),
        ("r2://KEY:SECRET@bucket/run?token=SECRET", "write s3://bucket/path"),
        ("hdfs://KEY:SECRET@node/run?x=SECRET", "unknown scheme"),
        ("file://KEY:SECRET@host/run", "file:///absolute/path"),
        ("https://acc:SECRET@acc.blob.core.windows.net/c/run", "not a location in Azure"),
        ("abfss://c@acc.dfs.core.windows.net/run?sig=SECRET", "AZURE_STORAGE_SAS_TOKEN"),
        ("http://bucket/run", "unknown scheme 'http'"),
        ("gcs://bucket/run", "write gs://bucket/path"),
        (Path("minio://bucket/run"), "write s3://bucket/path"),
        (Path("hdfs://node/run"), "mount it"),
        (Path("sftp://host/run"), "mount it"),
        ("local:/run", "write file:///path"),
        ("s3a://bucket/run", "write s3://bucket/path"),
        ("azure://container/run", "write az://container/path"),
        ("wasb://container/run", "write abfss://container@account.dfs.core.windows.net/path"),
        ("wasbs://c:SECRET@acc.blob.core.windows.net/run?sig=SECRET", "***"),
        ("wasbs://c@acc/run", "write abfss://container@account.dfs.core.windows.net/path"),
        ("oss://bucket/run", "write s3://bucket/path"),
        ("dbfs:/run", "/dbfs/path"),
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
        ("https://acc.blob.core.windows.net/c/run?sv=1&sig=SECRET", "AZURE_STORAGE_SAS_TOKEN"),
        ("https://acc.blob.core.windows.net/c/run?comp=list", "a query or a fragment"),
        ("abfss://c@acc/run", "abfss://container@account.dfs.core.windows.net/path"),
        ("abfss://@acc.dfs.core.windows.net/run", "names no bucket"),
        ("abfss://c@acc-primary.dfs.core.windows.net/run", "abfss://container@account"),
        ("https://acc.z7.evil.blob.storage.azure.net/c/run", "abfss://container@account"),
        ("file://host/run", "file:///absolute/path"),
        ("file://run\u2100/step", "file:///absolute/path"),
        *((f"hf://{name}", "hf://buckets/namespace/name/path") for name in (*REPOSITORIES, "/b")),
        # what a path makes of a URI
        ("hf:/buckets/me/b/run", 'pass the string "hf://buckets/me/b/run" instead'),
        ("/home/me/hf:/buckets/me/b/run", 'pass the string "hf://buckets/me/b/run" instead'),
        (Path("/folder/s3:/bucket/run").as_uri(), '"s3://bucket/run"'),
        ("~/gs:/bucket/run", '"gs://bucket/run"'),
        (Path(f"abfss://c@{HOST}/run"), f'"abfss://c@{HOST}/run"'),
        (f"/w/https:/{HOST}/c/run", f'"https://{HOST}/c/run"'),
        ("/folder/s3a:/bucket/run", '"s3a://bucket/run"'),
        (7, "not int"),
        (None, "not NoneType"),
        (b"s3://bucket/run", "not bytes"),
    ],
)
def test_what_is_no_location_is_refused_with_a_hint_and_shows_no_secret(text, hint):
    with pytest.raises(InvalidURIError) as caught:
        CheckpointURI.parse(text)
    assert hint in str(caught.value)
    assert "SECRET" not in str(caught.value)
    assert caught.value.__cause__ is None
    str(caught.value).encode()  # it can be printed
    assert isinstance(caught.value, ValueError)


@given(
    scheme=st.sampled_from(["s3", "gs", "az"]),
    bucket=st.text("az09.-", min_size=1, max_size=30).map("b{}".format),
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
    account=st.text("az09", min_size=3, max_size=24),
    container=st.text("az09-", min_size=1, max_size=30).map("c{}".format),
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
    assert CheckpointURI.parse(uri) is uri
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
