"""What befalls one rank while a model is saved is told to all, and leaves nothing behind."""

import contextlib
import os
import signal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import cloudckpt.hf
from cloudckpt.dcp.save_plan import CloudSavePlanner
from cloudckpt.errors import AccessDeniedError, IncompleteSaveError, RanksFailedError
from cloudckpt.hf import SafetensorsWriter, sending
from cloudckpt.stores import registry
from dcp.layouts import LAYOUTS, spread
from dcp.values import numbered
from support.faulty_store import FaultyStore
from support.forks import child

OLD = {"old": torch.ones(3)}


def _state() -> dict[str, torch.Tensor]:
    return {"wide": numbered(2600, 2048), "tall": numbered(3001, 501), "small": numbered(7, 3)}


def _denied(message: str) -> AccessDeniedError:
    return AccessDeniedError(message, certain=True)


@contextlib.contextmanager
def _failing(verb: str, error=_denied, calls=None, where=lambda key: True):
    """All stores that are opened fail so."""
    opened = registry._OPENERS

    def opener(scheme):
        def make(uri, config):
            if verb == "open":
                raise error("no credentials")
            store = FaultyStore(opened[scheme]()(uri, config))
            store.fail(verb, error, calls=calls, where=where)
            return store

        return lambda: make

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_OPENERS", {scheme: opener(scheme) for scheme in opened})
        patch.setattr(registry, "_places", {})
        yield


class _OutOfMemory:
    """torch, for a module that can't allocate bytes any more."""

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def zeros(*args, **options):
        if options["dtype"] == torch.uint8:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return torch.zeros(*args, **options)


def _interrupt(*_):
    raise KeyboardInterrupt


def _save(place, layout, who, phase) -> None:
    state = spread(_state(), LAYOUTS[layout])
    uri, options = place.uri, {"max_shard_size": "23MB"}
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == who:
            match phase:
                case "location":
                    uri = place.at("elsewhere").uri
                case "no location":
                    uri = "s4://nowhere"
                case "option":
                    options["max_shard_size"] = "some"
                case "no tensor":
                    state["odd"] = 3
                case "no memory":
                    state["wide"].to_local().untyped_storage().resize_(0)
                case "interrupt":
                    stack.callback(setattr, sending, "_split_sizes", sending._split_sizes)
                    sending._split_sizes = _interrupt
                case "out of memory":
                    stack.callback(setattr, sending, "torch", torch)
                    sending.torch = _OutOfMemory()
                case _:
                    verb, _, what = phase.partition(" ")
                    calls = [2] if what == "later" else None
                    where = (lambda key: key.endswith("json")) if what == "index" else lambda key: 1
                    stack.enter_context(_failing(verb, calls=calls, where=where))
        cloudckpt.hf.save(state, uri, config=place.config, **options)


