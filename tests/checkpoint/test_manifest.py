"""The manifest: what was written comes back, and nothing else is believed."""

import base64
import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudckpt.checkpoint.manifest import ItemRecord, Manifest, ManifestId
from cloudckpt.checkpoint.objects import ObjectRecord
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checksum import ALGORITHMS, CRC32C
from cloudckpt.errors import CheckpointCorruptError

URI = "s3://bucket/run/.manifest"
ATTEMPT = "0123456789abcdef"

NAMES = st.text(st.characters(blacklist_categories=("Cs",)), min_size=1, max_size=20)
OFFSETS = st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple)


@st.composite
def manifests(draw):
    """Items in a few objects, one behind the other."""
    objects = [
        (f"__{rank}_0.{ATTEMPT}.distcp", draw(st.integers(0, 0xFFFFFFFF)))
        for rank in range(draw(st.integers(1, 3)))
    ]
    planned = []
    for _ in range(draw(st.integers(0, 6))):
        key = (draw(NAMES), draw(st.none() | OFFSETS))
        numbers = [draw(st.integers(0, 5000)) for _ in range(4)]
        dtype = draw(st.sampled_from([None, "float32", "float8_e4m3fn"]))
        planned.append((key, draw(st.sampled_from(objects)), numbers, dtype))
    algorithm = draw(st.sampled_from(list(ALGORITHMS.values())))
    ends, items = {}, {}
    for key, (name, _), (gap, before, raw, behind), dtype in planned:
        offset = ends.get(name, 0) + gap
        blocks = -(-raw // 512)
        checksums = algorithm.pack([draw(st.integers(0, 0xFFFFFFFF)) for _ in range(blocks)])
        length = before + raw + behind
        items[key] = (name, offset, length, offset + before, raw, dtype, (raw,), 512, checksums)
        ends[name] = offset + length
    made = {name: ObjectRecord(name, ends.get(name, 0) + 7, crc) for name, crc in objects}
    records = {key: ItemRecord(made[item[0]], *item[1:]) for key, item in items.items()}
    return Manifest(records, algorithm)


def stored(manifest):
    data = manifest.to_json()
    return data, manifest.identify(ATTEMPT, data)


@settings(deadline=None)
@given(manifests())
def test_a_manifest_comes_back(manifest):
    data, identity = stored(manifest)
    assert Manifest.from_json(data, identity, URI) == manifest
    assert Manifest.from_json(bytearray(data), identity, URI) == manifest


def test_items_of_one_object_share_its_record():
    data, identity = stored(EXAMPLE)
    back = Manifest.from_json(data, identity, URI)
    one, other = back.items.values()
    assert one.object is other.object


def test_it_is_json_that_anybody_can_read():
    document = json.loads(EXAMPLE.to_json())
    assert (document["format"], document["version"]) == ("cloudckpt", 1)
    assert document["checksum"] == "crc32c"
    assert document["objects"] == [["__0_0.ab.distcp", 10_000, "TQAAAA=="]]


SHARD = ObjectRecord("__0_0.ab.distcp", 10_000, 77)
EXAMPLE = Manifest(
    {
        ("w", (0, 0)): ItemRecord(
            SHARD, 0, 1000, 640, 300, "float32", (3, 25), 128, CRC32C.pack((1, 2, 3))
        ),
        ("step", None): ItemRecord(SHARD, 1024, 99, 1024, 99, None, (), 128, CRC32C.pack((4,))),
    },
    CRC32C,
)


def test_the_structure_comes_back_and_is_not_there_if_nothing_is_lost():
    structure = Structure({("a", 0): {"1": 1}}, {("b",): (3,)})
    manifest = dataclasses.replace(EXAMPLE, structure=structure)
    data, identity = stored(manifest)
    assert Manifest.from_json(data, identity, URI).structure == structure
    assert "structure" not in json.loads(EXAMPLE.to_json())


@pytest.mark.parametrize(
    "structure",
    [7, [], "x", {}, {"keys": [], "empty": 0}, {"keys": [[["a"], [["1"]]]], "empty": []}],
)
def test_a_structure_that_makes_no_sense_is_damage(structure):
    document = json.loads(EXAMPLE.to_json()) | {"structure": structure}
    data = json.dumps(document).encode()
    with pytest.raises(CheckpointCorruptError) as caught:
        Manifest.from_json(data, EXAMPLE.identify(ATTEMPT, data), URI)
    assert caught.value.uri == URI


# damage


@settings(deadline=None)
@given(st.data())
def test_a_flipped_bit_is_noticed(data):
    stored_bytes, identity = stored(EXAMPLE)
    damaged = bytearray(stored_bytes)
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CheckpointCorruptError, match="damaged") as caught:
        Manifest.from_json(damaged, identity, URI)
    assert caught.value.uri == URI


