# SPDX-License-Identifier: Apache-2.0
"""The indexer's logits: inputs, the definition in float64, and their times."""

from __future__ import annotations

import math
from typing import Any

import torch

DIM, PAGE = 128, 64
ROW_BYTES = DIM + 4  # a token's share of a page: its key and its scale
FP8 = torch.float8_e4m3fn

# Of the largest logit: products of two e4m3 numbers are exact, and the float8 units
# of SM89 and later keep fewer bits of a sum than float32.
LIMIT = 3e-4
CHECKED_ROWS = 4


def decode_inputs(
    requests: int, context: int, heads: int, pool_bytes: int, device: str
) -> list[dict[str, Any]]:
    """Some batches over one pool; replayed in turn, none stays in L2."""
    pages = context // PAGE
    blocks = max(pool_bytes // (PAGE * ROW_BYTES), requests * pages)
    pool = torch.empty(blocks, PAGE * ROW_BYTES, dtype=torch.uint8, device=device)
    keys, scales = pool[:, : PAGE * DIM].view(FP8), pool[:, PAGE * DIM :]
    for piece in keys.split(8192):
        piece.copy_(_draw_keys(*piece.shape, device=device))
    scales.view(torch.float32).uniform_(0, 0.01)
    sets = max(1, min(10, blocks // (requests * pages)))
    order = torch.randperm(blocks, device=device, dtype=torch.int32)
    return [
        {
            "q": torch.randn(requests, 1, heads, DIM, device=device).to(FP8),
            "kv_cache": pool.view(blocks, PAGE, 1, ROW_BYTES),
            "weights": torch.randn(requests, heads, device=device),
            "context_lens": torch.full(
                (requests, 1), context, dtype=torch.int32, device=device
            ),
            "block_table": order[i * requests * pages :][: requests * pages].view(
                requests, pages
            ),
            "max_len": context,
        }
        for i in range(sets)
    ]


def prefill_inputs(
    queries: int, keys: int, heads: int, device: str
) -> dict[str, torch.Tensor]:
    """Every query sees every key."""
    starts = torch.zeros(queries, dtype=torch.int32, device=device)
    return {
        "q": torch.randn(queries, heads, DIM, device=device).to(FP8),
        "k": _draw_keys(keys, DIM, device=device).to(FP8),
        "k_scale": torch.rand(keys, device=device) / 100,
        "weights": torch.randn(queries, heads, device=device),
        "starts": starts,
        "ends": torch.full_like(starts, keys),
    }


def _draw_keys(*shape: int, device: str) -> torch.Tensor:
    """Float32 numbers that e4m3 can hold: beyond 448 it has NaN alone."""
    return (torch.randn(*shape, device=device) * 100).clamp(-448, 448)


def check_decode(logits: torch.Tensor, inputs: dict[str, Any]) -> float:
    """Hold some rows against float64; gives the error as a share of the limit."""
    pool = inputs["kv_cache"].view(-1, PAGE * ROW_BYTES)
    worst = 0.0
    for b in _some(len(logits)):
        pages = pool[inputs["block_table"][b].long()]
        k = pages[:, : PAGE * DIM].contiguous().view(FP8).view(-1, DIM)
        scale = pages[:, PAGE * DIM :].contiguous().view(torch.float32).view(-1)
        expected = _definition(inputs["q"][b, 0], k, scale, inputs["weights"][b])
        worst = max(worst, _error(logits[b], expected))
    return worst


def check_prefill(logits: torch.Tensor, inputs: dict[str, torch.Tensor]) -> float:
    """Hold some rows against float64; gives the error as a share of the limit."""
    k, scale = inputs["k"], inputs["k_scale"]
    return max(
        _error(logits[m], _definition(inputs["q"][m], k, scale, inputs["weights"][m]))
        for m in _some(len(logits))
    )


def _some(rows: int) -> list[int]:
    """A spread of rows, first and last among them."""
    steps = CHECKED_ROWS - 1
    return sorted({round(i * (rows - 1) / steps) for i in range(CHECKED_ROWS)})


def _definition(
    q: torch.Tensor, k: torch.Tensor, scale: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Logits ``[N]`` of one query over all keys, float64."""
    scores = (q.float().double() @ k.float().double().T).relu()
    return (weights.double() @ scores) * scale.double()


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (actual.double() - expected).abs().max() / expected.abs().max()
    return float(difference.nan_to_num(nan=math.inf, posinf=math.inf)) / LIMIT
