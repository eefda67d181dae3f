# SPDX-License-Identifier: Apache-2.0
"""Find the vLLM that an interpreter would import, without importing it.

Only metadata and file names are read. The working directory never counts, even
where Python itself would look there first.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

from glm5_patch.errors import NotFound, Usage

PACKAGE = "vllm"

_SEARCH_PATH_PROGRAM = """
import json, sys
print(json.dumps([sys.executable, [p for p in sys.path if p]]))
"""


@dataclass(frozen=True)
class Installation:
    """One installed vLLM."""

    root: Path
    """The folder that holds ``vllm/``: site-packages, or a source tree."""
    version: str
    """The version that its metadata states, local label included."""
    dist_info: Path | None
    """Its metadata folder, where pip keeps RECORD; None for an egg-link."""
    editable: bool
    python: Path | None
    """The interpreter it belongs to, if that is known."""
    shadowed: tuple[Path, ...] = ()
    """Roots of further vLLMs on the same path, which Python would not import."""

    @property
    def record(self) -> Path | None:
        """The RECORD of a normal installation, which lists the package's files."""
        if self.editable or self.dist_info is None:
            return None
        record = self.dist_info / "RECORD"
        return record if record.is_file() else None


def of_running_interpreter() -> Installation:
    """The vLLM that the interpreter which runs glm5-patch would import."""
    # Python puts the script's folder, or the working directory, first: not ours.
    isolated = sys.flags.isolated or getattr(sys.flags, "safe_path", False)
    entries = sys.path if isolated else sys.path[1:]
    return _find([Path(entry) for entry in entries if entry], Path(sys.executable))


def of_python(python: Path) -> Installation:
    """The vLLM that the interpreter ``python`` would import.

    Starts it once, in the root folder, to print its search path.
    """
    try:
        done = subprocess.run(
            [str(python.absolute()), "-c", _SEARCH_PATH_PROGRAM],
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        executable, entries = json.loads(done.stdout.splitlines()[-1])
        paths = [Path(entry) for entry in entries]
    except (
        OSError,
        subprocess.SubprocessError,
        ValueError,
        IndexError,
        TypeError,
    ) as error:
        raise Usage(
            "--python does not name a Python interpreter that starts",
            where=str(python),
            expected="its search path, within a minute",
            found=_reason(error),
            todo="give the path of the interpreter that runs vLLM",
        ) from error
    # With -c the first entry is "", the working directory, which was dropped there.
    return _find(paths, Path(executable))


def in_site_packages(folder: Path) -> Installation:
    """The vLLM installed in ``folder``, or linked from it."""
    if not folder.is_dir():
        raise Usage(
            "--site-packages does not name a folder",
            where=str(folder),
            expected="a folder",
            found="something else" if folder.exists() else "nothing of that name",
            todo="give the folder that holds vllm-*.dist-info",
        )
    folder = folder.resolve()
    return _find([folder, *_linked_from(folder)], _interpreter_above(folder))


def _find(entries: Sequence[Path], python: Path | None) -> Installation:
    owned = dict(_owned_roots(entries))
    first = PathFinder.find_spec(PACKAGE, [str(entry) for entry in entries])
    imported = Path(first.origin).parent.parent if first and first.origin else None
    if imported is None:
        # An editable install may answer through an import hook instead of the path.
        imported = next((root for root in owned if _has_package(root)), None)
    if imported is None:
        raise NotFound(
            "no vLLM here",
            where=str(python) if python else ", ".join(map(str, entries)),
            expected="an installed package 'vllm'",
            found="no metadata of it" if not owned else "metadata without the package",
            todo="name the environment with --python PATH or --site-packages DIR",
        )
    imported = imported.resolve()
    dist = owned.get(imported)
    if dist is None:
        raise NotFound(
            "Python would import a vLLM that no installer put there",
            where=first.origin if first else str(imported / PACKAGE),
            expected="a vllm-*.dist-info beside it, or an editable install of it",
            found="none" if not owned else "only of " + ", ".join(map(str, owned)),
            todo="take it off PYTHONPATH, or install it with pip",
        )
    return Installation(
        root=imported,
        version=dist.version,
        dist_info=_dist_info(dist),
        # `setup.py develop` leaves metadata without a version in its name
        editable=_source_of(dist) is not None
        or (imported / f"{PACKAGE}.egg-info").is_dir(),
        python=python,
        shadowed=tuple(r for r in owned if r != imported and _has_package(r)),
    )


def _owned_roots(entries: Sequence[Path]) -> Iterator[tuple[Path, Distribution]]:
    """Each distribution of vLLM on the path with the folder its package lies in."""
    seen: set[Path] = set()
    for dist in Distribution.discover(name=PACKAGE, path=[str(e) for e in entries]):
        if _version(dist) is None:
            continue
        root = _source_of(dist) or Path(str(dist.locate_file("")))
        root = root.resolve()
        if root not in seen:
            seen.add(root)
            yield root, dist


def _source_of(dist: Distribution) -> Path | None:
    """The source tree of an editable install, from its ``direct_url.json``."""
    text = dist.read_text("direct_url.json")
    if text is None:
        return None
    try:
        origin = json.loads(text)
        editable = origin.get("dir_info", {}).get("editable") is True
        path = Path(unquote(urlsplit(origin["url"]).path))
    except (ValueError, AttributeError, KeyError, TypeError):
        return None
    if not editable:
        return None
    return path if _has_package(path) else path / "src"


def _linked_from(folder: Path) -> Iterator[Path]:
    """Folders that the .pth files of ``folder`` add to the path.

    Lines that are code are left alone: nothing of a user's tree is run here.
    """
    for link in sorted(folder.glob("*.pth")):
        try:
            text = link.read_text(errors="replace")
        except OSError:
            continue  # as Python does
        for line in text.splitlines():
            line = line.strip()
            if line and not line.startswith(("#", "import ", "import\t")):
                target = folder / line
                if target.is_dir():
                    yield target


def _interpreter_above(folder: Path) -> Path | None:
    """The interpreter of the environment that ``folder`` is the library of."""
    # <prefix>/lib/pythonX.Y/site-packages
    if folder.parent.parent.name in ("lib", "lib64"):
        for name in (folder.parent.name, "python3", "python"):
            python = folder.parents[2] / "bin" / name
            if python.exists():
                return python
    return None


def _dist_info(dist: Distribution) -> Path | None:
    folders = Path(str(dist.locate_file(""))).glob(f"{PACKAGE}-*.dist-info")
    return next(
        (f for f in folders if _version(PathDistribution(f)) == dist.version), None
    )


def _version(dist: Distribution) -> str | None:
    """The version of a vLLM.

    Metadata that an interrupted uninstall left behind has none, and a folder such as
    ``vllm-tpu-1.0.dist-info`` is another project's.
    """
    metadata = dist.metadata
    if not metadata or "Version" not in metadata or metadata["Name"] != PACKAGE:
        return None
    return metadata["Version"]


def _reason(error: Exception) -> str:
    """Why an interpreter did not answer: what it printed last, if it did."""
    printed = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
    lines = (printed or str(error)).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def _has_package(root: Path) -> bool:
    return (root / PACKAGE / "__init__.py").is_file()
