# SPDX-License-Identifier: Apache-2.0
"""Where the results of a call go, and adding them up where keys were split.

Where r[s] and l[s] are the result and the LSE of split s,

    out = sum_s r[s] * exp(l[s]) / sum_s exp(l[s]),   lse = log sum_s exp(l[s]),

always in one order, whichever split ended first: the same bits every time.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .triton_sparse_launch import (
    LATENT_DIM,
    MERGED_BY_THE_LAST,
    LaunchConfig,
    chip,
    num_splits,
)


@triton.jit
def hand_in(
    b_out,  # tuple of chunks, [BLOCK_H, CHUNK] float32: the result of one split
    b_lse,  # [BLOCK_H] float32, base e
    out,  # [T, H, LATENT], contiguous
    lse,  # [T, H] float32, contiguous
    part,  # [T, SPLITS, H, LATENT] float32, contiguous; unused where SPLITS is 1
    part_lse,  # [T, SPLITS, H] float32, contiguous; likewise
    tickets,  # [T, head blocks] int32, zeros; unused unless MERGE
    i_t,
    i_s,
    i_h,
    num_heads,
    CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Store what one program has found; if it is the last of its token, merge."""
    BLOCK_H: tl.constexpr = b_out[0].shape[0]
    CHUNK: tl.constexpr = b_out[0].shape[1]
    # [BLOCK_H], [CHUNK]
    o_h = i_h * BLOCK_H + tl.arange(0, BLOCK_H)
    o_chunk = tl.arange(0, CHUNK)
    m_h = o_h < num_heads
    o_row = i_t * num_heads + o_h
    o_part = (i_t * SPLITS + i_s) * num_heads + o_h
    # [BLOCK_H, CHUNK], [BLOCK_H]
    if SPLITS == 1:
        p_out = out + o_row[:, None] * (CHUNK * CHUNKS) + o_chunk[None, :]
        p_lse = lse + o_row
    else:
        p_out = part + o_part[:, None] * (CHUNK * CHUNKS) + o_chunk[None, :]
        p_lse = part_lse + o_part
    for c in tl.static_range(CHUNKS):
        b_chunk = b_out[c].to(p_out.dtype.element_ty)
        tl.store(p_out + c * CHUNK, b_chunk, mask=m_h[:, None])
    tl.store(p_lse, b_lse, mask=m_h)

    if MERGE:
        # Every thread's results must be out before the ticket says so.
        tl.debug_barrier()
        p_ticket = tickets + i_t * tl.cdiv(num_heads, BLOCK_H) + i_h
        if tl.atomic_add(p_ticket, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(p_ticket, 0)  # for the next call
            o_first = i_t * SPLITS * num_heads + o_h
            _merge_here(
                part + o_first[:, None] * (CHUNK * CHUNKS) + o_chunk[None, :],
                part_lse + o_first,
                num_heads,
                out + o_row[:, None] * (CHUNK * CHUNKS) + o_chunk[None, :],
                lse + o_row,
                m_h,
                SPLITS,
                CHUNKS,
            )


@triton.jit
def _merge_here(
    p_part,  # [BLOCK_H, CHUNK], the first chunk of the first split
    p_part_lse,  # [BLOCK_H], of the first split
    num_heads,  # rows from one split to the next
    p_out,  # [BLOCK_H, CHUNK], the first chunk
    p_lse,  # [BLOCK_H]
    m_h,  # [BLOCK_H]
    SPLITS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Merge the splits of some heads of one token."""
    CHUNK: tl.constexpr = p_part.shape[1]
    b_lse = ()
    b_max = tl.full([p_part.shape[0]], float("-inf"), dtype=tl.float32)
    for s in tl.static_range(SPLITS):
        # Past the first-level cache, which does not see what other programs wrote.
        p_split = p_part_lse + s * num_heads
        b_one = tl.load(p_split, mask=m_h, other=0.0, cache_modifier=".cg")
        b_lse = b_lse + (b_one,)
        b_max = tl.maximum(b_max, b_one)
    b_ref = tl.where(b_max == float("-inf"), 0.0, b_max)
    b_sum = tl.zeros([p_part.shape[0]], dtype=tl.float32)
    for s in tl.static_range(SPLITS):
        b_sum += tl.exp(b_lse[s] - b_ref)
    # A split that holds the maximum has weight 1: the sum is 0 or at least 1.
    b_div = tl.maximum(b_sum, 1.0)
    for c in tl.static_range(CHUNKS):
        b_out = tl.zeros(p_part.shape, dtype=tl.float32)
        for s in tl.static_range(SPLITS):
            p_split = p_part + s * num_heads * CHUNK * CHUNKS + c * CHUNK
            b_one = tl.load(p_split, mask=m_h[:, None], other=0.0, cache_modifier=".cg")
            b_out += b_one * (tl.exp(b_lse[s] - b_ref) / b_div)[:, None]
        b_out = b_out.to(p_out.dtype.element_ty)
        tl.store(p_out + c * CHUNK, b_out, mask=m_h[:, None])
    tl.store(p_lse, b_ref + tl.log(b_sum), mask=m_h)


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
    """Merge some latents of one head of one token."""
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


def new_tickets(device: torch.device) -> torch.Tensor:
    """Counters by which the splits of a token learn which of them is the last.

    As many as a chip runs tokens whose splits are merged so, int32, all 0.
    """
    _, num_sms = chip(device)
    return torch.zeros(2 * num_sms, dtype=torch.int32, device=device)


class Call(NamedTuple):
    """How one batch is launched, and the tensors that `hand_in` writes."""

    capability: tuple[int, int]
    config: LaunchConfig
    splits: int
    merges: bool  # whether the last split of a token merges
    grid: tuple[int]
    out: torch.Tensor
    lse: torch.Tensor
    part: torch.Tensor
    part_lse: torch.Tensor
    tickets: torch.Tensor

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge what no program has merged; gives the output and the LSE."""
        if self.splits > 1 and not self.merges:
            merge(self.part, self.part_lse, self.out, self.lse, self.splits)
        return self.out, self.lse


def prepare(
    q_nope: torch.Tensor,
    slots: torch.Tensor,
    config_of: Callable[[tuple[int, int], int, int], LaunchConfig],
    tickets: torch.Tensor | None,
) -> Call:
    """Choose the launch of a batch, and take room for its results.

    Args:
        q_nope: `[T, H, 512]`.
        slots: `[T, topk]`.
        config_of: the launch table of the kernel.
        tickets: of the operator's caller, if it has any.

    The room for splits is float32. In a captured graph it comes from the graph's own
    pool: a replay allocates nothing.

    Raises:
        ValueError: the tickets are too few, or none.
    """
    num_tokens, num_heads, _ = q_nope.shape
    device = q_nope.device
    capability, num_sms = chip(device)
    config = config_of(capability, num_heads, num_tokens)
    head_blocks = triton.cdiv(num_heads, config.block_h)
    splits = 1
    if num_tokens > 0:
        topk = slots.shape[1]
        splits = num_splits(config, num_heads, num_tokens, topk, num_sms)
    out = torch.empty(q_nope.shape, dtype=q_nope.dtype, device=device)
    lse = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=device)
    part, part_lse = out, lse
    if splits > 1:
        count = num_tokens * splits * num_heads
        part = torch.empty(count * (LATENT_DIM + 1), dtype=torch.float32, device=device)
        part_lse = part[count * LATENT_DIM :]
    merges = tickets is not None and 1 < splits <= MERGED_BY_THE_LAST
    if merges:
        _check_tickets(tickets, num_tokens * head_blocks, device)
    return Call(
        capability,
        config,
        splits,
        merges,
        (num_tokens * splits * head_blocks,),
        out,
        lse,
        part,
        part_lse,
        tickets if merges else slots,  # any int32 will do for what is not read
    )


def _check_tickets(tickets: torch.Tensor, count: int, device: torch.device) -> None:
    """Raise ValueError unless these are `count` tickets on `device`, or more."""
    if (
        tickets.dtype != torch.int32
        or tickets.device != device
        or not tickets.is_contiguous()
        or tickets.numel() < count
    ):
        raise ValueError(
            f"tickets must be contiguous, torch.int32, on {device} and at least "
            f"{count}, found {tickets.dtype} on {tickets.device}, {tickets.numel()}"
        )
