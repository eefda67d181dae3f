# SPDX-License-Identifier: Apache-2.0
"""What the two sparse-MLA operators ask of their arguments, checked in sentences."""

import torch

from .triton_sparse_launch import LATENT_DIM, MAX_HEADS, ROPE_DIM, ROW_DIM


def split_query(
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


def check_arguments(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    row_size: int,
    kv_dtype: torch.dtype,
) -> None:
    """Raise ValueError for the first argument that breaks the contract.

    Args:
        q_nope: `[T, H, 512]`, float16 or bfloat16.
        q_pe: `[T, H, 64]`, like `q_nope`.
        kv_cache: `[num_blocks, page, row_size]`, `kv_dtype`.
        slots: `[T, topk]`, int32.
        row_size: elements of one cache row.
        kv_dtype: what these elements must be.
    """
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
    if kv_cache.dim() != 3 or kv_cache.shape[2] != row_size:
        raise ValueError(
            f"kv_cache must be [num_blocks, page, {row_size}], "
            f"found {list(kv_cache.shape)}"
        )
    if slots.dim() != 2 or slots.shape[0] != num_tokens:
        raise ValueError(
            f"slots must be [{num_tokens}, topk], found {list(slots.shape)}"
        )
    for name, tensor, dtype in (
        ("q_pe", q_pe, q_nope.dtype),
        ("kv_cache", kv_cache, kv_dtype),
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
