"""Loads while requests fail, bytes get damaged on their way, and objects change or go."""

import dataclasses
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch.distributed.checkpoint as dcp

import cloudckpt
from cloudckpt import RetryPolicy, errors
from cloudckpt.config import MIB
from support.wire.faults import Corrupt, Drip, Reset, Stall, Throttle, Truncate
from support.wire.hop import Hop

from .refusals import COMMON, Refusal
from .selection import everywhere, on
from .states import BIG, SMALL, enough_tries, filled, impatient, load_step, silence

# every kind of request that a load makes
READS = {"metadata": "*/.metadata", "data": "*.distcp"}
FAULTS = {
    **COMMON,
    "reset within the body": Reset("body", after=200),
    "cut answer": Truncate(after=200),
    "no body": Truncate(after=0),  # a byte would be progress
    "key disabled": Refusal("key disabled"),
    "stall of the request": Stall("request", after=100),
    "stall in the body": Stall("body", after=100),
    "stall by drips": Drip(0.2),
}
FOR_GOOD = None
LASTING = ("denied", "key disabled", "stall by drips")

# as for a save: which request fails, how, how often, and what becomes of the load
MATRIX = [
    *(("data", fault, 2, None) for fault in FAULTS if fault not in LASTING),
    ("metadata", "cut answer", 2, None),
    ("metadata", "stall before the answer", 1, None),
    ("data", "reset", FOR_GOOD, errors.ConnectionLostError),
    ("data", "no body", FOR_GOOD, errors.ConnectionLostError),
    ("data", "slow down", FOR_GOOD, errors.ThrottledError),
    ("data", "denied", FOR_GOOD, errors.AccessDeniedError),
    ("data", "key disabled", FOR_GOOD, errors.StoreError),
    ("data", "stall in the body", FOR_GOOD, errors.ConnectionLostError),
    ("metadata", "stall by drips", FOR_GOOD, errors.ConnectionLostError),
    *((read, "internal error", FOR_GOOD, errors.ServerError) for read in READS),
    ("metadata", "stall before the answer", FOR_GOOD, errors.ConnectionLostError),
]


@pytest.mark.timeout(150)
@everywhere(fault=["cut answer", "internal error", "denied", "stall in the body"])
@pytest.mark.parametrize(("read", "fault", "times", "error"), MATRIX)
def test_a_load_ends_whole_or_by_a_name(saved, proxy, endpoint, read, fault, times, error):
    uri = saved()
    config = impatient(endpoint, **(silence() if "stall" in fault else {}))
    rule = proxy.inject(FAULTS[fault], operation="GetObject", path=READS[read], times=times)
    if error is None:
        assert load_step(uri, config, SMALL) == 1
        assert rule.injected == times or fault == "late answer"
        return
    with pytest.raises(error) as caught:
        load_step(uri, config, SMALL)
    assert caught.value.uri.startswith(uri)
    tries = Counter(request.target for request in proxy.requests("GetObject", READS[read]))
    assert enough_tries(tries)


@on("s3")
@pytest.mark.timeout(150)
def test_a_slow_link_carries_a_save_and_a_load(saved, store, proxy, endpoint):
    """They take longer than silence may, also behind the next look of the watch at them."""
    limits = dict.fromkeys(("read_timeout", "stall_timeout"), 3.0)
    config = impatient(endpoint, **limits, retry=RetryPolicy(attempts=1))
    uri = saved(MIB)
    proxy.inject(Throttle(MIB / 4.5))
    with ThreadPoolExecutor() as beside:
        loaded = beside.submit(load_step, uri, config, MIB)
        cloudckpt.save(filled(2, MIB), checkpoint_id=store.uri("other"), config=config)
        assert loaded.result() == 1


