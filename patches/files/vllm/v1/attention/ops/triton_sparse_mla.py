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
token are split over several programs, and a second kernel merges their results
by their LSE.

Nothing here imports vLLM: the kernel is built for float16 and bfloat16, from
SM80 on, and runs under TRITON_INTERPRET=1 on the CPU.
"""

import torch
import triton
import triton.language as tl

from .triton_sparse_launch import (
    LATENT_DIM,
    MAX_HEADS,
    ROPE_DIM,
    ROW_DIM,
    chip,
    launch_config,
    num_splits,
)
from .triton_sparse_merge import merge, split_room


@triton.jit
def _dot(b_a, b_b, b_acc, INTERPRETED: tl.constexpr):
    """b_acc + b_a @ b_b in float32."""
    if INTERPRETED:
        # Triton 3.5 to 3.6 interpret bfloat16 as the integers of its bits here.
        b_a = b_a.to(tl.float32)
        b_b = b_b.to(tl.float32)
    return tl.dot(b_a, b_b, b_acc)


@triton.jit(do_not_specialize=["splits", "num_heads", "stride_lse_t", "stride_lse_s"])
def _sparse_mla_kernel(
    q_nope,  # [T, H, LATENT]
    q_pe,  # [T, H, ROPE]
    kv_cache,  # [num_slots // PAGE, PAGE, LATENT + ROPE]
    slots,  # [T, TOPK] int32
    out,  # [T, splits, H, LATENT]; float32 where `splits` > 1
    lse,  # [T, splits, H] float32
    scale_log2,  # softmax scale times log2(e)
    num_heads,
    num_slots,
    splits,
    stride_qn_t,
    stride_qn_h,
    stride_qp_t,
    stride_qp_h,
    stride_kv_page,
    stride_kv_row,
    stride_slots_t,
    stride_out_t,
    stride_out_s,
    stride_out_h,
    stride_lse_t,
    stride_lse_s,
    TOPK: tl.constexpr,
    KEYS: tl.constexpr,  # of one split, a multiple of BLOCK_N
    PAGE: tl.constexpr,
    PAGES_ADJOIN: tl.constexpr,  # stride_kv_page == PAGE * stride_kv_row
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LATENT_DOWN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    # Head blocks of one token are neighbours in the grid: they read the same
    # rows, and the second one finds them in L2.
    num_head_blocks = tl.cdiv(num_heads, BLOCK_H)
    i_h = tl.program_id(0) % num_head_blocks
    i_ts = tl.program_id(0) // num_head_blocks
    i_s = i_ts % splits
    # 64-bit, because token * stride and page * stride pass 2**31 elements.
    i_t = (i_ts // splits).to(tl.int64)

    # [BLOCK_H], [LATENT], [ROPE], [BLOCK_N]
    o_h = i_h * BLOCK_H + tl.arange(0, BLOCK_H)
    o_latent = tl.arange(0, LATENT)
    o_rope = tl.arange(0, ROPE)
    o_n = tl.arange(0, BLOCK_N)
    m_h = o_h < num_heads

    # [BLOCK_H, LATENT]
    p_qn = q_nope + i_t * stride_qn_t + o_h[:, None] * stride_qn_h + o_latent[None, :]
    b_qn = tl.load(p_qn, mask=m_h[:, None], other=0.0)
    # [BLOCK_H, ROPE]
    p_qp = q_pe + i_t * stride_qp_t + o_h[:, None] * stride_qp_h + o_rope[None, :]
    b_qp = tl.load(p_qp, mask=m_h[:, None], other=0.0)

    p_slots = slots + i_t * stride_slots_t
    # Column first, then row: the compiler then adds one product to one address
    # for each row, instead of building every address from the start.
    # [1, LATENT], [1, ROPE]
    p_column = kv_cache + o_latent[None, :]
    p_rope_column = kv_cache + LATENT + o_rope[None, :]
    row_stride = stride_kv_row.to(tl.int64)
    end_of_slots = num_slots.to(tl.uint32)

    # Running maximum of the scores in log2 units, running sum of the weights,
    # and the weighted sum of the latents, all relative to that maximum.
    b_max = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_H], dtype=tl.float32)
    # With LATENT_DOWN the 512 latents are the rows of the second product, which
    # Hopper's wgmma wants in 64s: 16 heads as its columns waste nothing, where
    # 16 heads as its rows would fall back to the older, slower instruction.
    if LATENT_DOWN:
        b_acc = tl.zeros([LATENT, BLOCK_H], dtype=tl.float32)
    else:
        b_acc = tl.zeros([BLOCK_H, LATENT], dtype=tl.float32)

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
        # [BLOCK_N, LATENT], [BLOCK_N, ROPE]
        b_latent = tl.load(p_column + o_row[:, None], mask=m_n[:, None], other=0.0)
        b_rope = tl.load(p_rope_column + o_row[:, None], mask=m_n[:, None], other=0.0)

        # [BLOCK_H, BLOCK_N], accumulated in float32: float16 keys of 6e4 give
        # scores of 1e12, far outside float16 and well inside float32.
        b_s = tl.zeros([BLOCK_H, BLOCK_N], dtype=tl.float32)
        b_s = _dot(b_qn, tl.trans(b_latent), b_s, INTERPRETED)
        b_s = _dot(b_qp, tl.trans(b_rope), b_s, INTERPRETED)
        b_s = tl.where(m_n[None, :], b_s * scale_log2, float("-inf"))

        b_new_max = tl.maximum(b_max, tl.max(b_s, axis=1))
        # No key so far: any finite reference turns exp2(-inf - reference) into
        # 0, where -inf itself would make it NaN.
        b_ref = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_p = tl.exp2(b_s - b_ref[:, None])
        b_shrink = tl.exp2(b_max - b_ref)

        b_sum = b_sum * b_shrink + tl.sum(b_p, axis=1)
        # The weights are at most 1, so 16 bits hold them in either dtype.
        b_p = b_p.to(b_latent.dtype)
        if LATENT_DOWN:
            b_acc = b_acc * b_shrink[None, :]
            b_acc = _dot(tl.trans(b_latent), tl.trans(b_p), b_acc, INTERPRETED)
        else:
            b_acc = b_acc * b_shrink[:, None]
            b_acc = _dot(b_p, b_latent, b_acc, INTERPRETED)
        b_max = b_new_max

    # A token without any key has sum 0 and accumulator 0: output 0, LSE -inf.
    m_any = b_sum > 0.0
    b_div = tl.where(m_any, b_sum, 1.0)
    if LATENT_DOWN:
        b_acc = tl.trans(b_acc)
    b_out = b_acc / b_div[:, None]
    LN2: tl.constexpr = 0.6931471805599453
    b_lse = tl.where(m_any, (b_max + tl.log2(b_div)) * LN2, float("-inf"))

    # [BLOCK_H, LATENT]
    p_out = out + i_t * stride_out_t + i_s * stride_out_s
    p_out = p_out + o_h[:, None] * stride_out_h + o_latent[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_h[:, None])
    # [BLOCK_H]
    p_lse = lse + i_t * stride_lse_t + i_s * stride_lse_s + o_h
    tl.store(p_lse, b_lse, mask=m_h)


def sparse_mla(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    workspace: torch.Tensor | None = None,
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
        workspace: float32, contiguous, at least `workspace_size` elements, for the
            results of splits; allocated when it is needed and not given.

    Returns:
        `out` `[T, H, 512]` in the dtype of `q`, and `lse` `[T, H]` float32, the
        natural logarithm of the sum of exp(score). A token without any key
        gives exactly 0 and -inf.

    Raises:
        ValueError: an argument breaks this contract; the message names both
            what was expected and what was found.
    """
    q_nope, q_pe = _split_query(q)
    _check_arguments(q_nope, q_pe, kv_cache, slots)
    num_tokens, num_heads, _ = q_nope.shape
    num_blocks, page, _ = kv_cache.shape

    out = torch.empty(
        (num_tokens, num_heads, LATENT_DIM), dtype=q_nope.dtype, device=q_nope.device
    )
    lse = torch.empty(
        (num_tokens, num_heads), dtype=torch.float32, device=q_nope.device
    )
    if num_tokens == 0:
        return out, lse

    topk = slots.shape[1]
    capability, num_sms = chip(q_nope.device)
    config = launch_config(capability, num_heads, num_tokens)
    splits = num_splits(config, num_heads, num_tokens, topk, num_sms)
    part, part_lse = out, lse
    if splits > 1:
        part, part_lse = split_room(
            workspace, (num_tokens, splits, num_heads), q_nope.device
        )

    steps = triton.cdiv(triton.cdiv(topk, config.block_n), splits)
    grid = (num_tokens * splits * triton.cdiv(num_heads, config.block_h),)
    _sparse_mla_kernel[grid](
        q_nope,
        q_pe,
        kv_cache,
        slots,
        part,
        part_lse,
        scale * 1.4426950408889634,
        num_heads,
        num_blocks * page,
        splits,
        q_nope.stride(0),
        q_nope.stride(1),
        q_pe.stride(0),
        q_pe.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        slots.stride(0),
        splits * num_heads * LATENT_DIM,
        num_heads * LATENT_DIM,
        LATENT_DIM,
        splits * num_heads,
        num_heads,
        TOPK=topk,  # one value a model
        KEYS=steps * config.block_n,
        PAGE=page,
        PAGES_ADJOIN=kv_cache.stride(0) == page * kv_cache.stride(1),
        LATENT=LATENT_DIM,
        ROPE=ROPE_DIM,
        BLOCK_H=config.block_h,
        BLOCK_N=config.block_n,
        LATENT_DOWN=config.latent_down,
        INTERPRETED=not isinstance(_sparse_mla_kernel, triton.JITFunction),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
    )
    if splits > 1:
        merge(part, part_lse, out, lse, splits)
    return out, lse


