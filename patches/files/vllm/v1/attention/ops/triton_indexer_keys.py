# SPDX-License-Identifier: Apache-2.0
"""Writing keys into the DSA indexer's paged float8 cache.

A page is 64 keys of 128 e4m3 values, one after another, and then their 64 float32
scales: key = e4m3 * scale.

vLLM has an operator for that, which is right in bfloat16. In float16 it takes the bits
of a value for an integer when it looks for a key's largest (0.16.0 to 0.23.0: it is
compiled for `unsigned short`): scales come out 16 times too large and more, keys end
among the subnormals of e4m3, and the indexer picks other tokens than it should.
"""

import torch
import triton
import triton.language as tl

from .triton_e4m3 import encode_e4m3
from .triton_mqa_logits import HEAD_DIM, ROW_BYTES


@triton.jit
def _write_keys_kernel(
    keys,  # [T or more, DIM], rows adjoin
    kv_cache,  # [blocks, PAGE, DIM + 4] bytes
    slots,  # [T] int64
    stride_kv_page,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    i_t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + i_t)
    if slot < 0:  # a padding token
        return
    p_page = kv_cache + (slot // PAGE) * stride_kv_page
    # [DIM]
    o_dim = tl.arange(0, DIM)
    b_key = tl.load(keys + i_t * DIM + o_dim).to(tl.float32)
    # As vLLM does: a key of zeros has a scale, too.
    b_scale = tl.div_rn(tl.maximum(tl.max(tl.abs(b_key), axis=0), 1e-4), 448.0)
    if POWER_OF_TWO:
        # Up to the next one, exactly: add all of the mantissa, then cut it off.
        b_bits = (b_scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        b_scale = b_bits.to(tl.float32, bitcast=True)
    tl.store(
        p_page + (slot % PAGE) * DIM + o_dim, encode_e4m3(tl.div_rn(b_key, b_scale))
    )
    p_scales = (p_page + PAGE * DIM).to(tl.pointer_type(tl.float32))
    tl.store(p_scales + slot % PAGE, b_scale)


def write_index_keys(
    keys: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    power_of_two: bool,
) -> None:
    """Write one key for every token that has a slot.

    Args:
        keys: `[T or more, 128]`, float16 or bfloat16, contiguous.
        kv_cache: `[num_blocks, page, 132]` uint8, contiguous within a block.
        slots: `[T]` int64, `block * page + offset`; negative for a padding token.
        power_of_two: round each scale up to a power of two, vLLM's format "ue8m0".

    Raises:
        ValueError: an argument breaks this contract; the message names both
            what was expected and what was found.
    """
    if (
        kv_cache.dtype != torch.uint8
        or kv_cache.shape[2:] != (ROW_BYTES,)
        or kv_cache.stride()[1:] != (ROW_BYTES, 1)
    ):
        raise ValueError(
            f"kv_cache must be [num_blocks, page, {ROW_BYTES}] of torch.uint8, "
            f"contiguous within a block, found {list(kv_cache.shape)} of "
            f"{kv_cache.dtype} with strides {kv_cache.stride()}"
        )
    if (
        keys.shape[1:] != (HEAD_DIM,)
        or keys.shape[0] < slots.shape[0]
        or not keys.is_contiguous()
    ):
        raise ValueError(
            f"keys must be [{slots.shape[0]} or more, {HEAD_DIM}], contiguous, found "
            f"{list(keys.shape)} with strides {keys.stride()}"
        )
    if slots.shape[0] == 0:
        return
    _write_keys_kernel[(slots.shape[0],)](
        keys,
        kv_cache,
        slots,
        kv_cache.stride(0),
        PAGE=kv_cache.shape[1],
        DIM=HEAD_DIM,
        POWER_OF_TWO=power_of_two,
        num_warps=1,
    )
