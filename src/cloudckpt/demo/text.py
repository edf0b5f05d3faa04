"""What the model reads: the source text of Python's standard library, byte by byte."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["StdlibText"]

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_HELD_OUT = 100_000  # bytes at the end that are for evaluation only
_FEWEST = 1_000_000


class StdlibText:
    """The text, and batches of it that depend on nothing but their number.

    A batch is drawn for all ranks together and then dealt out, so that the curve of the loss goes
    on as before when the number of ranks changes. The position in the data is just the step: there
    is no state of a sampler that a checkpoint would have to hold.

    Args:
        length: Bytes of a sequence.
        batch: Sequences of a batch, over all ranks; each rank takes an equal share.
        rank: This rank.
        ranks: The number of ranks.

    Raises:
        RuntimeError: If this Python comes without its sources.
    """

    def __init__(self, *, length: int, batch: int, rank: int, ranks: int) -> None:
        self._length = length
        self._batch = batch
        self._mine = slice(rank, None, ranks)
        self._text = np.frombuffer(b"".join(_sources()), dtype=np.uint8)
        if len(self._text) < _FEWEST:
            raise RuntimeError("this Python comes without the sources of its standard library")

    def __len__(self) -> int:
        return len(self._text)

    def training_batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's share of the batch of ``step``: inputs, and the bytes that follow them."""
        return self._draw(step, 0, len(self._text) - _HELD_OUT)

    def held_out_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's share of a batch that is always the same and never trained on."""
        return self._draw(0, len(self._text) - _HELD_OUT, len(self._text))

    def _draw(self, seed: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = np.random.default_rng(seed)
        starts = generator.integers(start, stop - self._length, self._batch)[self._mine]
        rows = [self._text[at : at + self._length + 1] for at in starts]
        tokens: npt.NDArray[np.int64] = np.stack(rows).astype(np.int64)
        sequences = torch.from_numpy(tokens)
        return sequences[:, :-1], sequences[:, 1:]


def _sources() -> Iterator[bytes]:
    """The modules in an order that is the same in every process."""
    for folder, below, names in os.walk(sysconfig.get_paths()["stdlib"]):
        below[:] = sorted(set(below) - _SKIPPED)
        for name in sorted(names):
            if name.endswith(".py"):
                with open(os.path.join(folder, name), "rb") as file:
                    yield file.read()
