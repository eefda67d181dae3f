# SPDX-License-Identifier: Apache-2.0
"""The kernel that writes fp8_ds_mla rows, byte for byte against its definition."""

import pytest
import reference
import torch
from cases import PAGE
from ops.triton_sparse_mla_fp8 import ROW_BYTES
from ops.triton_sparse_rows_fp8 import write_rows_fp8

both_dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def write(
    latents: torch.Tensor, rope: torch.Tensor, slots: torch.Tensor, device: str
) -> torch.Tensor:
    """`[3 * PAGE, 656]`, 0xEE where nothing was written."""
    cache = torch.full((3, PAGE, ROW_BYTES), 0xEE, dtype=torch.uint8, device=device)
    write_rows_fp8(latents.to(device), rope.to(device), cache, slots.to(device))
    return cache.cpu().view(-1, ROW_BYTES)


@both_dtypes
def test_rows_are_those_of_the_reference(dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-6, 4, 100)[:, None]
    latents = (torch.randn(100, 512, generator=generator) * sizes).to(dtype)
    latents[3] = 0.0
    latents[4, 128:256] = 0.0
    latents[5, 7] = -0.0
    rope = torch.randn(100, 64, generator=generator).to(dtype)
    slots = torch.randperm(3 * PAGE, generator=generator)[:100]
    slots[10:13] = -1
    written = write(latents, rope, slots, device)
    expected = torch.full_like(written, 0xEE)
    named = slots >= 0
    rows = torch.cat([latents, rope], dim=1)
    expected[slots[named]] = reference.encode_fp8(rows, dtype)[named]
    assert torch.equal(written, expected)


def test_every_float16_is_rounded_as_torch_rounds_it(device: str) -> None:
    """With 448 in each group the scale is 1, and the codes are those of the latents."""
    bits = torch.arange(0x6000, dtype=torch.int16)  # 0 to 512, of which 448 is the end
    latents = bits.view(torch.float16)
    latents = torch.cat([latents[latents <= 448], -latents[latents <= 448]])
    latents = torch.nn.functional.pad(latents, (0, -len(latents) % 127))
    latents = torch.nn.functional.pad(latents.view(-1, 127), (0, 1), value=448.0)
    rows = -len(latents) % 4
    latents = torch.nn.functional.pad(latents, (0, 0, 0, rows)).view(-1, 512)
    for piece in latents.split(3 * PAGE):
        slots = torch.arange(len(piece))
        written = write(piece, torch.zeros(len(piece), 64).half(), slots, device)
        codes = written[: len(piece), :512].unflatten(1, (4, 128))
        full = piece.unflatten(1, (4, 128))[..., -1] == 448
        expected = piece.to(torch.float8_e4m3fn).view(torch.uint8)
        expected = expected.unflatten(1, (4, 128))
        assert torch.equal(codes[full], expected[full])


def test_nan_stays_nan(device: str) -> None:
    latents = torch.ones(1, 512).half()
    latents[0, 130] = torch.nan
    written = write(latents, torch.zeros(1, 64).half(), torch.tensor([5]), device)
    assert torch.isnan(reference.decode_fp8(written[5], torch.float16)[130])


def test_strides_and_longer_inputs(device: str) -> None:
    """A slice of a wider projection, more rows than slots, and a pool of layers."""
    wide = torch.randn(9, 640, generator=torch.Generator().manual_seed(1)).half()
    pool = torch.full((3, 2, PAGE, 672), 0xEE, dtype=torch.uint8, device=device)
    latents, rope = wide[:, :512].to(device), wide[:, 512:576].to(device)
    slots = torch.tensor([0, PAGE, 3 * PAGE - 1], device=device)
    write_rows_fp8(latents, rope, pool[:, 1, :, :ROW_BYTES], slots)
    expected = torch.full_like(pool, 0xEE).cpu()
    rows = reference.encode_fp8(wide[:3, :576], torch.float16)
    for row, slot in zip(rows, slots.tolist(), strict=True):
        expected[slot // PAGE, 1, slot % PAGE, :ROW_BYTES] = row
    assert torch.equal(pool.cpu(), expected)


def test_a_wrong_argument_is_named(device: str) -> None:
    latents, rope = torch.zeros(2, 512).half(), torch.zeros(2, 64).half()
    with pytest.raises(ValueError, match="latents must have at least 3 rows"):
        write(latents, rope, torch.arange(3), device)
    with pytest.raises(ValueError, match=r"found \[1, 64, 576\] of torch.uint8"):
        write_rows_fp8(
            latents, rope, torch.zeros(1, 64, 576).byte(), torch.zeros(1).long()
        )
