# SPDX-License-Identifier: Apache-2.0
"""The indexer's logits against their definition, and the test against itself."""

from collections.abc import Callable
from dataclasses import replace

import mqa_reference as reference
import pytest
import torch
from compare import MismatchError
from mqa_cases import DECODE, NAN_BYTE, PREFILL, Decode, Prefill
from mqa_compare import check_logits, topk_overlap
from ops import triton_mqa_logits as mqa

Arguments = dict[str, object]


@pytest.fixture(params=[False, True], ids=["integers", "float8"])
def on_both_kinds_of_chip(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Chips without float8 decode it themselves; on a GPU, what it has is tested."""
    capability = (9, 0) if request.param else (8, 6)
    if device == "cpu":
        monkeypatch.setattr(mqa, "_capability", lambda _: capability)
    elif request.param != mqa.has_float8(torch.cuda.get_device_capability()):
        if request.param:
            pytest.skip("this GPU has no float8")
        monkeypatch.setattr(mqa, "has_float8", lambda _: False)


@pytest.mark.usefixtures("on_both_kinds_of_chip")
@pytest.mark.parametrize("case", PREFILL, ids=lambda case: case.name)
def test_prefill_agrees_with_the_reference(case: Prefill, device: str) -> None:
    arguments = case.build(device)
    logits = mqa.mqa_logits(**arguments, clean=True)
    expected = reference.mqa_logits(**arguments)
    assert logits.dtype == torch.float32
    check_logits(case.name, logits, expected)


@pytest.mark.usefixtures("on_both_kinds_of_chip")
@pytest.mark.parametrize("case", DECODE, ids=lambda case: case.name)
def test_decode_agrees_with_the_reference(case: Decode, device: str) -> None:
    arguments = case.build(device)
    logits = mqa.paged_mqa_logits(**arguments, clean=True)
    expected = reference.paged_mqa_logits(**arguments)
    assert list(logits.shape) == [len(case.lens) * case.next_n, case.max_len]
    check_logits(case.name, logits, expected)


def test_all_values_of_e4m3_are_exact(device: str) -> None:
    """Each of the 254 numbers as a key, against a query that copies it out."""
    bits = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    bits = bits[(bits & NAN_BYTE) != NAN_BYTE]
    values = bits.view(torch.float8_e4m3fn)
    k = torch.zeros(254, 128).to(torch.float8_e4m3fn)
    k.view(torch.uint8)[:, 5] = bits
    q = torch.zeros(1, 32, 128)
    q[0, 0, 5], q[0, 1, 5] = 1.0, -1.0
    weights = torch.zeros(1, 32)
    weights[0, 0], weights[0, 1] = 1.0, -1.0  # relu(x) - relu(-x) = x
    logits = mqa.mqa_logits(
        q.to(torch.float8_e4m3fn).to(device),
        k.to(device),
        torch.ones(254, device=device),
        weights.to(device),
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.full((1,), 254, dtype=torch.int32, device=device),
    )
    assert torch.equal(logits[0].cpu(), values.float())


@pytest.mark.parametrize("clean", [False, True])
def test_columns_that_are_no_keys_are_not_written(
    clean: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by one element, and not in the space between two rows either."""
    made: list[torch.Tensor] = []

    def poisoned(rows: int, columns: int, where: torch.device, _: bool) -> torch.Tensor:
        made.append(torch.full((rows, columns + 20), 12345.0, device=where))
        return made[-1][:, :columns]

    monkeypatch.setattr(mqa, "_empty_logits", poisoned)
    prefill = PREFILL[2].build(device)
    decode = next(c for c in DECODE if c.name == "next-2-short").build(device)
    for logits, expected in (
        (mqa.mqa_logits(**prefill, clean=clean), reference.mqa_logits(**prefill)),
        (
            mqa.paged_mqa_logits(**decode, clean=clean),
            reference.paged_mqa_logits(**decode),
        ),
    ):
        is_key = expected > -torch.inf
        assert is_key.any()
        assert not is_key.all()
        assert (logits.cpu()[~is_key] == 12345.0).all()
        assert (made[-1][:, logits.shape[1] :] == 12345.0).all()
        assert not (logits.cpu()[is_key] == 12345.0).any()


def test_ranges_that_are_empty_reversed_or_too_wide(device: str) -> None:
    arguments = Prefill("ranges", requests=((80, 6),)).build(device)
    num_keys = arguments["k"].shape[0]
    arguments["k"].view(torch.uint8)[-7:] = 0  # no poison: ranges may go there
    arguments["k_scale"][-7:] = 1.0
    for name, values in (
        ("starts", (0, 50, 60, -5, num_keys, 2**31 - 1)),
        ("ends", (0, 50, 40, 2**31 - 1, num_keys + 5, -1)),
    ):
        arguments[name] = torch.tensor(values, dtype=torch.int32, device=device)
    logits = mqa.mqa_logits(**arguments, clean=True)
    assert (logits[[0, 1, 2, 4, 5]] == -torch.inf).all()
    check_logits("too wide", logits, reference.mqa_logits(**arguments))


def test_a_block_outside_of_the_cache_is_never_picked(device: str) -> None:
    arguments = Decode("no block", lens=(200,)).build(device)
    num_blocks = arguments["kv_cache"].shape[0]
    for wrong in (-1, -(2**31), num_blocks, 2**31 - 1):
        arguments["block_table"][0, 1] = wrong
        logits = mqa.paged_mqa_logits(**arguments)
        assert (logits[0, 64:128] == -torch.inf).all()
        assert torch.isfinite(logits[0, :64]).all()
        assert torch.isfinite(logits[0, 128:200]).all()


def test_cache_beyond_two_to_the_31_bytes(device: str) -> None:
    """Blocks on both sides of the 2**31st byte; only those pages are touched."""
    arguments = Decode("far", lens=(200,)).build(device)
    near = arguments["kv_cache"]
    num_blocks = 2**31 // (64 * 132) + 9
    far = torch.empty((num_blocks, 64, 1, 132), dtype=torch.uint8, device=device)
    blocks = torch.tensor([0, num_blocks - 1, num_blocks // 2, num_blocks - 2])
    used = arguments["block_table"][0, :4].long()
    far[blocks.to(device)] = near[used]
    expected = reference.paged_mqa_logits(**arguments)
    arguments["kv_cache"] = far
    arguments["block_table"][0, :4] = blocks.int()
    logits = mqa.paged_mqa_logits(**arguments, clean=True)
    check_logits("far", logits, expected)


def test_inputs_are_addressed_by_strides(device: str) -> None:
    prefill = PREFILL[1].build(device)
    expected = reference.mqa_logits(**prefill)
    for name in ("q", "k", "weights"):
        tensor = prefill[name]
        wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 32, device=device)
        wide = torch.full_like(wide, torch.nan).to(tensor.dtype)
        wide[..., : tensor.shape[-1]] = tensor
        prefill[name] = wide[..., : tensor.shape[-1]]
    logits = mqa.mqa_logits(**prefill, clean=True)
    check_logits("strides", logits, expected)


def test_a_row_depends_on_nothing_but_itself(device: str) -> None:
    """Bit for bit, whatever requests share the batch."""
    arguments = Decode("batch", lens=(90, 200, 30)).build(device)
    together = mqa.paged_mqa_logits(**arguments)
    for b, length in enumerate((90, 200, 30)):
        alone = dict(arguments)
        for name in ("q", "weights", "context_lens", "block_table"):
            alone[name] = arguments[name][b : b + 1]
        logits = mqa.paged_mqa_logits(**alone)
        assert torch.equal(logits[0, :length], together[b, :length])


def test_top_k_is_that_of_the_reference(device: str) -> None:
    """A share of 0.999 of the picks, and every pick that is not a near tie."""
    prefill = Prefill("top-k", requests=((1000, 6),), seed=3).build(device)
    decode = Decode("top-k", lens=(900, 1024), max_len=1024, seed=4).build(device)
    for logits, expected in (
        (mqa.mqa_logits(**prefill, clean=True), reference.mqa_logits(**prefill)),
        (
            mqa.paged_mqa_logits(**decode, clean=True),
            reference.paged_mqa_logits(**decode),
        ),
    ):
        share, wrong = topk_overlap(logits, expected, 256)
        assert share >= 0.999
        assert wrong == 0


def test_weights_in_sixteen_bits_would_be_seen(device: str) -> None:
    """Why they stay float32: the comparison has to notice."""
    arguments = Prefill("bf16", requests=((1000, 6),), seed=3).build(device)
    expected = reference.mqa_logits(**arguments)
    arguments["weights"] = arguments["weights"].bfloat16().float()
    logits = mqa.mqa_logits(**arguments, clean=True)
    with pytest.raises(MismatchError, match="relative"):
        check_logits("bf16", logits, expected)


# Each takes good arguments of both kernels and makes the mistake of a wrong one.
MISTAKES: dict[str, Callable[[Arguments], Arguments]] = {
    "heads-shifted": lambda a: {**a, "q": a["q"].roll(1, dims=-2)},
    "weights-shifted": lambda a: {**a, "weights": a["weights"].roll(1, dims=0)},
    "no-weights": lambda a: {**a, "weights": torch.ones_like(a["weights"])},
    "one-head-missing": lambda a: {
        **a,
        "weights": torch.cat([a["weights"][:, :-1], 0 * a["weights"][:, -1:]], dim=1),
    },
    "queries-shifted": lambda a: {**a, "q": a["q"].roll(1, dims=0)},
}
PREFILL_MISTAKES = {
    **MISTAKES,
    "keys-shifted": lambda a: {**a, "k": a["k"].roll(1, dims=0)},
    "scales-shifted": lambda a: {**a, "k_scale": a["k_scale"].roll(1, dims=0)},
    "one-key-missed": lambda a: {**a, "ends": a["ends"] - 1},
    "one-key-too-many": lambda a: {**a, "ends": a["ends"] + 1},
    "starts-ignored": lambda a: {**a, "starts": 0 * a["starts"]},
}
DECODE_MISTAKES = {
    **MISTAKES,
    "wrong-block": lambda a: {**a, "block_table": a["block_table"].roll(1, dims=0)},
    "one-key-missed": lambda a: {**a, "context_lens": a["context_lens"] - 1},
    "one-key-too-many": lambda a: {**a, "context_lens": a["context_lens"] + 1},
    "scales-beside-keys": lambda a: {
        **a,
        "kv_cache": a["kv_cache"].flatten(1).roll(-4, dims=1).view_as(a["kv_cache"]),
    },
}


@pytest.mark.parametrize("mistake", PREFILL_MISTAKES)
def test_the_comparison_sees_a_wrong_prefill(mistake: str, device: str) -> None:
    arguments = Prefill(mistake, requests=((20, 4), (50, 3))).build(device)
    expected = reference.mqa_logits(**arguments)
    logits = mqa.mqa_logits(**PREFILL_MISTAKES[mistake](arguments), clean=True)
    with pytest.raises(MismatchError):
        check_logits(mistake, logits, expected)


@pytest.mark.parametrize("mistake", DECODE_MISTAKES)
def test_the_comparison_sees_a_wrong_decode(mistake: str, device: str) -> None:
    arguments = Decode(mistake, lens=(100, 90), next_n=2, shape="Bn").build(device)
    expected = reference.paged_mqa_logits(**arguments)
    logits = mqa.paged_mqa_logits(**DECODE_MISTAKES[mistake](arguments), clean=True)
    with pytest.raises(MismatchError):
        check_logits(mistake, logits, expected)


def test_nothing_to_do(device: str) -> None:
    prefill = PREFILL[0].build(device)
    no_queries = {n: prefill[n][:0] for n in ("q", "weights", "starts", "ends")}
    assert list(mqa.mqa_logits(**{**prefill, **no_queries}).shape) == [0, 8]
    no_keys = {n: prefill[n][:0] for n in ("k", "k_scale")}
    assert list(mqa.mqa_logits(**{**prefill, **no_keys}).shape) == [1, 0]
    decode = DECODE[1].build(device)
    nobody = {n: decode[n][:0] for n in ("q", "weights", "context_lens", "block_table")}
    assert list(mqa.paged_mqa_logits(**{**decode, **nobody}).shape) == [0, 300]
    no_pages = {**decode, "block_table": decode["block_table"][:, :0]}
    logits = mqa.paged_mqa_logits(**no_pages, clean=True)
    assert (logits == -torch.inf).all()


def test_rows_start_on_boundaries_of_a_kilobyte(device: str) -> None:
    for logits in (
        mqa.mqa_logits(**PREFILL[2].build(device)),
        mqa.paged_mqa_logits(**DECODE[2].build(device)),
    ):
        assert logits.stride(0) * 4 % 1024 == 0
        assert logits.stride(1) == 1


WRONG_PREFILL = {
    "q must be [M, H, 128], found [5, 32, 64]": {"q": lambda t: t[..., :64]},
    "q must have 32 or 64 heads, found 31": {"q": lambda t: t[:, 1:]},
    "q must be torch.float8_e4m3fn, found torch.float32": {"q": torch.Tensor.float},
    "k must be [52, 128], found [52, 64]": {"k": lambda t: t[:, :64]},
    "k_scale must be [52], found [51]": {"k_scale": lambda t: t[1:]},
    "weights must be torch.float32, found torch.bfloat16": {
        "weights": torch.Tensor.bfloat16
    },
    "starts must be torch.int32, found torch.int64": {"starts": torch.Tensor.long},
    "ends must be [5], found [4]": {"ends": lambda t: t[1:]},
}


@pytest.mark.parametrize("message", WRONG_PREFILL)
def test_a_wrong_prefill_argument_is_named(message: str, device: str) -> None:
    arguments = Prefill("wrong").build(device)
    for name, change in WRONG_PREFILL[message].items():
        arguments[name] = change(arguments[name])
    with pytest.raises(ValueError) as error:
        mqa.mqa_logits(**arguments)
    assert str(error.value) == message


WRONG_DECODE = {
    "q must be [B, next_n, H, 128], found [2, 32, 128]": {"q": lambda t: t[:, 0]},
    "kv_cache must be [num_blocks, 64, 1, 132], found [6, 64, 132]": {
        "kv_cache": lambda t: t.squeeze(2)
    },
    "kv_cache must be torch.uint8, found torch.int8": {
        "kv_cache": lambda t: t.view(torch.int8)
    },
    "kv_cache must have 132 bytes a token and blocks a multiple of 16 bytes apart, "
    "found strides [8449, 132, 132, 1]": {
        "kv_cache": lambda t: t.new_empty(6 * 8449).as_strided(
            (6, 64, 1, 132), (8449, 132, 132, 1)
        )
    },
    "weights must be [2, 32], found [1, 32]": {"weights": lambda t: t[1:]},
    "context_lens must be [2], [2, 1] or [2, 1], found [2, 3]": {
        "context_lens": lambda t: t.view(2, 1).repeat(1, 3)
    },
    "block_table must be torch.int32, found torch.int64": {
        "block_table": torch.Tensor.long
    },
}


@pytest.mark.parametrize("message", WRONG_DECODE)
def test_a_wrong_decode_argument_is_named(message: str, device: str) -> None:
    arguments = Decode("wrong", lens=(100, 50)).build(device)
    for name, change in WRONG_DECODE[message].items():
        arguments[name] = change(arguments[name])
    with pytest.raises(ValueError) as error:
        mqa.paged_mqa_logits(**arguments)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "capability",
    [(8, 0), (8, 6), (8, 9), (9, 0), (12, 0), (12, 1), (13, 0)],
    ids=lambda c: f"sm{c[0]}{c[1]}",
)
def test_launch_configs_are_pure_and_legal(capability: tuple[int, int]) -> None:
    configs = [mqa.prefill_config(capability)]
    assert configs[0].span % configs[0].block_n == 0
    assert mqa.prefill_config(capability) == configs[0]
    for heads in mqa.HEADS:
        for next_n in range(1, 9):
            config = mqa.decode_config(capability, next_n * heads)
            assert config == mqa.decode_config(capability, next_n * heads)
            configs.append(config)
            assert config.columns % heads == 0
            assert config.columns < 2 * next_n * heads, "more than half is padding"
    for config in configs:
        for size in (config.columns, config.block_n):
            assert size >= 16
            assert size & (size - 1) == 0


def test_poison_is_real(device: str) -> None:
    """The cases do hold NaN where nothing may be read."""
    prefill = PREFILL[0].build(device)
    assert prefill["k"].float().isnan().any()
    decode = replace(DECODE[0], lens=(70,)).build(device)
    block = int(decode["block_table"][0, 1])
    keys, scales = reference.unpack_page(decode["kv_cache"][block])
    assert keys[6:].float().isnan().all()
    assert scales[6:].isnan().all()
    assert scales[:6].isfinite().all()
