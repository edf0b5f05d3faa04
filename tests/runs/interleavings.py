"""Saves by each road, copies, deletions, sweeps and loads, in every order that a scheduler draws.

The requests of all of them go to one store in memory, one at a time: at each request the scheduler
draws whose is next, lets hours pass, loses answers, ends some for ever, and has others stand still
until all are done but they. After each every committed checkpoint must be whole, and in the end a
sweep leaves nothing that no checkpoint names.

A seed tells what is done and in which order, but for actors that have several threads.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import types
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import TypeVar

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import cloudckpt
from cloudckpt import CheckpointManager, Config, RetryPolicy, errors
from cloudckpt.checkpoint import baseline
from cloudckpt.checkpoint.base import Base
from cloudckpt.checkpoint.baseline import begin
from cloudckpt.checkpoint.commit import publish
from cloudckpt.checkpoint.committed import CommitObject, Fetched, fetch
from cloudckpt.checkpoint.file_folder import MANIFEST
from cloudckpt.checkpoint.index import index_bytes
from cloudckpt.checkpoint.manifest import Manifest, Planned, earlier_objects
from cloudckpt.checkpoint.notes import Notes
from cloudckpt.checkpoint.objects import CLAIM, METADATA, WrittenObject, keep_name, pending_name
from cloudckpt.checkpoint.pending import Pending
from cloudckpt.checkpoint.record import Extents, Record
from cloudckpt.checkpoint.references import Hold
from cloudckpt.checkpoint.structure import Structure
from cloudckpt.checkpoint.trailer import notes_at_end
from cloudckpt.checkpointer import CheckpointerConfig, CommitHook
from cloudckpt.checksum import CRC32C
from cloudckpt.dcp.global_plan import record_of
from cloudckpt.hf.safetensors import INDEX, is_claim, parse_index
from cloudckpt.integrations.torch_checkpointing import folders
from cloudckpt.integrations.torch_checkpointing.folders import FileFolders
from cloudckpt.integrations.torch_checkpointing.manifest import read_manifest
from cloudckpt.runs import Preemption
from cloudckpt.runs.adopting import Adoption
from cloudckpt.runs.catalog import Run
from cloudckpt.runs.copying import copy
from cloudckpt.runs.deleting import delete
from cloudckpt.runs.pruning import prune
from cloudckpt.runs.sweeping import find_leftovers, sweep
from cloudckpt.stores import registry
from cloudckpt.stores.base import ObjectInfo, once
from cloudckpt.transfer import retry
from cloudckpt.transfer.retry import Retrier
from cloudckpt.uri import CheckpointURI
from support import memory_store
from support.memory_store import MemoryStore

T = TypeVar("T")

HOUR = 3600.0
MODEL = "model"
_ALONE = 1000  # the number of one beside whom there is nobody
RANKS = 3  # that have written what a save commits
KINDS = (
    "save", "save", "increment", "chain", "chain", "copy", "delete", "delete", "prune", "sweep",
    "load", "orphan", "adopt", "state", "manager", "manager", "manager", "model", "files", "files",
    "rm",
)  # fmt: skip
"""What an actor may do, as often as chance has it."""

RETRY = RetryPolicy(attempts=3, base=0.0, cap=0.0, deadline=86_400.0)


class KilledError(BaseException):
    """What ends an actor amid a request; nothing that it does then reaches the store."""


class Actor:
    """One who sends requests, from one thread or several."""

    def __init__(self, name: str, work: Callable[[Config], None]) -> None:
        self.name = name
        self.work = work
        self.is_dead = self.has_ended = False
        self.job = ""  # its name, if it has claimed the run
        self.listed = 0  # the number of the request by which it last saw which steps there are
        self.at_gate, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.sending = threading.Lock()  # of its threads one at a time
        self.error: BaseException | None = None

    def gate(self) -> None:
        """Waits for this actor's turn."""
        if not self.is_dead:
            self.at_gate.release()
            self.go.acquire()
        if self.is_dead:
            raise KilledError


