"""What is replaced in torch for the time of a save, and given back."""

import threading

import pytest
import torch
from torch.distributed.checkpoint import utils as steps

import cloudckpt
from cloudckpt.checkpoint.torch_private import errors_gathered_as

USUAL = steps._wrap_exception


class OurError(Exception):
    """What an error is told as."""


def told(error):
    return OurError(str(error))


def gathered(error):
    """What torch would tell other ranks of an error."""
    return steps._wrap_exception(error)[0]


@pytest.fixture(autouse=True)
def is_given_back():
    yield
    assert steps._wrap_exception is USUAL


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_save_leaves_torch_as_it_was(tmp_path, is_whole):
    state = {"a": torch.ones(3) if is_whole else torch.ones(3, device="meta")}
    try:
        cloudckpt.save(state, checkpoint_id=tmp_path / "step")
    except cloudckpt.CloudCheckpointError:
        assert not is_whole
    else:
        assert is_whole
    assert steps._wrap_exception is USUAL


def test_what_torch_tells_of_an_error_is_another_one_within_only():
    with errors_gathered_as(told):
        assert isinstance(gathered(ValueError("x")), OurError)
        with errors_gathered_as(lambda error: error):
            assert isinstance(gathered(ValueError("x")), ValueError)
        assert isinstance(gathered(ValueError("x")), OurError)
    assert isinstance(gathered(ValueError("x")), ValueError)


def test_saves_in_several_threads_do_not_take_it_from_each_other():
    found, first_in, second_out = {}, threading.Event(), threading.Event()

    def first():
        with errors_gathered_as(told):
            first_in.set()
            assert second_out.wait(60)
            found["beside"] = gathered(ValueError("x"))

    thread = threading.Thread(target=first)
    thread.start()
    assert first_in.wait(60)
    with errors_gathered_as(lambda error: KeyError(str(error))):
        found["own"] = gathered(ValueError("x"))
    found["none"] = gathered(ValueError("x"))  # while the other thread still has its own
    second_out.set()
    thread.join()
    assert {name: type(error) for name, error in found.items()} == {
        "beside": OurError,
        "own": KeyError,
        "none": ValueError,
    }


def test_what_somebody_has_put_before_it_meanwhile_stays(monkeypatch):
    with monkeypatch.context() as patched:
        with errors_gathered_as(told):
            ours = steps._wrap_exception

            def theirs(error):
                return ours(error)

            patched.setattr(steps, "_wrap_exception", theirs)
        assert steps._wrap_exception is theirs
        assert isinstance(gathered(ValueError("x")), ValueError)
        steps._wrap_exception = USUAL
        patched.undo()
    steps._wrap_exception = USUAL
