# SPDX-License-Identifier: Apache-2.0
"""Compiling the indexer's kernels before the first request asks for them.

Triton compiles a binary when it is first launched. vLLM's own warm-up runs no prefill
of the indexer, and decode only in the sizes that it captures.
"""

from functools import cache

import torch

from .triton_indexer_keys import write_index_keys
from .triton_mqa_logits import (
    HEAD_DIM,
    PAGE,
    ROW_BYTES,
    mqa_logits,
    paged_mqa_logits,
    request_block,
)


@cache
def warm_up_prefill(num_heads: int, device: torch.device) -> None:
    """Launch the binary of `mqa_logits` without `width`, once a process."""
    mqa_logits(
        torch.zeros((1, num_heads, HEAD_DIM), dtype=torch.float8_e4m3fn, device=device),
        torch.zeros((1, HEAD_DIM), dtype=torch.float8_e4m3fn, device=device),
        torch.zeros(1, device=device),
        torch.zeros((1, num_heads), device=device),
        *torch.zeros((2, 1), dtype=torch.int32, device=device),  # an empty range
    )


@cache
def warm_up_keys(dtype: torch.dtype, device: torch.device) -> None:
    """Launch the binary of `write_index_keys` for scales of "ue8m0", once a process."""
    write_index_keys(
        torch.zeros((1, HEAD_DIM), dtype=dtype, device=device),
        torch.zeros((1, PAGE, ROW_BYTES), dtype=torch.uint8, device=device),
        torch.full((1,), -1, dtype=torch.int64, device=device),
        power_of_two=True,
    )


@cache
def warm_up_decode(
    num_heads: int, next_n: int, max_requests: int, device: torch.device
) -> None:
    """Launch each binary of `paged_mqa_logits` for a number of tokens a request.

    Args:
        num_heads, next_n: of the queries, as in `paged_mqa_logits`.
        max_requests: the most in one batch.
        device: where it will run.

    The launches take the smallest batch of each class, over a cache of one block, and
    read nothing: no request has a key. Once a process.
    """
    kv_cache = torch.zeros((1, PAGE, 1, ROW_BYTES), dtype=torch.uint8, device=device)
    requests = 1
    while requests <= max_requests:
        rows = requests * next_n
        q = torch.zeros(
            (rows, num_heads, HEAD_DIM), dtype=torch.float8_e4m3fn, device=device
        )
        paged_mqa_logits(
            q.view(requests, next_n, num_heads, HEAD_DIM),
            kv_cache,
            torch.zeros((rows, num_heads), device=device),
            torch.zeros(requests, dtype=torch.int32, device=device),
            torch.zeros((requests, 1), dtype=torch.int32, device=device),
            max_len=PAGE,
        )
        requests = request_block(requests) + 1
