"""A small byte-level GPT and the text it reads: real enough that a wrong bit anywhere changes the final weights.

Dropout makes every step depend on each rank's RNG, and the shifted windows make every sample depend on the RNG of the
loader worker that happened to fetch it.
"""

import hashlib
import random
import sysconfig
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 256
CONTEXT_BYTES = 128


def standard_library_text() -> bytes:
    """The source of Python's own standard library (its top-level modules), which every machine has."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"\n".join(module.read_bytes() for module in modules)


class SourceText(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """`windows` windows spread evenly over a text; sample i is the i-th, shifted at random by up to half a context.

    A sample is (input, target), both int64 of shape (CONTEXT_BYTES,), the target one byte further on.
    """

    def __init__(self, text: bytes, windows: int) -> None:
        last_start = len(text) - CONTEXT_BYTES - 1
        if windows < 1 or last_start < CONTEXT_BYTES:
            raise ValueError(f"a text of {len(text)} bytes has no room for {windows} windows of {CONTEXT_BYTES} bytes")
        self._text = np.frombuffer(text, dtype=np.uint8)
        self._windows = windows
        self._last_start = last_start
        self.revision = hashlib.sha256(text).hexdigest()[:16]

    def __len__(self) -> int:
        return self._windows

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        middle = index * self._last_start // self._windows
        shift = random.randint(-CONTEXT_BYTES // 2, CONTEXT_BYTES // 2)
        start = min(max(middle + shift, 0), self._last_start)
        window = torch.from_numpy(self._text[start : start + CONTEXT_BYTES + 1].astype(np.int64))
        return window[:-1], window[1:]


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer of four times the width; both behind a LayerNorm."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 4 * width)
        self.feed_out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width)))
        fed: torch.Tensor = self.dropout(self.feed_out(F.gelu(self.feed_in(self.feed_norm(x)))))
        return x + fed


class ByteGPT(nn.Module):
    """Maps bytes (batch, length <= CONTEXT_BYTES) to logits (batch, length, 256); 1.4 million parameters by default."""

    def __init__(self, *, width: int = 192, layers: int = 3, heads: int = 6, dropout: float = 0.1) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT_BYTES, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.bytes(x) + self.positions(torch.arange(x.shape[1], device=x.device)))
        for block in self.blocks:
            x = block(x)
        return cast(torch.Tensor, self.head(self.norm(x)))
