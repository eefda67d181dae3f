# SPDX-License-Identifier: Apache-2.0
"""The kernel for fp8_ds_mla rows against its definition; the test against itself."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import reference
import torch
from cases import CASES, PAGE, Case, Inputs, in_fp8
from compare import MismatchError, check_lse, check_out, merge_shards
from ops import triton_sparse_merge
from ops.triton_sparse_launch import (
    LATENT_DIM,
    chip,
    converts_e4m3,
)
from ops.triton_sparse_merge import new_tickets
from ops.triton_sparse_mla_fp8 import ROW_BYTES, sparse_mla_fp8

ids = [case.name for case in CASES]
both_dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def run(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    return sparse_mla_fp8(inputs.q, inputs.kv_cache, inputs.slots, inputs.scale)


def expect(
    inputs: Inputs,
    read: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = reference.decode_fp8,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = read(inputs.kv_cache.cpu(), inputs.q.dtype)
    return reference.sparse_mla(inputs.q.cpu(), rows, inputs.slots.cpu(), inputs.scale)


def check(name: str, inputs: Inputs) -> None:
    out, lse = run(inputs)
    expected_out, expected_lse = expect(inputs)
    assert out.dtype == inputs.q.dtype
    check_out(name, out, expected_out)
    check_lse(name, lse, expected_lse)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_agrees_with_the_reference(case: Case, device: str) -> None:
    check(case.name, in_fp8(case.build(device)))


def test_our_e4m3_is_the_one_of_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = codes.view(torch.float8_e4m3fn).double()
    assert torch.equal(
        reference.decode_e4m3(codes).nan_to_num(nan=1e9), theirs.nan_to_num(nan=1e9)
    )


@both_dtypes
def test_every_byte_is_decoded_exactly(dtype: torch.dtype, device: str) -> None:
    """One key has weight 1, so the output is its latents; with scale 1, their codes."""
    codes = torch.arange(256, dtype=torch.uint8)
    # Each code as the first and as the second of a pair.
    row = torch.zeros(1, 1, ROW_BYTES, dtype=torch.uint8)
    row[..., :512] = torch.cat([codes, codes.roll(1)])
    row[..., 512:528] = torch.ones(4).view(torch.uint8)
    slots = torch.zeros(1, 1, dtype=torch.int32)
    q = torch.zeros(1, 16, 576, dtype=dtype)
    out, _ = sparse_mla_fp8(q.to(device), row.to(device), slots.to(device), 1.0)
    expected = reference.decode_e4m3(row[0, 0, :512])
    if not converts_e4m3(chip(torch.device(device))[0]):
        sign = 1.0 - 2.0 * (row[0, 0, :512] >> 7)
        expected = torch.where(expected.isnan(), 480.0 * sign, expected)
    torch.testing.assert_close(
        out.cpu().double(), expected.expand(1, 16, 512), rtol=0, atol=0, equal_nan=True
    )


@both_dtypes
def test_zero_latents_are_a_key_nevertheless(dtype: torch.dtype, device: str) -> None:
    inputs = Case("zeros", dtype=dtype, poison=False).build(device)
    inputs.kv_cache[:, ::2, :LATENT_DIM] = 0.0
    inputs = in_fp8(inputs)
    for smallest in (0.0, torch.finfo(torch.float32).tiny):  # what a scale may be then
        scale = torch.full((4,), smallest).view(torch.uint8)
        inputs.kv_cache[:, ::2, 512:528] = scale.to(device)
        check(f"zeros, scale {smallest}", inputs)
    only_zeros = torch.arange(0, PAGE, 2, dtype=torch.int32, device=device)
    check("only zeros", replace(inputs, slots=only_zeros.repeat(3, 1)))


# Factors on the latents of each row (one column) or of each group of a row (four).
AMPLITUDES = {
    "1e-4": torch.tensor([[1e-4]]),
    "6e4": torch.tensor([[1e4]]),
    "rows-from-1e-4-to-1e4": torch.logspace(-4, 4, 64)[:, None],
    "groups-apart": torch.tensor([[1.0, 100.0, 0.01, 10.0]]),
}


@both_dtypes
@pytest.mark.parametrize("amplitude", AMPLITUDES)
def test_latents_of_any_size(amplitude: str, dtype: torch.dtype, device: str) -> None:
    """float16 weights times float32 scales: neither overflow nor underflow shows."""
    # Few keys where they would average to less than float16 can say of the output.
    topk = 3 if amplitude == "1e-4" else 200
    inputs = Case(amplitude, dtype=dtype, topk=topk, heads=8).build("cpu")
    factors = AMPLITUDES[amplitude].repeat_interleave(
        512 // AMPLITUDES[amplitude].shape[1], dim=1
    )
    latents = inputs.kv_cache[..., :LATENT_DIM].float() * factors
    inputs.kv_cache[..., :LATENT_DIM] = latents.clamp(-6e4, 6e4).to(dtype)
    # Scores of a few units, so that many keys take part.
    inputs.q[..., :LATENT_DIM] /= factors.max()
    inputs = in_fp8(inputs)
    check(
        amplitude,
        replace(
            inputs,
            q=inputs.q.to(device),
            kv_cache=inputs.kv_cache.to(device),
            slots=inputs.slots.to(device),
        ),
    )


def test_queries_of_any_size(device: str) -> None:
    """bfloat16 reaches far beyond float16, in which the query meets the latents."""
    for size in (1e-30, 1e-5, 1e5, 1e30):
        inputs = in_fp8(Case("q", dtype=torch.bfloat16, topk=40).build(device))
        check(f"q of {size}", replace(inputs, q=inputs.q * size, scale=0.06 / size))


def test_a_head_of_zeros(device: str) -> None:
    inputs = in_fp8(Case("zero head").build(device))
    inputs.q[:, 3] = 0.0
    check("zero head", inputs)


def _swap_16_bits(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    other = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}[dtype]
    return reference.decode_fp8(rows, other)


def _change(
    change: Callable[[torch.Tensor], torch.Tensor], part: slice
) -> Callable[[torch.Tensor, torch.dtype], torch.Tensor]:
    def read(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        rows = rows.clone()
        rows[..., part] = change(rows[..., part])
        return reference.decode_fp8(rows, dtype)

    return read


def _e5m2(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    right = reference.decode_fp8(rows, dtype)
    latents = rows[..., :512].contiguous().view(torch.float8_e5m2).double()
    scales = right[..., :512] / reference.decode_e4m3(rows[..., :512])
    return torch.cat([latents * scales.nan_to_num(nan=0.0), right[..., 512:]], dim=-1)


# Wrong ways to read a row. Each must differ from the kernel's.
MISREADINGS = {
    "scales-of-the-next-group": _change(lambda b: b.roll(4, dims=-1), slice(512, 528)),
    "one-scale-for-all": _change(lambda b: b[..., :4].repeat(1, 1, 4), slice(512, 528)),
    "scales-ignored": _change(
        lambda b: torch.ones(4).view(torch.uint8).expand_as(b), slice(512, 528)
    ),
    "rope-in-the-other-dtype": _swap_16_bits,
    "latents-in-e5m2": _e5m2,
    "pairs-swapped": _change(
        lambda b: b.unflatten(-1, (-1, 2)).flip(-1).flatten(-2), slice(0, 512)
    ),
    "subnormals-are-zero": _change(
        lambda b: torch.where((b & 0x78) == 0, 0, b), slice(0, 512)
    ),
    "sign-dropped": _change(lambda b: b & 0x7F, slice(0, 512)),
    "rope-one-value-off": _change(lambda b: b.roll(2, dims=-1), slice(528, 656)),
}


@both_dtypes
@pytest.mark.parametrize("mistake", MISREADINGS)
def test_the_comparison_sees_a_misread_row(
    mistake: str, dtype: torch.dtype, device: str
) -> None:
    inputs = in_fp8(Case(mistake, dtype=dtype, topk=80, poison=False).build("cpu"))
    # Every group its own scale, and half of the codes subnormal, all others near.
    inputs.kv_cache[..., :512] &= 0x8F
    scales = torch.tensor([30.0, 60.0, 15.0, 45.0]).view(torch.uint8)
    inputs.kv_cache[..., 512:528] = scales
    on_device = replace(
        inputs,
        q=inputs.q.to(device),
        kv_cache=inputs.kv_cache.to(device),
        slots=inputs.slots.to(device),
    )
    check("right", on_device)
    out, lse = run(on_device)
    wrong_out, wrong_lse = expect(inputs, MISREADINGS[mistake])
    with pytest.raises(MismatchError):
        check_lse(mistake, lse, wrong_lse)
    with pytest.raises(MismatchError):
        check_out(mistake, out, wrong_out)


def test_one_wrong_slot_and_one_missed_key_are_seen(device: str) -> None:
    inputs = in_fp8(Case("slots", topk=80, poison=False).build(device))
    wrong = inputs.slots.clone()
    wrong[:, -1] = (wrong[:, -1] + 1) % (5 * PAGE)
    for slots in (wrong, inputs.slots[:, :-1].contiguous()):
        out, lse = run(replace(inputs, slots=slots))
        expected_out, expected_lse = expect(inputs)
        with pytest.raises(MismatchError):
            check_out("wrong", out, expected_out)
        with pytest.raises(MismatchError):
            check_lse("wrong", lse, expected_lse)


def test_a_token_without_keys_is_zero_and_minus_infinity(device: str) -> None:
    inputs = in_fp8(Case("empty").build(device))
    for slots in (torch.full_like(inputs.slots, -1), inputs.slots[:, :0]):
        out, lse = run(replace(inputs, slots=slots))
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(lse, torch.full_like(lse, -torch.inf))
    out, lse = run(replace(inputs, q=inputs.q[:0], slots=inputs.slots[:0]))
    assert list(out.shape) == [0, 16, LATENT_DIM]
    assert list(lse.shape) == [0, 16]


def test_cache_slots_and_query_are_addressed_by_strides(device: str) -> None:
    """One layer of a pool of wider rows, and the query as vLLM hands it over."""
    inputs = in_fp8(Case("strided", heads=8, topk=40).build(device))
    pool = torch.full((5, 3, PAGE, 672), 0xFF, dtype=torch.uint8, device=device)
    pool[:, 1, :, :ROW_BYTES] = inputs.kv_cache
    wide_slots = torch.full((3, 64), 7, dtype=torch.int32, device=device)
    wide_slots[:, :40] = inputs.slots
    q_nope = inputs.q[..., :LATENT_DIM].transpose(0, 1).contiguous().transpose(0, 1)
    wide_q = torch.full((3, 8, 256), torch.nan, dtype=inputs.q.dtype, device=device)
    wide_q[..., 192:] = inputs.q[..., LATENT_DIM:]
    out, lse = sparse_mla_fp8(
        (q_nope, wide_q[..., 192:]),
        pool[:, 1, :, :ROW_BYTES],
        wide_slots[:, :40],
        inputs.scale,
    )
    expected_out, expected_lse = expect(inputs)
    check_out("strided", out, expected_out)
    check_lse("strided", lse, expected_lse)


def test_cache_beyond_two_to_the_31_bytes(device: str) -> None:
    """Rows on both sides of the 2**31st byte; only their pages are touched."""
    small = in_fp8(Case("beyond", tokens=2, heads=8, poison=False).build(device))
    num_blocks = 2**31 // (PAGE * ROW_BYTES) + 40
    kv_cache = torch.empty(
        (num_blocks, PAGE, ROW_BYTES), dtype=torch.uint8, device=device
    )
    assert kv_cache.numel() > 2**31
    blocks = torch.tensor([0, 1, num_blocks // 2, num_blocks - 2, num_blocks - 1])
    kv_cache[blocks.to(device)] = small.kv_cache
    slots = blocks[small.slots.cpu().long() // PAGE] * PAGE + small.slots.cpu() % PAGE
    out, lse = run(replace(small, kv_cache=kv_cache, slots=slots.int().to(device)))
    expected_out, expected_lse = expect(small)
    check_out("beyond 2**31", out, expected_out)
    check_lse("beyond 2**31", lse, expected_lse)


@pytest.mark.parametrize("topk", [1, 33, 200])
@pytest.mark.parametrize("heads", [8, 17, 64])
def test_every_number_of_splits_gives_the_same(
    heads: int, topk: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also more splits than steps, and splits without a single key."""
    inputs = in_fp8(Case("splits", heads=heads, tokens=2, topk=topk).build(device))
    inputs.slots[1, : topk // 2] = -1
    for splits in (1, 2, 4, 16):
        monkeypatch.setattr(triton_sparse_merge, "num_splits", lambda *_, n=splits: n)
        check(f"{splits} splits", inputs)


@pytest.mark.parametrize("shards", [2, 4])
def test_shards_merged_by_their_lse_equal_the_whole(shards: int, device: str) -> None:
    inputs = in_fp8(Case("shards", heads=8, tokens=3, topk=90).build(device))
    inputs.slots[1, ::shards] = -1  # rank 0 holds no key of token 1
    whole, lse = merge_shards(run, inputs, shards)
    expected_out, expected_lse = expect(inputs)
    check_out("shards", whole, expected_out)
    check_lse("shards", lse, expected_lse)


def test_the_last_split_merges_where_it_has_tickets(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_sparse_merge, "num_splits", lambda *_: 2)
    inputs = in_fp8(Case("tickets", heads=17, tokens=2, topk=70).build(device))
    expected_out, expected_lse = expect(inputs)
    tickets = new_tickets(torch.device(device))
    for call in ("first", "second"):
        out, lse = sparse_mla_fp8(
            inputs.q, inputs.kv_cache, inputs.slots, inputs.scale, tickets
        )
        check_out(f"{call} call", out, expected_out)
        check_lse(f"{call} call", lse, expected_lse)
        assert not tickets.any()
    tickets[0] = 1  # control: the first split takes itself for the last
    out, _ = sparse_mla_fp8(
        inputs.q, inputs.kv_cache, inputs.slots, inputs.scale, tickets
    )
    with pytest.raises(MismatchError):
        check_out("control", out, expected_out)


WRONG_ARGUMENTS = {
    "kv_cache must be torch.uint8, found torch.int8": lambda i: replace(
        i, kv_cache=i.kv_cache.view(torch.int8)
    ),
    "kv_cache must be [num_blocks, page, 656], found [5, 64, 576]": lambda i: replace(
        i, kv_cache=i.kv_cache[..., :576]
    ),
    "kv_cache must have rows at multiples of 16 bytes, found a row stride of 664": (
        lambda i: replace(
            i, kv_cache=torch.nn.functional.pad(i.kv_cache, (0, 8))[..., :ROW_BYTES]
        )
    ),
    "slots must be torch.int32, found torch.int64": lambda i: replace(
        i, slots=i.slots.long()
    ),
}


@pytest.mark.parametrize("message", WRONG_ARGUMENTS)
def test_a_wrong_argument_is_named(message: str, device: str) -> None:
    inputs = in_fp8(Case("wrong").build(device))
    with pytest.raises(ValueError) as error:
        run(WRONG_ARGUMENTS[message](inputs))
    assert str(error.value) == message
