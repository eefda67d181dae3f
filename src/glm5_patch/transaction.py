# SPDX-License-Identifier: Apache-2.0
"""Carry a plan out, or take it back: all of it, or nothing, at any instant.

The order of an apply: state with phase ``applying``; originals; new bytes beside
their targets; renames; state with phase ``applied``. Every step is durable before the
next. Whatever stops it, putting back the originals that differ undoes it, and that is
also all that a revert is. So there is one way back, and it can be taken again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath

from glm5_patch import files, lock, record, state, tree
from glm5_patch.errors import Conflict, Failed, PatchError
from glm5_patch.locate import Installation
from glm5_patch.manifest import sha256
from glm5_patch.plan import Plan
from glm5_patch.recover import Lost
from glm5_patch.state import (
    Condition,
    Entry,
    Found,
    Inspection,
    Kind,
    Phase,
    State,
)


def apply(installation: Installation, plan: Plan) -> State:
    """Write ``plan``; an earlier or interrupted one is taken back first.

    Raises ``Conflict`` if a file is no longer what the plan was made from, and
    ``NotPermitted`` if the file system refuses; the tree is then as it was, or as
    installed if an earlier plan was taken back.
    """
    root = installation.root
    with lock.exclusive(root):
        _take_back(installation)
        for edit in plan.edits:
            _expect(root, edit.path, sha256(edit.before))
        for addition in plan.additions:
            _expect(root, addition.path, None, sha256(addition.data))
        contents = _contents(installation, plan)
        begun = State(
            phase=Phase.APPLYING,
            installed=installation.version,
            release=plan.release,
            tested=plan.tested,
            features=plan.features,
            digest=plan.digest,
            entries=_entries(root, contents, {a.path for a in plan.additions}),
            folders=tuple(_missing_folders(root, contents)),
        )
        try:
            return _write(root, begun, contents)
        except BaseException as error:
            todo = None
            try:
                _restore(root, begun)
            except (OSError, PatchError):
                todo = (
                    "what was written could not all be taken back; make the "
                    "environment writable, then run 'glm5-patch revert'"
                )
            if not isinstance(error, OSError):
                raise
            refused = tree.refused(error, root)
            refused.todo = todo or refused.todo
            raise refused from error


def revert(installation: Installation) -> Inspection | None:
    """Give back what was there before; None if nothing was applied.

    What is returned tells how each file was found.

    Raises ``Failed``, and writes nothing, if a patched file was edited since: the edit
    would be lost.
    """
    if not (installation.root / state.FOLDER).exists():
        return None
    with lock.exclusive(installation.root):
        return _take_back(installation)


def repair(installation: Installation) -> bool:
    """Take back what an interrupted run left; True if there was such a run."""
    found = lock.settled(installation.root, lambda: state.inspect(installation))
    if found.condition is not Condition.INTERRUPTED:
        return False
    with lock.exclusive(installation.root):
        # the run may not have been interrupted but at work until now
        if state.inspect(installation).condition is Condition.INTERRUPTED:
            _take_back(installation)
            return True
    return False


def rebuild(installation: Installation, find: Callable[[], Lost | None]) -> bool:
    """Write what ``find`` made again of a lost state; True if anything was lost.

    A note that is made again is that of a revert at work: ``repair`` comes next.
    """
    root = installation.root
    if lock.settled(root, find) is None:
        return False
    with lock.exclusive(root):
        lost = find()  # another run may have been at work until now
        if lost is None:
            return False
        try:
            _put_record(root, lost)
        except OSError as error:
            raise tree.refused(error, root) from error
    return True


def _put_record(root: Path, lost: Lost) -> None:
    folder = tree.folder(root, state.ORIGINALS)
    if not folder.exists():
        files.make_folder(folder, (root / "vllm").stat())
    for entry in lost.state.entries:
        if entry.path in lost.originals and not state.is_kept(root, entry):
            kept = state.kept(root, entry)
            files.remove(kept)
            like = tree.target(root, entry.path).stat()
            files.write(kept, lost.originals[entry.path], like)
    files.sync_folder(folder)
    if not lost.noted:  # last: until it is there, the next run makes it all again
        _put_state(root, lost.state)


def check_revertible(root: Path, inspection: Inspection) -> None:
    """Raise ``Failed`` if taking the patch back would lose or miss something."""
    replaced = inspection.replaced
    for entry, found in inspection.found:
        if state.goes_back(found, replaced):
            state.original(root, entry)
        elif found is Found.EDITED and entry.kind is not Kind.RECORD and not replaced:
            raise Failed(
                "a patched file was edited, and taking the patch back would lose that",
                where=str(root / entry.path),
                expected=f"sha256 {entry.after} (patched) or {entry.before} (stock)",
                found=f"sha256 {state.hash_of(root, entry.path)}",
                todo="save the file elsewhere if you want it, delete it here, and run "
                "'glm5-patch revert': a missing file comes back as it was",
            )


def _take_back(installation: Installation) -> Inspection | None:
    root = installation.root
    inspection = state.inspect(installation)
    done = inspection.state
    check_revertible(root, inspection)
    try:
        if done is None:
            _forget(root)
            return None
        # A replaced tree keeps its phase: read again, it still tells what it is.
        if done.phase is Phase.APPLIED and not inspection.replaced:
            _put_state(root, replace(done, phase=Phase.REVERTING))
        _restore(root, done, inspection.replaced)
    except OSError as error:
        raise tree.refused(error, root) from error
    return inspection


def _write(root: Path, begun: State, contents: dict[str, bytes]) -> State:
    package = (root / "vllm" / "__init__.py").stat()
    folder = (root / "vllm").stat()
    _put_state(root, begun)
    files.sync_folder(root)
    for path in begun.folders:
        files.make_folder(tree.target(root, path), folder)
    files.make_folder(root / state.ORIGINALS, folder)
    for entry in begun.entries:
        if entry.before is not None:
            files.copy(tree.target(root, entry.path), state.kept(root, entry))
    files.sync_folder(root / state.ORIGINALS)
    for path, data in contents.items():
        target = tree.target(root, path)
        like = target.stat() if target.exists() else package
        files.write(_staged(target), data, like)
    # New modules come first, so that no hook is ever there without what it calls.
    for path in sorted(contents, key=lambda p: (root / p).exists()):
        target = tree.target(root, path)
        files.rename(_staged(target), target)
    for file in _bytecode(root, contents):
        files.remove(tree.target(root, file))
    done = replace(begun, phase=Phase.APPLIED)
    _put_state(root, done)
    return done


def _restore(root: Path, done: State, replaced: bool = False) -> None:
    """Put back every original whose place does not hold it, and forget the state.

    With ``replaced`` the files that another installation put there stay.
    """
    ours = [e for e in done.entries if e.kind is not Kind.BYTECODE]
    added = frozenset(e.path for e in ours if e.kind is Kind.ADDED)
    for entry in ours:
        target = tree.target(root, entry.path)
        files.remove(_staged(target))
        found = state.find(root, entry)
        if found is Found.EDITED and entry.kind is Kind.RECORD and not replaced:
            # Another tool wrote to it since: keep that, and take out our rows only.
            rest = record.without_rows(target.read_bytes(), added)
            files.write(_staged(target), rest, target.stat())
            files.rename(_staged(target), target)
        elif state.goes_back(found, replaced):
            if entry.before is None:
                files.remove(target)
            elif target.parent.is_dir():
                state.original(root, entry)
                files.rename(state.kept(root, entry), target)
    _restore_bytecode(root, done, replaced)
    for path in reversed(done.folders):
        files.remove_folder(tree.folder(root, f"{path}/__pycache__"))
        files.remove_folder(tree.folder(root, path))
    _forget(root)


def _restore_bytecode(root: Path, done: State, replaced: bool) -> None:
    compiled = {e.path: e for e in done.entries if e.kind is Kind.BYTECODE}
    modules = [e.path for e in done.entries if e.kind is not Kind.BYTECODE]
    if replaced:  # what stands there now was compiled by the other installation
        modules = [path for path in modules if not (root / path).exists()]
    for path in _bytecode(root, modules):
        entry = compiled.get(path)
        # An apply that stopped early has not dropped these yet, nor kept all of them.
        if entry is None or state.hash_of(root, path) != entry.before:
            files.remove(tree.target(root, path))
    for path, entry in compiled.items():
        target = tree.target(root, path)
        if not target.exists() and not replaced and state.kept(root, entry).exists():
            state.original(root, entry)
            files.rename(state.kept(root, entry), target)


def _forget(root: Path) -> None:
    originals = tree.folder(root, state.ORIGINALS)
    for file in originals.glob("*"):
        files.remove(file)
    files.remove_folder(originals)
    files.remove(_staged(root / state.STATE))
    files.remove(root / state.STATE)


def _put_state(root: Path, new: State) -> None:
    file = tree.target(root, state.STATE)
    files.remove(_staged(file))
    files.write(_staged(file), state.dump(new), (root / "vllm" / "__init__.py").stat())
    files.rename(_staged(file), file)


def _contents(installation: Installation, plan: Plan) -> dict[str, bytes]:
    """The new bytes of every file that an apply writes, RECORD included."""
    added = {a.path: a.data for a in plan.additions}
    contents = {**added, **{e.path: e.after for e in plan.edits}}
    if installation.record is not None and added:
        path = installation.record.relative_to(installation.root).as_posix()
        before = tree.read(installation.root, path) or b""
        contents[path] = record.with_rows(before, added)
    return contents


def _entries(
    root: Path, contents: dict[str, bytes], added: set[str]
) -> tuple[Entry, ...]:
    entries = []
    for path, data in contents.items():
        before = state.hash_of(root, path)
        kind = Kind.RECORD if path.endswith("/RECORD") else Kind.PATCHED
        if path in added:
            # One of ours that is there already outlived an uninstall: it goes too.
            kind, before = Kind.ADDED, None
        entries.append(Entry(path, kind, before, sha256(data)))
    for path in _bytecode(root, contents):
        entries.append(Entry(path, Kind.BYTECODE, state.hash_of(root, path), None))
    return tuple(entries)


def _bytecode(root: Path, paths: Iterable[str]) -> Iterator[str]:
    """Compiled files of the modules at ``paths``, for any Python."""
    for path in paths:
        module = PurePosixPath(path)
        if module.suffix == ".py":
            cache = root / module.parent / "__pycache__"
            for file in sorted(cache.glob(f"{module.stem}.*.pyc")):
                yield file.relative_to(root).as_posix()


def _missing_folders(root: Path, paths: Iterable[str]) -> list[str]:
    """Folders that do not exist yet, outermost first."""
    missing = {
        parent.as_posix()
        for path in paths
        for parent in PurePosixPath(path).parents
        if not (root / parent).exists()
    }
    return sorted(missing)


def _expect(root: Path, path: str, *hashes: str | None) -> None:
    have = state.hash_of(root, path)
    if have not in hashes:
        raise Conflict(
            "a file changed while the patch was being planned",
            where=str(root / path),
            expected=f"sha256 {hashes[0]}" if hashes[0] else "no such file",
            found=f"sha256 {have}" if have else "no such file",
            todo="see what else writes to this environment, then try again",
        )


def _staged(target: Path) -> Path:
    return target.with_name(f".{target.name}.glm5-patch")
