# SPDX-License-Identifier: Apache-2.0
"""Whose fault an exception is: a package that the target lacks, or our own."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

OUR_DEPENDENCIES = frozenset({"torch", "triton"})
"""All that the modules which we add may import, besides vLLM and the standard library.
Another missing name in one of them is our mistake."""

_STDLIB = Path(sysconfig.get_paths()["stdlib"]).resolve()
_THIRD_PARTY = ("site-packages", "dist-packages")
_HERE = Path(__file__).resolve().parent


def excuse(error: BaseException, vllm: Path, ours: frozenset[Path]) -> str | None:
    """One sentence that blames a package of the environment, or None.

    ``vllm`` is the package's folder; ``ours`` are the files that the patch adds or
    changes, wherever they lie.
    """
    files = list(_files(error))
    last = files[-1] if files else None
    package = _named(error)
    if last in ours and package not in OUR_DEPENDENCIES:
        return None
    if isinstance(error, ModuleNotFoundError) and package not in (None, vllm.name):
        return f"the package {package} is missing in the target's environment"
    what = f"{type(error).__name__}: {error}"
    if last is None or last in ours or _inside(last, vllm) or _inside(last, _HERE):
        if package in (None, vllm.name):
            return None
        return f"the package {package} there does not fit this vLLM: {what}"
    return f"the package {_package(last)} there is broken: {what}"


def _named(error: BaseException) -> str | None:
    """The top-level package that an ImportError is about."""
    name = error.name if isinstance(error, ImportError) else None
    return name.partition(".")[0] if name else None


def _files(error: BaseException) -> Iterator[Path]:
    """The files of the traceback, outermost first, without the standard library.

    An error in ``re.compile`` is its caller's, and import machinery is nobody's.
    """
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith("<"):
            continue
        file = Path(frame.filename).resolve()
        if _inside(file, _STDLIB) and not set(_THIRD_PARTY) & set(file.parts):
            continue
        yield file


def _package(file: Path) -> str:
    parts = file.parts
    for folder in _THIRD_PARTY:
        if folder in parts:
            return Path(parts[parts.index(folder) + 1]).stem
    return str(file)


def _inside(file: Path, folder: Path) -> bool:
    return folder in file.parents
