# SPDX-License-Identifier: Apache-2.0
"""Which backend each GPU, dtype and KV dtype gets, before the patch and after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from glm5_patch.child.process import Failed, NotRun
from glm5_patch.probe.model import (
    Answer,
    Capability,
    Case,
    Ran,
    Request,
    Selection,
)
from glm5_patch.probe.run import run_probes

Overlay = Mapping[str, Path | None]


@dataclass(frozen=True)
class Row:
    """One case in both states."""

    case: Case
    before: Selection
    after: Selection


@dataclass(frozen=True)
class Explanation:
    """The whole table, and what vLLM leaves out of it."""

    version: str
    rows: tuple[Row, ...]
    import_errors: Mapping[str, str]
    """The text behind each reason "ImportError", by backend; after the patch."""


def explain(
    python: Path,
    root: Path,
    before: Overlay,
    after: Overlay,
    capabilities: Sequence[Capability],
    dtypes: Sequence[str],
    kv_cache_dtypes: Sequence[str],
    timeout_s: float,
) -> Explanation | NotRun | Failed:
    """Ask in both states. ``before`` and ``after`` are overlays on what is at root."""
    cases = tuple(Case(*c) for c in product(capabilities, dtypes, kv_cache_dtypes))
    return compare(
        *ask_both(
            python,
            Request(root, before, cases=cases),
            Request(root, after, cases=cases),
            timeout_s,
        )
    )


def ask_both(
    python: Path, before: Request, after: Request, timeout_s: float
) -> tuple[Answer, Answer]:
    """Both states at once, each in a process of its own."""
    first, second = run_probes(python, (before, after), timeout_s)
    return first, second


def compare(before: Answer, after: Answer) -> Explanation | NotRun | Failed:
    """Rows in the order asked; the first state that has no answer speaks for both."""
    if not isinstance(before, Ran):
        return before
    if not isinstance(after, Ran):
        return after
    rows = zip(before.selections, after.selections, strict=True)
    return Explanation(
        version=after.version,
        rows=tuple(Row(old.case, old, new) for old, new in rows),
        import_errors={**before.import_errors, **after.import_errors},
    )
