# SPDX-License-Identifier: Apache-2.0
"""The answer as a table that a user can send back."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from glm5_patch.bench.model import KERNELS, Chip, Ran, Row
from glm5_patch.report import Table

_HEADS = (
    *("kernel", "dtype", "tokens", "heads", "keys", "error / allowed"),
    *("us", "rate", "read us", "us / read", "launch"),
)
_NONE = "-"


def notes(chip: Chip) -> tuple[str, ...]:
    """The lines that say on what it ran."""
    lines = [
        f"{chip.name}, compute capability {chip.capability}, {chip.processors} "
        f"multiprocessors, {chip.memory_bytes / 1e9:.1f} GB, L2 "
        f"{chip.l2_bytes / 1e6:.0f} MB",
        f"Python {chip.python}, torch {chip.torch}, triton {chip.triton}, "
        f"CUDA {chip.cuda}",
    ]
    if chip.pool_blocks:
        lines.append(
            f"attention reads from a cache of {64 * chip.pool_blocks} tokens, that of "
            "2048 tokens from 32768 of it; 'read' is the same rows and nothing else"
        )
    return tuple(lines)


def table(answer: Ran) -> Table:
    """A line for each shape; times in microseconds."""
    return Table(_HEADS, tuple(map(_cells, answer.rows)))


def data(answer: Ran) -> dict[str, Any]:
    """The answer for ``--json``."""
    rows = [
        {**asdict(row), "shape": row.shape._asdict(), "gb_s": _gb_s(row)}
        for row in answer.rows
    ]
    return {"chip": asdict(answer.chip), "rows": rows}


def faults(answer: Ran) -> tuple[str, ...]:
    """A sentence for each shape that is wrong, or did not run."""
    return tuple(f"{row.shape}: {row.fault}" for row in answer.rows if row.fault)


def _cells(row: Row) -> tuple[str, ...]:
    shape = row.shape
    ratio = row.us / row.read_us if row.us and row.read_us else None
    return (
        KERNELS[shape.kernel],
        shape.dtype,
        str(shape.tokens),
        str(shape.heads),
        str(shape.keys),
        _fixed(row.error, 2),
        _fixed(row.us, 1),
        _rate(row),
        _fixed(row.read_us, 1),
        _fixed(ratio, 2),
        row.fault or row.launch,
    )


def _rate(row: Row) -> str:
    if row.us and row.flop:
        return f"{row.flop / row.us / 1e6:.0f} TFLOP/s"
    rate = _gb_s(row)
    return _NONE if rate is None else f"{rate:.0f} GB/s"


def _gb_s(row: Row) -> float | None:
    return row.bytes / row.us / 1e3 if row.us and row.bytes else None


def _fixed(value: float | None, digits: int) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"