class Gated(MemoryStore):
    """The store as one actor sees it."""

    def __init__(self, name: str, actor: Actor, world: World) -> None:
        super().__init__(name)
        self._actor, self._world = actor, world

    def _sent(self, request, *, reads=False):
        with self._actor.sending:
            self._actor.gate()
            self._world.is_checked &= reads
            self._world.requests += 1
            luck = self._world.rng.random()
            if luck < 0.01:
                raise errors.ConnectionLostError("the request was lost", uri=self.root)
            answer = request()
            if luck > 0.99:
                raise errors.ConnectionLostError("the answer was lost", uri=self.root)
            return answer

    def put(self, key, body, **kwargs):
        signed = self._world.hours

        def put():
            if key.endswith(METADATA) and self._world.hours - signed > 1:  # as of clouds
                raise errors.AccessDeniedError(
                    "the signature has expired", uri=self.root, certain=True
                )
            made = MemoryStore.put(self, key, body, **kwargs)
            if key.endswith(CLAIM):
                self._actor.job = json.loads(b"".join(body))["job"]
                self._world.claims.append(self._actor.job)
            return made

        return self._sent(put)

    def complete_upload(self, upload, parts, **condition):
        plain = self._world.plain  # whose put is no request of its own
        return self._sent(lambda: plain.complete_upload(upload, parts, **condition))

    def list(self, prefix, retry=once):
        return self._listed(MemoryStore.list, prefix, retry)

    def list_level(self, prefix, retry=once):
        self._actor.listed = self._world.requests
        return self._listed(MemoryStore.list_level, prefix, retry)

    def list_uploads(self, prefix, retry=once):
        return self._listed(MemoryStore.list_uploads, prefix, retry)

    def _listed(self, listing, prefix, retry):
        return iter(
            retry(lambda: self._sent(lambda: [*listing(self._world.plain, prefix)], reads=True))
        )

    def copies_from(self, source):
        return self._world.copies_by_store

    def copy(self, source, key, **kwargs):
        def copied():
            data, info = MemoryStore.get(source.store, source.info.key)
            if info.version != source.info.version:
                raise errors.PreconditionFailedError("the source was replaced", uri=self.root)
            made = MemoryStore.put(self, key, [memoryview(data)], checksum=0, **kwargs)
            return replace(made, checksum=CRC32C.of(data))

        return self._sent(copied)

    def delete(self, key, *, if_version=None):
        def deleted():
            self._world.deleted_by[key] = self._actor, self._world.requests
            if self._actor.job and key.endswith(METADATA):
                gone = notes_at_end(MemoryStore.get(self, key)[0], key)
                self._world.check_others(self._actor, key)
                MemoryStore.delete(self, key, if_version=if_version)
                self._world.check_owner(self._actor, Notes.from_json(gone, key))
                return None
            return MemoryStore.delete(self, key, if_version=if_version)

        return self._sent(deleted)


def _gated(verb: str, *, reads: bool) -> Callable[..., object]:
    usual = getattr(MemoryStore, verb)
    return lambda self, *args, **options: self._sent(
        lambda: usual(self, *args, **options), reads=reads
    )


for _verb in ("create_upload", "put_part", "abort_upload", "get", "get_range", "head"):
    setattr(Gated, _verb, _gated(_verb, reads=_verb in ("get", "get_range", "head")))


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((16,), float(step)), "same": torch.zeros(16)}


def sent(store: MemoryStore, uri: CheckpointURI, rank: int, attempt: str) -> WrittenObject:
    """The object of a rank."""
    item = attempt.encode() * 4
    index = index_bytes([0], [0], [0], [len(item)], [CRC32C.of(item)], CRC32C)
    data, crc = item + index, CRC32C.of(item + index)
    one = WrittenObject(rank, 0, attempt, len(data), crc, len(index), CRC32C.of(index))
    key = uri.key(one.name)
    Retrier(RETRY).call(lambda: store.put(key, [memoryview(data)], checksum=crc))
    return one


@lru_cache(maxsize=RANKS)
def _record_of(rank: int) -> bytes:
    item = WriteItem(MetadataIndex(f"v{rank}"), WriteItemType.BYTE_IO)
    plan = SavePlan([item], planner_data={f"v{rank}": (f"v{rank}",)})
    return record_of(plan, Structure(), CRC32C)


def left_of(save: str, rank: int, sent: WrittenObject) -> bytes:
    """What the saving process of a rank has left."""
    return Pending(
        save=save,
        rank=rank,
        ranks=RANKS,
        job="",
        attempt=save,
        plan=_record_of(rank),
        record=Record(extents=Extents(*torch.tensor([[0], [0], [64]]))).to_bytes(),
        notes=b"",
        objects=(sent,),
    ).to_bytes()


@cache
def _config(number: int) -> Config:
    """By which the store of an actor is found."""
    return Config(connections=1, retry=RETRY, read_timeout=1.0 + number)


