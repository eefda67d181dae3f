# SPDX-License-Identifier: Apache-2.0
"""Sparse multi-head latent attention over a paged cache, in portable Triton.

Every query token attends to its own short list of cache rows (GLM-5: the 2048
that the indexer picked). A row is one latent of 512 values, which is key and
value at once, followed by 64 rotary values, which are key only:

    s[t, h, j] = scale * (q_nope[t, h] . latent[slot] + q_pe[t, h] . rope[slot])
    out[t, h]  = sum_j softmax_j(s[t, h]) * latent[slot],   slot = slots[t, j]

All heads of a token read the same rows, so one program takes one token and a
block of its heads, and each gathered row is used twice from shared memory. A
batch of few tokens would leave most of the chip idle, so there the keys of a
token are split over several programs, and their results are merged by their LSE:
a few by the program that is last, many by a second kernel.

Nothing here imports vLLM: the kernel is built for float16 and bfloat16, from
SM80 on, and runs under TRITON_INTERPRET=1 on the CPU.
"""

import torch
import triton
import triton.language as tl

from .triton_sparse_arguments import check_arguments, split_query
from .triton_sparse_launch import (
    CHUNKS,
    LATENT_DIM,
    ROPE_DIM,
    ROW_DIM,
    launch_config,
)
from .triton_sparse_merge import hand_in, prepare


@triton.jit
def _dot(b_a, b_b, b_acc, INTERPRETED: tl.constexpr):
    """b_acc + b_a @ b_b in float32."""
    if INTERPRETED:
        # Triton 3.5 to 3.6 interpret bfloat16 as the integers of its bits here.
        b_a = b_a.to(tl.float32)
        b_b = b_b.to(tl.float32)
    return tl.dot(b_a, b_b, b_acc)


