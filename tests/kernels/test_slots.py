# SPDX-License-Identifier: Apache-2.0
"""The page-table lookup against its definition. Integers: equal or wrong."""

from dataclasses import dataclass, replace

import pytest
import reference
import torch
from ops.triton_sparse_slots import BLOCK, slots_from_positions

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True)
class Lookup:
    positions: torch.Tensor
    block_table: torch.Tensor
    req_of_token: torch.Tensor
    page: int = 64


def make(device: str, tokens: int = 5, topk: int = 50, page: int = 64) -> Lookup:
    """Three requests of up to 6 pages; blocks in random order, no block 0."""
    generator = torch.Generator().manual_seed(tokens * 1000 + topk)
    positions = torch.randint(6 * page, (tokens, topk), generator=generator).int()
    blocks = torch.randperm(18, generator=generator).int() + 1
    req_of_token = torch.randint(3, (tokens,), generator=generator).int()
    return Lookup(
        positions.to(device),
        blocks.view(3, 6).to(device),
        req_of_token.to(device),
        page,
    )


def run(lookup: Lookup) -> torch.Tensor:
    return slots_from_positions(
        lookup.positions, lookup.block_table, lookup.req_of_token, lookup.page
    )


def expect(lookup: Lookup) -> torch.Tensor:
    return reference.slots_from_positions(
        lookup.positions, lookup.block_table, lookup.req_of_token, lookup.page
    )


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("topk", [1, 50, 127, 128, BLOCK - 1, BLOCK, BLOCK + 1])
def test_agrees_with_the_reference(topk: int, page: int, device: str) -> None:
    lookup = make(device, topk=topk, page=page)
    assert torch.equal(run(lookup).cpu(), expect(lookup))


@pytest.mark.parametrize(
    "bad", [-1, -2, -64, -65, INT_MIN, 6 * 64, 6 * 64 + 1, INT_MAX]
)
def test_what_is_no_position_gives_minus_one(bad: int, device: str) -> None:
    lookup = make(device)
    lookup.positions[:, 7] = bad
    lookup.positions[2] = bad
    slots = run(lookup).cpu()
    assert (slots[:, 7] == -1).all()
    assert (slots[2] == -1).all()
    assert torch.equal(slots, expect(lookup))


@pytest.mark.parametrize("bad", [-1, 3, INT_MAX, INT_MIN])
def test_a_padding_token_has_no_keys(bad: int, device: str) -> None:
    lookup = make(device)
    lookup.req_of_token[3] = bad
    slots = run(lookup).cpu()
    assert (slots[3] == -1).all()
    assert torch.equal(slots, expect(lookup))


def test_an_unassigned_page_gives_minus_one(device: str) -> None:
    lookup = make(device)
    lookup.block_table[:, 2] = -1
    slots = run(lookup).cpu()
    assert ((slots == -1) == (lookup.positions.cpu() // 64 == 2)).all()
    assert torch.equal(slots, expect(lookup))


def test_block_zero_is_a_block(device: str) -> None:
    lookup = make(device)
    lookup.block_table[:] = 0
    assert torch.equal(run(lookup).cpu(), lookup.positions.cpu() % 64)


def test_tables_and_picks_are_addressed_by_strides(device: str) -> None:
    """vLLM's table and top-k buffer are corners of wider ones."""
    lookup = make(device)
    table = torch.full((5, 40), INT_MAX, dtype=torch.int32, device=device)
    table[:3, :6] = lookup.block_table
    picks = torch.full((9, 70), 1, dtype=torch.int32, device=device)
    picks[:5, :50] = lookup.positions
    corner = replace(lookup, positions=picks[:5, :50], block_table=table[:3, :6])
    assert torch.equal(run(corner).cpu(), expect(lookup))


def test_nothing_to_look_up(device: str) -> None:
    lookup = make(device)
    none = replace(
        lookup, positions=lookup.positions[:0], req_of_token=lookup.req_of_token[:0]
    )
    assert list(run(none).shape) == [0, 50]
    assert list(run(replace(lookup, positions=lookup.positions[:, :0])).shape) == [5, 0]


MISTAKES = {
    "invalid-becomes-block-0": lambda i: replace(i, positions=i.positions.clamp(min=0)),
    "wrong-request": lambda i: replace(i, req_of_token=(i.req_of_token + 1) % 3),
    "wrong-page-size": lambda i: replace(i, page=32),
    "table-not-used": lambda i: replace(
        i, block_table=torch.arange(18, dtype=torch.int32).view(3, 6)
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_sees_a_wrong_lookup(mistake: str, device: str) -> None:
    lookup = make(device)
    lookup.positions[:, 7] = -1
    wrong = MISTAKES[mistake](lookup)
    wrong = replace(wrong, block_table=wrong.block_table.to(device))
    assert not torch.equal(run(wrong).cpu(), expect(lookup))


WRONG_ARGUMENTS = {
    "positions must be torch.int32, found torch.int64": lambda i: replace(
        i, positions=i.positions.long()
    ),
    "block_table must have 2 dimensions, found [18]": lambda i: replace(
        i, block_table=i.block_table.flatten()
    ),
    "req_of_token must have 5 tokens like positions, found 4": lambda i: replace(
        i, req_of_token=i.req_of_token[:4]
    ),
    "positions must be contiguous in its last dimension, found stride 2": lambda i: (
        replace(i, positions=i.positions[:, ::2])
    ),
    "page must be at least 1, found 0": lambda i: replace(i, page=0),
}


@pytest.mark.parametrize("message", WRONG_ARGUMENTS)
def test_a_wrong_argument_is_named(message: str, device: str) -> None:
    with pytest.raises(ValueError) as error:
        run(WRONG_ARGUMENTS[message](make(device)))
    assert str(error.value) == message
