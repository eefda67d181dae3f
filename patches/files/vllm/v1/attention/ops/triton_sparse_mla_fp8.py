# SPDX-License-Identifier: Apache-2.0
"""Sparse multi-head latent attention over vLLM's `fp8_ds_mla` cache.

The operator is that of triton_sparse_mla; a row of the cache is 656 bytes:

    byte   0   512 latents, e4m3, four groups of 128
    byte 512   4 scales, float32, one a group: latent = e4m3 * scale
    byte 528   64 rotary values in 16 bits, the model's own dtype

A latent is decoded where it is multiplied, in the registers of the tensor-core
operand, and exactly: e4m3 fits into float16 with room to spare. What is not exact,
the scale, stays in float32 and goes to the scores, and to the weights of the second
product. Chips from SM89 on convert in one instruction; for the others the bits are
moved, so that nothing here needs a float8 type.

Nothing here imports vLLM, and it runs under TRITON_INTERPRET=1 on the CPU.
"""

import torch
import triton
import triton.language as tl

from .triton_sparse_arguments import check_arguments, split_query
from .triton_sparse_launch import (
    converts_e4m3,
    launch_config_fp8,
)
from .triton_sparse_merge import hand_in, prepare

ROW_BYTES = 656
# Rows are copied 16 bytes at a time, so each must begin at a multiple of that.
ALIGNMENT = 16