@pytest.mark.parametrize("change", [lambda d: d[:-1], lambda d: d + b" ", lambda d: b""])
def test_missing_and_surplus_bytes_are_noticed(change):
    data, identity = stored(EXAMPLE)
    with pytest.raises(CheckpointCorruptError):
        Manifest.from_json(change(data), identity, URI)


def test_the_manifest_of_another_attempt_is_not_believed():
    _, identity = stored(EXAMPLE)
    other, _ = stored(Manifest({}, CRC32C))
    with pytest.raises(CheckpointCorruptError):
        Manifest.from_json(other, identity, URI)


def row(**changes):
    """An item as it is stored, with changes."""
    fields = {
        "fqn": "w",
        "offsets": [0, 0],
        "object": 0,
        "offset": 0,
        "length": 1000,
        "raw_offset": 640,
        "raw_length": 300,
        "dtype": "float32",
        "shape": [3, 25],
        "block_size": 128,
        "checksums": base64.b64encode(bytes(12)).decode(),
    }
    return list({**fields, **changes}.values())


def document(rows=(), objects=(("__0_0.ab.distcp", 10_000, "TQAAAA=="),), **changes):
    return {
        "format": "cloudckpt",
        "version": 1,
        "checksum": "crc32c",
        "objects": list(objects),
        "items": list(rows),
        **changes,
    }


