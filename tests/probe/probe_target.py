# SPDX-License-Identifier: Apache-2.0
"""What the probe's tests share besides fixtures."""

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from glm5_patch.probe.explain import ask_both
from glm5_patch.probe.model import Answer, Ran, Request

RELEASE = "0.16.0"
TIMEOUT_S = 300.0

Overlay = Mapping[str, Path | None]


@dataclass(frozen=True)
class Target:
    """An interpreter, and the site-packages that vLLM is in."""

    python: Path
    root: Path


MakeTarget = Callable[..., Target]


@dataclass(frozen=True)
class Answers:
    """What a tree answers as stock and as patched."""

    stock: Ran
    patched: Ran


def ask(target: Target, stock: Request, patched: Request) -> Answers:
    """Both requests, which must both be answered."""
    before, after = ask_both(target.python, stock, patched, TIMEOUT_S)
    return Answers(ran(before), ran(after))


def ran(answer: Answer) -> Ran:
    """The answer, if there is one."""
    assert isinstance(answer, Ran), answer
    return answer


def listing(folder: Path) -> dict[str, str]:
    """Every file and folder below ``folder``: contents, mode and time of change."""
    found = {}
    for path in sorted(folder.rglob("*")):
        stat = path.lstat()
        digest = "-"
        if path.is_file() and not path.is_symlink():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        name = os.fspath(path.relative_to(folder))
        found[name] = f"{digest} {stat.st_mode:o} {stat.st_mtime_ns}"
    return found