class World:
    """One interleaving."""

    def __init__(self, seed: int, kinds: Sequence[str] = KINDS) -> None:
        self.rng = random.Random(seed)
        self.hours = 1000.0
        self.name = uuid.uuid4().hex
        self.root = CheckpointURI.parse(f"memory://{self.name}/run")
        self.plain = MemoryStore(self.name)
        self.history: list[str] = []
        self.is_checked = False  # since the last request that may have changed anything
        self.requests = 0
        self.deleted_by: dict[str, tuple[Actor, int]] = {}  # with the number of the request
        self.removed: set[str] = set()  # by hand: whatever needed these is damaged by nobody else
        self.claims: list[str] = []  # jobs, in order
        self.newest_of: dict[int, list[int]] = {}  # by thread: the newest steps while it restores
        self.loss = ""
        self.copies_by_store = self.rng.random() < 0.5
        self.first: Callable[[Config], None] | None = None
        chosen = ["save", *self.rng.choices(kinds, k=self.rng.randint(2, 4))]
        self.actors = [
            Actor(f"{kind}-{n}", getattr(self, kind)(self.rng.choice([1, 1, 2])))
            for n, kind in enumerate(chosen)
        ]

    def step(self, number: int) -> CheckpointURI:
        return self.root.join(f"step-{number}")

    def increment(self, number: int) -> Callable[[Config], None]:
        """A save that refers to what another one, or the one before in its place, has written."""
        base = self.rng.choice([3 - number, 3 - number, number])
        self.first = self.save(base)
        return self.save(number, base)

    def chain(self, number: int) -> Callable[[Config], None]:
        """A save whose base has some of its objects in a third checkpoint."""
        first, second = self.save(number), self.save(3 - number, number)

        def both(config: Config) -> None:
            first(config)
            second(config)

        self.first = both
        return self.save(3, 3 - number)

    def manager(self, number: int) -> Callable[[Config], None]:
        """A job that continues the run, saves twice, and keeps one step."""
        options = {"asynchronous": self.rng.random() < 0.5, "incremental": self.rng.random() < 0.5}

        def work(config: Config) -> None:
            made = CheckpointerConfig(config=config, kind=AsyncCheckpointerType.THREAD)
            quiet = Preemption(signals=())
            with CheckpointManager(
                str(self.root), checkpointer=made, max_to_keep=1, preemption=quiet, **options
            ) as manager:
                state = state_of(0)
                newest = self.restored(manager, state)
                assert state["w"].unique().numel() == 1
                for step in range(newest + 1, newest + 3):
                    manager.save(step, state_of(step))
                manager.wait_until_finished()

        if self.rng.random() < 0.5:
            self.first = work  # as an earlier job
        return work

    def restored(self, manager: CheckpointManager, state: dict[str, torch.Tensor]) -> int:
        """Restores a step, which may not be older than the newest was at every moment meanwhile."""
        me = threading.get_ident()
        self.newest_of[me] = [self.newest()]
        step = manager.restore(state) or 0
        least = min(self.newest_of.pop(me))
        assert step >= least or self.removed, f"restored step {step}, and step {least} was there"
        return step

    def newest(self) -> int:
        """The newest step on the line of the run."""
        return self.undisturbed(lambda config: Run(self.root, config=config).newest()) or 0

    def state(self, number: int) -> Callable[[Config], None]:
        """A save by the function, at once or from a base."""
        is_incremental = self.rng.random() < 0.5

        def work(config: Config) -> None:
            options = replace(config, incremental=is_incremental)
            cloudckpt.save(state_of(number), checkpoint_id=str(self.step(number)), config=options)

        return work

    def model(self, number: int) -> Callable[[Config], None]:
        """A model of two files and their index, beside the steps."""

        def work(config: Config) -> None:
            state = {name: torch.full((4,), float(number)) for name in "ab"}
            cloudckpt.hf.save(state, str(self.root.join(MODEL)), max_shard_size=16, config=config)

        return work

    def files(self, number: int) -> Callable[[Config], None]:
        """A folder of files, which a rename commits; one that is there is removed."""
        job, target = f"{self.rng.getrandbits(64):016x}", self.root.join(f"files-{number}").prefix

        def work(config: Config) -> None:
            store = registry.open_store(self.root, config)
            found = FileFolders(store, config, job=job, temporary="tmp_")
            unfinished = f"{self.root.prefix}/tmp_files-{number}"
            if found.exists(target):
                found.remove_folder(target)
            for name in "ab":
                with found.written(f"{unfinished}/{name}") as file:
                    file.write(job.encode())
            found.rename_folder(unfinished, target)
            read = {found.read(f"{target}/{name}") for name in "ab"}
            assert len(read) == 1, f"{target} is of two jobs"

        return work

    def rm(self, number: int) -> Callable[[Config], None]:
        """What somebody does who knows nothing of checkpoints."""

        def work(config: Config) -> None:
            store = registry.open_store(self.root, config)
            found = [info.key for info in store.list(self.step(number).key(""))]
            self.removed.update(found)  # with its marks goes what keeps the others
            for key in found:
                store.delete(key)

        return work

    def publish(
        self, store, uri, config, baseline, attempt, written, notes=b"", check=lambda: None
    ) -> Manifest:
        planned = Planned.of(
            Metadata({f"v{rank}": BytesStorageMetadata() for rank in range(RANKS)}),
            [[MetadataIndex(f"v{rank}")] for rank in range(RANKS)],
            store.capabilities.checksum,
            str(uri),
        )
        manifest = Manifest(planned.written(written, attempt=attempt, uri=str(uri)), str(uri))
        objects = manifest.objects
        earlier = earlier_objects(written, uri.folder)
        publish(
            store,
            uri,
            config,
            baseline=baseline,
            attempt=attempt,
            objects=objects,
            own=[one.name for one in objects if one.name not in earlier],
            data=lambda: manifest.data(notes),
            kept=earlier,
            check=check,
        )
        return manifest

    def save(self, number: int, base: int | None = None) -> Callable[[Config], None]:
        uri, attempt = self.step(number), f"{self.rng.getrandbits(64):016x}"
        contents = [self.rng.choice([1, 1, 1, 2]) for _ in range(RANKS)]  # of each rank

        def work(config: Config) -> None:
            store, retrier = registry.open_store(uri, config), Retrier(RETRY)
            key = uri.key(METADATA)
            baseline = begin(
                lambda: retrier.call(lambda: store.look(key)), key, str(uri), overwrite=True
            )
            hold = None
            if base is not None:
                with contextlib.suppress(errors.CloudCheckpointError):
                    hold = Hold.of(store, uri, self.step(base), config, attempt)
            try:
                committed(store, baseline, hold, config)
            except errors.CommitUnknownError:
                raise
            except errors.CloudCheckpointError:
                if hold is not None:
                    hold.let_go()
                raise

        def committed(store, baseline, hold, config) -> None:
            table = None
            if hold is not None:
                table = Base(hold.commit.record, hold.base.folder)
            written = []
            for rank in range(RANKS):
                digest = rank, contents[rank]
                known = None if table is None else table.find(digest)
                one = sent(store, uri, rank, attempt) if known is None else None
                one = one or table.objects[known.object]
                columns = [torch.tensor([number]) for number in (0, 0, 64, *digest)]
                written.append(Record(location=str(uri), objects=(one,), extents=Extents(*columns)))
            manifest = self.publish(store, uri, config, baseline, attempt, written)
            if hold is not None:
                hold.let_go({one.folder for one in manifest.objects} - {uri.folder})

        return work

    def orphan(self, number: int) -> Callable[[Config], None]:
        """A save whose trainers have ended: its saving processes send the rest."""
        uri, attempt = self.step(number), f"{self.rng.getrandbits(64):016x}"

        def work(config: Config) -> None:
            store, retrier = registry.open_store(uri, config), Retrier(RETRY)
            for rank in range(RANKS):
                data = memoryview(left_of(attempt, rank, sent(store, uri, rank, attempt)))
                key = uri.key(pending_name(rank, attempt))
                retrier.call(
                    lambda key=key, data=data: store.put(key, [data], checksum=CRC32C.of(data))
                )

        return work

    def adopt(self, number: int) -> Callable[[Config], None]:
        self.first = self.orphan(number)
        return lambda config: Adoption(self.step(number), config, CommitHook()).carry_out(0.0)

    def copy(self, number: int) -> Callable[[Config], None]:
        source, overwrite = self.step(3 - number), self.rng.random() < 0.5
        self.first = self.save(3 - number)  # else there would seldom be anything to copy

        def work(config: Config) -> None:
            copy(source, self.step(number), overwrite=overwrite, config=config)

        return work

    def delete(self, number: int) -> Callable[[Config], None]:
        return lambda config: delete(self.step(number), config=config)

    def prune(self, number: int) -> Callable[[Config], None]:
        def work(config: Config) -> None:
            for uri in prune(self.root, max_to_keep=1, dry_run=True, config=config):
                delete(uri, config=config)

        return work

    def sweep(self, number: int) -> Callable[[Config], None]:
        return lambda config: sweep(self.root, config=config) and None

    def load(self, number: int) -> Callable[[Config], None]:
        uri = self.step(number)

        def work(config: Config) -> None:
            store, retrier, key = (
                registry.open_store(uri, config),
                Retrier(RETRY),
                uri.key(METADATA),
            )
            found = retrier.call(lambda: fetch(store, key))
            info = found.info
            for name in sorted(CommitObject.parse(found, str(uri)).names(str(uri))):
                try:
                    retrier.call(lambda name=name: store.get(uri.key(name)))
                except errors.ObjectNotFoundError:
                    try:
                        now = retrier.call(lambda: store.head(key)).version
                    except errors.ObjectNotFoundError:
                        return
                    gone = uri.key(name)
                    is_known = gone in self.removed or self.is_being_deleted(gone)
                    assert now != info.version or is_known, (
                        f"{name} is gone, and {uri} is still there"
                    )
                    return

        return work

    def run(self) -> None:
        if self.first is not None:
            self.undisturbed(self.first)
        for number, actor in enumerate(self.actors):
            threading.Thread(target=self._act, args=(actor, _config(number))).start()
            actor.at_gate.acquire()
        doomed = {
            actor: self.rng.randint(1, 12) for actor in self.actors if self.rng.random() < 0.3
        }
        frozen = {
            actor: self.rng.randint(1, 12) for actor in self.actors if self.rng.random() < 0.3
        }
        turns: dict[Actor, int] = dict.fromkeys(self.actors, 0)
        try:
            while live := [actor for actor in self.actors if not actor.has_ended]:
                awake = [actor for actor in live if turns[actor] != frozen.get(actor)]
                actor = self.rng.choice(awake or live)
                turns[actor] += 1
                if self.rng.random() < 0.1:
                    self.hours += self.rng.choice([1.0, 7.0, 11.0, 13.0, 25.0])
                actor.is_dead = doomed.get(actor) == turns[actor]
                self.history.append(f"{self.hours:g} h: {actor.name}{' †' * actor.is_dead}")
                actor.go.release()
                assert actor.at_gate.acquire(timeout=120), f"{actor.name} hangs"
                self.check()
        finally:
            for actor in self.actors:
                actor.is_dead = True
                actor.go.release()

    def undisturbed(self, work: Callable[[Config], T]) -> T:
        """Does something while nobody else does, and nothing fails."""
        rng, self.rng = self.rng, random.Random(0)
        self.rng.random = lambda: 0.5
        try:
            return work(_config(_ALONE))
        finally:
            self.rng = rng

    def actor(self, number: int) -> Actor:
        """Who has these options."""
        if number != _ALONE:
            return self.actors[number]
        alone = Actor("alone", lambda config: None)
        alone.gate = lambda: None
        return alone

    def _act(self, actor: Actor, config: Config) -> None:
        try:
            actor.gate()
            actor.work(config)
        except (KilledError, errors.CloudCheckpointError):
            pass
        except BaseException as error:  # noqa: BLE001 - raised by the test
            actor.error = error
        actor.has_ended = True
        actor.at_gate.release()

    def is_being_deleted(self, key: str) -> bool:
        """Whether an object was deleted with its checkpoint by one who is still at it.

        Its commit may have been sent once more meanwhile, as the answer was lost.
        """
        actor, _ = self.deleted_by.get(key, (None, 0))
        return actor is not None and not actor.has_ended and actor.name[:6] in ("delete", "prune-")

    def check(self) -> None:
        """Every committed checkpoint has all of its objects."""
        if self.is_checked:
            return
        self.is_checked = True
        for seen in self.newest_of.values():
            seen.append(self.newest())
        there = {info.key for info in self.plain.list("")}
        keys = there | self.removed
        for key in there:
            if key.endswith((f"/{METADATA}", f"/{MANIFEST}", f"/{INDEX}")):
                for name in self.named_by(key):
                    assert name in keys or self.is_being_deleted(name), f"{name} is gone"

    def check_owner(self, actor: Actor, gone: Notes) -> None:
        """No job deletes what one has saved that has claimed the run after it."""
        if gone.job and self.claims.index(gone.job) > self.claims.index(actor.job):
            self.loss = f"{actor.name} has deleted step {gone.step} of a later job"

    def check_others(self, actor: Actor, key: str) -> None:
        """A job deletes no step unless a newer one was there when it looked, or has come since."""
        known = {info.key for info in self.plain.list(self.root.key(""))}
        known |= {one for one, (_, at) in self.deleted_by.items() if at > actor.listed}
        steps = [self.step_in(one) for one in known - {key} if one.endswith(f"/{METADATA}")]
        if max(steps, default=0) < self.step_in(key):
            self.loss = f"{actor.name} has deleted {key}, and nothing newer was there"

    def step_in(self, commit: str) -> int:
        return int(commit.split("/")[-2].removeprefix("step-"))

    def check_end(self) -> None:
        """A sweep leaves what is named by checkpoints, and nothing else."""
        self.hours += 25

        def work(config: Config) -> None:
            sweep(self.root, config=config)
            found = find_leftovers(self.root, config=config)
            assert not found.objects
            assert not found.unread

        self.undisturbed(work)
        self.is_checked = False
        self.check()
        below = {info.key for info in self.plain.list("")}
        below = {key for key in below if not key.startswith(self.root.key(f"{MODEL}/"))}
        commits = [key for key in below if key.endswith((f"/{METADATA}", f"/{MANIFEST}"))]
        named = {*commits, *(name for key in commits for name in self.named_by(key, marks=True))}
        left = below - {self.root.key(CLAIM)}
        assert left == named - (self.removed - below), f"left is {sorted(left ^ named)}"
        assert not self.loss, self.loss

    def named_by(self, commit: str, *, marks: bool = False) -> set[str]:
        """The keys that a commit object names; with those of its marks in other checkpoints."""
        folder, _, kind = commit.rpartition("/")
        uri, data = replace(self.root, prefix=folder), bytes(self.plain.get(commit)[0])
        if kind == MANIFEST:
            return {file.key for file in read_manifest(data, folder, commit).values()}
        if kind == INDEX:  # which may be the claim of a save that goes on
            files = () if is_claim(data) else parse_index(data, commit).values()
            return {*map(uri.key, files)}
        names, attempt = _named(data)
        found = {uri.key(name) for name in names}
        if marks:
            folders = {name.split("/")[1] for name in names if name.startswith("../")}
            found |= {uri.beside(one).key(keep_name(attempt)) for one in folders - {uri.folder}}
        return found


