# SPDX-License-Identifier: Apache-2.0
"""The note that an apply leaves beside the package, and what the tree says to it.

The folder ``.glm5-patch`` beside ``vllm/`` holds ``state.json``, the originals of all
changed files, and the lock. It is the journal too: its phase is written before the
first change and after the last one. Reading it never writes.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from urllib.parse import quote

from packaging.version import Version

from glm5_patch import relpath, tree
from glm5_patch.diff import PACKAGES
from glm5_patch.errors import Failed
from glm5_patch.locate import Installation
from glm5_patch.manifest import sha256

FOLDER = ".glm5-patch"
STATE = f"{FOLDER}/state.json"
ORIGINALS = f"{FOLDER}/originals"
FORMAT = 1
AS_WRITTEN = "the note as 'glm5-patch apply' wrote it"


class Phase(str, Enum):
    """How far the last writing run came."""

    APPLYING = "applying"
    APPLIED = "applied"
    REVERTING = "reverting"


class Kind(str, Enum):
    """Why a file is in the state."""

    PATCHED = "patched"
    ADDED = "added"
    RECORD = "record"
    BYTECODE = "bytecode"


@dataclass(frozen=True)
class Entry:
    """One file that an apply changes; a hash is None where there is no file."""

    path: str
    kind: Kind
    before: str | None
    after: str | None


@dataclass(frozen=True)
class State:
    """What an apply did, or was about to do."""

    phase: Phase
    installed: str
    """The version label of the vLLM that was patched."""
    release: str
    tested: bool
    features: tuple[str, ...]
    digest: str
    entries: tuple[Entry, ...]
    folders: tuple[str, ...] = ()
    """Folders that the added files needed, outermost first."""


class Unreadable(Failed):
    """There is a note, or what only a note can explain, and it cannot be read."""


class Condition(str, Enum):
    """What the tree and the state say together."""

    NOT_APPLIED = "not applied"
    APPLIED = "applied"
    DRIFTED = "drifted"
    INTERRUPTED = "interrupted"
    REPLACED = "replaced"
    """Another vLLM was installed over the patched one."""
    UNRECORDED = "unrecorded"
    """The patch is there by its bytes, and its note is not; ``recover`` finds that."""


class Found(str, Enum):
    """What stands at an entry's path."""

    STOCK = "stock"
    PATCHED = "patched"
    EDITED = "edited"
    MISSING = "missing"


@dataclass(frozen=True)
class Inspection:
    """A state with what was found at each of its paths, bytecode left out."""

    condition: Condition
    state: State | None = None
    found: tuple[tuple[Entry, Found], ...] = ()
    unkept: tuple[Entry, ...] = ()
    """Entries whose originals have to go back, and are missing or were changed."""

    @property
    def replaced(self) -> bool:
        """Whether what stands there now is another installation's."""
        return self.condition is Condition.REPLACED


def dump(state: State) -> bytes:
    """``state`` as the bytes of ``state.json``."""
    return (json.dumps({"format": FORMAT, **asdict(state)}, indent=1) + "\n").encode()


def load(root: Path) -> State | None:
    """Read and check the state below ``root``; None if there is none.

    Originals without a state are not left by any run: raises ``Unreadable`` for them
    too. A note of another format is whole, but not ours to judge: raises ``Failed``.
    """
    data = tree.read(root, STATE)
    if data is None:
        if any(tree.folder(root, ORIGINALS).glob("*")):
            raise _unreadable(root, "no such file")
        return None
    try:
        table = json.loads(data)
        written = table.pop("format")
        if type(written) is int and written != FORMAT:
            raise _of_another_version(root, written)
        if written != FORMAT:
            raise ValueError("it has no format")
        return State(
            phase=Phase(table["phase"]),
            installed=str(table["installed"]),
            release=str(Version(table["release"])),
            tested=table["tested"] is True,
            features=tuple(str(name) for name in table["features"]),
            digest=str(table["digest"]),
            entries=tuple(_entry(e) for e in table["entries"]),
            folders=tuple(
                relpath.checked(f, STATE, PACKAGES) for f in table["folders"]
            ),
        )
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise _unreadable(root, str(error)) from error


def _of_another_version(root: Path, written: int) -> Failed:
    return Failed(
        "the note of what was applied was written by another version of glm5-patch",
        where=str(root / STATE),
        expected=f"format {FORMAT}",
        found=f"format {written}",
        todo="run 'revert' of the glm5-patch that applied it, then this again",
    )


