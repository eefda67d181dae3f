# SPDX-License-Identifier: Apache-2.0
"""Unified diffs: parse with unidiff, apply in memory, never with fuzz.

Everything here is pure: text in, text out. A line keeps its line feed, so a file
without a final one survives; no other character ends a line.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace

from unidiff.errors import UnidiffParseError
from unidiff.patch import Hunk as ParsedHunk
from unidiff.patch import PatchSet as ParsedPatch

from glm5_patch import relpath
from glm5_patch.errors import Conflict, Failed

PACKAGES = ("vllm",)
"""The packages that a diff may touch."""

TOO_DIFFERENT = "this build of vLLM is not one that the patch can be put on"


@dataclass(frozen=True)
class Hunk:
    """One change: the lines it expects and the lines it leaves in their place."""

    header: str
    start: int
    """Index of the first expected line, from 0, where the patch was made."""
    before: tuple[str, ...]
    after: tuple[str, ...]
    added: int
    removed: int


@dataclass(frozen=True)
class FileDiff:
    """All hunks of one file, in order; ``path`` is relative to site-packages."""

    path: str
    hunks: tuple[Hunk, ...]


def parse(text: str, source: str) -> tuple[FileDiff, ...]:
    """Read a patch file; ``source`` names it in messages.

    Raises ``Failed`` if it is not a unified diff of existing text files below one
    of ``PACKAGES``, with lines to find the place of every change by, or if any of its
    lines would have no effect.
    """
    try:
        parsed = ParsedPatch(io.StringIO(text, newline="\n"))
    except (UnidiffParseError, ValueError) as error:
        raise _bad_patch(source, str(error).strip()) from error
    if not parsed:
        raise _bad_patch(source, "no file in it")
    diffs = []
    for file in parsed:
        old, new = file.source_file, file.target_file
        for name, prefix in ((old, "a/"), (new, "b/")):
            if not name.startswith(prefix):
                raise _bad_patch(source, f"{name!r} does not start with {prefix!r}")
        path = relpath.checked(new[2:], source, PACKAGES)
        if old[2:] != path:
            raise _bad_patch(source, f"{old!r} is renamed to {new!r}")
        if file.is_binary_file or not file:
            raise _bad_patch(source, f"no text change of {path!r}")
        diffs.append(FileDiff(path, tuple(_hunk(h, source) for h in file)))
    paths = [d.path for d in diffs]
    if len(set(paths)) != len(paths):
        raise _bad_patch(source, "a file is named twice")
    _check_nothing_is_skipped(parsed, text, source)
    return tuple(diffs)


def apply(diff: FileDiff, text: str) -> str:
    """Put every hunk at the one place in ``text`` where its lines stand.

    The line numbers in the headers are only looked at for messages: a variant serves
    several releases, and what counts is that a place is exact and the only one.
    Raises ``Conflict`` if a hunk's lines stand nowhere or in several places, or if two
    hunks overlap.
    """
    lines = split(text)
    places = sorted(((_place(diff, h, lines), h) for h in diff.hunks), key=_by_place)
    result: list[str] = []
    done = 0
    for at, hunk in places:
        end = at + len(hunk.before)
        if at < done:
            raise _misplaced(diff, hunk, f"after line {done}", f"line {at + 1}")
        if hunk.after and not hunk.after[-1].endswith("\n") and end < len(lines):
            raise _misplaced(diff, hunk, "the end of the file", repr(lines[end]))
        result += lines[done:at]
        result += hunk.after
        done = end
    return "".join(result + lines[done:])


def reverse(diff: FileDiff) -> FileDiff:
    """The diff that takes ``diff`` back, where its places are still the only ones."""
    hunks = (
        replace(h, before=h.after, after=h.before, added=h.removed, removed=h.added)
        for h in diff.hunks
    )
    return FileDiff(diff.path, tuple(hunks))


def split(text: str) -> list[str]:
    """The lines of ``text``, each with its line feed; nothing else ends a line."""
    return io.StringIO(text, newline="\n").readlines()


def _place(diff: FileDiff, hunk: Hunk, lines: Sequence[str]) -> int:
    last = len(lines) - len(hunk.before)
    places = [i for i in range(last + 1) if _stands_at(hunk, lines, i)]
    if len(places) == 1:
        return places[0]
    if not places:
        nearest = max(
            range(max(len(lines), 1)),
            key=lambda i: (_agreement(hunk, lines, i), -abs(i - hunk.start)),
        )
        raise _mismatch(diff, hunk, lines, nearest)
    several = "lines " + ", ".join(str(i + 1) for i in places)
    raise _misplaced(diff, hunk, "exactly one place", several)


def _by_place(placed: tuple[int, Hunk]) -> int:
    return placed[0]


def _misplaced(diff: FileDiff, hunk: Hunk, expected: str, found: str) -> Conflict:
    return Conflict(
        "a hunk's lines are there, but not where they can be changed",
        where=f"{diff.path}, hunk {hunk.header}",
        expected=expected,
        found=found,
        todo=TOO_DIFFERENT,
    )


def _stands_at(hunk: Hunk, lines: Sequence[str], at: int) -> bool:
    return tuple(lines[at : at + len(hunk.before)]) == hunk.before


def _agreement(hunk: Hunk, lines: Sequence[str], at: int) -> int:
    """How many lines of the hunk stand where they would if it began at ``at``."""
    return sum(map(str.__eq__, hunk.before, lines[at : at + len(hunk.before)]))


def _mismatch(diff: FileDiff, hunk: Hunk, lines: Sequence[str], at: int) -> Conflict:
    rest = lines[at:]
    offset = next(i for i, want in enumerate(hunk.before) if rest[i : i + 1] != [want])
    line = at + offset
    return Conflict(
        "a hunk does not match",
        where=f"{diff.path}, hunk {hunk.header}, line {line + 1}",
        expected=repr(hunk.before[offset]),
        found=repr(lines[line]) if line < len(lines) else "the end of the file",
        todo=TOO_DIFFERENT,
    )


def _check_nothing_is_skipped(parsed: ParsedPatch, text: str, source: str) -> None:
    """Raise ``Failed`` if the parser passed over a line.

    unidiff takes what follows a complete hunk for a comment: a line too many, or the
    header of a hunk or file that was cut off.
    """
    lines = split(text)
    if not lines[-1].endswith("\n"):
        raise _bad_patch(source, f"its last line, {lines[-1]!r}, has no end")
    taken = {line.diff_line_no for file in parsed for hunk in file for line in hunk}
    begun = False
    heads = 0
    for number, line in enumerate(lines, 1):
        begun = begun or number in taken
        if number in taken:
            continue
        head = line.startswith(("--- ", "+++ ", "@@ "))
        heads += head
        between = line == "\n" or line.startswith(("diff --git ", "index ", "\\ No "))
        if begun and not head and not between:
            raise _bad_patch(source, f"line {number} is in no hunk: {line!r}")
    if heads != sum(2 + len(file) for file in parsed):
        raise _bad_patch(source, "the header of a file or hunk is cut short")


def _hunk(hunk: ParsedHunk, source: str) -> Hunk:
    header = (
        f"@@ -{hunk.source_start},{hunk.source_length} "
        f"+{hunk.target_start},{hunk.target_length} @@"
    )
    before: list[str] = []
    after: list[str] = []
    sides: list[list[str]] = []
    for line in hunk:
        if line.line_type == "\\":
            # "No newline at end of file" speaks of the line just before it.
            if not sides:
                raise _bad_patch(source, f"hunk {header} begins with a marker")
            for side in sides:
                side[-1] = side[-1].removesuffix("\n")
            continue
        if line.line_type == "":
            # unidiff hands blank lines between hunks to the hunk before them
            continue
        sides = {" ": [before, after], "-": [before], "+": [after]}[line.line_type]
        for side in sides:
            side.append(line.value)
    if not before:
        raise _bad_patch(source, f"hunk {header} has no line to find its place by")
    if before == after:
        raise _bad_patch(source, f"hunk {header} changes nothing")
    for side in (before, after):
        if any(not line.endswith("\n") for line in side[:-1]):
            raise _bad_patch(source, f"hunk {header} has a line without an end")
    return Hunk(
        header,
        hunk.source_start - 1,
        tuple(before),
        tuple(after),
        hunk.added,
        hunk.removed,
    )


def _bad_patch(source: str, why: str) -> Failed:
    return Failed(
        "a patch file cannot be used",
        where=source,
        expected="a unified diff of existing files below vllm/",
        found=why,
        todo="install glm5-patch again",
    )