GROUPS = tl.constexpr(4)
GROUP = tl.constexpr(128)  # latents that share a scale
ROPE = tl.constexpr(64)
# Where a row's parts begin, in elements of their own type.
SCALES_AT = tl.constexpr(512 // 4)
ROPE_AT = tl.constexpr(528 // 2)
# What moving the bits of e4m3 into float16 leaves to multiply by: the exponent bias of
# float16 is 15, that of e4m3 is 7, and the exponent itself is left as it was.
MOVED = tl.constexpr(2.0**8)


@triton.jit
def _decode(b_pairs, NATIVE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Give the first and the second of each pair of e4m3 bytes, in float16.

    Where `NATIVE` is false they are divided by `MOVED`, and NaN (0x7f, 0xff) reads
    as 480. Each instruction treats two pairs at a time, which the compiler does not
    find by itself.
    """
    if INTERPRETED:
        b_pairs = b_pairs.to(tl.uint16, bitcast=True)
        b_first = ((b_pairs << 8) & 0x8000) | ((b_pairs << 7) & 0x3F80)
        b_second = (b_pairs & 0x8000) | ((b_pairs >> 1) & 0x3F80)
        b_first = b_first.to(tl.float16, bitcast=True)
        b_second = b_second.to(tl.float16, bitcast=True)
    elif NATIVE:
        # The first bytes of both pairs to the lower half, the second ones to the upper.
        b_first, b_second = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 firsts, seconds;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {firsts, seconds}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, firsts;
            cvt.rn.f16x2.e4m3x2 $1, seconds;
            }""",
            "=r,=r,r",
            [b_pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        # Sign to bit 15, exponent and mantissa to bits 7 to 13; this holds for
        # subnormals too. 0xEA: (first & second) | third.
        b_first, b_second = tl.inline_asm_elementwise(
            """{
            .reg .b32 sign, rest;
            shl.b32 sign, $2, 8;
            shl.b32 rest, $2, 7;
            and.b32 rest, rest, 0x3F803F80;
            lop3.b32 $0, sign, 0x80008000, rest, 0xEA;
            shr.u32 rest, $2, 1;
            and.b32 rest, rest, 0x3F803F80;
            lop3.b32 $1, $2, 0x80008000, rest, 0xEA;
            }""",
            "=&r,=r,r",
            [b_pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return b_first, b_second


@triton.jit
def _exponent(b_x, SMALLEST: tl.constexpr):
    """floor(log2(x)) of float32 numbers >= 0, and `SMALLEST` at least."""
    return tl.maximum((b_x.to(tl.int32, bitcast=True) >> 23) - 127, SMALLEST)


@triton.jit
def _two_to(b_exponent):
    """2**exponent in float32, exactly."""
    return ((b_exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_heads", "num_slots"])
def _sparse_mla_fp8_kernel(
    q_nope,  # [T, H, GROUPS * GROUP]
    q_pe,  # [T, H, ROPE]
    kv_cache,  # [num_slots // PAGE, PAGE, 656] bytes
    slots,  # [T, TOPK] int32
    out,  # these five: see hand_in
    lse,
    part,
    part_lse,
    tickets,
    scale_log2,  # softmax scale times log2(e)
    num_heads,
    num_slots,
    stride_qn_t,
    stride_qn_h,
    stride_qp_t,
    stride_qp_h,
    units_page,  # strides of the cache, in units of 16 bytes
    units_row,
    stride_slots_t,
    TOPK: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGE: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES_ADJOIN: tl.constexpr,  # units_page == PAGE * units_row
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    DECODED: tl.constexpr = 1.0 if NATIVE else MOVED
    # Program, addresses and softmax are those of _sparse_mla_kernel.
    KEYS: tl.constexpr = (TOPK + SPLITS * BLOCK_N - 1) // (SPLITS * BLOCK_N) * BLOCK_N
    num_head_blocks = tl.cdiv(num_heads, BLOCK_H)
    i_h = tl.program_id(0) % num_head_blocks
    i_ts = tl.program_id(0) // num_head_blocks
    i_s = i_ts % SPLITS
    i_t = (i_ts // SPLITS).to(tl.int64)

    # [BLOCK_H], [GROUP], [GROUP // 2], [ROPE], [BLOCK_N]
    o_h = i_h * BLOCK_H + tl.arange(0, BLOCK_H)
    o_latent = tl.arange(0, GROUP)
    o_pair = tl.arange(0, GROUP // 2)
    o_rope = tl.arange(0, ROPE)
    o_n = tl.arange(0, BLOCK_N)
    m_h = o_h < num_heads

    # [BLOCK_H, ROPE]
    p_qp = q_pe + i_t * stride_qp_t + o_h[:, None] * stride_qp_h + o_rope[None, :]
    b_qp = tl.load(p_qp, mask=m_h[:, None], other=0.0)
    # GROUPS of [BLOCK_H, GROUP]
    p_qn = q_nope + i_t * stride_qn_t + o_h[:, None] * stride_qn_h + o_latent[None, :]
    b_qn = ()
    b_top = tl.zeros([BLOCK_H], dtype=tl.float32)
    for g in tl.static_range(GROUPS):
        b_part = tl.load(p_qn + g * GROUP, mask=m_h[:, None], other=0.0)
        b_part = b_part.to(tl.float32)
        b_top = tl.maximum(b_top, tl.max(tl.abs(b_part), axis=1))
        b_qn += (b_part,)
    # The query meets the latents in float16, whatever the model's dtype: divided by
    # the power of two that brings each head's largest value to 2**14 or more, it
    # loses nothing that is not 2**-29 times smaller than that.
    b_q_exponent = _exponent(b_top, -100) - 14
    # A cache word holds two neighbouring latents. The first and the second of each
    # pair are products of their own, so nothing is ever moved between threads.
    # GROUPS of [BLOCK_H, GROUP // 2]
    b_q_first, b_q_second, b_acc_first, b_acc_second = (), (), (), ()
    for g in tl.static_range(GROUPS):
        b_part = (b_qn[g] * _two_to(-b_q_exponent)[:, None]).to(tl.float16)
        b_part = tl.reshape(b_part, [BLOCK_H, GROUP // 2, 2])
        b_part_first, b_part_second = tl.split(b_part)
        b_q_first += (b_part_first,)
        b_q_second += (b_part_second,)
        b_zero = tl.zeros([BLOCK_H, GROUP // 2], dtype=tl.float32)
        b_acc_first += (b_zero,)
        b_acc_second += (b_zero,)
    b_q_unit = _two_to(b_q_exponent) * DECODED

    p_slots = slots + i_t * stride_slots_t
    # [1, GROUP // 2], [1, GROUPS], [1, ROPE]
    p_pair_column = kv_cache.to(tl.pointer_type(tl.int16)) + o_pair[None, :]
    p_scale_column = kv_cache.to(tl.pointer_type(tl.float32)) + SCALES_AT
    p_scale_column += tl.arange(0, GROUPS)[None, :]
    p_rope_column = kv_cache.to(tl.pointer_type(q_pe.dtype.element_ty)) + ROPE_AT
    p_rope_column += o_rope[None, :]
    row_units = units_row.to(tl.int64)
    end_of_slots = num_slots.to(tl.uint32)

    b_max = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
    # Added up over the keys at the end: a sum across warps in each step would cost
    # two barriers.
    b_sum = tl.zeros([BLOCK_H, BLOCK_N], dtype=tl.float32)

    first = i_s * KEYS
    for i_n in range(0, KEYS, BLOCK_N):
        # [BLOCK_N]
        o_k = first + i_n + o_n
        b_slot = tl.load(p_slots + o_k, mask=o_k < TOPK, other=-1)
        b_slot = b_slot.to(tl.uint32, bitcast=True)
        m_n = b_slot < end_of_slots
        if PAGES_ADJOIN:
            o_unit = b_slot.to(tl.int64) * row_units
        else:
            o_unit = (b_slot // PAGE).to(tl.int64) * units_page
            o_unit += (b_slot % PAGE).to(tl.int64) * row_units
        o_half = (o_unit * 8)[:, None]

        # A row that is not a key is never read: its scales may be NaN.
        # [BLOCK_N, ROPE], [BLOCK_N, GROUPS]
        b_rope = tl.load(p_rope_column + o_half, mask=m_n[:, None], other=0.0)
        p_scale = p_scale_column + (o_unit * 4)[:, None]
        b_scales = tl.load(p_scale, mask=m_n[:, None], other=0.0)
        # [BLOCK_N] each
        b_scale_02, b_scale_13 = tl.split(tl.reshape(b_scales, [BLOCK_N, 2, 2]))
        b_scale_0, b_scale_2 = tl.split(b_scale_02)
        b_scale_1, b_scale_3 = tl.split(b_scale_13)
        b_scale = (b_scale_0, b_scale_1, b_scale_2, b_scale_3)

        # [BLOCK_H, BLOCK_N], accumulated in float32
        b_s = tl.zeros([BLOCK_H, BLOCK_N], dtype=tl.float32)
        b_pairs = ()
        for g in tl.static_range(GROUPS):
            # [BLOCK_N, GROUP // 2]
            p_pairs = p_pair_column + g * (GROUP // 2) + o_half
            b_group = tl.load(p_pairs, mask=m_n[:, None], other=0)
            b_pairs += (b_group,)
            b_first, b_second = _decode(b_group, NATIVE, INTERPRETED)
            b_dot = tl.dot(b_q_first[g], tl.trans(b_first))
            b_dot = tl.dot(b_q_second[g], tl.trans(b_second), b_dot)
            b_s += b_dot * b_scale[g][None, :]
        b_s = b_s * b_q_unit[:, None]
        if INTERPRETED:  # bfloat16 is the integers of its bits there
            b_s = tl.dot(b_qp.to(tl.float32), tl.trans(b_rope.to(tl.float32)), b_s)
        else:
            b_s = tl.dot(b_qp, tl.trans(b_rope), b_s)

        # A weight times a scale may be far too small or too large for float16. So the
        # running maximum is that of weight times 2**e, with e the exponent of the
        # row's largest scale: what is rounded to 16 bits is at most 2, and what is
        # lost is small beside the output, not beside a weight. A row of zeros has a
        # scale of 2**-126 or 0: no need to take that literally.
        b_largest = tl.maximum(b_scale_0, b_scale_1)
        b_largest = tl.maximum(b_largest, tl.maximum(b_scale_2, b_scale_3))
        b_exponent = _exponent(b_largest, -40)
        b_unscaled = _two_to(-b_exponent)
        b_s = b_s * scale_log2 + b_exponent.to(tl.float32)[None, :]
        b_s = tl.where(m_n[None, :], b_s, float("-inf"))

        b_new_max = tl.maximum(b_max, tl.max(b_s, axis=1))
        b_ref = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_p = tl.exp2(b_s - b_ref[:, None])
        b_shrink = tl.exp2(b_max - b_ref)
        b_max = b_new_max
        b_sum = b_sum * b_shrink[:, None] + b_p * b_unscaled[None, :]

        # All weights before the first product: they pass through shared memory, and
        # then one barrier serves the four of them.
        b_weights = ()
        for g in tl.static_range(GROUPS):
            b_factor = b_scale[g] * b_unscaled
            b_weights += ((b_p * b_factor[None, :]).to(tl.float16),)
        b_old_first, b_old_second = b_acc_first, b_acc_second
        b_acc_first, b_acc_second = (), ()
        for g in tl.static_range(GROUPS):
            b_first, b_second = _decode(b_pairs[g], NATIVE, INTERPRETED)
            b_old = b_old_first[g] * b_shrink[:, None]
            b_acc_first += (tl.dot(b_weights[g], b_first, b_old),)
            b_old = b_old_second[g] * b_shrink[:, None]
            b_acc_second += (tl.dot(b_weights[g], b_second, b_old),)

    b_total = tl.sum(b_sum, axis=1)
    m_any = b_total > 0.0
    b_div = tl.where(m_any, b_total, 1.0)
    b_results = ()
    for g in tl.static_range(GROUPS):
        b_out = tl.join(b_acc_first[g], b_acc_second[g])
        b_out = tl.reshape(b_out, [BLOCK_H, GROUP]) * DECODED / b_div[:, None]
        b_results += (b_out,)
    LN2: tl.constexpr = 0.6931471805599453
    b_lse = tl.where(m_any, (b_max + tl.log2(b_div)) * LN2, float("-inf"))
    hand_in(
        b_results,
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
        GROUPS,
        SPLITS,
        MERGE,
    )


def sparse_mla_fp8(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    tickets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from every query token to its own list of `fp8_ds_mla` rows.

    Args:
        q: `[T, H, 576]`, or the pair (`[T, H, 512]` latent part, `[T, H, 64]`
            rotary part); float16 or bfloat16; 1 to 128 heads; any strides as
            long as the last dimension is contiguous.
        kv_cache: `[num_blocks, page, 656]` uint8, rows as above, their rotary part in
            the dtype of `q`. Rows begin at multiples of 16 bytes; their other
            strides are free, so a view into a larger pool will do. On chips before
            SM89 e4m3's NaN is not told apart: it reads as 480.
        slots: `[T, topk]` int32, `block * page + offset` of each key. A value
            below 0, or beyond the cache, marks a place without a key; such
            places may stand anywhere and fill a whole row.
        scale: factor on the scores before the softmax.
        tickets: as in `sparse_mla`.

    Returns:
        `out` `[T, H, 512]` in the dtype of `q`, and `lse` `[T, H]` float32, the
        natural logarithm of the sum of exp(score). A token without any key
        gives exactly 0 and -inf.

    Raises:
        ValueError: an argument breaks this contract; the message names both
            what was expected and what was found.
    """
    q_nope, q_pe = split_query(q)
    check_arguments(q_nope, q_pe, kv_cache, slots, ROW_BYTES, torch.uint8)
    _check_alignment(kv_cache)
    num_blocks, page, _ = kv_cache.shape
    call = prepare(q_nope, slots, launch_config_fp8, tickets)
    if q_nope.shape[0] > 0:
        _sparse_mla_fp8_kernel[call.grid](
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
            kv_cache.stride(0) // ALIGNMENT,
            kv_cache.stride(1) // ALIGNMENT,
            slots.stride(0),
            TOPK=slots.shape[1],  # one value a model
            SPLITS=call.splits,
            MERGE=call.merges,
            PAGE=page,
            PAGES_ADJOIN=kv_cache.stride(0) == page * kv_cache.stride(1),
            BLOCK_H=call.config.block_h,
            BLOCK_N=call.config.block_n,
            NATIVE=converts_e4m3(call.capability),
            INTERPRETED=not isinstance(_sparse_mla_fp8_kernel, triton.JITFunction),
            num_warps=call.config.num_warps,
            num_stages=call.config.num_stages,
        )
    return call.finish()


def _check_alignment(kv_cache: torch.Tensor) -> None:
    """Raise ValueError unless every row begins at a multiple of 16 bytes."""
    for name, count in (
        ("start", kv_cache.data_ptr()),
        ("block stride", kv_cache.stride(0)),
        ("row stride", kv_cache.stride(1)),
    ):
        if count % ALIGNMENT:
            raise ValueError(
                f"kv_cache must have rows at multiples of {ALIGNMENT} bytes, found a "
                f"{name} of {count}"
            )