@triton.jit(do_not_specialize=["num_heads", "num_slots"])
def _sparse_mla_kernel(
    q_nope,  # [T, H, LATENT]
    q_pe,  # [T, H, ROPE]
    kv_cache,  # [num_slots // PAGE, PAGE, LATENT + ROPE]
    slots,  # [T, TOPK] int32
    out,  # [T, H, LATENT], contiguous
    lse,  # [T, H] float32, contiguous
    part,  # [T, splits, H, LATENT] float32, contiguous; unused where SPLITS is 1
    part_lse,  # [T, splits, H] float32, contiguous; likewise
    tickets,  # [T, head blocks] int32, zeros; unused unless MERGE
    scale_log2,  # softmax scale times log2(e)
    num_heads,
    num_slots,
    stride_qn_t,
    stride_qn_h,
    stride_qp_t,
    stride_qp_h,
    stride_kv_page,
    stride_kv_row,
    stride_slots_t,
    TOPK: tl.constexpr,
    SPLITS: tl.constexpr,  # programs among which the keys of a token are divided
    MERGE: tl.constexpr,  # whether the last of them also adds up the results
    PAGE: tl.constexpr,
    PAGES_ADJOIN: tl.constexpr,  # stride_kv_page == PAGE * stride_kv_row
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    CHUNKS: tl.constexpr,  # pieces of a latent, see below
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    # A latent is loaded, multiplied and accumulated in pieces. A thread then copies
    # the same columns of few rows, instead of few columns of many, and computes an
    # address for each of them; and the sums of the scores are two short chains
    # instead of a long one.
    CHUNK: tl.constexpr = LATENT // CHUNKS
    # Of one split; a constant, so that the compiler knows how rows are aligned.
    KEYS: tl.constexpr = (TOPK + SPLITS * BLOCK_N - 1) // (SPLITS * BLOCK_N) * BLOCK_N
    # Head blocks of one token are neighbours in the grid: they read the same
    # rows, and the second one finds them in L2.
    num_head_blocks = tl.cdiv(num_heads, BLOCK_H)
    i_h = tl.program_id(0) % num_head_blocks
    i_ts = tl.program_id(0) // num_head_blocks
    i_s = i_ts % SPLITS
    # 64-bit, because token * stride and page * stride pass 2**31 elements.
    i_t = (i_ts // SPLITS).to(tl.int64)

    # [BLOCK_H], [CHUNK], [ROPE], [BLOCK_N]
    o_h = i_h * BLOCK_H + tl.arange(0, BLOCK_H)
    o_chunk = tl.arange(0, CHUNK)
    o_rope = tl.arange(0, ROPE)
    o_n = tl.arange(0, BLOCK_N)
    m_h = o_h < num_heads

    # [BLOCK_H, CHUNK] each
    p_qn = q_nope + i_t * stride_qn_t + o_h[:, None] * stride_qn_h + o_chunk[None, :]
    b_qn = ()
    b_acc = ()
    for c in tl.static_range(CHUNKS):
        b_qn = b_qn + (tl.load(p_qn + c * CHUNK, mask=m_h[:, None], other=0.0),)
        b_acc = b_acc + (tl.zeros([BLOCK_H, CHUNK], dtype=tl.float32),)
    # [BLOCK_H, ROPE]
    p_qp = q_pe + i_t * stride_qp_t + o_h[:, None] * stride_qp_h + o_rope[None, :]
    b_qp = tl.load(p_qp, mask=m_h[:, None], other=0.0)

    p_slots = slots + i_t * stride_slots_t
    # Column first, then row: the compiler then adds one product to one address
    # for each row, instead of building every address from the start.
    # [1, CHUNK], [1, ROPE]
    p_column = kv_cache + o_chunk[None, :]
    p_rope_column = kv_cache + LATENT + o_rope[None, :]
    row_stride = stride_kv_row.to(tl.int64)
    end_of_slots = num_slots.to(tl.uint32)

    # Running maximum of the scores in log2 units, running sum of the weights,
    # and in b_acc the weighted sum of the latents, all relative to that maximum.
    b_max = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_H], dtype=tl.float32)

    first = i_s * KEYS
    for i_n in range(0, KEYS, BLOCK_N):
        # [BLOCK_N]; unsigned, so that one comparison rejects -1 too and a page is
        # a shift: this arithmetic runs once for every row and thread.
        o_k = first + i_n + o_n
        b_slot = tl.load(p_slots + o_k, mask=o_k < TOPK, other=-1)
        b_slot = b_slot.to(tl.uint32, bitcast=True)
        m_n = b_slot < end_of_slots
        if PAGES_ADJOIN:
            o_row = b_slot.to(tl.int64) * row_stride
        else:
            o_row = (b_slot // PAGE).to(tl.int64) * stride_kv_page
            o_row += (b_slot % PAGE).to(tl.int64) * row_stride

        # A row that is not a key is never read: an unused row may hold NaN, and
        # 0 * NaN in the second product would poison the whole token.
        # [BLOCK_N, CHUNK] each, [BLOCK_N, ROPE]
        p_row = p_column + o_row[:, None]
        b_latent = ()
        for c in tl.static_range(CHUNKS):
            b_chunk = tl.load(p_row + c * CHUNK, mask=m_n[:, None], other=0.0)
            b_latent = b_latent + (b_chunk,)
        b_rope = tl.load(p_rope_column + o_row[:, None], mask=m_n[:, None], other=0.0)

        # [BLOCK_H, BLOCK_N], accumulated in float32: float16 keys of 6e4 give
        # scores of 1e12, far outside float16 and well inside float32.
        b_even = tl.zeros([BLOCK_H, BLOCK_N], dtype=tl.float32)
        b_odd = tl.zeros([BLOCK_H, BLOCK_N], dtype=tl.float32)
        for c in tl.static_range(0, CHUNKS, 2):
            b_even = _dot(b_qn[c], tl.trans(b_latent[c]), b_even, INTERPRETED)
            b_odd = _dot(b_qn[c + 1], tl.trans(b_latent[c + 1]), b_odd, INTERPRETED)
        b_s = _dot(b_qp, tl.trans(b_rope), b_even, INTERPRETED) + b_odd
        b_s = tl.where(m_n[None, :], b_s * scale_log2, float("-inf"))

        b_new_max = tl.maximum(b_max, tl.max(b_s, axis=1))
        # No key so far: any finite reference turns exp2(-inf - reference) into
        # 0, where -inf itself would make it NaN.
        b_ref = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_p = tl.exp2(b_s - b_ref[:, None])
        b_shrink = tl.exp2(b_max - b_ref)

        b_sum = b_sum * b_shrink + tl.sum(b_p, axis=1)
        # The weights are at most 1, so 16 bits hold them in either dtype.
        b_p = b_p.to(b_rope.dtype)
        b_longer = ()
        for c in tl.static_range(CHUNKS):
            b_chunk = b_acc[c] * b_shrink[:, None]
            b_longer = b_longer + (_dot(b_p, b_latent[c], b_chunk, INTERPRETED),)
        b_acc = b_longer
        b_max = b_new_max

    # A token without any key has sum 0 and accumulator 0: output 0, LSE -inf.
    m_any = b_sum > 0.0
    b_div = tl.where(m_any, b_sum, 1.0)
    LN2: tl.constexpr = 0.6931471805599453
    b_lse = tl.where(m_any, (b_max + tl.log2(b_div)) * LN2, float("-inf"))

    b_out = ()
    for c in tl.static_range(CHUNKS):
        b_out = b_out + (b_acc[c] / b_div[:, None],)
    hand_in(
        b_out,
        b_lse,
        out,
        lse,
        part,
        part_lse,
        tickets,
        i_t,
        i_s,
        i_h,
        num_heads,
        CHUNKS,
        SPLITS,
        MERGE,
    )


def sparse_mla(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    tickets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from every query token to its own list of cache rows.

    Args:
        q: `[T, H, 576]`, or the pair (`[T, H, 512]` latent part, `[T, H, 64]`
            rotary part); float16 or bfloat16; 1 to 128 heads; any strides as
            long as the last dimension is contiguous.
        kv_cache: `[num_blocks, page, 576]` in the dtype of `q`; addressed by its
            strides, of which only the last must be 1, so a view into a larger
            pool will do.
        slots: `[T, topk]` int32, `block * page + offset` of each key. A value
            below 0, or beyond the cache, marks a place without a key; such
            places may stand anywhere and fill a whole row.
        scale: factor on the scores before the softmax.
        tickets: `new_tickets(device)`, with which a few splits are merged without
            a kernel of their own. The call leaves it as it found it. Calls that
            may run at the same time must not share it.

    Returns:
        `out` `[T, H, 512]` in the dtype of `q`, and `lse` `[T, H]` float32, the
        natural logarithm of the sum of exp(score). A token without any key
        gives exactly 0 and -inf.

    Raises:
        ValueError: an argument breaks this contract; the message names both
            what was expected and what was found.
    """
    q_nope, q_pe = split_query(q)
    check_arguments(q_nope, q_pe, kv_cache, slots, ROW_DIM, q_nope.dtype)
    num_blocks, page, _ = kv_cache.shape
    call = prepare(q_nope, slots, launch_config, tickets)
    if q_nope.shape[0] > 0:
        _sparse_mla_kernel[call.grid](
            q_nope,
            q_pe,
            kv_cache,
            slots,
            call.out,
            call.lse,
            call.part,
            call.part_lse,
            call.tickets,
            scale * 1.4426950408889634,
            q_nope.shape[1],
            num_blocks * page,
            q_nope.stride(0),
            q_nope.stride(1),
            q_pe.stride(0),
            q_pe.stride(1),
            kv_cache.stride(0),
            kv_cache.stride(1),
            slots.stride(0),
            TOPK=slots.shape[1],  # one value a model
            SPLITS=call.splits,
            MERGE=call.merges,
            PAGE=page,
            PAGES_ADJOIN=kv_cache.stride(0) == page * kv_cache.stride(1),
            LATENT=LATENT_DIM,
            ROPE=ROPE_DIM,
            CHUNKS=CHUNKS,
            BLOCK_H=call.config.block_h,
            BLOCK_N=call.config.block_n,
            INTERPRETED=not isinstance(_sparse_mla_kernel, triton.JITFunction),
            num_warps=call.config.num_warps,
            num_stages=call.config.num_stages,
        )
    return call.finish()
