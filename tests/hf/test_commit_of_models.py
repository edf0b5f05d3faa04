"""A model is there whole, or not at all: whoever dies when, and whoever else saves or loads."""

import contextlib
import json
import threading
import uuid

import pytest
import torch

import cloudckpt.hf
from background.waiting import eventually
from cloudckpt import Config, RetryPolicy
from cloudckpt.errors import (
    CheckpointConflictError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CloudCheckpointError,
    CommitUnknownError,
    ConnectionLostError,
    ObjectNotFoundError,
    StoreError,
)
from cloudckpt.hf.safetensors import INDEX, SINGLE_FILE
from cloudckpt.stores import registry
from cloudckpt.transfer import retry
from runs import interleavings
from runs.interleavings import KilledError, try_one, worlds  # noqa: F401 - a fixture
from support import memory_store
from support.faulty_store import FaultyStore
from support.memory_store import MemoryStore

safetensors_torch = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NAMES = ("a", "b", "c")
SHAPES = {  # of a model of three tensors: what save is told of its files
    "one file": {},
    "two files": {"max_shard_size": 128},
    "three files": {"max_shard_size": 64},
    "numbered files": {"fqn_to_file": {"a": 2, "b": 1, "c": 2}},
}
RETRY = RetryPolicy(attempts=3, base=0.0, cap=0.0, deadline=86_400.0)
FOREIGN = "adapter_model.safetensors"


class Gated(FaultyStore):
    """A store that asks before each request whether it may be sent."""

    def __init__(self, inner, gate) -> None:
        super().__init__(inner)
        self._gate = gate

    def _struck(self, verb, key):
        self._gate(f"{verb} {key}")
        return super()._struck(verb, key)


def changes(request: str) -> bool:
    """Whether it may change what is there."""
    return request.split()[0] not in ("head", "get", "get_range", "list", "list_uploads")


class World:
    """A place in memory, and those who reach it, each by options of its own."""

    def __init__(self, name: str | None = None) -> None:
        name = name or uuid.uuid4().hex
        self.uri = f"memory://{name}/model"
        self.plain = MemoryStore(name)
        self.gates = []  # the others reach the store without one
        self.stores = []
        self.put(FOREIGN, b"of nobody here")

    def put(self, name: str, data: bytes) -> None:
        self.plain.put(f"model/{name}", [memoryview(data)], checksum=0)

    def config(self, gate=None) -> Config:
        self.gates.append(gate)
        return Config(connections=1, retry=RETRY, read_timeout=len(self.gates))

    def opened(self, config: Config):
        gate = self.gates[int(config.read_timeout) - 1]
        if gate is None:
            return self.plain
        self.stores.append(Gated(self.plain, gate))
        return self.stores[-1]

    def faulty(self) -> tuple[Config, Gated]:
        """Options, and the store that who has them reaches: it can be told to fail."""
        config = self.config(lambda request: None)
        registry.open_store(cloudckpt.uri.CheckpointURI.parse(self.uri), config)
        return config, self.stores[-1]

    def save(self, step: int, shape: str, gate=None, config: Config | None = None) -> None:
        state = {name: torch.full((16,), float(step)) for name in NAMES}
        cloudckpt.hf.save(state, self.uri, config=config or self.config(gate), **SHAPES[shape])

    def export(self, step: int, shape: str, gate=None, **options) -> None:
        source = self.uri.replace("/model", f"/checkpoint-{step}")
        state = {name: torch.full((16,), float(step)) for name in NAMES}
        cloudckpt.save(state, checkpoint_id=source, config=self.config())
        cloudckpt.hf.export_checkpoint(
            source, self.uri, config=self.config(gate), **options, **SHAPES[shape]
        )

    def load(self, gate=None) -> int:
        """The one step that all tensors are of."""
        state = {name: torch.full((16,), -1.0) for name in NAMES}
        cloudckpt.hf.load(state, self.uri, config=self.config(gate))
        return one_step(state)

    def names(self) -> set[str]:
        return {info.key.removeprefix("model/") for info in self.plain.list("model/")}

    def seen(self) -> int | None:
        """The step that all kinds of readers see, as far as they see any."""
        steps = {self._seen_by_us(), self._seen_by_index(), self._seen_by_names()} - {None}
        assert len(steps) <= 1, steps
        return next(iter(steps), None)

    def look(self) -> None:
        """Fails if readers see a mix, beside several writers: those who go by the index."""
        self._seen_by_us()
        self._seen_by_index()

    def _seen_by_us(self) -> int | None:
        try:
            return self.load()
        except CheckpointNotFoundError:
            return None

    def _read(self, name: str) -> bytes | None:
        try:
            return bytes(self.plain.get(f"model/{name}")[0])
        except ObjectNotFoundError:
            return None

    def _index(self) -> dict | None:
        return json.loads(self._read(INDEX) or "null")

    def _seen_by_index(self) -> int | None:
        """As transformers does it."""
        if (data := self._read(SINGLE_FILE)) is not None:
            return one_step(safetensors_torch.load(data))
        try:
            index = self._index()
        except ValueError:
            return None
        if index is None:
            return None
        files = {name: self._read(name) for name in index["weight_map"].values()}
        tensors = {
            name: safetensors_torch.load(files[file])[name]
            for name, file in index["weight_map"].items()
        }
        return one_step(tensors)

    def _seen_by_names(self) -> int | None:
        """As vLLM does it: all files that end like that, or those of them that the index names."""
        files = {name for name in self.names() if name.endswith(".safetensors")} - {FOREIGN}
        try:
            index = self._index()
        except ValueError:
            return None
        if index is not None:
            files &= set(index["weight_map"].values())
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(files):
            found = safetensors_torch.load(self._read(file))
            assert not found.keys() & tensors.keys(), "a tensor is there twice"
            tensors |= found
        if tensors.keys() < set(NAMES):
            return None  # it misses weights
        return one_step(tensors)


