"""The model: a small GPT over bytes."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import nn

__all__ = ["CONTEXT", "GPT"]

CONTEXT = 96
"""Bytes that the model sees."""

_VOCABULARY = 256
_LAYERS = 8
_HEADS = 5
_WIDTH = 320


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
