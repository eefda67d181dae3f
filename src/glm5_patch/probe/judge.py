# SPDX-License-Identifier: Apache-2.0
"""Decides whether a patched vLLM selects what it should. Pure.

Two rules. Where stock vLLM picks a backend, the patched one picks the same. Where it
picks none, our backend serves, on every GPU that it is written for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from glm5_patch.probe.model import BACKEND, Capability, Case, Ran, Selection

OURS = tuple(Capability(*c) for c in [(8, 0), (8, 6), (8, 9), (12, 0), (12, 1)])
"""GPUs without a sparse MLA backend in some release: what the project is for."""
HOPPER = Capability(9, 0)
BLACKWELL = Capability(10, 0)
"""Served by stock vLLM in bfloat16; here our backend may refuse by its own rule."""

CAPABILITIES = (*OURS, HOPPER, BLACKWELL)
DTYPES = ("float16", "bfloat16")
KV_CACHE_DTYPES = ("auto", "bfloat16", "fp8_ds_mla")
CASES = tuple(Case(*each) for each in product(CAPABILITIES, DTYPES, KV_CACHE_DTYPES))
BLOCK_SIZE_ON = (Capability(12, 0), Capability(8, 0))
BLOCK_SIZE = 64
"""Tokens in a block: the only size that vLLM's indexer takes on CUDA."""

_NONE = "no backend"


@dataclass(frozen=True)
class Violation:
    """One thing that is not as it should be."""

    subject: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.subject}: expected {self.expected}, found {self.found}"


def judge_imports(patched: Ran) -> tuple[Violation, ...]:
    """Our modules import, and the registry knows our backend."""
    broken = [
        Violation(module.name, "imports", module.error)
        for module in patched.modules
        if module.error is not None
    ]
    if BACKEND not in patched.members:
        missing = f"no member {BACKEND}"
        broken.append(Violation("AttentionBackendEnum", BACKEND, missing))
    return tuple(broken)


def judge_selection(stock: Ran, patched: Ran) -> tuple[Violation, ...]:
    """Every case and block size that the patched vLLM gets wrong.

    Both answers must be to the same cases.
    """
    before = {selection.case: selection for selection in stock.selections}
    if set(before) != {selection.case for selection in patched.selections}:
        raise ValueError("the two answers are not to the same cases")
    judged = [
        _judge_case(before[selection.case], selection, patched)
        for selection in patched.selections
    ]
    return tuple(each for each in judged if each) + _judge_block_sizes(patched)


def _judge_case(stock: Selection, found: Selection, patched: Ran) -> Violation | None:
    if stock.crashed:
        wanted = "an answer from stock vLLM to compare with"
        return Violation(str(stock.case), wanted, stock.error or "none")
    if found.crashed:
        wanted = _expected(stock, found) or _NONE
        return Violation(str(found.case), wanted, found.error or "no answer")
    expected = _expected(stock, found)
    if found.selected == expected:
        return None
    return Violation(
        str(found.case), expected or _NONE, _describe(found, patched.import_errors)
    )


def _expected(stock: Selection, found: Selection) -> str | None:
    if stock.selected is not None:
        return stock.selected
    if found.case.capability.major == BLACKWELL.major and found.reasons.get(BACKEND):
        return None
    return BACKEND


def _describe(found: Selection, import_errors: Mapping[str, str]) -> str:
    if found.selected is not None:
        return found.selected
    if BACKEND not in found.reasons:
        return f"{_NONE}: {BACKEND} is not in the list of priorities"
    why = list(found.reasons[BACKEND])
    if BACKEND in import_errors:
        why.append(import_errors[BACKEND])
    return f"{_NONE}: {BACKEND} refuses: {', '.join(why)}"


def _judge_block_sizes(patched: Ran) -> tuple[Violation, ...]:
    return tuple(
        Violation(
            f"block size on {size.capability} with {size.requested or 'auto'}",
            f"{BLOCK_SIZE} tokens",
            size.error or f"{size.tokens} tokens",
        )
        for size in patched.block_sizes
        if size.tokens != BLOCK_SIZE
    )