def one_step(tensors) -> int:
    assert tensors.keys() == set(NAMES)
    steps = {int(value) for tensor in tensors.values() for value in tensor.unique()}
    assert len(steps) == 1, f"a mix of steps: {steps}"
    return steps.pop()


@pytest.fixture
def world(monkeypatch):
    """Makes worlds, of which the newest is there."""
    current: list[World] = []
    monkeypatch.setattr(registry, "_OPENERS", {"memory": lambda: lambda uri, config:
                                               current[0].opened(config)})  # fmt: skip
    monkeypatch.setattr(registry, "_places", {})
    monkeypatch.setattr(memory_store, "_buckets", {})
    monkeypatch.setattr(retry, "_FIRST_PAUSE", 0.0)

    def made() -> World:
        current[:] = [World()]
        return current[0]

    return made


class _Life:
    """Ends amid its requests: none is sent any more."""

    def __init__(self, requests: float) -> None:
        self.left = requests

    def __call__(self, request: str) -> None:
        self.left -= changes(request) or self.left <= 0
        if self.left < 0:
            raise KilledError


@pytest.mark.parametrize("new", ["one file", "two files", "numbered files"])
@pytest.mark.parametrize("old", [None, *SHAPES])
def test_a_save_that_is_killed_leaves_the_old_model_or_none_or_the_new_one(
    world, old: str | None, new: str
) -> None:
    outcomes: list[int | None] = []
    fresh = world()
    fresh.save(3, new)
    while True:
        here = world()
        if old is not None:
            here.save(1, old)
        life = _Life(len(outcomes))
        try:
            here.save(2, new, life)
            is_over = True
        except KilledError:
            is_over = False
        outcomes.append(here.seen())
        here.save(3, new)
        assert here.seen() == 3
        assert here.names() == fresh.names()
        if is_over:
            break
    before = None if old is None else 1
    assert outcomes[0] == before
    assert outcomes[-1] == 2
    order = [before, None, 2]
    assert [order.index(one) for one in outcomes] == sorted(order.index(one) for one in outcomes)
    if old in (None, "one file") and new == "one file":
        assert None not in outcomes[outcomes.index(2) :]
        assert old is None or None not in outcomes, "one file replaces another at once"


