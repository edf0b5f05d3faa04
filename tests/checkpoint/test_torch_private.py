"""Nothing in torch is replaced for a save."""

import pytest
import torch
from torch.distributed.checkpoint import utils as steps

import cloudckpt

USUAL = steps._wrap_exception


class Looking(cloudckpt.checkpointer.CommitHook):
    """Looks at torch amid a save."""

    seen = None

    def before_commit(self, uri, metadata):
        self.seen = steps._wrap_exception


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_save_leaves_torch_as_it_is(tmp_path, is_whole):
    state = {"a": torch.ones(3) if is_whole else torch.ones(3, device="meta")}
    hook = Looking()
    writer = cloudckpt.CloudStorageWriter(tmp_path / "step", commit_hook=hook)
    try:
        cloudckpt.save(state, storage_writer=writer)
    except cloudckpt.errors.CloudCheckpointError:
        assert not is_whole
    else:
        assert is_whole
        assert hook.seen is USUAL
    assert steps._wrap_exception is USUAL