def test_the_rows_of_these_tests_are_right():
    data = json.dumps(document([row()])).encode()
    manifest = Manifest.from_json(data, ManifestId(ATTEMPT, len(data), CRC32C.of(data)), URI)
    assert manifest.items[("w", (0, 0))].object == SHARD


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"{",
        b"\xff\xfe",
        document(items=None),
        document(checksum="md5"),
        document(checksum=None),
        document([row()], checksum="crc64nvme"),
        document(objects=[["__0_0.ab.distcp", 10_000]]),
        document(objects=[["__0_0.ab.distcp", 10_000, 77]]),
        document(objects=[["__0_0.ab.distcp", 10_000, "TQAAAE0AAAA="]]),
        document(objects=[["../other", 10_000, "TQAAAA=="]]),
        document(objects=[["/etc/passwd", 10_000, "TQAAAA=="]]),
        document(objects=[[7, 10_000, "TQAAAA=="]]),
        document([row()[:-1]]),
        document([row(object=1)]),
        document([row(object=-1)]),
        document([row(object="0")]),
        document([row(offset=-1)]),
        document([row(offset=9001)]),
        document([row(raw_offset=701)]),
        document([row(raw_offset=-1)]),
        document([row(raw_length=361)]),
        document([row(raw_length=400)]),
        document([row(raw_length=-1, checksums="")]),
        document([row(length=10_001)]),
        document([row(block_size=1024)]),
        document([row(block_size=0)]),
        document([row(block_size=None)]),
        document([row(checksums="?")]),
        document([row(checksums=base64.b64encode(bytes(11)).decode())]),
        document([row(shape=None)]),
        document([row(offsets=7)]),
        document([row(fqn=["w"])]),
        document([row(fqn=None)]),
        document([row(fqn=7)]),
        document([row(shape=["a", 25])]),
        document([row(shape=[3.0, 25])]),
        document([row(shape=[True, 75])]),
        document([row(shape=[-3, -25])]),
        document([row(shape=[1 << 70, 25])]),
        document([row(shape={"3": 25})]),
        document([row(shape="ab")]),
        document([row(offsets=[0, "a"])]),
        document([row(offsets=[0.5, 0])]),
        document([row(offsets=[0, -1])]),
        document([row(offsets=[0, 1 << 63])]),
        document([row(offsets=[None])]),
        document([row(offsets={})]),
        document([row(offset=0.0)]),
        document([row(offset=False)]),
        document([row(object=True)]),
        document([row(length=1e3)]),
        document([row(raw_length=float("nan"))]),
        document([row(raw_length=float("inf"))]),
        document([row(raw_length=1 << 70)]),
        document([row(block_size=1 << 70)]),
        document([row(block_size=128.0)]),
        document([row(dtype="float33")]),
        document([row(dtype="nn")]),
        document([row(dtype="Tensor")]),
        document([row(dtype="")]),
        document([row(dtype=7)]),
        document([row(dtype=["float32"])]),
        document([row(checksums=7)]),
        document([row(checksums=None)]),
        document([row(checksums="ünïcode")]),
        document([row(), row()]),
        document(["abcdefghijk"]),
        document([dict.fromkeys("abcdefghijk")]),
        document({"a": row()}),
        document(objects=[["a", True, "TQAAAA=="]]),
        document(objects=[["a", -1, "TQAAAA=="]]),
        document(objects=[["a", 1.5, "TQAAAA=="]]),
        document(objects=[["a", 1 << 63, "TQAAAA=="]]),
        document(objects=[["a\ud800", 1, "TQAAAA=="]]),
        document(objects=[["a", 1, 7]]),
        document(objects=["abc"]),
        document(objects=[7]),
        document(checksum=["crc32c"]),
        document(checksum={}),
        document(version=0),
        document(version=-1),
        document(version=1.0),
        document(version=True),
        document(version="1"),
        document(version=None),
        document(format="another"),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"format": "cloudckpt", "version": ' + b"9" * 5000 + b"}",
        json.dumps(document([row()])).encode().replace(b"640", b"9" * 5000),
        json.dumps(document([row()])).encode().replace(b"640", b"NaN"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(content):
    """Whoever can write to the bucket can also write the id that goes with it."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    identity = ManifestId(ATTEMPT, len(data), CRC32C.of(data))
    with pytest.raises(CheckpointCorruptError) as caught:
        Manifest.from_json(data, identity, URI)
    assert caught.value.uri in (URI, "s3://bucket/run")


def read(content):
    data = json.dumps(content).encode()
    return Manifest.from_json(data, ManifestId(ATTEMPT, len(data), CRC32C.of(data)), URI)


@pytest.mark.parametrize("version", [2, 3, 1 << 70])
def test_a_manifest_of_a_newer_version_says_so(version):
    with pytest.raises(CheckpointCorruptError, match="newer cloudckpt"):
        read(document([row()], version=version))
    with pytest.raises(CheckpointCorruptError, match="newer cloudckpt"):
        read({"format": "cloudckpt", "version": version, "columns": {}})


def test_what_a_manifest_holds_besides_is_of_no_consequence():
    assert read(document([row()], owners={"w": [1, None]})) == read(document([row()]))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_any_value_anywhere_in_a_manifest_is_right_or_told_as_damage(data):
    content = document([row()])
    place = data.draw(st.sampled_from([content, content["items"][0], content["objects"]]))
    keys = list(place) if isinstance(place, dict) else range(len(place))
    place[data.draw(st.sampled_from(keys))] = data.draw(JSON)
    try:
        found = read(content)
    except CheckpointCorruptError:
        return
    for item in found.items.values():
        assert all(type(dim) is int and dim >= 0 for dim in item.shape)


# its id


@given(
    attempt=st.from_regex(r"[0-9a-f]{1,32}", fullmatch=True),
    size=st.integers(0, 1 << 50),
    crc=st.integers(0, 0xFFFFFFFF),
)
def test_an_id_comes_back_from_its_text(attempt, size, crc):
    identity = ManifestId(attempt, size, crc)
    assert ManifestId.parse(str(identity), URI) == identity
    assert attempt in identity.name


@pytest.mark.parametrize(
    "save_id", [None, "", 7, "0d9f64d1-6e3b-4d8a-8f0e-2b1f5f1f3a55", "cloudckptx-1-ab-7-00000000"]
)
def test_the_save_id_of_another_writer_is_none_of_ours(save_id):
    assert ManifestId.parse(save_id, URI) is None


@pytest.mark.parametrize(
    "save_id",
    [
        "cloudckpt-2-ab-7-00000000",
        "cloudckpt-1-../../x-7-00000000",
        "cloudckpt-1-AB-7-00000000",
        "cloudckpt-1-ab-7-0000000",
        "cloudckpt-1-ab--7-00000000",
        "cloudckpt-1-ab-7-00000000\n",
        "cloudckpt-",
        f"cloudckpt-1-ab-{'9' * 5000}-00000000",
    ],
)
def test_an_id_that_this_version_does_not_know_is_refused(save_id):
    with pytest.raises(CheckpointCorruptError):
        ManifestId.parse(save_id, URI)