@pytest.mark.parametrize("options", [{}, {"dtype": torch.float64}], ids=["by copies", "sent"])
@pytest.mark.parametrize("new", ["one file", "two files"])
def test_an_export_that_is_killed_does_so_too(world, monkeypatch, new: str, options) -> None:
    monkeypatch.setattr(cloudckpt.uri.CheckpointURI, "is_cloud", True)
    outcomes: list[int | None] = []
    while 2 not in outcomes:
        here = world()
        here.save(1, "three files")
        with contextlib.suppress(KilledError):
            here.export(2, new, _Life(len(outcomes)), **options)
        outcomes.append(here.seen())
        here.export(3, new, **options)
        assert here.seen() == 3
    assert outcomes[0] == 1
    assert [one for one in outcomes if one != 1][:-1] == [None] * outcomes.count(None)


def test_an_export_is_of_the_checkpoint_that_it_has_found_first(world) -> None:
    here = world()
    here.save(1, "three files")

    def replaced(request: str) -> None:
        if request.startswith("create_upload") and not done:
            done.append(request)
            state = {name: torch.full((16,), 9.0) for name in NAMES}
            cloudckpt.save(state, checkpoint_id=here.uri.replace("/model", "/checkpoint-2"),
                           config=here.config())  # fmt: skip

    done: list[str] = []
    with pytest.raises(CheckpointReplacedError):
        here.export(2, "three files", replaced, dtype=torch.float64)
    assert here.seen() == 1


LOOKED_UP = [("complete_upload", "after", "one file"), ("put", "after", "two files")]
"""Commits of which all answers are lost."""


