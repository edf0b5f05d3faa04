# ruff: noqa: D103 - a test's name is its docstring
"""The loopback server speaks enough S3 that boto3 finds nothing amiss."""

from __future__ import annotations

import http.client
import os
import time
from typing import Any

import boto3
import botocore.exceptions
import pytest
from botocore.config import Config

from benchmarks.server.process import ServerHandle
from benchmarks.server.shaping import Shape

MIB = 1024 * 1024


@pytest.fixture
def client(server: ServerHandle) -> Any:
    server.clear()
    server.inject()
    server.shape(Shape())
    server.reset()
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        config=Config(
            s3={"addressing_style": "path"},
            retries={"total_max_attempts": 1},
            read_timeout=5,
        ),
    )


def status_of(error: pytest.ExceptionInfo[botocore.exceptions.ClientError]) -> int:
    return int(error.value.response["ResponseMetadata"]["HTTPStatusCode"])


@pytest.mark.parametrize("size", [0, 1, 70_000, 9 * MIB])
def test_an_object_comes_back_whole_and_by_range(client: Any, size: int) -> None:
    data = os.urandom(size)
    client.put_object(Bucket="keep", Key="a b/ü+", Body=data)
    assert client.get_object(Bucket="keep", Key="a b/ü+")["Body"].read() == data
    assert client.head_object(Bucket="keep", Key="a b/ü+")["ContentLength"] == size
    if size > 100:
        part = client.get_object(Bucket="keep", Key="a b/ü+", Range="bytes=50-99")
        assert part["ContentRange"] == f"bytes 50-99/{size}"
        assert part["Body"].read() == data[50:100]
        tail = client.get_object(Bucket="keep", Key="a b/ü+", Range="bytes=-7")
        assert tail["Body"].read() == data[-7:]


def test_conditions_guard_the_write(client: Any) -> None:
    first = client.put_object(Bucket="keep", Key="k", Body=b"1", IfNoneMatch="*")["ETag"]
    with pytest.raises(botocore.exceptions.ClientError) as error:
        client.put_object(Bucket="keep", Key="k", Body=b"2", IfNoneMatch="*")
    assert status_of(error) == 412
    client.put_object(Bucket="keep", Key="k", Body=b"3", IfMatch=first)
    with pytest.raises(botocore.exceptions.ClientError) as error:
        client.put_object(Bucket="keep", Key="k", Body=b"4", IfMatch=first)
    assert status_of(error) == 412
    assert client.get_object(Bucket="keep", Key="k")["Body"].read() == b"3"


def test_multipart_joins_its_parts_and_counts_them(client: Any, server: ServerHandle) -> None:
    parts = [os.urandom(5 * MIB), os.urandom(6 * MIB), b"end"]
    upload = client.create_multipart_upload(Bucket="keep", Key="big")["UploadId"]
    assert client.list_multipart_uploads(Bucket="keep")["Uploads"][0]["UploadId"] == upload
    tags = [
        {
            "PartNumber": number,
            "ETag": client.upload_part(
                Bucket="keep", Key="big", UploadId=upload, PartNumber=number, Body=part
            )["ETag"],
        }
        for number, part in enumerate(parts, 1)
    ]
    client.complete_multipart_upload(
        Bucket="keep", Key="big", UploadId=upload, MultipartUpload={"Parts": tags}
    )
    whole = b"".join(parts)
    assert client.get_object(Bucket="keep", Key="big")["Body"].read() == whole
    across = client.get_object(Bucket="keep", Key="big", Range=f"bytes={4 * MIB}-{12 * MIB}")
    assert across["Body"].read() == whole[4 * MIB : 12 * MIB + 1]
    assert "Uploads" not in client.list_multipart_uploads(Bucket="keep")
    counts = server.counts()
    assert counts.operations["UploadPart"]["requests"] == 3
    assert counts.operations["UploadPart"]["bytes_in"] == len(whole)


def test_an_aborted_upload_is_gone(client: Any) -> None:
    upload = client.create_multipart_upload(Bucket="keep", Key="k")["UploadId"]
    client.abort_multipart_upload(Bucket="keep", Key="k", UploadId=upload)
    with pytest.raises(botocore.exceptions.ClientError) as error:
        client.upload_part(Bucket="keep", Key="k", UploadId=upload, PartNumber=1, Body=b"x")
    assert status_of(error) == 404


