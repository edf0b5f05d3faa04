"""What ranks do: they carry out the saves of a segment, and say where they see something else."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import logging
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist
from botocore.exceptions import ClientError
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dcp.places import Place

from . import values
from .aftermath import aftermath
from .cases import ALONE, Save, Segment
from .checks import CHECK, there_is_nothing
from .limits import tight
from .states import content_of, flat, made, scribble
from .values import Here
from .ways import KEPT_STEPS, Ways

__all__ = ["Finding", "Known", "Model", "run_segment"]

_UNCERTAIN = ("CommitUnknownError", "ProcessGroupError")
_LEAVES_OBJECTS = ("dcp.save", "dcp.save of a URI")  # if it fails: torch has no hook for that


@dataclass(frozen=True)
class Finding:
    """What is not as it should be.

    Attributes:
        step: Behind which save, counted from 0.
        what: The save, or the check.
        kind: The class of an error, or ``difference``.
        text: All of it.
    """

    step: int
    what: str
    kind: str
    text: str


@dataclass(frozen=True)
class Known:
    """What a place may hold: a save, as which step, by how many ranks."""

    save: Save
    step: int
    world: int


@dataclass
class Model:
    """What there is.

    Attributes:
        places: By place what may be there, where None is nothing: one thing, unless a save said
            that it does not know.
        littered: Places at which objects may lie that no checkpoint names.
        root: Where the next process group saves; empty if where the last one did.
    """

    places: dict[Place, list[Known | None]] = field(default_factory=dict)
    littered: set[str] = field(default_factory=set)
    root: str = ""


def run_segment(
    segment: Segment, first: int, model: Model, root: Place, is_tight: bool
) -> tuple[Model, list[Finding]]:
    """Saves, and looks, on one rank.

    Args:
        segment: What to do.
        first: The number of its first save.
        model: What there is.
        root: Where.
        is_tight: Whether objects are to be small.

    Returns:
        What there is then, and what is not as it should be; both are the same on all ranks.
    """
    values.forget_meshes()
    root = dataclasses.replace(root, uri=model.root or root.uri).having(replicas="refuse")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_silence())
        if is_tight:
            stack.enter_context(tight())
        ways = Ways(root)
        findings = _Rank(ways, root, model).carry_out(segment.saves, first)
        error = _caught(ways.close)
        if error is not None and not findings:
            findings = [_raised(first + len(segment.saves) - 1, "close", error)]
    return model, _of_all(findings)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """What libraries say of saves that are to fail."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


