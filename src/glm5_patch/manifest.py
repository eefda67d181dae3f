# SPDX-License-Identifier: Apache-2.0
"""What the patch set holds, and which series of it serves an installed vLLM.

``manifest.toml`` is written by hand: features, their variants, the releases.
``lock.json`` is generated: the sha256 of each source file of the patch set, and of
every file of vLLM that it touches, before and after, release by release.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from glm5_patch import diff, relpath
from glm5_patch.diff import FileDiff
from glm5_patch.errors import Conflict, Failed, NotSupported, Usage

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MANIFEST = "manifest.toml"
LOCK = "lock.json"
FORMAT = 1
REINSTALL = "install glm5-patch again"

Read = Callable[[str], "bytes | None"]
"""A file's stock bytes by its path relative to site-packages; None if absent."""


def sha256(data: bytes) -> str:
    """The sha256 of ``data`` in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Variant:
    """One patch file; it serves from ``since`` until the next variant starts."""

    since: Version
    patch: str


@dataclass(frozen=True)
class Feature:
    """A group of hooks and new files that is applied as a whole."""

    name: str
    summary: str
    variants: tuple[Variant, ...]
    files: tuple[str, ...]

    def variant_for(self, release: Version) -> Variant:
        """The newest variant that is not newer than ``release``, else the oldest."""
        fitting = [v for v in self.variants if v.since <= release]
        return fitting[-1] if fitting else self.variants[0]


@dataclass(frozen=True)
class Hashes:
    """The sha256 of one file of a release, as released and as patched."""

    before: str
    after: str


@dataclass(frozen=True)
class Series:
    """What is to be done to one installed vLLM."""

    release: str
    """The release that the bytes are of, or whose variants are tried."""
    tested: bool
    """False for a build that no row of the manifest knows."""
    features: tuple[str, ...]
    diffs: tuple[FileDiff, ...]
    """Merged: one for each file, in the order of their paths."""
    new_files: Mapping[str, bytes]
    hashes: Mapping[str, Hashes]
    """What the lock expects; empty for an untested build or a part of the features."""


@dataclass(frozen=True)
class PatchSet:
    """The manifest, the lock, and the folder that they and the patches lie in."""

    root: Path
    features: tuple[Feature, ...]
    releases: tuple[str, ...]
    needs: Mapping[str, str]
    """A text that a file of vLLM must contain for the patches to make sense."""
    sources: Mapping[str, str]
    lock: Mapping[str, Mapping[str, Hashes]]

    def source(self, path: str) -> bytes:
        """Read a file of the patch set, and hold it against the lock."""
        try:
            data = (self.root / path).read_bytes()
        except OSError as error:
            raise Failed(
                "a file of the patch set is missing",
                where=path,
                expected=f"sha256 {self.sources.get(path, 'none: not in the lock')}",
                found=error.strerror,
                todo=REINSTALL,
            ) from error
        if sha256(data) != self.sources.get(path):
            raise Failed(
                "a file of the patch set was changed or cut short",
                where=path,
                expected=f"sha256 {self.sources.get(path, 'none: not in the lock')}",
                found=f"sha256 {sha256(data)}",
                todo=REINSTALL,
            )
        return data


def bundled_root() -> Path:
    """The folder of the patch set: inside the installed package, or the checkout's."""
    package = Path(__file__).resolve().parent
    installed = package / "patches"
    return installed if installed.is_dir() else package.parents[1] / "patches"


