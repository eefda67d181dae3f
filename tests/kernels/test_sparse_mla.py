# SPDX-License-Identifier: Apache-2.0
"""The attention kernel against its definition, and the test against itself."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import reference
import torch
from cases import CASES, PAGE, ROW_DIM, Case, Inputs
from compare import MismatchError, check_lse, check_out, merge_shards
from ops import triton_sparse_merge
from ops.triton_sparse_launch import (
    LATENT_DIM,
    LaunchConfig,
    launch_config,
    launch_config_fp8,
    num_splits,
)
from ops.triton_sparse_merge import new_tickets
from ops.triton_sparse_mla import sparse_mla

ids = [case.name for case in CASES]


def run(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    return sparse_mla(inputs.q, inputs.kv_cache, inputs.slots, inputs.scale)


def expect(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.sparse_mla(inputs.q, inputs.kv_cache, inputs.slots, inputs.scale)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_agrees_with_the_reference(case: Case, device: str) -> None:
    inputs = case.build(device)
    out, lse = run(inputs)
    expected_out, expected_lse = expect(inputs)
    assert out.dtype == case.dtype
    assert lse.dtype == torch.float32
    check_out(case.name, out, expected_out)
    check_lse(case.name, lse, expected_lse)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_token_without_keys_is_zero_and_minus_infinity(
    dtype: torch.dtype, device: str
) -> None:
    inputs = Case("empty", dtype=dtype).build(device)
    out, lse = run(replace(inputs, slots=torch.full_like(inputs.slots, -1)))
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))


# Each takes good inputs and makes the mistake of a wrong kernel.
MISTAKES = {
    "dense-instead-of-sparse": lambda i: replace(
        i,
        slots=torch.arange(
            i.kv_cache.shape[0] * PAGE, dtype=torch.int32, device=i.slots.device
        ).repeat(i.slots.shape[0], 1),
    ),
    "one-wrong-slot": lambda i: replace(
        i,
        slots=torch.cat(
            [i.slots[:, :-1], (i.slots[:, -1:] + 1) % (i.kv_cache.shape[0] * PAGE)],
            dim=1,
        ),
    ),
    "minus-one-is-slot-zero": lambda i: replace(i, slots=i.slots.clamp(min=0)),
    "last-key-missed": lambda i: replace(i, slots=i.slots[:, :-1].contiguous()),
    "rope-dropped": lambda i: replace(
        i, q=torch.cat([i.q[..., :LATENT_DIM], 0 * i.q[..., LATENT_DIM:]], dim=-1)
    ),
    "wrong-scale": lambda i: replace(i, scale=i.scale * 1.05),
    "heads-shifted": lambda i: replace(i, q=i.q.roll(1, dims=1)),
    "tokens-shifted": lambda i: replace(i, slots=i.slots.roll(1, dims=0)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_sees_a_wrong_kernel(
    mistake: str, dtype: torch.dtype, device: str
) -> None:
    case = Case(
        mistake,
        dtype=dtype,
        topk=80,
        poison=False,  # so that only the comparison can tell
        spoil=lambda slots: torch.where(slots % 7 == 3, -1, slots),
    )
    inputs = case.build(device)
    inputs.slots[:, -1] = torch.arange(3, dtype=torch.int32) + 20
    out, lse = run(MISTAKES[mistake](inputs))
    expected_out, expected_lse = expect(inputs)
    with pytest.raises(MismatchError):
        check_out(mistake, out, expected_out)
    with pytest.raises(MismatchError):
        check_lse(mistake, lse, expected_lse)


def test_the_comparison_sees_one_wrong_token_and_nan() -> None:
    expected = torch.randn(100, 8, 512, dtype=torch.float64)
    actual = expected.half()
    check_out("good", actual, expected)
    for wrong in (torch.nan, torch.inf, 0.0):
        actual = expected.half()
        actual[57, 3] = wrong
        with pytest.raises(MismatchError, match="token 57, head 3"):
            check_out("wrong", actual, expected)
    with pytest.raises(MismatchError, match="inf"):
        check_out("not 0", torch.full((1, 1, 512), 1e-7).half(), expected[:1, :1] * 0)


def test_query_in_two_parts_with_the_strides_of_vllm(device: str) -> None:
    """vLLM hands over the latent part head-major and the rotary part as a slice."""
    case = Case("two-parts", heads=8, tokens=5, topk=40)
    inputs = case.build(device)
    q_nope = inputs.q[..., :LATENT_DIM].transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.full((5, 8, 256), torch.nan, dtype=case.dtype, device=device)
    wide[..., 192:] = inputs.q[..., LATENT_DIM:]
    q_pe = wide[..., 192:]
    out, lse = sparse_mla((q_nope, q_pe), inputs.kv_cache, inputs.slots, inputs.scale)
    expected_out, expected_lse = expect(inputs)
    check_out(case.name, out, expected_out)
    check_lse(case.name, lse, expected_lse)


def test_cache_and_slots_are_addressed_by_strides(device: str) -> None:
    """One layer of a pool that interleaves layers, with NaN in all the others."""
    case = Case("strided", topk=40)
    inputs = case.build(device)
    num_blocks = inputs.kv_cache.shape[0]
    pool = torch.full(
        (num_blocks, 3, PAGE, ROW_DIM + 16), torch.nan, dtype=case.dtype, device=device
    )
    pool[:, 1, :, :ROW_DIM] = inputs.kv_cache
    wide_slots = torch.full((3, 64), 7, dtype=torch.int32, device=device)
    wide_slots[:, :40] = inputs.slots
    out, lse = sparse_mla(
        inputs.q, pool[:, 1, :, :ROW_DIM], wide_slots[:, :40], inputs.scale
    )
    expected_out, expected_lse = expect(inputs)
    check_out(case.name, out, expected_out)
    check_lse(case.name, lse, expected_lse)


def test_cache_beyond_two_to_the_31_elements(device: str) -> None:
    """Rows on both sides of the 2**31st element; only their pages are touched."""
    num_blocks = 2**31 // (PAGE * ROW_DIM) + 40
    kv_cache = torch.empty(
        (num_blocks, PAGE, ROW_DIM), dtype=torch.float16, device=device
    )
    assert kv_cache.numel() > 2**31
    generator = torch.Generator().manual_seed(1)
    blocks = torch.tensor([0, 1, num_blocks // 2, num_blocks - 2, num_blocks - 1])
    kv_cache[blocks.to(device)] = (
        torch.randn(5, PAGE, ROW_DIM, generator=generator).half().to(device)
    )
    offsets = torch.randint(PAGE, (2, 40), generator=generator)
    slots = (blocks.repeat(8) * PAGE + offsets).int().to(device)
    q = torch.randn(2, 8, ROW_DIM, generator=generator).half().to(device)
    inputs = Inputs(q, kv_cache, slots)
    out, lse = run(inputs)
    expected_out, expected_lse = expect(inputs)
    check_out("beyond 2**31", out, expected_out)
    check_lse("beyond 2**31", lse, expected_lse)


def test_a_token_depends_on_nothing_but_itself(device: str) -> None:
    """Bit for bit, in a batch of the same size: place and padding do not matter."""
    inputs = Case("rows", tokens=4, heads=8, topk=40).build(device)
    out, lse = run(inputs)
    padded = replace(
        inputs,
        q=torch.cat([inputs.q[2:3], torch.full_like(inputs.q[1:], torch.nan)]),
        slots=torch.cat([inputs.slots[2:3], torch.full_like(inputs.slots[1:], -1)]),
    )
    alone, alone_lse = run(padded)
    assert torch.equal(alone[0], out[2])
    assert torch.equal(alone_lse[0], lse[2])
    assert torch.equal(alone[1:], torch.zeros_like(alone[1:]))


@pytest.mark.parametrize("topk", [1, 33, 200])
@pytest.mark.parametrize("heads", [8, 17, 64])
def test_every_number_of_splits_gives_the_same(
    heads: int, topk: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also more splits than steps, and splits without a single key."""
    case = Case("splits", heads=heads, tokens=2, topk=topk)
    inputs = case.build(device)
    inputs.slots[1, : topk // 2] = -1
    expected_out, expected_lse = expect(inputs)
    for splits in (1, 2, 4, 16):
        monkeypatch.setattr(triton_sparse_merge, "num_splits", lambda *_, n=splits: n)
        out, lse = run(inputs)
        check_out(f"{splits} splits", out, expected_out)
        check_lse(f"{splits} splits", lse, expected_lse)


@pytest.mark.parametrize("shards", [2, 4])
def test_shards_merged_by_their_lse_equal_the_whole(shards: int, device: str) -> None:
    """What decode context parallelism does: each rank holds some of the keys."""
    inputs = Case("shards", heads=8, tokens=3, topk=90).build(device)
    inputs.slots[1, ::shards] = -1  # rank 0 holds no key of token 1
    whole, lse = merge_shards(run, inputs, shards)
    expected_out, expected_lse = expect(inputs)
    check_out("shards", whole, expected_out)
    check_lse("shards", lse, expected_lse)


@pytest.mark.parametrize("splits", [2, 4])
@pytest.mark.parametrize("heads", [8, 17, 64])
def test_the_last_split_merges_where_it_has_tickets(
    heads: int, splits: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same result as the kernel that merges, and tickets for the next call."""
    monkeypatch.setattr(triton_sparse_merge, "num_splits", lambda *_: splits)
    inputs = Case("tickets", heads=heads, tokens=3, topk=150).build(device)
    inputs.slots[1, :40] = -1
    inputs.slots[2] = -1
    expected_out, expected_lse = expect(inputs)
    tickets = new_tickets(torch.device(device))
    for call in ("first", "second"):
        out, lse = run_with(tickets, inputs)
        check_out(f"{call} call", out, expected_out)
        check_lse(f"{call} call", lse, expected_lse)
        assert not tickets.any()


def run_with(
    tickets: torch.Tensor, inputs: Inputs
) -> tuple[torch.Tensor, torch.Tensor]:
    return sparse_mla(
        inputs.q, inputs.kv_cache, inputs.slots, inputs.scale, tickets=tickets
    )


def test_a_used_ticket_is_seen(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: were the tickets not used, a wrong one would change nothing."""
    monkeypatch.setattr(triton_sparse_merge, "num_splits", lambda *_: 2)
    inputs = Case("control", heads=8, tokens=2, topk=70).build(device)
    tickets = new_tickets(torch.device(device))
    tickets[0] = 1  # the first split of token 0 takes itself for the last
    out, _ = run_with(tickets, inputs)
    with pytest.raises(MismatchError):
        check_out("control", out, expect(inputs)[0])


def test_too_few_tickets_are_named(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_sparse_merge, "num_splits", lambda *_: 2)
    inputs = Case("tickets", heads=8, tokens=4).build(device)
    with pytest.raises(
        ValueError,
        match=r"tickets must be .* at least 4, found .*, 3$",
    ):
        run_with(new_tickets(torch.device(device))[:3], inputs)


@pytest.mark.parametrize("config_of", [launch_config, launch_config_fp8])
def test_there_are_tickets_for_every_batch(
    config_of: Callable[[tuple[int, int], int, int], LaunchConfig],
) -> None:
    """Every number of tokens, heads and multiprocessors that is split."""
    for capability in ((8, 0), (8, 6), (9, 0), (12, 0)):
        for num_sms in (8, 84, 132, 188):
            for heads in (1, 16, 17, 32, 64, 128):
                for tokens in range(1, 600):
                    config = config_of(capability, heads, tokens)
                    splits = num_splits(config, heads, tokens, 2048, num_sms)
                    if splits > 1:
                        blocks = -(-heads // config.block_h)
                        assert tokens * blocks <= 2 * num_sms


def test_no_tokens(device: str) -> None:
    inputs = Case("none").build(device)
    out, lse = run(replace(inputs, q=inputs.q[:0], slots=inputs.slots[:0]))
    assert list(out.shape) == [0, 16, LATENT_DIM]
    assert list(lse.shape) == [0, 16]


def test_no_keys_at_all(device: str) -> None:
    inputs = Case("topk 0").build(device)
    out, lse = run(replace(inputs, slots=inputs.slots[:, :0]))
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))


WRONG_ARGUMENTS = {
    "q must be [T, H, 576], found [3, 16, 512]": lambda i: replace(i, q=i.q[..., :512]),
    "q must have 1 to 128 heads, found 144": lambda i: replace(
        i, q=i.q.repeat(1, 9, 1)
    ),
    "q must be float16 or bfloat16, found torch.float32": lambda i: replace(
        i, q=i.q.float()
    ),
    "kv_cache must be torch.float16, found torch.bfloat16": lambda i: replace(
        i, kv_cache=i.kv_cache.bfloat16()
    ),
    "kv_cache must be [num_blocks, page, 576], found [320, 576]": lambda i: replace(
        i, kv_cache=i.kv_cache.flatten(0, 1)
    ),
    "slots must be [3, topk], found [2, 50]": lambda i: replace(i, slots=i.slots[:2]),
    "slots must be torch.int32, found torch.int64": lambda i: replace(
        i, slots=i.slots.long()
    ),
    "slots must be contiguous in its last dimension, found stride 2": lambda i: replace(
        i, slots=i.slots[:, ::2]
    ),
    "q_nope must be contiguous in its last dimension, found stride 2": lambda i: (
        replace(i, q=i.q.repeat_interleave(2, dim=-1)[..., ::2])
    ),
}


@pytest.mark.parametrize("message", WRONG_ARGUMENTS)
def test_a_wrong_argument_is_named(message: str, device: str) -> None:
    inputs = Case("wrong").build(device)
    with pytest.raises(ValueError) as error:
        run(WRONG_ARGUMENTS[message](inputs))
    assert str(error.value) == message


def test_a_wrong_pair_is_named(device: str) -> None:
    inputs = Case("pair").build(device)
    latent, rope = inputs.q[..., :LATENT_DIM], inputs.q[:2, :, LATENT_DIM:]
    with pytest.raises(ValueError) as error:
        sparse_mla((latent, rope), inputs.kv_cache, inputs.slots, 1.0)
    assert str(error.value) == "q_pe must be [3, 16, 64], found [2, 16, 64]"


@pytest.mark.parametrize("tokens", [1, 8, 9, 128, 8192])
@pytest.mark.parametrize("heads", [1, 16, 17, 32, 33, 64, 128])
@pytest.mark.parametrize(
    "capability",
    [(8, 0), (8, 6), (8, 9), (9, 0), (12, 0), (12, 1), (13, 0)],
    ids=lambda c: f"sm{c[0]}{c[1]}",
)
@pytest.mark.parametrize("config_of", [launch_config, launch_config_fp8])
def test_a_launch_table_is_pure_and_legal(
    config_of: Callable[[tuple[int, int], int, int], LaunchConfig],
    capability: tuple[int, int],
    heads: int,
    tokens: int,
) -> None:
    config = config_of(capability, heads, tokens)
    assert config == config_of(capability, heads, tokens)
    for size in (config.block_h, config.block_n):
        assert size >= 16
        assert size & (size - 1) == 0
    assert config.block_h < 2 * max(heads, 16), (
        "more than half of the heads are padding"
    )
    splits = num_splits(config, heads, tokens, 2048, 132)
    assert splits & (splits - 1) == 0
    assert 1 <= splits <= 2048 // config.block_n
