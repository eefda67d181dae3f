# SPDX-License-Identifier: Apache-2.0
"""How far the indexer's logits may be from the reference."""

import torch
from compare import MismatchError

# Of the largest logit of all: a row of one key may be small by cancellation alone.
# Products of two e4m3 numbers are exact and the
# rest is float32; the float8 units of SM89 and later keep fewer bits of a sum
# (DeepGEMM on an H200: 1.3e-4).
TOLERANCE = 3e-4
TOLERANCE_INTERPRETED = 2e-6


def check_logits(name: str, actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Raise MismatchError unless keys are near and all else is -inf."""
    if actual.shape != expected.shape:
        raise MismatchError(
            f"{name}: expected shape {list(expected.shape)}, found {list(actual.shape)}"
        )
    limit = TOLERANCE if actual.device.type == "cuda" else TOLERANCE_INTERPRETED
    a, e = actual.double().cpu(), expected.double().cpu()
    is_key = e > -torch.inf
    if not (a[~is_key] == -torch.inf).all():
        raise MismatchError(f"{name}: a column that is no key is not -inf")
    if not is_key.any():
        return 0.0
    error = torch.where(is_key, (a - e).abs(), 0.0) / e[is_key].abs().max()
    worst = float(error.nan_to_num(nan=torch.inf).max())
    if not worst <= limit:
        row = int(error.nan_to_num(nan=torch.inf).amax(dim=1).argmax())
        raise MismatchError(
            f"{name}: error {worst:.2e} relative to the largest logit, in row {row}; "
            f"may have {limit:.0e}"
        )
    return worst


def topk_overlap(
    actual: torch.Tensor, expected: torch.Tensor, k: int
) -> tuple[float, int]:
    """Share of the reference's top-k that is picked, and picks no tie excuses.

    A pick is excused when the reference puts it within the tolerance of the k-th.
    """
    on_gpu = actual.device.type == "cuda"
    limit = 2 * (TOLERANCE if on_gpu else TOLERANCE_INTERPRETED)
    a, e = actual.double().cpu(), expected.double().cpu()
    ours, theirs = a.topk(k).indices, e.topk(k)
    picked = torch.zeros_like(e, dtype=torch.bool).scatter(1, ours, True)
    due = torch.zeros_like(picked).scatter(1, theirs.indices, True)
    last = theirs.values[:, -1:]
    size = e.where(e > -torch.inf, 0.0).abs().amax(dim=1, keepdim=True)
    near = (e - last).abs() <= limit * size
    share = (picked & due).sum().item() / due.sum().item()
    return share, int(((picked ^ due) & ~near).sum())
