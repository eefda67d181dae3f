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
FP8_ROW_BYTES = 656
"""Of ``fp8_ds_mla``: 512 e4m3 latents, 4 float32 scales, 64 rotary 16-bit values."""
GROUPS, GROUP, E4M3_MAX = 4, 128, 448

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


def draw_pool(
    num_blocks: int, dtype: torch.dtype, device: str, fp8: bool = False
) -> torch.Tensor:
    """A cache of normal numbers, ``[num_blocks, PAGE, ROW_DIM]``.

    With ``fp8`` it is one of bytes, ``[num_blocks, PAGE, FP8_ROW_BYTES]``.
    """
    if not fp8:
        pool = torch.empty(num_blocks, PAGE, ROW_DIM, dtype=dtype, device=device)
        for piece in pool.split(4096):
            piece.normal_()
        return pool
    shape = (num_blocks, PAGE, FP8_ROW_BYTES)
    pool = torch.empty(shape, dtype=torch.uint8, device=device)
    for piece in pool.split(4096):
        latents = torch.randn(*piece.shape[:2], GROUPS, GROUP, device=device)
        scales = latents.abs().amax(dim=-1) / E4M3_MAX
        codes = (latents / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2)
        rope = torch.randn(*piece.shape[:2], ROW_DIM - LATENT_DIM, device=device)
        parts = (codes, scales, rope.to(dtype))
        torch.cat([part.view(torch.uint8) for part in parts], dim=-1, out=piece)
    return pool


def draw_queries(
    tokens: int, heads: int, dtype: torch.dtype, device: str
) -> torch.Tensor:
    """``[tokens, heads, ROW_DIM]`` normal numbers."""
    return torch.randn(tokens, heads, ROW_DIM, device=device).to(dtype)


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
    rows = _numbers(pool.flatten(0, 1)[slots[slots >= 0].long()], q.dtype)
    scores = SCALE * (q.double() @ rows.T)
    lse = torch.logsumexp(scores, dim=1)
    if len(rows) == 0:
        return torch.zeros_like(scores @ rows)[:, :LATENT_DIM], lse
    return torch.softmax(scores, dim=1) @ rows[:, :LATENT_DIM], lse


def _numbers(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What rows of either cache stand for, ``[n, ROW_DIM]`` float64."""
    if rows.dtype != torch.uint8:
        return rows.double()
    widths = (LATENT_DIM, 4 * GROUPS, 2 * (ROW_DIM - LATENT_DIM))
    codes, scales, rope = (part.contiguous() for part in rows.split(widths, dim=1))
    latents = codes.view(torch.float8_e4m3fn).float().double()
    latents = latents.unflatten(1, (GROUPS, GROUP))
    latents = latents * scales.view(torch.float32).double()[..., None]
    return torch.cat([latents.flatten(1), rope.view(dtype).double()], dim=1)


def _relative(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Relative RMS difference of every row; infinite where 0 is expected and missed."""
    difference = (actual - expected).square().mean(dim=1).sqrt()
    size = expected.square().mean(dim=1).sqrt()
    return torch.where(difference == 0, 0.0, difference / size)


def read_us(pool: torch.Tensor, slots: torch.Tensor, repeats: int) -> float:
    """Microseconds for reading the rows of ``slots``, ``[sets, T, topk]``, alone."""
    sets, tokens, topk = slots.shape
    parities = torch.empty(tokens * topk // 16, dtype=torch.int32, device=pool.device)
    read = Rotation(lambda s: gather(pool, s, parities), slots.unbind())
    return graph_us(read, sets, repeats)


def kernel_us(
    sparse_mla: SparseMLA,
    q: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    repeats: int,
) -> float:
    """Microseconds of the kernel; a captured graph takes each set of slots once."""
    ours = Rotation(lambda s: sparse_mla(q, pool, s, SCALE), slots.unbind())
    return graph_us(ours, len(slots), repeats)
