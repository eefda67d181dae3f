# SPDX-License-Identifier: Apache-2.0
"""What `glm5-patch bench` says of right kernels, and of wrong ones."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glm5_patch.bench.child import attention, indexer, kernels, shapes
from glm5_patch.bench.child.gather import gather

FILES = Path(__file__).parents[2] / "patches" / "files"
CAPABILITY = (8, 6)  # what the interpreter pretends to be

# (kernel, dtype, tokens, keys, heads)
SHAPES = [
    ("attention", "float16", 5, 256, 8),
    ("attention", "float16", 1, 256, 17),
    ("attention_fp8", "float16", 5, 256, 8),
    ("decode", "float8", 3, 128, 32),
    ("prefill", "float8", 5, 128, 32),
]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The repository's files stand for an installed vLLM."""
    torch.manual_seed(0)
    kernels.from_installed(FILES)
    monkeypatch.setattr(attention, "PREFILL_BLOCKS", 8)
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: CAPABILITY)
    yield


def row(shape: tuple[Any, ...], device: str) -> dict[str, Any]:
    return shapes._guarded(shapes._Bench(0, 0, device), *shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_right_kernels_are_found_right(shape: tuple[Any, ...], device: str) -> None:
    found = row(shape, device)
    assert found["fault"] is None
    assert 0 < found["error"] <= 1
    assert found["launch"]
    assert (found["us"], found["read_us"]) == (None, None), "nothing was to be timed"


def scaled(result: Any) -> Any:
    if isinstance(result, tuple):
        return result[0] * 1.01, result[1]
    return result * 1.01


def with_a_hole(result: Any) -> Any:
    first = result[0] if isinstance(result, tuple) else result
    first[-1, -1] = torch.nan
    return result


def shifted(result: Any) -> Any:
    if isinstance(result, tuple):
        return result[0].roll(1, dims=-1), result[1]
    return result.roll(1, dims=-1)


@pytest.mark.parametrize(
    ("mistake", "fault"),
    [
        (scaled, "wrong: the error is larger than is allowed"),
        (shifted, "wrong: the error is larger than is allowed"),
        (with_a_hole, "wrong: NaN or infinity, or a token without keys is not 0"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_wrong_kernels_are_found_wrong(
    shape: tuple[Any, ...],
    mistake: Callable[[Any], Any],
    fault: str,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, function in (
        ("triton_sparse_mla", "sparse_mla"),
        ("triton_sparse_mla_fp8", "sparse_mla_fp8"),
        ("triton_mqa_logits", "paged_mqa_logits"),
        ("triton_mqa_logits", "mqa_logits"),
    ):
        module = kernels.kernel_module(name)
        right = getattr(module, function)
        wrong = lambda *a, right=right, **k: mistake(right(*a, **k))  # noqa: E731
        monkeypatch.setattr(module, function, wrong)
    assert row(shape, device)["fault"] == fault


def test_the_lse_and_the_empty_token_are_looked_at(device: str) -> None:
    sparse_mla = kernels.kernel_module("triton_sparse_mla").sparse_mla
    pool = attention.draw_pool(4, torch.float16, device)
    q = attention.draw_queries(3, 8, torch.float16, device)
    slots = attention.draw_slots(1, 3, pool, topk=64)[0]

    def wrong_lse(*arguments: Any) -> Any:
        out, lse = sparse_mla(*arguments)
        return out, lse + 1e-3

    def not_empty(*arguments: Any) -> Any:
        out, lse = sparse_mla(*arguments)
        out[-1] = 1e-3
        return out, lse

    assert attention.check(sparse_mla, q, pool, slots) <= 1
    assert attention.check(wrong_lse, q, pool, slots) > 1
    assert attention.check(not_empty, q, pool, slots) == float("inf")


@pytest.mark.parametrize(
    ("raised", "fault"),
    [
        (torch.OutOfMemoryError("much text"), "out of GPU memory"),
        (ValueError("two\n  lines"), "ValueError: two lines"),
        (RuntimeError("x" * 1000), f"RuntimeError: {'x' * 286}"),
    ],
    ids=["memory", "lines", "long"],
)
def test_one_shape_that_breaks_is_a_row(
    raised: Exception, fault: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any) -> None:
        raise raised

    monkeypatch.setattr(attention, "draw_queries", breaks)
    found = row(SHAPES[0], device)
    assert found["fault"] == fault
    assert found["launch"], "how it would have been launched is worth knowing"


def test_inputs_are_those_of_the_kernels() -> None:
    mqa = kernels.kernel_module("triton_mqa_logits")
    launch = kernels.kernel_module("triton_sparse_launch")
    assert (indexer.DIM, indexer.PAGE) == (mqa.HEAD_DIM, mqa.PAGE)
    assert indexer.ROW_BYTES == mqa.ROW_BYTES
    assert attention.ROW_DIM == launch.ROW_DIM
    fp8 = kernels.kernel_module("triton_sparse_mla_fp8")
    assert attention.FP8_ROW_BYTES == fp8.ROW_BYTES


def test_neighbours_share_what_they_should() -> None:
    pool = attention.draw_pool(8, torch.float16, "cpu")
    slots = attention.draw_slots(1, 32, pool, shared=0.75, topk=64)[0]
    assert (slots[1:16, :48] == slots[0, :48]).all()
    assert (slots[16:, :48] == slots[16, :48]).all()
    assert not (slots[1:16, 48:] == slots[0, 48:]).all(dim=1).any()
    assert not torch.equal(slots[0, :48], slots[16, :48])


@pytest.mark.parametrize("fp8", [False, True], ids=["float16", "fp8"])
def test_the_ceiling_reads_every_row(fp8: bool, device: str) -> None:
    """Its parities are those of the rows: a kernel that reads less would be a lie."""
    pool = attention.draw_pool(4, torch.float16, device, fp8)
    slots = attention.draw_slots(1, 2, pool, topk=256)[0]
    parities = torch.empty(32, dtype=torch.int32, device=device)
    gather(pool, slots, parities)
    words = pool.view(torch.int32).flatten(0, 1)[slots.flatten().long()].cpu().numpy()
    expected = np.bitwise_xor.reduce(words.reshape(32, -1), axis=1)
    assert parities.tolist() == expected.tolist()
    assert len(set(expected.tolist())) == 32
