# SPDX-License-Identifier: Apache-2.0
"""What applying a series would do to an installed vLLM: complete, and pure.

A plan exists only if every hunk fits and every resulting module compiles.
"""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass

from glm5_patch import diff
from glm5_patch.diff import FileDiff
from glm5_patch.errors import Conflict, Failed
from glm5_patch.manifest import REINSTALL, Read, Series, sha256


@dataclass(frozen=True)
class Edit:
    """A file that is there and gets new bytes."""

    path: str
    before: bytes
    after: bytes
    hunks: int
    added: int
    removed: int


@dataclass(frozen=True)
class Addition:
    """A file that is not there yet."""

    path: str
    data: bytes


@dataclass(frozen=True)
class Plan:
    """Every byte that applying a series would change."""

    release: str
    tested: bool
    features: tuple[str, ...]
    edits: tuple[Edit, ...]
    additions: tuple[Addition, ...]
    digest: str
    """Twelve digits, equal wherever the release, the series and the files are."""


def make(series: Series, read: Read) -> Plan:
    """Apply ``series`` in memory to the stock files that ``read`` gives.

    Raises ``Conflict`` for a target that is missing, is not UTF-8, or does not match a
    hunk, and ``Failed`` if a result does not compile or is not what the lock holds.
    """
    if not series.diffs and not series.new_files:
        raise Failed(
            "the series is empty",
            where=series.release,
            expected="a hunk or a new file",
            found="neither",
            todo=REINSTALL,
        )
    edits = tuple(_edit(file, series, read) for file in series.diffs)
    additions = tuple(
        _addition(path, data, read) for path, data in series.new_files.items()
    )
    for edit in edits:
        _check_compiles(edit.path, edit.after)
    for addition in additions:
        _check_compiles(addition.path, addition.data)
    return Plan(
        series.release,
        series.tested,
        series.features,
        edits,
        additions,
        _digest(series, edits, additions),
    )


def _edit(file: FileDiff, series: Series, read: Read) -> Edit:
    before = read(file.path)
    if before is None:
        raise Conflict(
            "a file that the patch changes is missing",
            where=file.path,
            expected=f"the file of vLLM {series.release}",
            found="no such file",
            todo="install vLLM again",
        )
    try:
        text = before.decode()
    except UnicodeDecodeError as error:
        raise Conflict(
            "a file that the patch changes is not UTF-8",
            where=file.path,
            expected="UTF-8",
            found=str(error),
            todo="install vLLM again",
        ) from error
    after = diff.apply(file, text).encode()
    expected = series.hashes.get(file.path)
    if expected is not None and sha256(after) != expected.after:
        raise Failed(
            "a patched file is not what the lock holds",
            where=file.path,
            expected=f"sha256 {expected.after}",
            found=f"sha256 {sha256(after)}",
            todo=REINSTALL,
        )
    return Edit(
        file.path,
        before,
        after,
        hunks=len(file.hunks),
        added=sum(h.added for h in file.hunks),
        removed=sum(h.removed for h in file.hunks),
    )


def _addition(path: str, data: bytes, read: Read) -> Addition:
    there = read(path)
    if there is not None and there != data:
        raise Conflict(
            "a file stands where the patch adds one",
            where=path,
            expected=f"no file, or sha256 {sha256(data)}",
            found=f"sha256 {sha256(there)}",
            todo="move it away if it is yours; else install vLLM again",
        )
    return Addition(path, data)


def _check_compiles(path: str, data: bytes) -> None:
    if not path.endswith(".py"):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(data, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise Failed(
            "a resulting module does not compile",
            where=path,
            expected="a module of Python",
            found=str(error),
            todo="report this with the version of vLLM",
        ) from error


def _digest(
    series: Series, edits: tuple[Edit, ...], additions: tuple[Addition, ...]
) -> str:
    lines = [series.release, *series.features]
    lines += [f"{e.path} {sha256(e.after)}" for e in edits]
    lines += [f"{a.path} {sha256(a.data)}" for a in additions]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