def test_listing_pages_groups_and_deletes(client: Any) -> None:
    for index in range(25):
        client.put_object(Bucket="keep", Key=f"p/{index % 5}/{index:02}&", Body=b"x")
    pages = client.get_paginator("list_objects_v2").paginate(
        Bucket="keep", Prefix="p/", PaginationConfig={"PageSize": 7}
    )
    keys = [found["Key"] for page in pages for found in page["Contents"]]
    assert keys == sorted(f"p/{index % 5}/{index:02}&" for index in range(25))
    pages = client.get_paginator("list_objects_v2").paginate(
        Bucket="keep", Prefix="p/", Delimiter="/", PaginationConfig={"PageSize": 2}
    )
    prefixes = [found["Prefix"] for page in pages for found in page["CommonPrefixes"]]
    assert prefixes == [f"p/{index}/" for index in range(5)]
    for key in keys[:20]:
        client.delete_object(Bucket="keep", Key=key)
    client.delete_object(Bucket="keep", Key=keys[20])
    left = client.list_objects_v2(Bucket="keep")
    assert [found["Key"] for found in left["Contents"]] == keys[21:]


def test_a_copy_shares_the_bytes(client: Any) -> None:
    client.put_object(Bucket="keep", Key="a", Body=b"abc")
    client.copy_object(Bucket="keep", Key="b/ c", CopySource={"Bucket": "keep", "Key": "a"})
    assert client.get_object(Bucket="keep", Key="b/ c")["Body"].read() == b"abc"


def test_a_sink_keeps_small_bodies_and_drops_large_ones(client: Any) -> None:
    client.put_object(Bucket="sink", Key="small", Body=b"abc")
    client.put_object(Bucket="sink", Key="large", Body=bytes(9 * MIB))
    assert client.get_object(Bucket="sink", Key="small")["Body"].read() == b"abc"
    assert client.head_object(Bucket="sink", Key="large")["ContentLength"] == 9 * MIB
    with pytest.raises(botocore.exceptions.ClientError) as error:
        client.get_object(Bucket="sink", Key="large")
    assert status_of(error) == 410


@pytest.mark.parametrize("wrapped", [False, True])
def test_aws_chunks_are_unwrapped(client: Any, server: ServerHandle, wrapped: bool) -> None:
    data = os.urandom(100_000)
    body = b"".join(
        b"%x;chunk-signature=00\r\n%b\r\n" % (len(piece), piece)
        for piece in (data[:65_536], data[65_536:], b"")
        if piece
    )
    body += b"0\r\nx-amz-checksum-crc32c:AAAAAA==\r\n\r\n"
    headers = {
        "Content-Encoding": "aws-chunked",
        "x-amz-content-sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
        "x-amz-decoded-content-length": str(len(data)),
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    for _ in range(2):
        pieces = iter([body[:1000], body[1000:]])
        connection.request(
            "PUT", "/keep/k", pieces if wrapped else body, headers, encode_chunked=wrapped
        )
        response = connection.getresponse()
        response.read()
        assert response.status == 200
    connection.close()
    assert client.get_object(Bucket="keep", Key="k")["Body"].read() == data


def test_faults_strike_the_requests_they_name(client: Any, server: ServerHandle) -> None:
    client.put_object(Bucket="keep", Key="k", Body=bytes(MIB))
    server.inject({"kind": "503", "count": 1})
    with pytest.raises(botocore.exceptions.ClientError) as error:
        client.get_object(Bucket="keep", Key="k")
    assert status_of(error) == 503
    server.inject({"kind": "truncate", "count": 1, "operations": ["GetObject"]})
    client.put_object(Bucket="keep", Key="other", Body=bytes(MIB))
    with pytest.raises(botocore.exceptions.ResponseStreamingError):
        client.get_object(Bucket="keep", Key="k")["Body"].read()
    server.inject({"kind": "reset", "count": 1})
    with pytest.raises(botocore.exceptions.HTTPClientError):
        client.put_object(Bucket="keep", Key="k", Body=bytes(4 * MIB))
    server.inject({"kind": "stall", "count": 1, "stall_s": 0.5})
    began = time.monotonic()
    with pytest.raises(botocore.exceptions.HTTPClientError):
        client.put_object(Bucket="keep", Key="k", Body=bytes(MIB))
    assert time.monotonic() - began > 0.4
    assert len(client.get_object(Bucket="keep", Key="k")["Body"].read()) == MIB


def test_a_shaped_link_is_no_faster_than_it_should_be(client: Any, server: ServerHandle) -> None:
    server.shape(Shape(latency_ms=50, connection_rate=8 * MIB))
    began = time.monotonic()
    client.put_object(Bucket="keep", Key="k", Body=bytes(4 * MIB))
    assert time.monotonic() - began > 0.5
    began = time.monotonic()
    client.get_object(Bucket="keep", Key="k")["Body"].read()
    assert time.monotonic() - began > 0.5
