# ruff: noqa: D103 - a test's name is its docstring
"""The loopback server speaks enough of Azure's Blob service that its SDK finds nothing amiss."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.server.azure import ACCOUNT
from benchmarks.server.process import ServerHandle

pytest.importorskip("azure.storage.blob")

from azure.core import MatchConditions
from azure.core.exceptions import HttpResponseError
from azure.storage.blob import BlobBlock, BlobServiceClient

MIB = 1024 * 1024
KEY = base64.b64encode(b"key").decode()


@pytest.fixture
def service(server: ServerHandle) -> Iterator[Any]:
    server.clear()
    server.reset()
    account = {"account_name": ACCOUNT, "account_key": KEY}
    with BlobServiceClient(f"{server.endpoint}/{ACCOUNT}", account, retry_total=0) as client:
        yield client


@pytest.fixture
def container(service: Any) -> Any:
    return service.get_container_client("keep")


def code_of(error: pytest.ExceptionInfo[HttpResponseError]) -> tuple[int | None, Any]:
    return error.value.status_code, error.value.error_code  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", [0, 1, 70_000, 9 * MIB])
def test_a_blob_comes_back_whole_and_by_range(container: Any, size: int) -> None:
    data = os.urandom(size)
    blob = container.upload_blob("a b/ü+", data)
    assert blob.download_blob().readall() == data
    assert blob.get_blob_properties().size == size
    if size > 100:
        assert blob.download_blob(50, 50).readall() == data[50:100]


def test_conditions_guard_the_write(container: Any) -> None:
    first = container.upload_blob("k", b"1").get_blob_properties().etag
    with pytest.raises(HttpResponseError) as error:
        container.upload_blob("k", b"2")
    assert code_of(error) == (409, "BlobAlreadyExists")
    matching = {"etag": first, "match_condition": MatchConditions.IfNotModified}
    blob = container.get_blob_client("k")
    blob.upload_blob(b"3", overwrite=True, **matching)
    with pytest.raises(HttpResponseError) as error:
        blob.upload_blob(b"4", overwrite=True, **matching)
    assert code_of(error) == (412, "ConditionNotMet")
    with pytest.raises(HttpResponseError) as error:
        blob.download_blob(**matching)
    assert code_of(error) == (412, "ConditionNotMet")
    assert blob.download_blob().readall() == b"3"


def test_blocks_make_a_blob_and_are_counted(container: Any, server: ServerHandle) -> None:
    pieces = [os.urandom(5 * MIB), os.urandom(6 * MIB), b"end"]
    blob = container.get_blob_client("big")
    names = [f"{number:05}" for number in range(len(pieces))]
    for name, piece in zip(names, pieces, strict=True):
        blob.stage_block(name, piece)
    assert [block.id for block in blob.get_block_list("uncommitted")[1]] == names
    assert [found.name for found in container.list_blobs(include="uncommittedblobs")] == ["big"]
    assert not list(container.list_blobs())
    blob.commit_block_list([BlobBlock(name) for name in names])
    whole = b"".join(pieces)
    assert blob.download_blob().readall() == whole
    assert blob.download_blob(4 * MIB, 5 * MIB).readall() == whole[4 * MIB : 9 * MIB]
    with pytest.raises(HttpResponseError) as error:
        blob.commit_block_list([BlobBlock("absent")])
    assert code_of(error) == (400, "InvalidBlockList")
    counts = server.counts()
    assert counts.operations["UploadPart"]["requests"] == 3
    assert counts.operations["UploadPart"]["bytes_in"] == len(whole)


def test_listing_pages_groups_and_deletes(container: Any) -> None:
    keys = sorted(f"p/{index % 5}/{index:02}&" for index in range(25))
    for key in keys:
        container.upload_blob(key, b"x")
    assert [found.name for found in container.list_blobs("p/", results_per_page=7)] == keys
    groups = [found.name for found in container.walk_blobs("p/", results_per_page=2)]
    assert groups == [f"p/{index}/" for index in range(5)]
    answers = container.delete_blobs(*keys[:20], raise_on_any_failure=False)
    assert [answer.status_code for answer in answers] == [202] * 20
    answers = container.delete_blobs(keys[0], keys[20], raise_on_any_failure=False)
    assert [answer.status_code for answer in answers] == [404, 202]
    with pytest.raises(HttpResponseError) as error:
        container.delete_blob(keys[0])
    assert code_of(error) == (404, "BlobNotFound")
    assert [found.name for found in container.list_blobs()] == keys[21:]


def test_a_sink_drops_large_blocks(service: Any) -> None:
    blob = service.get_blob_client("sink", "large")
    blob.stage_block("0", bytes(9 * MIB))
    blob.commit_block_list([BlobBlock("0")])
    assert blob.get_blob_properties().size == 9 * MIB
    with pytest.raises(HttpResponseError) as error:
        blob.download_blob()
    assert code_of(error) == (410, "BodyDropped")


def test_faults_strike_this_dialect_too(container: Any, server: ServerHandle) -> None:
    server.inject({"kind": "503", "count": 1})
    with pytest.raises(HttpResponseError) as error:
        container.upload_blob("k", b"x")
    assert error.value.status_code == 503
    server.inject()
