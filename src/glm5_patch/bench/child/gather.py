# SPDX-License-Identifier: Apache-2.0
"""The ceiling of sparse MLA: a kernel that reads the same rows and does nothing else.

No attention kernel that reads them can be faster.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _gather_kernel(
    rows,  # [num_slots, 576], contiguous
    slots,  # [T, topk]
    out,  # [T * splits]
    topk,
    PER_PROGRAM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    splits = topk // PER_PROGRAM
    i_t = (tl.program_id(0) // splits).to(tl.int64)
    i_s = tl.program_id(0) % splits
    o_d = tl.arange(0, 512)
    o_r = 512 + tl.arange(0, 64)
    b_latent = tl.zeros([BLOCK_N, 512], dtype=tl.float32)
    b_rope = tl.zeros([BLOCK_N, 64], dtype=tl.float32)
    for i_n in range(0, PER_PROGRAM, BLOCK_N):
        o_n = i_s * PER_PROGRAM + i_n + tl.arange(0, BLOCK_N)
        # [BLOCK_N]
        b_slot = tl.load(slots + i_t * topk + o_n).to(tl.int64)
        # [BLOCK_N, 512], [BLOCK_N, 64]
        b_latent += tl.load(rows + b_slot[:, None] * 576 + o_d[None, :])
        b_rope += tl.load(rows + b_slot[:, None] * 576 + o_r[None, :])
    total = tl.sum(b_latent) + tl.sum(b_rope)
    tl.store(out + tl.program_id(0), total)


def gather(kv_cache: torch.Tensor, slots: torch.Tensor, sums: torch.Tensor) -> None:
    """Read every named row once; keep a sum, so that no load is dead.

    Args:
        kv_cache: ``[num_blocks, page, 576]`` float16 or bfloat16, contiguous.
        slots: ``[T, topk]`` int32, each a row of the cache; contiguous; topk a
            multiple of 256.
        sums: float32, at least one element for every 64 slots.
    """
    per_program = 64 if slots.shape[0] <= 128 else 256
    grid = (slots.shape[0] * slots.shape[1] // per_program,)
    _gather_kernel[grid](
        kv_cache,
        slots,
        sums,
        slots.shape[1],
        PER_PROGRAM=per_program,
        BLOCK_N=16,
        num_warps=4,
        num_stages=3,
    )