class _Rank:
    """One rank of a segment."""

    def __init__(self, ways: Ways, root: Place, model: Model) -> None:
        self._ways, self._root, self._model = ways, root, model
        self._kept: dict[str, Any] = {}
        self._pending: list[tuple[Save, int, Place, Callable[[], None]]] = []

    def carry_out(self, saves: Sequence[Save], first: int) -> list[Finding]:
        """All saves, up to one behind which something is found."""
        for place, held in self._model.places.items():
            if len(held) == 1 and held[0] is not None:  # of another number of ranks, mostly
                findings = self._look(place, first, ("placed otherwise",), "by other ranks")
                if findings := _of_all(findings):
                    return findings
        for step, save in enumerate(saves, first):
            if findings := self._save(save, step):
                return findings
        if findings := self._end_pending():
            return findings
        for number, place in enumerate(sorted(self._model.places, key=lambda one: one.uri)):
            if _is_mine(number):
                findings += self._look(place, step, ("alone",), "at the end")
        return _of_all(findings)

    def _save(self, save: Save, step: int) -> list[Finding]:
        place = self._ways.place_of(save.to, save.by, step, incremental=save.incremental)
        is_under_way = any(pending[2].uri == place.uri for pending in self._pending)
        if (save.fault or is_under_way) and (findings := self._end_pending()):
            return findings
        if not save.overwrite:
            place = place.having(overwrite=False)
        here = Here(step, dist.get_rank(), dist.get_world_size(), kept=self._kept)
        different: set[str] = set()
        if save.fault and save.fault.names:
            unlike = dataclasses.replace(here, unlike=frozenset(save.fault.names))
            different = _different(state := made(save.state, unlike))
        if not different:
            state = made(save.state, here)
        if self._pending:  # the marks of each keep what the others replace, until a sweep
            at_once = [(pending[0], pending[2]) for pending in self._pending] + [(save, place)]
            if any(each.incremental for each, _ in at_once):
                self._model.littered |= {there.uri for _, there in at_once}
        waits: list[Callable[[], None]] = []
        with _fault_of(save, state):
            error = _caught(lambda: waits.append(self._ways.save(save.by, state, place, step)))
            if error is None:
                scribble(state)  # who saves in the background has a copy
                if save.later and save.fault is None:
                    findings = self._end_pending()
                    self._pending.append((save, step, place, waits[0]))
                    return findings
                error = _caught(waits[0])
        findings = self._end_pending() or self._judge(save, step, place, error, different)
        if not findings and save.then and error is None:
            place = dataclasses.replace(self._root, uri=place.uri)
            findings = self._becomes(save.then, place, step)
        return findings

    def _becomes(self, then: str, place: Place, step: int) -> list[Finding]:
        """What happens to a checkpoint, or to all, between two saves."""
        held = self._model.places
        if any(len(each) > 1 for each in held.values()):
            return []  # nobody knows what there is
        [known] = held[place]
        assert known is not None
        is_shared = known.save.incremental
        after = aftermath(then, self._root, place, step, held, is_shared=is_shared)
        findings: list[Finding] = []
        if _is_mine(0) and (error := _caught(after.act)) is not None:
            findings = [_raised(step, then, error)]
        if findings := _of_all(findings):
            return findings
        held.update(after.changed)
        self._model.littered |= {each.uri for each in after.changed if after.is_littered}
        self._model.root = after.root or self._model.root
        for number, each in enumerate(after.changed):
            if _is_mine(number):
                findings += self._look(each, step, ("alone", "stock alone"), then)
        return _of_all(findings)

    def _end_pending(self) -> list[Finding]:
        pending, self._pending = self._pending, []
        for save, step, place, wait in pending:
            if findings := self._judge(save, step, place, _caught(wait)):
                return findings
        return []

    def _judge(
        self,
        save: Save,
        step: int,
        place: Place,
        error: BaseException | None,
        different: Collection[str] = (),
    ) -> list[Finding]:
        """Notes what has become of a save, and looks at it."""
        place = dataclasses.replace(self._root, uri=place.uri)
        told: list[tuple[str, str] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(told, None if error is None else (type(error).__name__, str(error)))
        raised = [one for one in told if one is not None]
        before = self._model.places.get(place, [None])
        is_taken = not save.overwrite and None not in before
        if raised and len(raised) < len(told):
            return [Finding(step, save.by, "ranks disagree", repr(told))]
        if not raised and is_taken:
            return [Finding(step, save.by, "overwritten", "although it was not to be")]
        is_refused = is_taken and "CheckpointExistsError" in repr(raised)  # before it is compared
        if different and not is_refused and (wrong := _not_said(different, raised)):
            return [Finding(step, save.by, "not named", wrong)]
        if raised:
            is_for_nothing = save.fault is None or (save.fault.names and not different)
            if is_for_nothing and not is_refused:
                return [Finding(step, save.by, *raised[0])]
            after = before
            if any(name in f"{kind} {text}" for kind, text in raised for name in _UNCERTAIN):
                after = [*before, Known(save, step, len(told))]
                self._model.littered.add(place.uri)
            if save.by in _LEAVES_OBJECTS:
                self._model.littered.add(place.uri)
            checks: tuple[str, ...] = ("alone",)
        else:
            after, checks = [Known(save, step, len(told))], save.checks
        self._model.places[place] = after
        self._forget_pruned(save, place)
        findings: list[Finding] = []
        for number, kind in enumerate(checks):
            if kind not in ALONE or _is_mine(number):
                findings += self._look(place, step, (kind,), kind)
        if _is_mine(0):
            error = _caught(lambda: findings.extend(self._look_for_litter(place, step)))
            findings += [] if error is None else [_raised(step, "litter", error)]
        return _of_all(findings)

    def _forget_pruned(self, save: Save, place: Place) -> None:
        """A manager keeps the last steps, and deletes those before."""
        if save.by.endswith("manager"):
            run = place.uri.rpartition("/")[0]
            steps = [
                one
                for one, held in self._model.places.items()
                if one.uri.startswith(f"{run}/step-") and held != [None]
            ]
            steps.sort(key=lambda one: int(one.uri.rpartition("-")[2]))
            for gone in steps[:-KEPT_STEPS]:
                self._model.places[gone] = [None]

    def _look(self, place: Place, step: int, kinds: Sequence[str], what: str) -> list[Finding]:
        """What is wrong at a place; nothing if it is one of what it may be."""
        wrong: list[Finding] = []
        for known in self._model.places[place]:
            wrong = []
            for kind in kinds:
                said: list[str | None] = []
                if (error := _caught(lambda: said.append(_said(kind, known, place)))) is not None:  # noqa: B023
                    wrong.append(_raised(step, what, error))
                elif said[0] is not None:
                    wrong.append(Finding(step, what, "difference", said[0]))
            if not wrong:
                return []
        return wrong

    def _look_for_litter(self, place: Place, step: int) -> list[Finding]:
        """Whether there is something that no checkpoint names."""
        if place.uri in self._model.littered:
            return []
        there = set(place.data())
        run, _, folder = place.uri.rpartition("/")
        named: set[str] = set()
        for other, held in self._model.places.items():
            beside = other.uri.rpartition("/")[0]
            if beside != run or held == [None]:
                continue
            if other != place and (None in held or len(held) > 1):
                return []  # nobody knows what it refers to
            try:
                metadata = pickle.loads(other.read(".metadata"))
            except (OSError, ClientError):  # a manager has deleted it behind the next save
                continue
            names = {each.relative_path for each in metadata.storage_data.values()}
            if other == place:
                named |= {name for name in names if not name.startswith("../")}
            named |= {name.rpartition("/")[2] for name in names if name.startswith(f"../{folder}/")}
        if there != named or place.unfinished():
            text = f"{sorted(there)} and {place.unfinished()} are there, {sorted(named)} are named"
            return [Finding(step, "litter", "difference", text)]
        return []


def _different(state: dict[Any, Any]) -> set[str]:
    """The names under which ranks have different copies of something."""
    mine: dict[tuple[str, Any], bytes] = {}
    for name, value in flat(state, dist.get_rank()).items():
        local = value._local_tensor if isinstance(value, DTensor) else value
        place: Any = ()
        if isinstance(value, DTensor):
            where = value.shape, value.device_mesh, value.placements
            place = tuple(compute_local_shape_and_global_offset(*where)[1])
        if not isinstance(value, DTensor) or local.numel():
            mine[name, place] = content_of(local)
    told: list[dict[tuple[str, Any], bytes]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(told, mine)
    found: dict[tuple[str, Any], set[bytes]] = {}
    for of_rank in told:
        for key, content in of_rank.items():
            found.setdefault(key, set()).add(content)
    return {name for (name, _), contents in found.items() if len(contents) > 1}


def _not_said(different: Collection[str], raised: Sequence[tuple[str, str]]) -> str:
    """What is wrong with the errors that name different copies; empty if nothing is."""
    count = f"{len(different)} {'entry differs' if len(different) == 1 else 'entries differ'}"
    for kind, text in raised or [("", "")]:
        lost = [name for name in different if f"{name}: rank" not in text]
        if lost or count not in text or "KeyCollisionError" not in f"{kind} {text}":
            return f"{lost} of {different}: {kind} {text[:1000]}"
    return ""


def _said(kind: str, known: Known | None, place: Place) -> str | None:
    if known is None:
        return there_is_nothing(place)
    return CHECK[kind](known.save, known.step, known.world, place)


def _is_mine(number: int) -> bool:
    """Whether this rank does what one of them is to do."""
    return number % dist.get_world_size() == dist.get_rank()


def _of_all(findings: list[Finding]) -> list[Finding]:
    """What any rank has found; the same on all."""
    told: list[list[Finding]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(told, findings)
    return list(dict.fromkeys(finding for each in told for finding in each))


def _caught(run: Callable[[], object]) -> BaseException | None:
    try:
        run()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - torch's is none of Exception
        return error
    return None


def _raised(step: int, what: str, error: BaseException) -> Finding:
    kind = type(error).__name__
    inner = getattr(error, "failures", None)
    if kind == "CheckpointException" and inner:
        kind = f"{kind} of {type(next(iter(inner.values()))[0]).__name__}"
    return Finding(step, what, kind, str(error))


# ---- faults


@contextlib.contextmanager
def _fault_of(save: Save, state: dict[Any, Any]) -> Iterator[None]:
    """Something is wrong on a rank, if it is to be, for the time of the block."""
    fault = save.fault
    if fault is None or fault.rank != dist.get_rank() or fault.kind == "unlike":
        yield
    elif fault.kind == "unpicklable":
        state["step"] = threading.Lock()
        yield
    else:
        calls = itertools.count()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("pwritev", "link", "replace"):
                patch.setattr(os, name, _full(getattr(os, name), calls, fault.skip))
            yield


def _full(call: Any, calls: Iterator[int], skip: int) -> Any:
    def limited(*arguments: Any, **keywords: Any) -> Any:
        if next(calls) >= skip:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return call(*arguments, **keywords)

    return limited
