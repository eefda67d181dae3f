# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA: inputs, the definition in float64 to hold it against, and its times."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .gather import gather
from .timing import Rotation, graph_us

PAGE, TOPK = 64, 2048
LATENT_DIM, ROW_DIM = 512, 576
SCALE = 256**-0.5
ROW_BYTES = 2 * ROW_DIM
BLOCK_BYTES = PAGE * ROW_BYTES

DECODE_TOKENS = 128
"""Up to here a batch is timed as decode: rows from memory, ten sets of them in turn."""
POOL_BLOCKS = 65_536  # 4.8 GB
PREFILL_BLOCKS = 512  # 32k tokens of context

# One 16-bit rounding of the weights and one of the output; the rest is float32.
LIMIT = {torch.float16: 1e-3, torch.bfloat16: 4e-3}
LSE_LIMIT = 5e-6
CHECKED_TOKENS = 4

SparseMLA = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]
]


def draw_pool(num_blocks: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """A cache ``[num_blocks, PAGE, ROW_DIM]`` of normal numbers."""
    pool = torch.empty(num_blocks, PAGE, ROW_DIM, dtype=dtype, device=device)
    for piece in pool.split(4096):
        piece.normal_()
    return pool


def draw_queries(tokens: int, heads: int, pool: torch.Tensor) -> torch.Tensor:
    """``[tokens, heads, ROW_DIM]`` normal numbers, of the pool's dtype."""
    return torch.randn(tokens, heads, ROW_DIM, device=pool.device).to(pool.dtype)


def draw_slots(
    sets: int,
    tokens: int,
    pool: torch.Tensor,
    shared: float = 0.0,
    topk: int = TOPK,
) -> torch.Tensor:
    """``[sets, tokens, topk]`` rows of the pool.

    Groups of 16 neighbouring tokens have the share ``shared`` of them in common.
    """
    num_slots = pool.shape[0] * PAGE
    slots = torch.randint(
        num_slots, (sets, tokens, topk), dtype=torch.int32, device=pool.device
    )
    common = round(shared * topk)
    if common:
        groups = slots.view(sets, -1, 16, topk)
        groups[..., :common] = groups[:, :, :1, :common].clone()
    return slots


def check(
    sparse_mla: SparseMLA, q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor
) -> float:
    """Hold the kernel against float64; gives its error as a share of what it may be.

    Some places of every token have no key, and of several tokens the last has none
    at all. A spread of tokens is compared, first and last among them. The error of
    a row is its RMS difference over the RMS of what is expected, and the worst row
    counts; infinity stands for NaN, and for a token without keys that is not 0.
    """
    slots = slots.clone()
    slots[:, 3::11] = -1
    if len(slots) > 1:
        slots[-1] = -1
    out, lse = sparse_mla(q, pool, slots, SCALE)
    last = len(slots) - 1
    some = {round(i * last / (CHECKED_TOKENS - 1)) for i in range(CHECKED_TOKENS)}
    error = 0.0
    for t in sorted(some):
        expected, expected_lse = _definition(q[t], pool, slots[t])
        row = _relative(out[t].double(), expected) / LIMIT[q.dtype]
        difference = (lse[t].double() - expected_lse).abs()
        # -inf is expected to be -inf, and the difference of two is NaN
        difference = difference.where(lse[t] != expected_lse, 0.0)
        size = expected_lse.abs().clamp(min=1.0)
        worst = torch.maximum(row.max(), (difference / size).max() / LSE_LIMIT)
        error = max(error, float(worst.nan_to_num(nan=math.inf, posinf=math.inf)))
    return error


def _definition(
    q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[H, 512]`` and LSE ``[H]`` of one token, float64."""
    rows = pool.view(-1, ROW_DIM)[slots[slots >= 0].long()].double()
    scores = SCALE * (q.double() @ rows.T)
    lse = torch.logsumexp(scores, dim=1)
    if len(rows) == 0:
        return torch.zeros_like(scores @ rows)[:, :LATENT_DIM], lse
    return torch.softmax(scores, dim=1) @ rows[:, :LATENT_DIM], lse


def _relative(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Relative RMS difference of every row; infinite where 0 is expected and missed."""
    difference = (actual - expected).square().mean(dim=1).sqrt()
    size = expected.square().mean(dim=1).sqrt()
    return torch.where(difference == 0, 0.0, difference / size)


def measure(
    sparse_mla: SparseMLA,
    q: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    repeats: int,
) -> tuple[float, float]:
    """Microseconds of the kernel, and of reading the same rows.

    ``slots`` is ``[sets, T, topk]``; a captured graph takes each set once.
    """
    sets, tokens, topk = slots.shape
    sums = torch.empty(tokens * topk // 64, dtype=torch.float32, device=q.device)
    read = Rotation(lambda s: gather(pool, s, sums), slots.unbind())
    ours = Rotation(lambda s: sparse_mla(q, pool, s, SCALE), slots.unbind())
    read_us = graph_us(read, sets, repeats)
    return graph_us(ours, sets, repeats), read_us
