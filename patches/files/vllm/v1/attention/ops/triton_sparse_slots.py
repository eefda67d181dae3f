# SPDX-License-Identifier: Apache-2.0
"""From the indexer's picks to cache rows: the page-table lookup of sparse MLA.

The indexer names keys by their position in the request (0, 1, 2, ...); the
attention kernel wants the row of the paged cache that holds that position.
Nothing here imports vLLM.
"""

import torch
import triton
import triton.language as tl

# One program looks up this many picks: 4 a thread, and wide enough that a row
# of 2048 takes two programs.
BLOCK = 1024


# One binary for all batches: Triton would compile another one where a count is 1 or
# a multiple of 16, or where a pointer is not 16-aligned, as in a slice of requests.
@triton.jit(
    do_not_specialize=["num_reqs", "num_pages", "stride_table_r"],
    do_not_specialize_on_alignment=["block_table", "req_of_token"],
)
def _slots_kernel(
    positions,  # [T, topk] int32
    block_table,  # [num_reqs, num_pages] int32
    req_of_token,  # [T] int32
    slots,  # [T, topk] int32
    topk,
    num_reqs,
    num_pages,
    stride_positions_t,
    stride_table_r,
    stride_slots_t,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    num_blocks = tl.cdiv(topk, BLOCK)
    i_t = (tl.program_id(0) // num_blocks).to(tl.int64)
    i_k = tl.program_id(0) % num_blocks

    i_req = tl.load(req_of_token + i_t)
    m_req = (i_req >= 0) & (i_req < num_reqs)

    # [BLOCK]
    o_k = i_k * BLOCK + tl.arange(0, BLOCK)
    m_k = o_k < topk
    b_pos = tl.load(positions + i_t * stride_positions_t + o_k, mask=m_k, other=-1)
    b_page = b_pos // PAGE
    # Also guards the table itself: no pick, however wrong, reads outside of it.
    m_pos = m_req & (b_pos >= 0) & (b_page < num_pages)
    # [BLOCK]
    p_block = block_table + i_req.to(tl.int64) * stride_table_r + b_page
    b_block = tl.load(p_block, mask=m_pos, other=-1)

    # 2**31 rows of 1152 bytes would be a cache of 2.4 TB on one GPU, so 32 bits
    # hold every slot that exists.
    b_slot = tl.where(b_block >= 0, b_block * PAGE + b_pos % PAGE, -1)
    tl.store(slots + i_t * stride_slots_t + o_k, b_slot, mask=m_k)


def slots_from_positions(
    positions: torch.Tensor,
    block_table: torch.Tensor,
    req_of_token: torch.Tensor,
    page: int,
) -> torch.Tensor:
    """Look up the cache slot of every picked position.

    Args:
        positions: `[T, topk]` int32, positions within the token's own request,
            any value below 0 for "no key"; last dimension contiguous; any topk.
        block_table: `[num_reqs, num_pages]` int32, the cache block that holds
            each page of a request; last dimension contiguous.
        req_of_token: `[T]` int32, the row of `block_table` for each token; a
            value outside of it (a padding token) gives no keys.
        page: tokens in one cache block.

    Returns:
        `[T, topk]` int32 of `block * page + offset`; -1 wherever there is no
        key: a negative pick, one beyond the table, or an unassigned block.

    Raises:
        ValueError: an argument breaks this contract; the message names both
            what was expected and what was found.
    """
    _check_arguments(positions, block_table, req_of_token, page)
    num_tokens, topk = positions.shape
    slots = torch.empty((num_tokens, topk), dtype=torch.int32, device=positions.device)
    if slots.numel() == 0:
        return slots
    _slots_kernel[(num_tokens * triton.cdiv(topk, BLOCK),)](
        positions,
        block_table,
        req_of_token,
        slots,
        topk,
        block_table.shape[0],
        block_table.shape[1],
        positions.stride(0),
        block_table.stride(0),
        slots.stride(0),
        PAGE=page,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return slots


def _check_arguments(
    positions: torch.Tensor,
    block_table: torch.Tensor,
    req_of_token: torch.Tensor,
    page: int,
) -> None:
    """Raise ValueError for the first argument that breaks the contract."""
    if page < 1:
        raise ValueError(f"page must be at least 1, found {page}")
    for name, tensor, dim in (
        ("positions", positions, 2),
        ("block_table", block_table, 2),
        ("req_of_token", req_of_token, 1),
    ):
        if tensor.dim() != dim:
            raise ValueError(
                f"{name} must have {dim} dimensions, found {list(tensor.shape)}"
            )
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name} must be torch.int32, found {tensor.dtype}")
        if tensor.device != positions.device:
            raise ValueError(
                f"{name} must be on {positions.device} like positions, "
                f"found {tensor.device}"
            )
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(
                f"{name} must be contiguous in its last dimension, "
                f"found stride {tensor.stride(-1)}"
            )
    if req_of_token.shape[0] != positions.shape[0]:
        raise ValueError(
            f"req_of_token must have {positions.shape[0]} tokens like positions, "
            f"found {req_of_token.shape[0]}"
        )
