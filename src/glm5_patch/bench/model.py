# SPDX-License-Identifier: Apache-2.0
"""What is asked of the child, and what it answers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from glm5_patch.child.process import Failed, NotRun

TOPK = 2048
HEADS = (8, 16, 64)
"""Of one GPU: GLM-5 has 64, which 8, 4 or 1 of them share."""
TOKENS = (1, 8, 32, 128, 2048)
INDEX_HEADS = 32
KERNELS = {
    "attention": "attention",
    "attention_fp8": "attention, fp8 cache",
    "decode": "indexer, decode",
    "prefill": "indexer, prefill",
}
"""Names for people, by those that the child knows."""
CONTEXT = 32_768
REPEATS = 30


class Shape(NamedTuple):
    """One call of one kernel."""

    kernel: str
    """One of ``KERNELS``."""
    dtype: str
    tokens: int
    keys: int
    """That a token attends to, or that it scores."""
    heads: int

    def __str__(self) -> str:
        return (
            f"{KERNELS[self.kernel]}: {self.dtype}, {self.tokens} tokens, "
            f"{self.heads} heads, {self.keys} keys"
        )


@dataclass(frozen=True)
class Request:
    """Everything that the child is asked."""

    root: Path
    """The folder that holds ``vllm/``."""
    shapes: tuple[Shape, ...]
    repeats: int
    """Replays that a time is the median of; 0: check, and time nothing."""


@dataclass(frozen=True)
class Chip:
    """The GPU, and what drives it."""

    name: str
    capability: str
    processors: int
    memory_bytes: int
    l2_bytes: int
    python: str
    torch: str
    triton: str
    cuda: str
    pool_blocks: int
    """Of the cache that attention read its rows from, 64 tokens each."""


@dataclass(frozen=True)
class Row:
    """What became of one shape."""

    shape: Shape
    launch: str
    """How the kernel was launched; empty if it did not come to that."""
    bytes: int
    """That have to be read; 0 where arithmetic is the bound."""
    flop: int
    error: float | None
    """Largest difference from float64, as a share of what is allowed."""
    us: float | None
    read_us: float | None
    """Microseconds for reading the same rows and doing nothing else."""
    fault: str | None
    """Why this shape has no time, or is wrong."""


@dataclass(frozen=True)
class Ran:
    """There is an answer; its rows are those that were asked for."""

    chip: Chip
    rows: tuple[Row, ...]


Answer = Ran | NotRun | Failed


def shapes(
    features: Collection[str], dtypes: Collection[str], quick: bool = False
) -> tuple[Shape, ...]:
    """The shapes to run for the features that are applied."""
    found: list[Shape] = []
    if "sparse-backend" in features:
        found += [
            Shape(kernel, dtype, tokens, TOPK, heads)
            for kernel in ("attention", "attention_fp8")
            for dtype in dtypes
            for heads in (HEADS[:1] if quick else HEADS)
            for tokens in (TOKENS[::2] if quick else TOKENS)
        ]
    if "indexer" in features:
        found += [
            Shape("decode", "float8", requests, CONTEXT, INDEX_HEADS)
            for requests in ((8,) if quick else (1, 8, 32))
        ]
        found.append(Shape("prefill", "float8", 2048, 8192, INDEX_HEADS))
    return tuple(found)
