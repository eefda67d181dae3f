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
    cache,  # [num_slots, ROW] of 32 bits, contiguous
    slots,  # [T, topk]
    parities,  # [T * splits]
    topk,
    ROW: tl.constexpr,
    HEAD: tl.constexpr,  # a power of two
    TAIL: tl.constexpr,  # a power of two, at least ROW - HEAD
    PER_PROGRAM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    splits = topk // PER_PROGRAM
    i_t = (tl.program_id(0) // splits).to(tl.int64)
    i_s = tl.program_id(0) % splits
    o_head = tl.arange(0, HEAD)
    o_tail = HEAD + tl.arange(0, TAIL)
    m_tail = (o_tail < ROW)[None, :]
    b_head = tl.zeros([BLOCK_N, HEAD], dtype=tl.int32)
    b_tail = tl.zeros([BLOCK_N, TAIL], dtype=tl.int32)
    for i_n in range(0, PER_PROGRAM, BLOCK_N):
        o_n = i_s * PER_PROGRAM + i_n + tl.arange(0, BLOCK_N)
        # [BLOCK_N, 1]
        b_slot = tl.load(slots + i_t * topk + o_n).to(tl.int64)
        p_row = cache + b_slot[:, None] * ROW
        # [BLOCK_N, HEAD], [BLOCK_N, TAIL]
        b_head ^= tl.load(p_row + o_head[None, :])
        b_tail ^= tl.load(p_row + o_tail[None, :], mask=m_tail, other=0)
    parity = tl.xor_sum(tl.xor_sum(b_head, 1) ^ tl.xor_sum(b_tail, 1), 0)
    tl.store(parities + tl.program_id(0), parity)


def gather(kv_cache: torch.Tensor, slots: torch.Tensor, parities: torch.Tensor) -> None:
    """Read every named row once; keep the parity of its words, so no load is dead.

    Args:
        kv_cache: ``[num_blocks, page, row]``, contiguous; rows of a multiple of 4
            bytes. Words are not converted: that would bound it.
        slots: ``[T, topk]`` int32, each a row of the cache; contiguous; topk a
            multiple of 256.
        parities: int32, at least one element for every 16 slots.
    """
    words = kv_cache.view(torch.int32)
    row = words.shape[2]
    head = 1 << (row.bit_length() - 1)
    tokens, topk = slots.shape
    per_program = 16 if tokens <= 32 else 64 if tokens <= 128 else 256
    _gather_kernel[(tokens * topk // per_program,)](
        words,
        slots,
        parities,
        topk,
        ROW=row,
        HEAD=head,
        TAIL=triton.next_power_of_2(row - head),
        PER_PROGRAM=per_program,
        BLOCK_N=16,
        num_warps=4,
        num_stages=3,
    )
