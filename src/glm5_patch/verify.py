# SPDX-License-Identifier: Apache-2.0
"""Checks of an applied patch, each level deeper than the one before it.

``files``: the bytes are ours, and the originals are there. ``import``: vLLM imports
what was added. ``select``: its selector picks our backend where stock vLLM has none,
and nothing else changes. These two run in the target's own interpreter, without a GPU.
``kernels``: what the kernels compute there agrees with float64, on the GPU that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from glm5_patch import overlay, transaction
from glm5_patch.bench import model as bench
from glm5_patch.bench.report import faults
from glm5_patch.bench.run import run_bench
from glm5_patch.child.process import Failed, NotRun
from glm5_patch.errors import PatchError
from glm5_patch.locate import Installation
from glm5_patch.plan import Plan
from glm5_patch.probe.explain import ask_both
from glm5_patch.probe.judge import (
    BLOCK_SIZE_ON,
    CASES,
    DTYPES,
    judge_imports,
    judge_selection,
)
from glm5_patch.probe.model import Answer, Ran, Request
from glm5_patch.probe.run import run_probe
from glm5_patch.state import Condition, Inspection

TIMEOUT_S = 300.0
"""For one probe: importing vLLM takes 10 to 60 s, by disk and processor."""


class Level(str, Enum):
    """How deep to check."""

    FILES = "files"
    IMPORT = "import"
    SELECT = "select"
    KERNELS = "kernels"


class Outcome(str, Enum):
    """What became of a level."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Result:
    """One level's outcome, and what it found."""

    level: Level
    outcome: Outcome
    details: tuple[str, ...] = ()


def check(
    installation: Installation,
    inspection: Inspection,
    plan: Plan | None,
    deepest: Level,
) -> tuple[Result, ...]:
    """Run every level down to ``deepest``; one that fails stops those below it.

    ``plan`` is what the patch set makes of the stock files; there is none for a tree
    that is not as it was applied.
    """
    results = [_files(installation, inspection)]
    if deepest is Level.FILES:
        return tuple(results)
    if results[0].outcome is not Outcome.PASSED or plan is None:
        return (*results, *_not_run(_below(Level.FILES, deepest), "the files failed"))
    if installation.python is None:
        reason = (
            "no interpreter belongs to this folder; "
            "use --python PATH in place of --site-packages"
        )
        return (*results, *_not_run(_below(Level.FILES, deepest), reason))
    modules = tuple(overlay.module_of(a.path) for a in plan.additions)
    if deepest is Level.IMPORT:
        answer = run_probe(
            installation.python,
            Request(installation.root, modules=modules),
            TIMEOUT_S,
        )
        return (*results, _import(answer))
    results += _import_and_select(installation, installation.python, plan, modules)
    if deepest is not Level.KERNELS:
        return tuple(results)
    above = results[-1]
    if above.outcome is not Outcome.PASSED:
        reason = f"{above.level.value} {above.outcome.value}: {above.details[0]}"
        return (*results, *_not_run([deepest], reason))
    return (*results, _kernels(installation.root, installation.python, plan))


def _import_and_select(
    installation: Installation, python: Path, plan: Plan, modules: tuple[str, ...]
) -> tuple[Result, ...]:
    with overlay.sides(plan) as (stock, _):
        before, after = ask_both(
            python,
            Request(installation.root, stock, cases=CASES),
            Request(
                installation.root,
                modules=modules,
                cases=CASES,
                block_size_on=BLOCK_SIZE_ON,
            ),
            TIMEOUT_S,
        )
    imported = _import(after)
    if imported.outcome is not Outcome.PASSED:
        reason = imported.details[0] if imported.details else "the import failed"
        return (imported, *_not_run([Level.SELECT], reason))
    return (imported, _select(before, after))


def _files(installation: Installation, inspection: Inspection) -> Result:
    if inspection.condition is not Condition.APPLIED:
        details = [f"the patch is {inspection.condition.value}"]
        details += [
            f"{entry.path}: {found.value}"
            for entry, found in inspection.found
            if found.value != "patched"
        ]
        return Result(Level.FILES, Outcome.FAILED, tuple(details))
    try:
        transaction.check_revertible(installation.root, inspection)
    except PatchError as error:
        return Result(Level.FILES, Outcome.FAILED, (f"{error.what}: {error.where}",))
    return Result(
        Level.FILES, Outcome.PASSED, (f"{len(inspection.found)} files as applied",)
    )


def _import(answer: Answer) -> Result:
    if not isinstance(answer, Ran):
        return _unanswered(Level.IMPORT, answer)
    violations = judge_imports(answer)
    if violations:
        return Result(Level.IMPORT, Outcome.FAILED, tuple(map(str, violations)))
    detail = f"{len(answer.modules)} added modules import"
    return Result(Level.IMPORT, Outcome.PASSED, (detail,))


def _select(before: Answer, after: Answer) -> Result:
    for answer in (before, after):
        if not isinstance(answer, Ran):
            return _unanswered(Level.SELECT, answer)
    assert isinstance(before, Ran) and isinstance(after, Ran)
    violations = judge_selection(before, after)
    if violations:
        return Result(Level.SELECT, Outcome.FAILED, tuple(map(str, violations)))
    kept = sum(s.selected is not None for s in before.selections)
    return Result(
        Level.SELECT,
        Outcome.PASSED,
        (f"{len(CASES)} simulated cases; {kept} that stock vLLM serves are unchanged",),
    )


def _kernels(root: Path, python: Path, plan: Plan) -> Result:
    shapes = bench.shapes(plan.features, DTYPES)
    if not shapes:
        none = "no feature with a kernel is applied"
        return Result(Level.KERNELS, Outcome.NOT_RUN, (none,))
    answer = run_bench(python, bench.Request(root, shapes, repeats=0))
    if not isinstance(answer, bench.Ran):
        return _unanswered(Level.KERNELS, answer)
    wrong = faults(answer)
    if wrong:
        return Result(Level.KERNELS, Outcome.FAILED, wrong)
    return Result(
        Level.KERNELS,
        Outcome.PASSED,
        (f"{len(shapes)} shapes agree with float64 on {answer.chip.name}",),
    )


def _unanswered(level: Level, answer: NotRun | Failed) -> Result:
    if isinstance(answer, NotRun):
        return Result(level, Outcome.NOT_RUN, (answer.reason,))
    return Result(level, Outcome.FAILED, (answer.reason, *answer.detail))


def _not_run(levels: Sequence[Level], reason: str) -> tuple[Result, ...]:
    return tuple(Result(level, Outcome.NOT_RUN, (reason,)) for level in levels)


def _below(level: Level, deepest: Level) -> list[Level]:
    order = list(Level)
    return order[order.index(level) + 1 : order.index(deepest) + 1]
