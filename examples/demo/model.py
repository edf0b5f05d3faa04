"""The model, a small GPT over bytes, and its text, the sources of Python's standard library."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import nn

__all__ = ["CONTEXT", "GPT", "StdlibText"]

CONTEXT = 96
"""Bytes that the model sees."""

_VOCABULARY = 256
_LAYERS = 8
_HEADS = 5
_WIDTH = 320
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_HELD_OUT = 100_000  # bytes at the end that are for evaluation only
_FEWEST = 1_000_000


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and around a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(_WIDTH)
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
        self.projection = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.feed_norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH, bias=False)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``(batch, time, width)`` to the same shape."""
        x = x + self._attend(self.attention_norm(x))
        fed: torch.Tensor = self.down(F.gelu(self.up(self.feed_norm(x))))
        return x + fed

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, _ = x.shape
        heads = self.qkv(x).view(batch, time, 3, _HEADS, _WIDTH // _HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: torch.Tensor = self.projection(mixed.transpose(1, 2).reshape(x.shape))
        return projected


class GPT(nn.Module):
    """About 10 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.position_embedding = nn.Embedding(CONTEXT, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(_LAYERS))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        self.apply(_initialize)
        # bytes stay far apart and positions close together: that saves the first hundred steps
        nn.init.normal_(self.position_embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss, in nats per byte, of predicting ``targets`` from ``tokens``."""
        positions = torch.arange(tokens.shape[1])
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)


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