def _split_query(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the latent and the rotary part of the query, as views."""
    if not isinstance(q, torch.Tensor):
        if len(q) != 2:
            raise ValueError(f"q must be one tensor or a pair, found {len(q)} parts")
        return q[0], q[1]
    if q.dim() != 3 or q.shape[2] != ROW_DIM:
        raise ValueError(f"q must be [T, H, {ROW_DIM}], found {list(q.shape)}")
    return q[..., :LATENT_DIM], q[..., LATENT_DIM:]


def _check_arguments(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Raise ValueError for the first argument that breaks the contract."""
    if q_nope.dim() != 3 or q_nope.shape[2] != LATENT_DIM:
        raise ValueError(
            f"q_nope must be [T, H, {LATENT_DIM}], found {list(q_nope.shape)}"
        )
    num_tokens, num_heads, _ = q_nope.shape
    if not 1 <= num_heads <= MAX_HEADS:
        raise ValueError(f"q must have 1 to {MAX_HEADS} heads, found {num_heads}")
    expected_pe = [num_tokens, num_heads, ROPE_DIM]
    if list(q_pe.shape) != expected_pe:
        raise ValueError(f"q_pe must be {expected_pe}, found {list(q_pe.shape)}")
    if q_nope.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"q must be float16 or bfloat16, found {q_nope.dtype}")
    if kv_cache.dim() != 3 or kv_cache.shape[2] != ROW_DIM:
        raise ValueError(
            f"kv_cache must be [num_blocks, page, {ROW_DIM}], "
            f"found {list(kv_cache.shape)}"
        )
    if slots.dim() != 2 or slots.shape[0] != num_tokens:
        raise ValueError(
            f"slots must be [{num_tokens}, topk], found {list(slots.shape)}"
        )
    for name, tensor, dtype in (
        ("q_pe", q_pe, q_nope.dtype),
        ("kv_cache", kv_cache, q_nope.dtype),
        ("slots", slots, torch.int32),
    ):
        if tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype}, found {tensor.dtype}")
        if tensor.device != q_nope.device:
            raise ValueError(
                f"{name} must be on {q_nope.device} like q, found {tensor.device}"
            )
    for name, tensor in (
        ("q_nope", q_nope),
        ("q_pe", q_pe),
        ("kv_cache", kv_cache),
        ("slots", slots),
    ):
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(
                f"{name} must be contiguous in its last dimension, "
                f"found stride {tensor.stride(-1)}"
            )
