# SPDX-License-Identifier: Apache-2.0
"""The definition of the indexer's logits, in float64, and of the top-k on them.

logit[m, n] = k_scale[n] * sum_h weights[m, h] * relu(q[m, h] . k[n])
"""

import torch

HEAD_DIM = 128
PAGE = 64


def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    """`[M, N]` float64: -inf wherever n is not in starts[m] .. ends[m] - 1.

    Args: q `[M, H, 128]`, k `[N, 128]`, k_scale `[N]`, weights `[M, H]`, starts
    and ends `[M]`. A key outside of every range may hold anything.
    """
    num_queries, num_keys = q.shape[0], k.shape[0]
    logits = torch.full((num_queries, num_keys), -torch.inf, dtype=torch.float64)
    k, k_scale = k.double().cpu(), k_scale.double().cpu()
    for m in range(num_queries):
        low, high = max(0, int(starts[m])), min(num_keys, int(ends[m]))
        if low < high:
            scores = (q[m].double().cpu() @ k[low:high].T).relu()  # [H, n]
            summed = weights[m].double().cpu() @ scores
            logits[m, low:high] = summed * k_scale[low:high]
    return logits


def shifted(
    logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, width: int
) -> torch.Tensor:
    """`[M, width]`: of each row of `logits`, its first `width` keys from column 0 on.

    Args: logits `[M, N]`; starts and ends `[M]`, any numbers. All else is -inf.
    """
    moved = torch.full((logits.shape[0], width), -torch.inf, dtype=logits.dtype)
    for m, row in enumerate(logits):
        keys = row[max(0, int(starts[m])) : max(0, int(ends[m]))][:width]
        moved[m, : len(keys)] = keys
    return moved


def unpack_page(page: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys `[64, 128]` and scales `[64]` of one block of the cache, 8448 bytes."""
    flat = page.reshape(-1).cpu()
    keys = flat[: PAGE * HEAD_DIM].view(torch.float8_e4m3fn).view(PAGE, HEAD_DIM)
    return keys, flat[PAGE * HEAD_DIM :].view(torch.float32)


def row_ends(context_lens: torch.Tensor, next_n: int) -> torch.Tensor:
    """Keys `[B, next_n]` of every row, from lengths in any of the three shapes.

    One length a request is that of its last row, as vLLM's top-k takes it.
    """
    lens = context_lens.cpu().reshape(context_lens.shape[0], -1)
    if lens.shape[1] == next_n:
        return lens
    return lens - next_n + 1 + torch.arange(next_n)


def paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_len: int,
) -> torch.Tensor:
    """`[B * next_n, max_len]` float64, -inf in every column that is no key.

    Args: q `[B, next_n, H, 128]`, kv_cache `[num_blocks, 64, 1, 132]` uint8,
    weights `[B * next_n, H]`, context_lens as in `row_ends`, block_table
    `[B, num_pages]`. A block outside of the cache holds no keys.
    """
    num_requests, next_n, _, _ = q.shape
    ends = row_ends(context_lens, next_n)
    logits = torch.full((num_requests * next_n, max_len), -torch.inf).double()
    for b in range(num_requests):
        for page in range(block_table.shape[1]):
            block = int(block_table[b, page])
            first = page * PAGE
            last = min(first + PAGE, max_len, int(ends[b].max()))
            if first >= last or not 0 <= block < kv_cache.shape[0]:
                continue
            keys, scales = unpack_page(kv_cache[block])
            part = slice(b * next_n, (b + 1) * next_n)
            logits[part, first:last] = mqa_logits(
                q[b],
                keys[: last - first],
                scales[: last - first],
                weights[part],
                torch.zeros(next_n),
                ends[b] - first,
            )
    return logits
