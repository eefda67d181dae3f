# SPDX-License-Identifier: Apache-2.0
"""How far a kernel may be from the reference, and the sentence when it is farther.

The error of a row is its root mean square difference over the root mean square
of the expected row. The worst row counts, so that one wrong token of a large
batch cannot hide in the average of the others.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from cases import Inputs

# One 16-bit rounding of the weights and one of the output; the rest is float32.
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 4e-3}
# Triton's interpreter cuts bfloat16 off where a GPU rounds, which costs a bias.
TOLERANCE_INTERPRETED = {torch.float16: 1e-3, torch.bfloat16: 1e-2}
# Float32 scores of size s carry errors of about s * 2**-22, and one score of many
# terms that cancel a little more: 3.2e-6 was measured on an H200.
LSE_TOLERANCE = 5e-6


class MismatchError(AssertionError):
    """A kernel's result is not the reference's."""


def worst_row(actual: torch.Tensor, expected: torch.Tensor) -> tuple[float, int]:
    """Largest relative RMS error over the rows (last dimension), and its row.

    A row that is expected to be 0 must be exactly 0, and counts as error inf
    when it is not; so does a row with NaN or infinity in it.
    """
    a = actual.double().cpu().flatten(end_dim=-2)
    e = expected.double().cpu().flatten(end_dim=-2)
    difference = (a - e).square().mean(dim=1).sqrt()
    size = e.square().mean(dim=1).sqrt()
    error = torch.where(size > 0, difference / size, difference * torch.inf)
    error = torch.where(difference == 0, 0.0, error).nan_to_num(
        nan=torch.inf, posinf=torch.inf
    )
    row = int(error.argmax())
    return float(error[row]), row


def check_out(name: str, actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Raise MismatchError unless every row of the output is near the reference."""
    if actual.shape != expected.shape:
        raise MismatchError(
            f"{name}: expected shape {list(expected.shape)}, found {list(actual.shape)}"
        )
    error, row = worst_row(actual, expected)
    on_gpu = actual.device.type == "cuda"
    limit = (TOLERANCE if on_gpu else TOLERANCE_INTERPRETED)[actual.dtype]
    if not error <= limit:
        token, head = divmod(row, actual.shape[1])
        raise MismatchError(
            f"{name}: relative RMS error {error:.2e} at token {token}, head {head}; "
            f"{actual.dtype} may have {limit:.0e}"
        )
    return error


def check_lse(name: str, actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Raise MismatchError unless every LSE is near, and -inf exactly where due."""
    a, e = actual.double().cpu(), expected.double().cpu()
    same = a == e  # -inf - -inf would be NaN
    error = torch.where(same, 0.0, (a - e).abs() / e.abs().clamp(min=1.0))
    worst = float(error.nan_to_num(nan=torch.inf, posinf=torch.inf).max())
    if not worst <= LSE_TOLERANCE:
        raise MismatchError(
            f"{name}: LSE error {worst:.2e} relative to max(1, |LSE|), may have "
            f"{LSE_TOLERANCE:.0e}"
        )
    return worst


def merge_shards(
    run: Callable[[Inputs], tuple[torch.Tensor, torch.Tensor]],
    inputs: Inputs,
    shards: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of ranks with every `shards`-th key each, merged by their LSE."""
    parts = []
    for rank in range(shards):
        slots = torch.full_like(inputs.slots, -1)
        slots[:, rank::shards] = inputs.slots[:, rank::shards]
        parts.append(run(replace(inputs, slots=slots)))
    lse = torch.logsumexp(torch.stack([part[1].double() for part in parts]), dim=0)
    whole = sum(
        part.double() * torch.exp(part_lse.double() - lse)[..., None]
        for part, part_lse in parts
    )
    return whole.to(inputs.q.dtype), lse