class TestDamageOnTheWay:
    @pytest.mark.parametrize(("path", "at"), [("*.distcp", SMALL // 2), ("*/.metadata", 100)])
    def test_what_was_damaged_once_is_fetched_again(self, saved, proxy, shaky, path, at):
        uri = saved()
        rule = proxy.inject(Corrupt(at), operation="GetObject", path=path, times=1)
        assert load_step(uri, shaky, SMALL) == 1
        assert rule.injected == 1

    @everywhere()
    def test_data_that_is_damaged_twice_is_reported_with_item_object_and_range(
        self, saved, store, proxy, shaky
    ):
        uri = saved(BIG)
        at = 4 * MIB + 77

        def holds_weight(request):
            span = request.byte_range
            return span is not None and span[1] - span[0] >= 5 * MIB

        proxy.inject(Corrupt(at), operation="GetObject", where=holds_weight, times=2)
        with pytest.raises(errors.CheckpointCorruptError) as caught:
            load_step(uri, shaky)
        assert caught.value.item == "weight"
        asked = next(filter(holds_weight, proxy.requests("GetObject")))
        assert caught.value.uri == store.root.partition("//")[0] + f"/{asked.path}"
        found = re.search(r"bytes (\d+) to (\d+) of the object", str(caught.value))
        first, last = int(found[1]), int(found[2])
        assert first <= asked.byte_range[0] + at < last
        assert last - first <= MIB


@dataclass(frozen=True)
class _Break(Truncate):
    """Breaks off an answer, and changes the store before the client can ask again."""

    change: object = None

    def inflict(self, hop: Hop) -> None:
        answer = hop.forward()
        self.change()
        hop.send(answer, stop=self.after)
        hop.hang_up()


class TestDamageInTheStore:
    @pytest.fixture
    def weight(self, store):
        """The key of the object that holds ``weight``, and its bytes."""

        def weight() -> tuple[str, bytes]:
            held = {key: store.get(key) for key in store.objects() if key.endswith(".distcp")}
            key = max(held, key=lambda name: len(held[name]))
            return key, held[key]

        return weight

    @everywhere(damage=["gone", "emptied", "cut"])
    @pytest.mark.parametrize("damage", ["gone", "emptied", "cut", "grown", "flipped"])
    def test_an_object_that_is_not_what_was_written_is_named(
        self, saved, store, direct, weight, damage
    ):
        uri = saved()
        key, data = weight()
        at = len(data) // 2
        flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        changed = {"emptied": b"", "cut": data[:-1], "grown": data + b"more", "flipped": flipped}
        if damage == "gone":
            store.delete(key)
        else:
            store.put(key, changed[damage])
        with pytest.raises(errors.CheckpointCorruptError) as caught:
            load_step(uri, direct, SMALL)
        assert (caught.value.uri, caught.value.item) == (store.uri_of(key), "weight")

    @everywhere()
    def test_an_object_that_is_replaced_while_it_is_read_is_named(
        self, saved, store, proxy, endpoint, weight, request_size
    ):
        uri = saved(BIG)
        key, data = weight()
        request_size(MIB)
        config = impatient(endpoint, connections=1)
        other = data[:-1] + bytes([data[-1] ^ 1])
        breaking = _Break(after=MIB, change=lambda: store.put(key, other))
        proxy.inject(breaking, operation="GetObject", path=f"*/{key}", skip=1, times=1)
        with pytest.raises(errors.CheckpointCorruptError, match="replaced") as caught:
            load_step(uri, config)
        assert (caught.value.uri, caught.value.item) == (store.uri_of(key), "weight")

    def test_a_damaged_index_is_told_and_can_be_done_without(self, saved, store, direct):
        uri = saved()
        for key in (key for key in store.objects() if key.endswith(".distcp")):
            data = bytearray(store.get(key))
            data[-20] ^= 1
            store.put(key, bytes(data))
        with pytest.raises(errors.CheckpointCorruptError, match="checksum") as caught:
            load_step(uri, direct, SMALL)
        assert caught.value.uri.endswith(".distcp")
        assert load_step(uri, dataclasses.replace(direct, verify=False), SMALL) == 1

    @everywhere()
    def test_a_checkpoint_of_torch_that_is_replaced_between_two_tries_is_not_mixed(
        self, store, proxy, endpoint, direct, tmp_path
    ):
        """torch's writers use the same names for every checkpoint, and write no checksums."""
        objects = {}
        for step in (1, 2):
            folder = tmp_path / str(step)
            dcp.save(filled(step), checkpoint_id=folder, no_dist=True)
            objects[step] = {path.name: path.read_bytes() for path in folder.iterdir()}
        uri = store.uri("run/torch")
        prefix = store.key_of(uri)

        def upload(step: int) -> None:
            for name, data in objects[step].items():
                store.put(f"{prefix}/{name}", data)

        upload(1)
        breaking = _Break(after=3 * MIB, change=lambda: upload(2))
        rule = proxy.inject(
            breaking,
            operation="GetObject",
            where=lambda r: r.byte_range is not None and r.byte_range[1] - r.byte_range[0] > MIB,
            times=1,
        )
        assert load_step(uri, impatient(endpoint)) == 2
        assert rule.injected == 1
