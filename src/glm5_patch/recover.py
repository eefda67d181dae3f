# SPDX-License-Identifier: Apache-2.0
"""What of the state is lost, made again from the patched files. Reads; never writes.

A patched file with its hunks taken back is the original if its sha256 is that of the
original: the lock has that, and the state too, where it can be read. Nothing is taken
for an original that no hash proves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from glm5_patch import diff, manifest, record, state, tree
from glm5_patch.errors import Failed, PatchError
from glm5_patch.locate import Installation
from glm5_patch.manifest import PatchSet, sha256
from glm5_patch.state import Entry, Kind, Phase, State, Unreadable


@dataclass(frozen=True)
class Lost:
    """What was lost, made again."""

    state: State
    """The note: the one that is there, or one under which the patch is taken back."""
    originals: Mapping[str, bytes]
    """By the path of the file that each is the original of."""
    noted: bool
    """Whether the note itself is there, and only originals are lost."""
    found: str
    """What there is instead, in a few words."""


def lost(installation: Installation, patches: Callable[[], PatchSet]) -> Lost | None:
    """What of the patch's state is lost; None if nothing is, or nothing is applied.

    Raises ``Failed`` where something is lost that cannot be made again.
    """
    try:
        inspection = state.inspect(installation)
    except Unreadable as error:
        return _search(installation, patches(), error)
    if inspection.state is None:
        return _search(installation, patches(), None)
    if not inspection.unkept:
        return None
    made = _originals(installation, patches(), inspection.state, inspection.unkept)
    return Lost(
        inspection.state,
        made,
        noted=True,
        found=f"missing or changed: {', '.join(e.path for e in inspection.unkept)}",
    )


def _search(
    installation: Installation, patches: PatchSet, unreadable: Unreadable | None
) -> Lost | None:
    """Find the release whose files, stock or patched, all those of the tree are."""
    root = installation.root
    additions = {path for feature in patches.features for path in feature.files}
    ours = {p: sha256(patches.source(f"files/{p}")) for p in additions}
    touched = {*ours, *(path for rows in patches.lock.values() for path in rows)}
    have = {path: state.hash_of(root, path) for path in touched}
    if unreadable is None and not any(
        have[path] == row.after
        for rows in patches.lock.values()
        for path, row in rows.items()
    ):
        return None  # an addition alone may outlive an uninstall; an apply adopts it

    def strangers(release: str) -> list[str]:
        known: dict[str, tuple[str | None, str]] = {p: (None, ours[p]) for p in ours}
        for path, row in patches.lock[release].items():
            known[path] = (row.before, row.after)
        return [path for path in sorted(known) if have[path] not in known[path]]

    release = min(patches.releases, key=lambda r: len(strangers(r)))
    if strangers(release):
        raise _beyond_help(installation, release, strangers(release)[0], unreadable)
    entries = [
        Entry(path, Kind.PATCHED, row.before, row.after)
        for path, row in patches.lock[release].items()
        if have[path] == row.after
    ]
    entries += [Entry(p, Kind.ADDED, None, ours[p]) for p in sorted(ours) if have[p]]
    originals: dict[str, bytes] = {}
    if installation.record is not None:
        path = installation.record.relative_to(root).as_posix()
        after = tree.read(root, path) or b""
        before = record.without_rows(after, frozenset(ours))
        if before != after:
            entries.append(Entry(path, Kind.RECORD, sha256(before), sha256(after)))
            originals[path] = before
    patched = {entry.path for entry in entries if entry.kind is not Kind.RECORD}
    found = State(
        phase=Phase.REVERTING,
        installed=installation.version,
        release=release,
        tested=True,
        features=tuple(
            f.name for f in patches.features if patched.intersection(f.files)
        ),
        digest="",
        entries=tuple(entries),
        folders=tuple(_folders_of(installation, ours)),
    )
    wanted = [entry for entry in entries if entry.kind is Kind.PATCHED]
    originals |= _originals(installation, patches, found, wanted)
    return Lost(
        found,
        originals,
        noted=False,
        found="no such file" if unreadable is None else unreadable.found or "",
    )


def _originals(
    installation: Installation,
    patches: PatchSet,
    have: State,
    wanted: Iterable[Entry],
) -> dict[str, bytes]:
    """The originals of patched files and of RECORD, each proven by its hash."""
    root = installation.root
    try:
        chosen = manifest.choose(patches, have.features)
        series = manifest.series(patches, chosen, have.release, have.tested)
        back = {file.path: diff.reverse(file) for file in series.diffs}
    except PatchError:
        back = {}
    added = frozenset(e.path for e in have.entries if e.kind is Kind.ADDED)
    made = {}
    for entry in wanted:
        data = tree.read(root, entry.path)
        if data is not None and entry.kind is Kind.RECORD:
            data = record.without_rows(data, added)
        elif data is not None and entry.path in back:
            data = _taken_back(back[entry.path], data)
        if data is None or sha256(data) != entry.before:
            raise Failed(
                "the original of a file is lost, and cannot be made again",
                where=str(state.kept(root, entry)),
                expected=f"sha256 {entry.before}",
                found=f"no such file, and {root / entry.path} does not lead back to it",
                todo=_reinstall(installation),
            )
        made[entry.path] = data
    return made


def _taken_back(file: diff.FileDiff, data: bytes) -> bytes | None:
    try:
        return diff.apply(file, data.decode()).encode()
    except (PatchError, UnicodeDecodeError):
        return None


def _folders_of(installation: Installation, ours: Iterable[str]) -> list[str]:
    """Folders with no module in them but ``ours``, outermost first."""
    root = installation.root
    parents = {path.rpartition("/")[0] for path in ours}
    return sorted(
        parent
        for parent in parents
        if (root / parent).is_dir()
        and all(f"{parent}/{f.name}" in ours for f in (root / parent).glob("*.py"))
    )


def _beyond_help(
    installation: Installation, release: str, path: str, unreadable: Unreadable | None
) -> Failed:
    where = str(installation.root / path)
    if unreadable is not None:
        unreadable.found = (
            f"{unreadable.found}; and it cannot be made again: {where} is neither "
            f"as in vLLM {release} nor as the patch leaves it there"
        )
        return unreadable
    return Failed(
        "files of the patch are there, but the note of it is gone, and cannot be made "
        "again",
        where=where,
        expected=f"the file of vLLM {release}, or what the patch makes of it",
        found="neither",
        todo=_reinstall(installation),
    )


def _reinstall(installation: Installation) -> str:
    return (
        f"install vLLM {installation.version} again, with pip's --force-reinstall "
        "--no-deps, and then run 'glm5-patch apply'"
    )
