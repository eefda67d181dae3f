# SPDX-License-Identifier: Apache-2.0
"""The JSON between the two processes; what comes back is checked, not trusted."""

from __future__ import annotations

import json
from typing import Any

from glm5_patch.bench.model import Answer, Chip, Ran, Request, Row, Shape
from glm5_patch.child.process import Failed, NotRun

_BOUND = 10**18


def encode(request: Request) -> str:
    """The request as ``child.answer`` reads it, in another working directory."""
    return json.dumps(
        {
            "root": str(request.root.absolute()),
            "shapes": request.shapes,
            "repeats": request.repeats,
        }
    )


def decode(request: Request, text: str) -> Answer:
    """The answer that ``child.answer`` wrote to ``request``.

    Raises ValueError, KeyError or TypeError if it is none, or if it does not have
    exactly one row for each shape, each with a time or a fault.
    """
    document = json.loads(text)
    state = document["state"]
    if state == "not run":
        return NotRun(_text(document["reason"]))
    if state == "failed":
        return Failed(
            " ".join(str(document["reason"]).split()),
            tuple(map(str, document["detail"])),
        )
    rows = tuple(_row(each, request.repeats > 0) for each in document["rows"])
    if tuple(row.shape for row in rows) != request.shapes:
        raise ValueError("the rows are not those that were asked for")
    return Ran(_chip(document["chip"]), rows)


def _chip(document: dict[str, Any]) -> Chip:
    return Chip(
        name=_text(document["name"]),
        capability=_text(document["capability"]),
        processors=_count(document["processors"]),
        memory_bytes=_count(document["memory_bytes"]),
        l2_bytes=_count(document["l2_bytes"]),
        python=_text(document["python"]),
        torch=_text(document["torch"]),
        triton=_text(document["triton"]),
        cuda=_text(document["cuda"]),
        pool_blocks=_count(document["pool_blocks"]),
    )


def _row(document: dict[str, Any], timed: bool) -> Row:
    kernel, dtype, *sizes = document["shape"]
    tokens, keys, heads = map(_count, sizes)
    row = Row(
        shape=Shape(_text(kernel), _text(dtype), tokens, keys, heads),
        launch=_text(document["launch"]),
        bytes=_count(document["bytes"]),
        flop=_count(document["flop"]),
        error=_number(document["error"]),
        us=_number(document["us"]),
        read_us=_number(document["read_us"]),
        fault=None if document["fault"] is None else _text(document["fault"]),
    )
    if row.fault is None and (
        row.error is None or row.error > 1.0 or (timed and not row.us)
    ):
        raise ValueError(f"neither right nor at fault: {row}")
    return row


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise TypeError(f"expected one line of text, found {value!r}")
    return value


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < _BOUND:
        raise TypeError(f"expected a count, found {value!r}")
    return value


def _number(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"expected a number, found {value!r}")
    if not 0 <= value < _BOUND:  # NaN is not, either
        raise ValueError(f"expected 0 to {_BOUND}, found {value!r}")
    return float(value)
