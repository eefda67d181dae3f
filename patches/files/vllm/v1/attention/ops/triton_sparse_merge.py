# SPDX-License-Identifier: Apache-2.0
"""Adding up the results of a token whose keys were split over several programs."""

import math

import torch
import triton
import triton.language as tl

from .triton_sparse_launch import LATENT_DIM


@triton.jit(do_not_specialize=["num_heads"])
def _merge_kernel(
    part,  # [T, SPLITS, H, LATENT] float32, contiguous
    part_lse,  # [T, SPLITS, H] float32, contiguous
    out,  # [T, H, LATENT], contiguous
    lse,  # [T, H] float32, contiguous
    num_heads,
    SPLITS: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out = sum_s part[s] * exp(lse[s]) / sum_s exp(lse[s]), for each head."""
    i_th = tl.program_id(0).to(tl.int64)
    i_d = tl.program_id(1)
    # [SPLITS], [BLOCK_D]
    o_row = (i_th // num_heads) * SPLITS + tl.arange(0, SPLITS)
    o_row = o_row * num_heads + i_th % num_heads
    o_d = i_d * BLOCK_D + tl.arange(0, BLOCK_D)

    b_lse = tl.load(part_lse + o_row)
    # [SPLITS, BLOCK_D]
    b_part = tl.load(part + o_row[:, None] * LATENT + o_d[None, :])
    b_max = tl.max(b_lse, axis=0)
    b_ref = tl.where(b_max == float("-inf"), 0.0, b_max)
    b_weight = tl.exp(b_lse - b_ref)
    # A split that holds the maximum has weight 1: the sum is 0 or at least 1.
    b_sum = tl.sum(b_weight, axis=0)
    b_out = tl.sum(b_part * b_weight[:, None], axis=0) / tl.maximum(b_sum, 1.0)
    tl.store(out + i_th * LATENT + o_d, b_out.to(out.dtype.element_ty))
    if i_d == 0:
        tl.store(lse + i_th, b_ref + tl.log(b_sum))


def merge(
    part: torch.Tensor,
    part_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    splits: int,
) -> None:
    """Write into `out` and `lse` what the splits of every token amount to.

    Args:
        part: float32, begins with `[T, splits, H, 512]`, contiguous.
        part_lse: float32, begins with `[T, splits, H]`, contiguous; base e, -inf for
            a split without a key.
        out: `[T, H, 512]`, contiguous.
        lse: `[T, H]` float32, contiguous.
        splits: a power of two.
    """
    num_tokens, num_heads, _ = out.shape
    block_d = merge_block(splits)
    _merge_kernel[(num_tokens * num_heads, LATENT_DIM // block_d)](
        part,
        part_lse,
        out,
        lse,
        num_heads,
        SPLITS=splits,
        LATENT=LATENT_DIM,
        BLOCK_D=block_d,
        num_warps=4,
    )


def merge_block(splits: int) -> int:
    """Latents of one merge program: narrow where there is much to add up."""
    return 128 if splits <= 16 else 64


def split_room(
    workspace: torch.Tensor | None, rows: tuple[int, int, int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the output and the LSE of every token, split and head."""
    count = math.prod(rows)
    if workspace is None:
        workspace = torch.empty(
            count * (LATENT_DIM + 1), dtype=torch.float32, device=device
        )
    elif (
        workspace.dtype != torch.float32
        or not workspace.is_contiguous()
        or workspace.numel() < count * (LATENT_DIM + 1)
    ):
        raise ValueError(
            f"workspace must be contiguous, torch.float32 and have at least "
            f"{count * (LATENT_DIM + 1)} elements, found {workspace.dtype} and "
            f"{workspace.numel()}"
        )
    flat = workspace.view(-1)
    return flat, flat[count * LATENT_DIM :]
