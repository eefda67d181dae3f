# SPDX-License-Identifier: Apache-2.0
"""The definition of the two operators, in float64 and without any cleverness.

The kernels are right when they agree with this file; nothing here is fast.

    sparse_mla          every token attends to its own list of cache slots
    slots_from_positions  the page-table lookup that makes such a list
    encode_fp8, decode_fp8  rows of 656 bytes, and the numbers that they stand for
"""

import math

import torch

LATENT_DIM = 512  # key and value at once
ROPE_DIM = 64  # key only


def sparse_mla(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from every query token to its own list of cache slots.

    Args:
        q: `[T, H, 576]`, 512 latent values and 64 rotary values a head.
        kv_cache: `[num_blocks, page, 576]`, the same two parts a row.
        slots: `[T, topk]` integers, `block * page + offset` of each key. A value
            outside of 0 .. num_blocks * page - 1 is not a key; it adds nothing,
            wherever it stands. A slot named twice counts twice.
        scale: factor on the scores.

    Returns:
        out `[T, H, 512]` and lse `[T, H]`, float64. The LSE is the natural
        logarithm of the sum of exp(score). A token without a key: 0 and -inf.
    """
    num_tokens, num_heads, _ = q.shape
    num_blocks, page, _ = kv_cache.shape
    out = torch.zeros(num_tokens, num_heads, LATENT_DIM, dtype=torch.float64)
    lse = torch.full((num_tokens, num_heads), -math.inf, dtype=torch.float64)

    for t in range(num_tokens):
        listed = slots[t].long()
        keys = listed[(listed >= 0) & (listed < num_blocks * page)]
        if keys.numel() == 0:
            continue
        rows = kv_cache[keys // page, keys % page].double().cpu()  # [n, 576]
        scores = scale * (q[t].double().cpu() @ rows.T)  # [H, n]
        lse[t] = torch.logsumexp(scores, dim=1)
        out[t] = torch.softmax(scores, dim=1) @ rows[:, :LATENT_DIM]
    return out, lse


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Bytes as the numbers of OCP FP8 E4M3, float64: bias 7, one NaN, no infinity."""
    codes = codes.long()
    sign = 1.0 - 2.0 * (codes >> 7)
    exponent, mantissa = (codes >> 3) & 15, (codes & 7).double()
    normal = (8 + mantissa) * torch.exp2(exponent.double() - 10)
    numbers = sign * torch.where(exponent == 0, mantissa * 2.0**-9, normal)
    return torch.where((codes & 127) == 127, torch.nan, numbers)


def decode_fp8(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`fp8_ds_mla` rows, `[..., 656]` uint8, as `[..., 576]` float64.

    512 e4m3 latents, then four float32 scales, one for 128 latents each, then 64
    rotary values in `dtype`.
    """
    latents = decode_e4m3(rows[..., :512]).unflatten(-1, (4, 128))
    scales = rows[..., 512:528].contiguous().view(torch.float32).double()
    rope = rows[..., 528:].contiguous().view(dtype).double()
    return torch.cat([(latents * scales[..., None]).flatten(-2), rope], dim=-1)


def encode_fp8(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse, rounded: `[..., 576]` as `[..., 656]` uint8.

    The largest latent of a group becomes 448, the largest number of e4m3.
    """
    latents = rows[..., :LATENT_DIM].float().unflatten(-1, (4, 128))
    scales = latents.abs().amax(dim=-1) / 448
    scales = scales.clamp(min=torch.finfo(torch.float32).tiny)
    codes = (latents / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2)
    rope = rows[..., LATENT_DIM:].to(dtype).contiguous()
    parts = (codes, scales.contiguous(), rope)
    return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)


def slots_from_positions(
    positions: torch.Tensor,
    block_table: torch.Tensor,
    req_of_token: torch.Tensor,
    page: int,
) -> torch.Tensor:
    """Look up the cache slot of every picked position.

    Args:
        positions: `[T, topk]` positions within the token's own request.
        block_table: `[num_reqs, num_pages]`, the cache block of each page.
        req_of_token: `[T]`, the row of `block_table` that belongs to the token.
        page: tokens in one block.

    Returns:
        `[T, topk]` int32. -1 for a position below 0 or beyond the table, a page
        without a block (below 0), and every place of a token whose request is
        not a row of the table.
    """
    num_reqs, num_pages = block_table.shape
    slots = torch.full(positions.shape, -1, dtype=torch.int32)
    for t, request in enumerate(req_of_token.tolist()):
        if not 0 <= request < num_reqs:
            continue
        for j, position in enumerate(positions[t].tolist()):
            if 0 <= position < num_pages * page:
                block = int(block_table[request, position // page])
                if block >= 0:
                    slots[t, j] = block * page + position % page
    return slots
