# SPDX-License-Identifier: Apache-2.0
"""The kernel that writes the indexer's keys, byte for byte against its definition."""

import pytest
import torch
from cases import PAGE
from ops.triton_indexer_keys import HEAD_DIM, write_index_keys

ROW = HEAD_DIM + 4
BLOCKS = 3

both_dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def definition(
    keys: torch.Tensor, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `[T, 128]` and scales `[T]`: the largest of a key becomes 448 or less."""
    scales = keys.float().abs().amax(dim=1).clamp(min=1e-4) / 448
    if power_of_two:
        mantissa, exponent = torch.frexp(scales)  # 0.5 <= mantissa < 1
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scales = torch.ldexp(torch.ones_like(scales), exponent)
    codes = (keys.float() / scales[:, None]).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scales


def as_vllm_takes_float16(keys: torch.Tensor) -> torch.Tensor:
    """Scales `[T]` of an operator that takes the bits for integers: the control."""
    bits = keys.view(torch.int16).to(torch.int32) & 0xFFFF
    return bits.amax(dim=1).float() / 448


def draw(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of many sizes, and slots of which some are padding."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-5, 4, 100)[:, None]
    keys = (torch.randn(100, HEAD_DIM, generator=generator) * sizes).to(dtype)
    keys[3] = 0.0
    keys[4] = 448 * 2.0**-6  # a scale that is a power of two already
    slots = torch.randperm(BLOCKS * PAGE, generator=generator)[:97]
    slots[10:13] = -1
    return keys, slots


@pytest.mark.parametrize("power_of_two", [True, False], ids=["ue8m0", "float32"])
@both_dtypes
def test_keys_are_those_of_the_definition(
    dtype: torch.dtype, power_of_two: bool, device: str
) -> None:
    keys, slots = draw(dtype)
    # A pool of which each block is the first of two.
    pool = torch.full((BLOCKS, 2, PAGE, ROW), 0xEE, dtype=torch.uint8, device=device)
    write_index_keys(keys.to(device), pool[:, 0], slots.to(device), power_of_two)
    codes, scales = definition(keys[:97], power_of_two)
    expected = torch.full((BLOCKS, 2, PAGE * ROW), 0xEE, dtype=torch.uint8)
    for code, scale, slot in zip(codes, scales, slots.tolist(), strict=True):
        if slot >= 0:
            page = expected[slot // PAGE, 0]
            page[: PAGE * HEAD_DIM].view(PAGE, HEAD_DIM)[slot % PAGE] = code
            page[PAGE * HEAD_DIM :].view(torch.float32)[slot % PAGE] = scale
    assert torch.equal(pool.cpu().view(BLOCKS, 2, -1), expected)


def test_float16_bits_taken_for_integers_lose_the_key() -> None:
    """Control: what vLLM's operator makes of float16 is no rounding difference."""
    keys, _ = draw(torch.float16)
    keys = keys[20:60]  # ordinary sizes
    _, right = definition(keys, power_of_two=False)
    wrong = as_vllm_takes_float16(keys)
    assert (wrong / right).min() > 50

    def lost(scales: torch.Tensor) -> float:
        codes = (keys.float() / scales[:, None]).to(torch.float8_e4m3fn)
        restored = codes.float() * scales[:, None]
        return float((restored - keys.float()).norm() / keys.float().norm())

    assert lost(right) < 0.03
    assert lost(wrong) > 0.03


def test_a_wrong_argument_is_named(device: str) -> None:
    keys = torch.zeros(2, HEAD_DIM, dtype=torch.float16, device=device)
    cache = torch.zeros(1, PAGE, ROW, dtype=torch.uint8, device=device)
    slots = torch.arange(3, device=device)
    with pytest.raises(ValueError, match=r"keys must be \[3 or more, 128\]"):
        write_index_keys(keys, cache, slots, True)
    with pytest.raises(ValueError, match=r"kv_cache must be .*found \[1, 64, 131\]"):
        write_index_keys(keys, cache[..., :-1], slots[:2], True)
    with pytest.raises(ValueError, match=r"kv_cache must be .*torch.float16"):
        write_index_keys(keys, cache.half(), slots[:2], True)