PHASES = {  # what goes wrong, on which rank, and what all raise
    "location": (-1, "DifferentCheckpointsError"),
    "no location": (-1, "InvalidURIError"),
    "option": (-1, "ConfigError"),
    "no tensor": (-1, "UnsupportedTensorError"),
    "no memory": (-1, "UnsupportedTensorError"),
    "out of memory": (-1, "RanksFailedError"),
    "open": (-1, "AccessDeniedError"),
    "list": (0, "AccessDeniedError"),
    "create_upload later": (0, "AccessDeniedError"),
    "put_part": (0, "AccessDeniedError"),
    "put_part later": (-1, "AccessDeniedError"),
    "complete_upload later": (0, "AccessDeniedError"),
    "put index": (0, "AccessDeniedError"),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("layout", ["2 rows", "2x2 blocks"])
def test_a_failure_of_one_rank_is_raised_on_all_and_leaves_nothing(
    ranks, local, layout: str, phase: str
) -> None:
    place, world = local.having(part_size=5 * 1024**2), LAYOUTS[layout].world
    who, expected = PHASES[phase]
    if layout == "2x2 blocks" and phase.startswith("put_part"):
        who = 1  # which puts the larger file together
    outcomes = ranks.outcomes(world, _save, place, layout, who % world, phase, deadline=60.0)
    assert [type(outcome.error).__name__ for outcome in outcomes] == [expected] * world, outcomes
    assert local.names() == []


@pytest.mark.parametrize("phase", ["no tensor", "put_part later", "create_upload later"])
def test_a_model_that_is_there_survives_what_fails_before_the_commit(ranks, s3, phase: str) -> None:
    place = s3.having(part_size=5 * 1024**2)
    cloudckpt.hf.save(OLD, place.uri, config=place.config)
    errors = ranks.errors(2, _save, place, "2 rows", PHASES[phase][0] % 2, phase)
    assert all(errors)
    found = {"old": torch.zeros(3)}
    cloudckpt.hf.load(found, place.uri, config=place.config)
    assert torch.equal(found["old"], OLD["old"])
    assert place.names() == ["model.safetensors"]
    assert not place.unfinished()


def _save_half(place) -> None:
    if dist.get_rank() == 0:
        state = spread(_state(), LAYOUTS["2 rows"])
        with pytest.raises(IncompleteSaveError, match="the shards of"):
            cloudckpt.hf.save(state, place.uri, no_dist=True, config=place.config)


def test_the_shards_of_one_rank_are_no_model(ranks, local) -> None:
    ranks(2, _save_half, local)
    assert local.names() == []


def _die(message: str) -> BaseException:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError(message)


def _save_and_die(rank: int, rendezvous: str, place) -> str:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    state = spread(_state(), LAYOUTS["2 rows"])
    with _failing("put_part", _die, [2]) if rank == 1 else contextlib.nullcontext():
        try:
            cloudckpt.hf.save(state, place.uri, config=place.config)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return type(error).__name__
    return "nothing"


def test_a_rank_that_dies_is_noticed_by_the_others_and_nothing_is_visible(s3, tmp_path) -> None:
    place = s3.having(part_size=5 * 1024**2)
    arguments = {"rendezvous": str(tmp_path / "rendezvous"), "place": place}
    with (
        child(_save_and_die, rank=0, **arguments) as zero,
        child(_save_and_die, rank=1, **arguments) as one,
    ):
        assert one.wait()[0] == -signal.SIGKILL
        assert zero.wait() == (0, "ProcessGroupError")
    assert place.names() == []
    assert not place.unfinished()


class _Failing(CloudSavePlanner):
    def finish_plan(self, new_plan):
        raise ValueError("this planner can't")


def test_what_a_writer_has_begun_is_gone_if_a_save_fails_elsewhere(s3) -> None:
    place = s3.having(part_size=5 * 1024**2)
    writer, state = SafetensorsWriter(place.uri, config=place.config), {"w": torch.ones(3_000_000)}
    with pytest.raises(RanksFailedError, match="this planner can't"):
        cloudckpt.save(state, storage_writer=writer, planner=_Failing(), no_dist=True)
    assert place.names() == place.unfinished() == []


def test_uploads_are_aborted_if_torch_saves_and_one_can_not_be_begun(s3) -> None:
    place = s3.having(part_size=5 * 1024**2, connections=1)
    state = {name: torch.ones(2_000_000) for name in "ab"}
    writer = SafetensorsWriter(place.uri, max_shard_size="8MB", config=place.config)
    with _failing("create_upload", calls=[2]), pytest.raises(CheckpointException):
        dcp.save(state, storage_writer=writer, no_dist=True)
    assert place.names() == place.unfinished() == []


def test_an_interrupt_of_one_rank_is_told_to_the_others(ranks, local) -> None:
    place = local.having(part_size=5 * 1024**2)
    errors = ranks.errors(2, _save, place, "2 rows", 1, "interrupt", deadline=60.0)
    assert [type(error).__name__ for error in errors] == ["RanksFailedError", "KeyboardInterrupt"]
    assert local.names() == []
