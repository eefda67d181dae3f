# SPDX-License-Identifier: Apache-2.0
"""Writing rows of the `fp8_ds_mla` cache; triton_sparse_mla_fp8 says what a row is.

vLLM has an operator for that, and in bfloat16 this one writes the same bytes. In
float16 vLLM's takes the bits of a latent for an integer when it looks for the
largest of a group (0.23.0, on an H200): scales come out near 100, and latents end
among the subnormals of e4m3.
"""

import torch
import triton
import triton.language as tl

from .triton_e4m3 import encode_e4m3
from .triton_sparse_mla_fp8 import GROUP, GROUPS, ROPE, ROPE_AT, ROW_BYTES, SCALES_AT


@triton.jit
def _write_rows_fp8_kernel(
    latents,  # [T, GROUPS * GROUP]
    rope,  # [T, ROPE], the same dtype
    kv_cache,  # [blocks, PAGE, 656] bytes
    slots,  # [T] int64
    stride_latents_t,
    stride_rope_t,
    stride_kv_page,
    stride_kv_row,
    PAGE: tl.constexpr,
):
    i_t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + i_t)
    if slot < 0:  # a padding token
        return
    p_row = kv_cache + (slot // PAGE) * stride_kv_page + (slot % PAGE) * stride_kv_row
    # [GROUPS], [GROUP], [ROPE]
    o_group = tl.arange(0, GROUPS)
    o_latent = tl.arange(0, GROUP)
    o_rope = tl.arange(0, ROPE)
    # [GROUPS, GROUP]
    o_row = o_group[:, None] * GROUP + o_latent[None, :]
    b_latents = tl.load(latents + i_t * stride_latents_t + o_row).to(tl.float32)
    # The largest becomes 448, rounded as vLLM rounds: `/` may be off by a bit on a GPU.
    # A group of zeros must not be divided by 0.
    b_largest = tl.max(tl.abs(b_latents), axis=1)
    b_scales = tl.maximum(tl.div_rn(b_largest, 448.0), 2.0**-126)
    b_codes = encode_e4m3(tl.div_rn(b_latents, b_scales[:, None]))
    tl.store(p_row + o_row, b_codes)
    p_scales = p_row.to(tl.pointer_type(tl.float32)) + SCALES_AT
    tl.store(p_scales + o_group, b_scales)
    b_rope = tl.load(rope + i_t * stride_rope_t + o_rope)
    p_rope = p_row.to(tl.pointer_type(rope.dtype.element_ty)) + ROPE_AT
    tl.store(p_rope + o_rope, b_rope)


def write_rows_fp8(
    latents: torch.Tensor,
    rope: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write one cache row for every token that has a slot.

    Args:
        latents: `[T or more, 512]`, float16 or bfloat16; last dimension contiguous.
        rope: `[T or more, 64]`, like `latents`.
        kv_cache: `[num_blocks, page, 656]` uint8, rows at multiples of 16 bytes.
        slots: `[T]` int64, `block * page + offset`; negative for a padding token.

    Raises:
        ValueError: an argument breaks this contract; the message names both
            what was expected and what was found.
    """
    if kv_cache.dtype != torch.uint8 or kv_cache.shape[2:] != (ROW_BYTES,):
        raise ValueError(
            f"kv_cache must be [num_blocks, page, {ROW_BYTES}] of torch.uint8, "
            f"found {list(kv_cache.shape)} of {kv_cache.dtype}"
        )
    for name, tensor in (("latents", latents), ("rope", rope)):
        if tensor.shape[0] < slots.shape[0] or tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} must have at least {slots.shape[0]} rows, contiguous, found "
                f"{list(tensor.shape)} with strides {tensor.stride()}"
            )
    if slots.shape[0] == 0:
        return
    _write_rows_fp8_kernel[(slots.shape[0],)](
        latents,
        rope,
        kv_cache,
        slots,
        latents.stride(0),
        rope.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        PAGE=kv_cache.shape[1],
        num_warps=4,
    )