def load(root: Path) -> PatchSet:
    """Read and check ``manifest.toml`` and ``lock.json`` below ``root``."""
    features, releases, needs = read_manifest(root)
    lock = _table(root / LOCK, json.loads)
    try:
        sources = {str(k): str(v) for k, v in lock["sources"].items()}
        rows = {
            release: {
                relpath.checked(path, LOCK, diff.PACKAGES): Hashes(**hashes)
                for path, hashes in files.items()
            }
            for release, files in lock["releases"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise _unreadable(LOCK, f"{type(error).__name__}: {error}") from error
    if not all(rows.values()):  # no file to differ in: any build would match
        raise _unreadable(LOCK, "a release has no file")
    if set(rows) != set(releases):
        raise _unreadable(LOCK, f"its releases are not those of {MANIFEST}")
    return PatchSet(root, features, releases, needs, sources, rows)


def read_manifest(
    root: Path,
) -> tuple[tuple[Feature, ...], tuple[str, ...], Mapping[str, str]]:
    """The features, releases and needs of ``manifest.toml``."""
    manifest = _table(root / MANIFEST, lambda text: tomllib.loads(text))
    try:
        features = tuple(_feature(f) for f in manifest["feature"])
        releases = tuple(str(Version(r)) for r in manifest["releases"])
        needs = {
            relpath.checked(n["file"], MANIFEST, diff.PACKAGES): str(n["contains"])
            for n in manifest["needs"]
        }
    except (KeyError, TypeError, AttributeError, InvalidVersion) as error:
        raise _unreadable(MANIFEST, f"{type(error).__name__}: {error}") from error
    if not features or not releases:
        raise _unreadable(MANIFEST, "it names no feature or no release")
    return features, releases, needs


def choose(patch_set: PatchSet, names: Sequence[str]) -> tuple[Feature, ...]:
    """The features called ``names``, in the manifest's order; all if none is named."""
    known = [f.name for f in patch_set.features]
    for name in names:
        if name not in known:
            raise Usage(
                f"no feature is called {name!r}",
                expected=" or ".join(known),
                todo="see 'glm5-patch list'",
            )
    return tuple(f for f in patch_set.features if not names or f.name in names)


def select(
    patch_set: PatchSet,
    features: Sequence[Feature],
    label: str,
    read: Read,
    allow_unlisted: bool = False,
) -> Series:
    """Find the series for the vLLM that calls itself ``label``.

    The bytes decide, not the label: a release whose every touched file has a known
    hash is served under any label. Other bytes raise ``Conflict`` if the label is a
    release's and ``NotSupported`` if not, or, with ``allow_unlisted``, give a series
    that is not tested and whose hunks must each find exactly one place.
    """
    release = _release_of(label)
    version = Version(release) if release else None
    found: dict[str, bytes | None] = {}

    def hash_of(path: str) -> str:
        if path not in found:
            found[path] = read(path)
        data = found[path]
        return "no such file" if data is None else sha256(data)

    def differing(candidate: str) -> list[str]:
        rows = patch_set.lock[candidate]
        return [path for path, row in rows.items() if hash_of(path) != row.before]

    order = sorted(patch_set.releases, key=lambda r: (r != release, Version(r)))
    known = next((r for r in order if not differing(r)), None)
    if known is not None:
        chosen = series(patch_set, features, known, tested=True)
        for file in chosen.diffs:
            if file.path not in patch_set.lock[known]:
                raise _unreadable(LOCK, f"{known} lacks a row for {file.path}")
        return chosen

    _check_needs(patch_set, label, read)
    if allow_unlisted:
        basis = _basis(patch_set, version, differing)
        return series(patch_set, features, basis, tested=False)

    supported = ", ".join(patch_set.releases)
    if release not in patch_set.releases:
        raise NotSupported(
            f"vLLM {label} is not a release that this patch set knows",
            expected=f"vLLM {supported}, or a build with the same files",
            found=_closest(patch_set, differing),
            todo="install a release that is known; or, for a build near one, "
            "try 'glm5-patch apply --allow-unlisted --dry-run'",
        )
    path = differing(release)[0]
    raise Conflict(
        f"a file is not as vLLM {release} released it",
        where=path,
        expected=f"sha256 {patch_set.lock[release][path].before}",
        found=f"sha256 {hash_of(path)}{_line_ends(found[path])}; "
        f"{_closest(patch_set, differing)}",
        todo="undo the edit or install vLLM again; or, if it is wanted, "
        "try 'glm5-patch apply --allow-unlisted --dry-run'",
    )


def series(
    patch_set: PatchSet, features: Sequence[Feature], release: str, tested: bool
) -> Series:
    """Gather what ``features`` do to ``release``, each source held against the lock."""
    hunks: dict[str, list[diff.Hunk]] = {}
    new_files: dict[str, bytes] = {}
    for feature in features:
        name = feature.variant_for(Version(release)).patch
        try:
            text = patch_set.source(name).decode()
        except UnicodeDecodeError as error:
            raise _unreadable(name, str(error)) from error
        for file in diff.parse(text, name):
            hunks.setdefault(file.path, []).extend(file.hunks)
        for path in feature.files:
            new_files[path] = patch_set.source(f"files/{path}")
    whole = len(features) == len(patch_set.features)
    return Series(
        release=release,
        tested=tested,
        features=tuple(f.name for f in features),
        diffs=tuple(FileDiff(path, tuple(hunks[path])) for path in sorted(hunks)),
        new_files=dict(sorted(new_files.items())),
        hashes=patch_set.lock.get(release, {}) if tested and whole else {},
    )


def _basis(
    patch_set: PatchSet,
    version: Version | None,
    differing: Callable[[str], list[str]],
) -> str:
    """The release whose variants an unlisted build is tried with.

    Images call themselves ``0.1.dev20051``, or nothing that is a version: then it is
    the release with the most files in common, the newest of several.
    """
    oldest = min(map(Version, patch_set.releases))
    if version is not None and Version(version.base_version) >= oldest:
        return str(version)
    newest_first = sorted(patch_set.releases, key=Version, reverse=True)
    return min(newest_first, key=lambda release: len(differing(release)))


def _release_of(label: str) -> str | None:
    """The label without its local part; None where it is no version at all."""
    try:
        return Version(label).public
    except InvalidVersion:
        return None


def _check_needs(patch_set: PatchSet, label: str, read: Read) -> None:
    for path, text in patch_set.needs.items():
        data = read(path)
        if data is None or text.encode() not in data:
            raise NotSupported(
                f"vLLM {label} does not know GLM-5",
                where=path,
                expected=text,
                found="no such file" if data is None else "no such text",
                todo="install vLLM " + ", ".join(patch_set.releases),
            )


def _closest(patch_set: PatchSet, differing: Callable[[str], list[str]]) -> str:
    nearest = min(patch_set.releases, key=lambda r: len(differing(r)))
    total = len(patch_set.lock[nearest])
    same = total - len(differing(nearest))
    return f"nearest release {nearest}, {same} of {total} files the same"


def _line_ends(data: bytes | None) -> str:
    return " (its lines end in CR LF)" if data is not None and b"\r\n" in data else ""


def _feature(table: Mapping[str, Any]) -> Feature:
    variants = sorted(
        (Variant(Version(since), str(p)) for since, p in table["variants"].items()),
        key=lambda v: v.since,
    )
    if not variants:
        raise _unreadable(MANIFEST, f"feature {table['name']!r} has no variant")
    return Feature(
        name=str(table["name"]),
        summary=str(table["summary"]),
        variants=tuple(
            Variant(v.since, relpath.checked(v.patch, MANIFEST, diff.PACKAGES))
            for v in variants
        ),
        files=tuple(
            relpath.checked(path, MANIFEST, diff.PACKAGES) for path in table["files"]
        ),
    )


def _table(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        table = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path.name, str(error)) from error
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise _unreadable(path.name, f"not of format {FORMAT}")
    return table


def _unreadable(where: str, why: str) -> Failed:
    return Failed(
        "a file of the patch set cannot be read",
        where=where,
        expected="the file as glm5-patch came with it",
        found=why,
        todo=REINSTALL,
    )