def _unreadable(root: Path, found: str) -> Unreadable:
    return Unreadable(
        "the note of what was applied cannot be read",
        where=str(root / STATE),
        expected=AS_WRITTEN,
        found=found,
        todo=f"install vLLM again, and then delete {root / FOLDER}; the originals are "
        f"in {root / ORIGINALS} until then, with %2F for each / of a path",
    )


def inspect(installation: Installation) -> Inspection:
    """Compare the state with the tree."""
    state = load(installation.root)
    if state is None:
        return Inspection(Condition.NOT_APPLIED)
    found = tuple(
        (entry, find(installation.root, entry))
        for entry in state.entries
        if entry.kind is not Kind.BYTECODE
    )
    kinds = {f for _, f in found}
    applied = state.phase is Phase.APPLIED
    if applied and kinds == {Found.PATCHED}:
        condition = Condition.APPLIED
    elif installation.version != state.installed:
        condition = Condition.REPLACED
    elif not applied:
        condition = Condition.INTERRUPTED
    elif Found.PATCHED not in kinds:
        condition = Condition.REPLACED
    else:
        condition = Condition.DRIFTED
    replaced = condition is Condition.REPLACED
    unkept = tuple(
        entry
        for entry, what in found
        if goes_back(what, replaced) and not is_kept(installation.root, entry)
    )
    return Inspection(condition, state, found, unkept)


def find(root: Path, entry: Entry) -> Found:
    """What stands at the path of ``entry``."""
    have = hash_of(root, entry.path)
    if have == entry.after:
        return Found.PATCHED
    if have == entry.before:
        return Found.STOCK
    return Found.MISSING if have is None else Found.EDITED


def goes_back(found: Found, replaced: bool) -> bool:
    """Whether taking the patch back puts the original where this was found."""
    return found is Found.PATCHED or (found is Found.MISSING and not replaced)


def hash_of(root: Path, path: str) -> str | None:
    """The sha256 of the file ``path`` below ``root``, or None if it is absent."""
    data = tree.read(root, path)
    return None if data is None else sha256(data)


def stock(root: Path, state: State | None, path: str) -> bytes | None:
    """The bytes that the installer put at ``path``, whatever was applied since.

    Those of a patched file that was deleted too: taking the patch back mends it.
    """
    data = tree.read(root, path)
    entry = next((e for e in state.entries if e.path == path), None) if state else None
    if entry is None or (data is not None and sha256(data) != entry.after):
        return data
    return original(root, entry)


def kept(root: Path, entry: Entry) -> Path:
    """Where the original of ``entry`` is kept."""
    return root / ORIGINALS / quote(entry.path, safe="")


def is_kept(root: Path, entry: Entry) -> bool:
    """Whether the original of ``entry`` is there as it was, or needs not be."""
    file = kept(root, entry).relative_to(root).as_posix()
    return entry.before is None or hash_of(root, file) == entry.before


def original(root: Path, entry: Entry) -> bytes | None:
    """The kept original of ``entry``, checked; None where there was no file."""
    if entry.before is None:
        return None
    file = kept(root, entry)
    data = tree.read(root, file.relative_to(root).as_posix())
    if data is None or sha256(data) != entry.before:
        raise Failed(
            "the original of a file is missing or was changed",
            where=str(file),
            expected=f"sha256 {entry.before}",
            found="no such file" if data is None else f"sha256 {sha256(data)}",
            todo="run 'glm5-patch apply' or 'glm5-patch revert': either makes it again "
            "from the patched file, where that can be proven",
        )
    return data


_RECORD = re.compile(r"vllm-[0-9A-Za-z.+!_]+\.dist-info")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def _entry(table: dict[str, object]) -> Entry:
    kind = Kind(table["kind"])
    path = table["path"]
    top: tuple[str, ...] = PACKAGES
    if kind is Kind.RECORD and isinstance(path, str):
        folder = path.removesuffix("/RECORD")
        top = (folder,) if _RECORD.fullmatch(folder) else ()
    return Entry(
        relpath.checked(path, STATE, top),
        kind,
        _hash(table["before"]),
        _hash(table["after"]),
    )


def _hash(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, str) and _SHA256.fullmatch(value):
        return value
    raise ValueError(f"{value!r} is no sha256")