@lru_cache(maxsize=4096)
def _named(metadata: bytes) -> tuple[frozenset[str], str]:
    """The names of its objects, and the random name of the save."""
    found = Fetched(ObjectInfo(METADATA, len(metadata), ""), bytearray(metadata))
    said = CommitObject.parse(found, "memory://")
    return frozenset(said.names("memory://")), said.record.attempt


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """Makes worlds; the store and the saves have their clock."""
    current: list[World] = []

    def opener():
        def make(uri, config):
            world = current[0]
            return Gated(world.name, world.actor(int(config.read_timeout) - 1), world)

        return make

    clock = types.SimpleNamespace(
        time=lambda: current[0].hours * HOUR,
        clock_gettime=lambda kind: current[0].hours * HOUR,
        CLOCK_MONOTONIC=1,
    )
    monkeypatch.setattr(registry, "_OPENERS", {"memory": opener})
    monkeypatch.setattr(registry, "_places", {})
    monkeypatch.setattr(memory_store, "_buckets", {})
    monkeypatch.setattr(memory_store, "time", clock)
    monkeypatch.setattr(retry, "_FIRST_PAUSE", 0.0)  # of a copy that begins anew
    for module in (baseline, folders):
        monkeypatch.setattr(module, "time", clock)

    def made(seed: int, kind: type[World] = World, **options: Sequence[str]) -> World:
        current[:] = [kind(seed, **options)]
        return current[0]

    return made


def try_one(worlds: Callable[..., World], seed: int, **options: Sequence[str]) -> None:
    """One interleaving; an error tells its seed and its story."""
    world = worlds(seed, **options)
    try:
        world.run()
        for actor in world.actors:
            if actor.error is not None:
                raise actor.error
        world.check_end()
    except Exception as error:
        story = "\n".join(world.history)
        raise AssertionError(f"seed {seed}: {error}\n{story}") from error
    memory_store._buckets.pop(world.name)
