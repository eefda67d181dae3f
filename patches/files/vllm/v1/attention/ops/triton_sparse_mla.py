# SPDX-License-Identifier: Apache-2.0
"""Sparse multi-head latent attention over a paged cache, in portable Triton.

Every query token attends to its own short list of cache rows (GLM-5: the 2048
that the indexer picked). A row is one latent of 512 values, which is key and
value at once, followed by 64 rotary values, which are key only:

    s[t, h, j] = scale * (q_nope[t, h] . latent[slot] + q_pe[t, h] . rope[slot])
    out[t, h]  = sum_j softmax_j(s[t, h]) * latent[slot],   slot = slots[t, j]

All heads of a token read the same rows, so one program takes one token and a
block of its heads, and each gathered row is used twice from shared memory.

Nothing here imports vLLM: the kernel is built for float16 and bfloat16, from
SM80 on, and runs under TRITON_INTERPRET=1 on the CPU.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

LATENT_DIM = 512
ROPE_DIM = 64
ROW_DIM = LATENT_DIM + ROPE_DIM
MAX_HEADS = 128

# What TRITON_INTERPRET=1 on the CPU pretends to be: the chips with the least
# shared memory, whose configuration most users of this kernel run.
INTERPRETED_CAPABILITY = (8, 6)

# Chips that give a program 160 KB of shared memory or more. All others, unknown
# ones included, are held to the 99 KB of SM86, SM89, SM120 and SM121.
LARGE_SHARED_MEMORY = frozenset({(8, 0), (9, 0), (10, 0), (10, 3)})


class LaunchConfig(NamedTuple):
    """How one program of the kernel is shaped."""

    block_h: int  # heads of one program; the tensor cores want at least 16
    block_n: int  # cache rows of one step, a power of two, at least 16
    num_warps: int
    num_stages: int  # 5 is what gives the rows two buffers: the chain of loads
    # is slot, then row, and the slots run ahead by the remaining stages


def launch_config(capability: tuple[int, int], num_heads: int) -> LaunchConfig:
    """Pick the launch shape for a compute capability and a number of heads.

    Pure, so that tests can compile every answer without a GPU. Two limits
    decide. The float32 accumulator of `block_h` x 512 lives in registers: 32
    heads are what 8 warps hold without spilling. Two buffers of `block_n` rows
    of 1152 bytes and the query live in shared memory.
    """
    if num_heads <= 16:
        return LaunchConfig(block_h=16, block_n=32, num_warps=8, num_stages=5)
    if capability in LARGE_SHARED_MEMORY:
        return LaunchConfig(block_h=32, block_n=32, num_warps=8, num_stages=5)
    return LaunchConfig(block_h=32, block_n=16, num_warps=8, num_stages=5)


@triton.jit
def _dot(b_a, b_b, b_acc, INTERPRETED: tl.constexpr):
    """b_acc + b_a @ b_b in float32."""
    if INTERPRETED:
        # Triton 3.5 to 3.6 interpret bfloat16 as the integers of its bits here.
        b_a = b_a.to(tl.float32)
        b_b = b_b.to(tl.float32)
    return tl.dot(b_a, b_b, b_acc)


@triton.jit
def _sparse_mla_kernel(
    q_nope,  # [T, H, LATENT]
    q_pe,  # [T, H, ROPE]
    kv_cache,  # [num_slots // PAGE, PAGE, LATENT + ROPE]
    slots,  # [T, TOPK] int32
    out,  # [T, H, LATENT]
    lse,  # [T, H] float32
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
    stride_out_t,
    stride_out_h,
    stride_lse_t,
    TOPK: tl.constexpr,
    PAGE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    # Head blocks of one token are neighbours in the grid: they read the same
    # rows, and the second one finds them in L2.
    num_head_blocks = tl.cdiv(num_heads, BLOCK_H)
    # 64-bit, because token * stride and page * stride pass 2**31 elements.
    i_t = (tl.program_id(0) // num_head_blocks).to(tl.int64)
    i_h = tl.program_id(0) % num_head_blocks

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
    # Running maximum of the scores in log2 units, running sum of the weights,
    # and the weighted sum of the latents, all relative to that maximum.
    b_max = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_H], dtype=tl.float32)
    b_acc = tl.zeros([BLOCK_H, LATENT], dtype=tl.float32)

    for i_n in range(0, TOPK, BLOCK_N):
        # [BLOCK_N]
        b_slot = tl.load(p_slots + i_n + o_n, mask=i_n + o_n < TOPK, other=-1)
        m_n = (b_slot >= 0) & (b_slot < num_slots)
        o_page = (b_slot // PAGE).to(tl.int64) * stride_kv_page
        o_row = o_page + (b_slot % PAGE).to(tl.int64) * stride_kv_row

        # A row that is not a key is never read: an unused row may hold NaN, and
        # 0 * NaN in the second product would poison the whole token.
        # [BLOCK_N, LATENT]
        p_latent = kv_cache + o_row[:, None] + o_latent[None, :]
        b_latent = tl.load(p_latent, mask=m_n[:, None], other=0.0)
        # [BLOCK_N, ROPE]
        p_rope = kv_cache + o_row[:, None] + LATENT + o_rope[None, :]
        b_rope = tl.load(p_rope, mask=m_n[:, None], other=0.0)

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
        b_acc = b_acc * b_shrink[:, None]
        b_acc = _dot(b_p.to(b_latent.dtype), b_latent, b_acc, INTERPRETED)
        b_max = b_new_max

    # A token without any key has sum 0 and accumulator 0: output 0, LSE -inf.
    m_any = b_sum > 0.0
    b_div = tl.where(m_any, b_sum, 1.0)
    b_out = b_acc / b_div[:, None]
    LN2: tl.constexpr = 0.6931471805599453
    b_lse = tl.where(m_any, (b_max + tl.log2(b_div)) * LN2, float("-inf"))

    # [BLOCK_H, LATENT]
    p_out = out + i_t * stride_out_t + o_h[:, None] * stride_out_h + o_latent[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_h[:, None])
    # [BLOCK_H]
    tl.store(lse + i_t * stride_lse_t + o_h, b_lse, mask=m_h)


def sparse_mla(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
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

    config = launch_config(_capability(q_nope.device), num_heads)
    grid = (num_tokens * triton.cdiv(num_heads, config.block_h),)
    _sparse_mla_kernel[grid](
        q_nope,
        q_pe,
        kv_cache,
        slots,
        out,
        lse,
        scale * 1.4426950408889634,
        num_heads,
        num_blocks * page,
        q_nope.stride(0),
        q_nope.stride(1),
        q_pe.stride(0),
        q_pe.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        slots.stride(0),
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        TOPK=slots.shape[1],  # one value a model
        PAGE=page,
        LATENT=LATENT_DIM,
        ROPE=ROPE_DIM,
        BLOCK_H=config.block_h,
        BLOCK_N=config.block_n,
        INTERPRETED=not isinstance(_sparse_mla_kernel, triton.JITFunction),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
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


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of the device; asked once, it costs microseconds."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)
    return INTERPRETED_CAPABILITY