@pytest.mark.parametrize("verb", ["create_upload", "put_part", "complete_upload", "put", "delete"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("new", ["one file", "two files"])
def test_a_save_outlives_passing_faults_and_undoes_itself_at_lasting_ones(
    world, verb, when, new
) -> None:
    for calls in ([1], [2], [1, 2], None):
        here = world()
        here.save(1, "three files")
        names = (SINGLE_FILE, "model-00001-of-00002.safetensors")
        others = [here.plain.create_upload(f"model/{name}", 64) for name in names]
        config, store = here.faulty()
        store.fail(verb, ConnectionLostError, calls=calls, when=when)
        try:
            here.save(2, new, config=config)
        except (ConnectionLostError, CommitUnknownError) as error:
            assert calls is None
            assert (verb, when, new) not in LOOKED_UP
            seen = here.seen()
            if isinstance(error, CommitUnknownError):
                assert seen in (None, 2)
            else:
                assert seen in (1, None)
        else:
            assert here.seen() == 2
            if (verb, when) != ("create_upload", "after"):  # which only a sweep can find
                assert len([*here.plain.list_uploads("")]) == len(others)
            here.save(3, "two files")
            assert here.seen() == 3
        assert {*others} <= {*here.plain.list_uploads("")}


@pytest.mark.parametrize("theirs", ["one file", "two files"])
@pytest.mark.parametrize("ours", ["one file", "three files"])
@pytest.mark.parametrize("before", [None, "one file", "two files"])
def test_what_comes_after_a_save_has_begun_is_not_replaced(world, before, ours, theirs) -> None:
    here = world()
    if before is not None:
        here.save(1, before)

    class Slow:
        """A model whose state takes so long that another job saves meanwhile."""

        def state_dict(self):
            assert eventually(lambda: not any("begin" in t.name for t in threading.enumerate()))
            here.save(3, theirs)
            return {name: torch.full((16,), 2.0) for name in NAMES}

        def load_state_dict(self, state):
            raise AssertionError

    with pytest.raises(CheckpointConflictError):
        cloudckpt.hf.save({"model": Slow()}, here.uri, config=here.config(), **SHAPES[ours])
    assert here.seen() == 3


@pytest.mark.parametrize("theirs", ["one file", "two files", "gone"])
def test_a_single_file_replaces_only_the_one_that_was_there(world, theirs: str) -> None:
    here, met = world(), []
    here.save(1, "one file")

    def meanwhile(request: str) -> None:
        if request.startswith("complete_upload") and not met:
            met.append(request)
            if theirs != "gone":
                here.save(3, theirs)
            else:  # S3 then says that the key does not exist
                here.plain.delete(f"model/{SINGLE_FILE}")
                raise ObjectNotFoundError("no such key", uri=here.uri, certain=True)

    with pytest.raises(CheckpointConflictError):
        here.save(2, "one file", meanwhile)
    assert here.seen() == (None if theirs == "gone" else 3)


@pytest.mark.parametrize(("shape", "last", "files"), [("one file", "complete_upload", 1),
                                                       ("two files", "put", 2)])  # fmt: skip
def test_a_commit_that_nobody_answers_is_unknown_and_nothing_is_deleted(
    world, shape: str, last: str, files: int
) -> None:
    here = world()
    config, store = here.faulty()
    if shape == "one file":
        store.fail(last, ConnectionLostError, calls=range(1, 99), when="after")
        store.fail("head", ConnectionLostError, calls=range(2, 99))  # the first is before the file
        store.fail("get", ConnectionLostError, calls=range(1, 99))
    else:  # the first is the claim
        store.fail(last, ConnectionLostError, calls=range(2, 99), when="before")
    with pytest.raises(CommitUnknownError):
        here.save(2, shape, config=config)
    found = {name for name in here.names() if name.endswith(".safetensors")} - {FOREIGN}
    assert len(found) == files


@pytest.mark.parametrize(
    ("error", "raised"),
    [(ConnectionLostError, CommitUnknownError), (KeyboardInterrupt, KeyboardInterrupt)],
)
def test_a_file_beside_which_nobody_can_look_is_kept(world, error, raised) -> None:
    here = world()
    config, store = here.faulty()
    store.fail("head", error, where=lambda key: key.endswith(INDEX))
    with pytest.raises(raised):
        here.save(2, "one file", config=config)
    assert here.seen() == 2


_NOT_THERE = (CheckpointNotFoundError, CheckpointReplacedError, ConnectionLostError)


class Together(interleavings.World):
    """Jobs that save a model to one location, and others that load it meanwhile."""

    def __init__(self, seed: int) -> None:
        self.outcomes: dict[int, BaseException | None] = {}
        super().__init__(seed, kinds=("save", "load"))
        self.first, self.before = self._begin, self.rng.choice([None, *SHAPES])

    def _begin(self, config) -> None:
        self.here = World(self.name)
        self.here.config = lambda given=None: given or config
        if self.before is not None:
            self.here.save(1, self.before)

    def save(self, number, base=None):
        step, shape = len(self.outcomes) + 2, self.rng.choice([*SHAPES][:3])
        self.outcomes[step] = KilledError()

        def work(config) -> None:
            self.outcomes[step] = error_of(
                lambda: self.here.save(step, shape, config=config),
                (CheckpointConflictError, StoreError, CommitUnknownError),
            )

        return work

    def load(self, number):
        def work(config) -> None:
            for _ in range(3):
                error_of(lambda: self.here.load(config), _NOT_THERE)

        return work

    def check(self) -> None:
        if not self.is_checked:
            self.is_checked = True
            self.undisturbed(lambda config: self.here.look())

    def check_end(self) -> None:
        self.undisturbed(lambda config: self._check_outcomes())

    def _check_outcomes(self) -> None:
        if any("†" in line for line in self.history):
            self.here.look()
        else:
            seen, errors = self.here.seen(), self.outcomes.values()
            unknown = (CommitUnknownError, type(None))
            failed = {step for step, e in self.outcomes.items() if not isinstance(e, unknown)}
            assert seen not in failed, f"step {seen} is there, and its save has failed"
            assert seen in self.outcomes or any(errors)
        self.here.save(99, "two files")
        assert self.here.seen() == 99


def error_of(work, expected) -> CloudCheckpointError | None:
    """The error that is raised, which must be one of those that are expected."""
    try:
        work()
    except expected as error:
        return error
    except CloudCheckpointError as error:
        raise AssertionError(repr(error)) from error
    return None


def test_no_interleaving_shows_anybody_a_mix_of_two_models(worlds) -> None:  # noqa: F811
    for seed in range(60):
        try_one(lambda seed: worlds(seed, kind=Together), seed)
