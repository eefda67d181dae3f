# SPDX-License-Identifier: Apache-2.0
"""What each command does with an installation: from arguments to a report."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from packaging.version import Version

from glm5_patch import (
    __version__,
    locate,
    lock,
    manifest,
    overlay,
    plan,
    recover,
    report,
    state,
    transaction,
    tree,
)
from glm5_patch import verify as checks
from glm5_patch.bench import model as bench_model
from glm5_patch.bench import report as bench_report
from glm5_patch.bench.run import run_bench
from glm5_patch.child.process import Failed as ChildFailed
from glm5_patch.child.process import NotRun
from glm5_patch.errors import Busy, Failed, NotFound, PatchError, Usage
from glm5_patch.locate import Installation
from glm5_patch.manifest import PatchSet, Series
from glm5_patch.plan import Plan
from glm5_patch.probe import explain as table_of
from glm5_patch.probe.explain import Row
from glm5_patch.probe.judge import CAPABILITIES, DTYPES, KV_CACHE_DTYPES
from glm5_patch.probe.model import BACKEND, Capability
from glm5_patch.report import Report, Table
from glm5_patch.state import Condition, Found, Inspection, State
from glm5_patch.verify import TIMEOUT_S, Level, Outcome


def find(python: Path | None, site_packages: Path | None) -> Installation:
    """The installation that the common options name."""
    if python is not None and site_packages is not None:
        raise Usage(
            "--python and --site-packages exclude each other",
            todo="give the one that names the environment of vLLM",
        )
    if python is not None:
        return locate.of_python(python)
    if site_packages is not None:
        return locate.in_site_packages(site_packages)
    return locate.of_running_interpreter()


def patch_set() -> PatchSet:
    """The patch set that this glm5-patch brings along."""
    return manifest.load(manifest.bundled_root())


P = ParamSpec("P")


def _undisturbed(
    command: Callable[Concatenate[Installation, P], Report],
) -> Callable[Concatenate[Installation, P], Report]:
    """Have a failure that another run may be the cause of say that, with ``Busy``."""

    @functools.wraps(command)
    def run(installation: Installation, /, *args: P.args, **kwargs: P.kwargs) -> Report:
        root = installation.root
        before = tree.read(root, state.STATE)
        try:
            outcome = command(installation, *args, **kwargs)
        except PatchError as error:
            ours = isinstance(error, Busy) or error.alone
            if ours or not lock.is_disturbed(root, before):
                raise
            raise _busy(root) from error
        if outcome.exit_code and lock.is_disturbed(root, before):
            raise _busy(root)
        return outcome

    return run


def _busy(root: Path) -> Busy:
    return Busy(
        "another run of glm5-patch is at work here, or was until now",
        where=str(root),
        expected="no other run while this one looks",
        found=f"{lock.LOCK} held, or {state.STATE} rewritten",
        todo="wait for it to end, then run this again",
    )


@_undisturbed
def apply(
    installation: Installation,
    patches: PatchSet,
    features: Sequence[str],
    dry_run: bool,
    allow_unlisted: bool,
) -> Report:
    """Plan, and write the plan unless it is there already."""
    notes = report.where(installation)
    rebuilt = False
    if dry_run:
        _check_recorded(installation, lambda: patches)
    else:
        rebuilt = transaction.rebuild(
            installation, lambda: recover.lost(installation, lambda: patches)
        )
        if transaction.repair(installation) and not rebuilt:
            notes += ("note: an interrupted run was taken back first",)
    if rebuilt:
        notes += (_REBUILT,)

    def look() -> tuple[Inspection, Plan]:
        found = state.inspect(installation)
        transaction.check_revertible(installation.root, found)
        return found, _plan(installation, patches, found, features, allow_unlisted)

    inspection, wanted = look() if dry_run else lock.settled(installation.root, look)
    notes += report.untested(wanted)
    data = {
        "installation": report.installation_data(installation),
        "plan": report.plan_data(wanted),
        "changed": False,
    }
    have = inspection.state
    if (
        inspection.condition is Condition.APPLIED
        and have is not None
        and have.digest == wanted.digest
    ):
        return Report(
            "apply",
            f"already applied, digest {wanted.digest}; "
            f"{'no file of vLLM' if rebuilt else 'nothing'} written",
            notes=notes,
            data={**data, "changed": rebuilt},
        )
    table = report.plan_table(wanted, installation.record)
    what = f"{', '.join(wanted.features)} to vLLM {installation.version}"
    if dry_run:
        return Report(
            "apply",
            f"dry run: would apply {what}, digest {wanted.digest}; nothing written",
            "glm5-patch apply",
            table=table,
            notes=notes,
            data=data,
        )
    transaction.apply(installation, wanted)
    return Report(
        "apply",
        f"applied {what}, digest {wanted.digest}",
        "glm5-patch verify",
        table=table,
        notes=notes,
        data={**data, "changed": True},
    )


_REBUILT = "note: what was lost of the patch's state was made again first"


def _check_recorded(
    installation: Installation, patches: Callable[[], PatchSet]
) -> None:
    """Raise ``Failed`` if something of the state is lost: only writing runs mend it."""
    lost = recover.lost(installation, patches)
    if lost is None:
        return
    raise Failed(
        "originals that the state names are missing or were changed"
        if lost.noted
        else "the patch is there, but the note of it is missing or cannot be read",
        where=str(installation.root / (state.ORIGINALS if lost.noted else state.STATE)),
        expected="the original of each patched file, as 'glm5-patch apply' kept it"
        if lost.noted
        else state.AS_WRITTEN,
        found=lost.found,
        todo=_MEND,
    )


_MEND = (
    "'glm5-patch apply' or 'glm5-patch revert'; either makes it again from the patched "
    "files, and holds the modules against known hashes first"
)


@_undisturbed
def revert(
    installation: Installation, patches: Callable[[], PatchSet], dry_run: bool
) -> Report:
    """Give back what was there before the patch.

    ``patches`` is only called if something of the state is lost.
    """
    notes = report.where(installation)
    if dry_run:
        _check_recorded(installation, patches)
    elif transaction.rebuild(installation, lambda: recover.lost(installation, patches)):
        notes += (_REBUILT,)
    data = {"installation": report.installation_data(installation), "changed": False}
    if dry_run:
        inspection = state.inspect(installation)
        transaction.check_revertible(installation.root, inspection)
    else:  # looked at when no other run is at work: it may be doing just this
        inspection = transaction.revert(installation) or Inspection(
            Condition.NOT_APPLIED
        )
    if inspection.state is None:
        return Report("revert", "not applied; nothing to do", notes=notes, data=data)
    rows = tuple(
        (entry.path, "remove" if entry.before is None else "restore")
        for entry, found in inspection.found
        if state.goes_back(found, inspection.replaced)
    )
    table = Table(("file", "change"), rows) if rows else None
    if dry_run:
        return Report(
            "revert",
            f"dry run: would give back {len(rows)} files; nothing written",
            "glm5-patch revert",
            table=table,
            notes=notes,
            data=data,
        )
    return Report(
        "revert",
        _reverted(inspection),
        table=table,
        notes=notes,
        data={**data, "changed": True},
    )


def _reverted(inspection: Inspection) -> str:
    """What taking the patch back came to, as far as it was checked."""
    if inspection.replaced:
        return "another vLLM was installed over the patched one; forgot the patch"
    changed = [
        entry.path for entry, found in inspection.found if found is Found.EDITED
    ]  # only a RECORD can be: an edit of anything else is refused
    if changed:
        return (
            "reverted: every file of vLLM has the bytes that it had before 'apply'; "
            f"{changed[0]}, which something else changed since, lost the patch's rows "
            "only"
        )
    return "reverted: every file has the bytes that it had before 'apply'"


@_undisturbed
def status(installation: Installation, patches: PatchSet) -> Report:
    """Say which of the states the tree is in; write nothing."""
    lost = recover.lost(installation, lambda: patches)
    if lost is not None and not lost.noted:
        inspection = Inspection(
            Condition.UNRECORDED,
            lost.state,
            tuple((e, state.find(installation.root, e)) for e in lost.state.entries),
        )
    else:
        inspection = state.inspect(installation)
    notes = report.where(installation)
    have = inspection.state
    data: dict[str, Any] = {
        "installation": report.installation_data(installation),
        "condition": inspection.condition.value,
        "digest": have.digest if have else None,
        "features": list(have.features) if have else [],
        "tested": have.tested if have else None,
        "files": [
            {"path": entry.path, "found": found.value}
            for entry, found in inspection.found
        ],
        "unkept": [entry.path for entry in inspection.unkept],
    }
    if have is None:
        return _status_of_stock(installation, patches, inspection, notes, data)
    features = ", ".join(have.features)
    table = Table(
        ("file", "found"),
        tuple((entry.path, found.value) for entry, found in inspection.found),
    )
    if inspection.condition is Condition.APPLIED and inspection.unkept:
        return Report(
            "status",
            f"applied: {features}, digest {have.digest}, but originals are missing or "
            f"were changed: {', '.join(e.path for e in inspection.unkept)}",
            _MEND,
            1,
            notes=notes,
            data=data,
        )
    if inspection.condition is Condition.APPLIED:
        tested = "" if have.tested else ", on a release that is not tested"
        return Report(
            "status",
            f"applied: {features}, digest {have.digest}{tested}",
            "glm5-patch verify",
            notes=notes,
            data=data,
        )
    summary, todo = {
        Condition.DRIFTED: (
            f"drifted: {features} was applied, and files were changed since",
            "glm5-patch apply, which mends what is missing and refuses what is edited",
        ),
        Condition.INTERRUPTED: (
            f"interrupted: a run stopped while {have.phase.value}",
            "glm5-patch apply or glm5-patch revert; either repairs it first",
        ),
        Condition.REPLACED: (
            f"replaced: {features} was applied to vLLM {have.installed}, and vLLM "
            f"{installation.version} was installed over it",
            "glm5-patch apply, or glm5-patch revert to forget the old patch",
        ),
        Condition.UNRECORDED: (
            f"unrecorded: {len(inspection.found)} files are as the patch leaves them, "
            f"but the note of it, {state.STATE}, is missing or cannot be read",
            _MEND,
        ),
    }[inspection.condition]
    return Report("status", summary, todo, 1, table, notes, data)


@_undisturbed
def verify(
    installation: Installation,
    patches: PatchSet,
    level: str | None,
    gguf: Path | None = None,
) -> Report:
    """Check what is applied; a level that was asked for by name has to run."""
    deepest = _level(level)
    _check_recorded(installation, lambda: patches)
    inspection = state.inspect(installation)
    notes = report.where(installation)
    have = _applied(installation, inspection)
    wanted = None
    if inspection.condition is Condition.APPLIED:
        wanted = _plan(
            installation, patches, inspection, have.features, not have.tested
        )
        if wanted.digest != have.digest:
            notes += (
                f"note: applied with digest {have.digest}; this glm5-patch would "
                f"apply {wanted.digest}",
            )
    results = checks.check(installation, inspection, wanted, deepest)
    rows = tuple(
        (r.level.value, r.outcome.value, "; ".join(r.details)) for r in results
    )
    file = None if gguf is None else _inspect_for(installation, have, gguf)
    failed = [r.level.value for r in results if r.outcome is Outcome.FAILED]
    if file is not None:
        outcome = Outcome.FAILED if file.exit_code else Outcome.PASSED
        rows += (("gguf", outcome.value, file.summary),)
        notes += file.notes
        failed += ["gguf"] * file.exit_code
    idle = [r for r in results if r.outcome is Outcome.NOT_RUN]
    passed = ", ".join(r.level.value for r in results if r.outcome is Outcome.PASSED)
    not_run = ", ".join(r.level.value for r in idle)
    todo = None
    if failed:
        summary = f"verification failed: {', '.join(failed)}"
        todo = "glm5-patch revert, or see above what was found"
    elif idle:
        named = level is not None
        summary = (
            f"not as deep as --level asks: passed: {passed}; not run: {not_run}"
            if named
            else f"verified: {passed}; not run: {not_run}, which is a failure only "
            "where --level asks for it"
        )
        todo = "mend what kept it from running, then verify again"
    else:
        summary = f"verified: {passed}"
        todo = "start vLLM"
    return Report(
        "verify",
        summary,
        todo,
        1 if failed or (idle and level is not None) else 0,
        Table(("level", "outcome", "found"), rows),
        notes,
        {
            "installation": report.installation_data(installation),
            "digest": have.digest,
            "levels": [
                {
                    "level": r.level.value,
                    "outcome": r.outcome.value,
                    "details": list(r.details),
                }
                for r in results
            ],
            "gguf": None if file is None else file.data,
        },
    )


def _applied(installation: Installation, inspection: Inspection) -> State:
    """The state of the patch; it is an error if there is none."""
    if inspection.state is None:
        raise Failed(
            "the patch is not applied",
            where=str(installation.root),
            expected="a patched vLLM",
            found=f"vLLM {installation.version}, and no {state.STATE}",
            todo="glm5-patch apply",
        )
    return inspection.state


@_undisturbed
def bench(
    installation: Installation, patches: PatchSet, dtype: str, quick: bool
) -> Report:
    """Check the kernels that are applied, and time them, on the GPU that is there."""
    if dtype not in DTYPES:
        raise _no_dtype(dtype)
    _check_recorded(installation, lambda: patches)
    inspection = state.inspect(installation)
    have = _applied(installation, inspection)
    if inspection.condition is not Condition.APPLIED:
        raise Failed(
            f"the patch is {inspection.condition.value}: these are not its kernels",
            where=str(installation.root),
            expected="every file as it was applied",
            found=", ".join(
                f"{entry.path} {found.value}"
                for entry, found in inspection.found
                if found is not Found.PATCHED
            ),
            todo="glm5-patch status, which says more",
        )
    wanted = bench_model.shapes(have.features, (dtype,), quick)
    if not wanted:
        raise Failed(
            "no feature with a kernel is applied",
            where=str(installation.root),
            expected="sparse-backend or indexer",
            found=", ".join(have.features),
            todo="glm5-patch apply",
        )
    answer = run_bench(
        _python(installation, "bench"),
        bench_model.Request(installation.root, wanted, bench_model.REPEATS),
    )
    if isinstance(answer, NotRun | ChildFailed):
        detail = answer.detail if isinstance(answer, ChildFailed) else ()
        raise Failed(
            "the kernels could not be run",
            where=str(installation.root),
            expected="a GPU from SM80 on, and torch and triton beside vLLM",
            found="; ".join((answer.reason, *detail)),
            todo="mend that, then run 'glm5-patch bench' again",
        )
    wrong = bench_report.faults(answer)
    summary = f"{len(wanted)} shapes agree with float64, and were timed"
    if wrong:
        summary = f"{len(wrong)} of {len(wanted)} shapes failed: {'; '.join(wrong)}"
    return Report(
        "bench",
        summary,
        "send this table, or what --json prints, to the project",
        1 if wrong else 0,
        bench_report.table(answer),
        (
            *report.where(installation),
            f"glm5-patch {__version__}, digest {have.digest}",
            *bench_report.notes(answer.chip),
        ),
        {
            "installation": report.installation_data(installation),
            "glm5_patch": __version__,
            "digest": have.digest,
            **bench_report.data(answer),
        },
    )


def inspect(path: Path, python: Path | None, site_packages: Path | None) -> Report:
    """Account for a GGUF file in the vLLM that is installed, else in the newest that
    is tested."""
    try:
        installation = find(python, site_packages)
    except NotFound:
        if python is not None or site_packages is not None:
            raise
        release = max(patch_set().releases, key=Version)
        return _noting(
            f"no vLLM here; this is what {release} would do", _account(path, release)
        )
    return _inspect_in(installation, patch_set(), path)


@_undisturbed
def _inspect_in(installation: Installation, patches: PatchSet, path: Path) -> Report:
    """Account for a GGUF file in the release that ``apply`` takes this vLLM for."""
    _check_recorded(installation, lambda: patches)
    series = _series(installation, patches, state.inspect(installation), (), True)
    found = _account(path, series.release)
    if series.tested:
        return found
    return _noting(
        f"the files of this vLLM, {installation.version}, are those of no tested "
        f"release; this is what {series.release} would do",
        found,
    )


def _noting(note: str, found: Report) -> Report:
    return replace(found, notes=(f"note: {note}", *found.notes))


def _inspect_for(installation: Installation, have: State, path: Path) -> Report:
    """Account for a GGUF file in a patched vLLM."""
    if "gguf" not in have.features:
        raise Failed(
            "the feature gguf is not applied",
            where=str(installation.root),
            expected="gguf",
            found=", ".join(have.features),
            todo="glm5-patch apply, which applies all features",
        )
    return _account(path, have.release)


def _account(path: Path, release: str) -> Report:
    from glm5_patch.gguf.report import inspect as account

    return account(path, Version(release))


@_undisturbed
def explain(
    installation: Installation,
    patches: PatchSet,
    capabilities: Sequence[str] | None,
    dtypes: Sequence[str] | None,
    kv_cache_dtypes: Sequence[str] | None,
) -> Report:
    """Which backend serves each case before and after, and why others refuse."""
    chosen = [_capability(text) for text in capabilities or ()] or CAPABILITIES
    for dtype in dtypes or ():
        if dtype not in DTYPES:
            raise _no_dtype(dtype)
    _check_recorded(installation, lambda: patches)
    inspection = state.inspect(installation)
    wanted = _plan(installation, patches, inspection, (), False)
    python = _python(installation, "explain")
    with overlay.sides(wanted) as (stock, patched):
        answer = table_of.explain(
            python,
            installation.root,
            stock,
            patched,
            chosen,
            dtypes or DTYPES,
            kv_cache_dtypes or KV_CACHE_DTYPES,
            TIMEOUT_S,
        )
    if isinstance(answer, NotRun | ChildFailed):
        detail = answer.detail if isinstance(answer, ChildFailed) else ()
        raise Failed(
            "vLLM's selector could not be asked",
            where=str(installation.root),
            expected="torch, and what vLLM imports; no GPU is needed",
            found="; ".join((answer.reason, *detail)),
            todo="mend that, or name another environment with --python PATH",
        )
    broken = answer.import_errors.get(BACKEND)
    crashed = sum(row.after.crashed for row in answer.rows)
    todo = None
    if broken:
        todo = f"install into {python} what is missing there, then ask again"
    elif crashed:
        todo = "mend what is named there, or ask again without it"
    rows = []
    for row in answer.rows:
        capability, dtype, kv = map(str, row.case)
        rows.append(
            (
                capability,
                dtype,
                kv,
                row.before.selected or "none",
                row.after.selected or "none",
                _need(row, broken),
            )
        )
        for name, reasons in row.after.reasons.items():
            why = [
                answer.import_errors.get(name, r) if r == "ImportError" else r
                for r in reasons
            ]
            if why:
                rows.append(("", "", "", "", f"  not {name}", "; ".join(why)))
    served = sum(row.before.selected is not None for row in answer.rows)
    after = sum(row.after.selected is not None for row in answer.rows)
    return Report(
        "explain",
        f"of {len(answer.rows)} cases stock vLLM {installation.version} serves "
        f"{served}, the patched one {after}"
        + (f"; {crashed} got no answer from vLLM, see above" if crashed else "")
        + (f"; what {BACKEND} serves is not known: {broken}" if broken else ""),
        todo,
        1 if todo else 0,
        table=Table(
            ("GPU", "dtype", "KV dtype", "before", "after", "why"), tuple(rows)
        ),
        notes=report.where(installation),
        data={
            "installation": report.installation_data(installation),
            "cases": [
                {
                    "capability": str(row.case.capability),
                    "dtype": row.case.dtype,
                    "kv_cache_dtype": row.case.kv_cache_dtype,
                    "before": row.before.selected,
                    "after": row.after.selected,
                    "reasons_before": {
                        k: list(v) for k, v in row.before.reasons.items()
                    },
                    "reasons_after": {k: list(v) for k, v in row.after.reasons.items()},
                }
                for row in answer.rows
            ],
        },
    )


def list_releases(patches: PatchSet) -> Report:
    """The releases that are known, and the features with the patch for each."""
    rows = []
    for release in patches.releases:
        for feature in patches.features:
            patch = feature.variant_for(Version(release)).patch
            rows.append((release, feature.name, patch, feature.summary))
    return Report(
        "list",
        f"releases known: {len(patches.releases)}; features: {len(patches.features)}",
        table=Table(("vLLM", "feature", "patch", "what it does"), tuple(rows)),
        data={
            "releases": list(patches.releases),
            "features": [
                {"name": f.name, "summary": f.summary} for f in patches.features
            ],
        },
    )


def _python(installation: Installation, command: str) -> Path:
    """The interpreter that a command has to start."""
    if installation.python is None:
        raise Failed(
            f"{command} needs the interpreter that runs this vLLM",
            where=str(installation.root),
            expected="this folder in an environment with a bin/python",
            found="no interpreter that belongs to it",
            todo="use --python PATH in place of --site-packages",
        )
    return installation.python


def _plan(
    installation: Installation,
    patches: PatchSet,
    inspection: Inspection,
    features: Sequence[str],
    allow_unlisted: bool,
) -> Plan:
    """The plan for the stock files, whatever was applied to them."""
    series = _series(installation, patches, inspection, features, allow_unlisted)
    return plan.make(series, _reader(installation, inspection))


def _series(
    installation: Installation,
    patches: PatchSet,
    inspection: Inspection,
    features: Sequence[str],
    allow_unlisted: bool,
) -> Series:
    """The series for the stock files, whatever was applied to them."""
    return manifest.select(
        patches,
        manifest.choose(patches, features),
        installation.version,
        _reader(installation, inspection),
        allow_unlisted,
    )


def _reader(installation: Installation, inspection: Inspection) -> manifest.Read:
    return functools.partial(state.stock, installation.root, inspection.state)


def _status_of_stock(
    installation: Installation,
    patches: PatchSet,
    inspection: Inspection,
    notes: tuple[str, ...],
    data: dict[str, Any],
) -> Report:
    try:
        wanted = _plan(installation, patches, inspection, (), False)
    except PatchError as error:
        return Report(
            "status",
            f"not applied, and 'apply' would refuse: {error.what}",
            "glm5-patch apply --dry-run, which says more",
            notes=notes,
            data={**data, "applicable": False},
        )
    return Report(
        "status",
        f"not applied; the files are those of vLLM {wanted.release}",
        "glm5-patch apply",
        notes=notes,
        data={**data, "applicable": True},
    )


def _level(name: str | None) -> Level:
    if name is None:
        return Level.SELECT
    try:
        return Level(name)
    except ValueError:
        raise Usage(
            f"no level is called {name!r}",
            expected=" or ".join(level.value for level in Level),
            todo="see 'glm5-patch verify --help'",
        ) from None


def _no_dtype(name: str) -> Usage:
    return Usage(
        f"no dtype is called {name!r}",
        expected=" or ".join(sorted(DTYPES)),
        todo="give one of these with --dtype",
    )


def _capability(text: str) -> Capability:
    major, _, minor = text.partition(".")
    if not re.fullmatch(r"\d{1,2}\.\d", text, re.ASCII):
        raise Usage(
            "a compute capability is two numbers",
            expected="such as 12.0",
            found=repr(text),
            todo="give it as --capability X.Y",
        )
    return Capability(int(major), int(minor))


def _need(row: Row, broken: str | None) -> str:
    """Whether the patch is what serves a case; ``broken``: why ours did not import."""
    if row.before.selected is not None:
        return "stock vLLM serves this; the patch is not needed"
    if row.after.selected is not None:
        return "served by the patch"
    if row.after.crashed:
        return f"not known: {row.after.error or 'the selector gave no answer'}"
    if broken is not None:
        return f"stock vLLM does not serve this; not known of {BACKEND}"
    return "nothing serves this"
