# SPDX-License-Identifier: Apache-2.0
"""A copy of a release's tree, and glm5-patch run on it as a user runs it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import glm5_patch

PROJECT = Path(__file__).resolve().parents[2]
IMPORTED_FROM = Path(glm5_patch.__file__).resolve().parents[1]
"""The folder that the tests import glm5_patch from: src, or where it is installed."""


def patched(release: str) -> tuple[str, ...]:
    """The files of ``release`` that the patch set changes, by its lock."""
    lock = json.loads((PROJECT / "patches" / "lock.json").read_text())
    return tuple(lock["releases"][release])


PATCHED = patched("0.16.0")
TARGET = "vllm/platforms/cuda.py"
ADDED = "vllm/v1/attention/ops/triton_sparse_mla.py"
STATE = ".glm5-patch/state.json"


@dataclass(frozen=True)
class Done:
    """A command that ended."""

    args: tuple[str, ...]
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


@dataclass
class Scene:
    """A site-packages folder at ``root``, below a folder that the test owns."""

    home: Path
    root: Path
    env: dict[str, str] = field(default_factory=dict)
    library: Path = IMPORTED_FROM
    """What stands in PYTHONPATH."""
    stand_in: Callable[[], None] | None = None
    """Called in the child before it starts."""

    def run(self, *args: str, cwd: Path | None = None) -> Done:
        """Run ``glm5-patch`` on this tree, or where ``args`` say."""
        if "--site-packages" not in args and "--python" not in args:
            args = (*args, "--site-packages", str(self.root))
        return self.run_exactly(*args, cwd=cwd)

    def run_exactly(
        self, *args: str, cwd: Path | None = None, python: Path | None = None
    ) -> Done:
        """Run ``python -m glm5_patch`` with these arguments and no others."""
        done = subprocess.run(
            [str(python or sys.executable), "-m", "glm5_patch", *args],
            cwd=cwd or self.home,
            env=environment(self.library) | self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            preexec_fn=self.stand_in,
        )
        return Done(args, done.returncode, done.stdout, done.stderr)

    def must(self, *args: str) -> Done:
        """Run a command that has to succeed."""
        done = self.run(*args)
        assert done.code == 0, done
        return done

    def read(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        """Put a new file at ``path``; the old one's inode is other tests' too."""
        file = self.root / path
        file.unlink(missing_ok=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    def edit(self, path: str, old: str, new: str) -> None:
        text = self.read(path).decode()
        assert old in text
        self.write(path, text.replace(old, new).encode())

    def label(self, version: str) -> None:
        """Have the metadata state another version."""
        (folder,) = self.root.glob("vllm-*.dist-info")
        renamed = folder.rename(folder.with_name(f"vllm-{version}.dist-info"))
        name = renamed.relative_to(self.root).as_posix()
        old = folder.name.removeprefix("vllm-").removesuffix(".dist-info")
        self.edit(f"{name}/METADATA", f"Version: {old}\n", f"Version: {version}\n")
        self.edit(f"{name}/RECORD", folder.name, name)

    def own_project(self) -> Path:
        """Run a copy of the project from now on; gives the copy's patch set."""
        copy = self.home / "project"
        package = Path(glm5_patch.__file__).resolve().parent
        skip = shutil.ignore_patterns("__pycache__", "patches")
        shutil.copytree(package, copy / "src" / "glm5_patch", ignore=skip)
        shutil.copytree(PROJECT / "patches", copy / "patches")
        self.library = copy / "src"
        self.env["PYTHONDONTWRITEBYTECODE"] = "1"
        return copy / "patches"


def environment(library: Path) -> dict[str, str]:
    """What a command sees: nothing of the terminal or of the tests' own variables."""
    kept = ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV")
    found = {name: os.environ[name] for name in kept if name in os.environ}
    pip = {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "SSL_"))}
    plain = {"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"}
    return found | pip | plain | {"PYTHONPATH": str(library)}


def link_tree(source: Path, target: Path) -> None:
    """Copy folders, and link files: fast, and a shared inode must never change."""
    shutil.copytree(source, target, copy_function=os.link, dirs_exist_ok=True)


def contents(folder: Path) -> Mapping[str, bytes | None]:
    """The bytes of every file, and None for every folder, below ``folder``."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        if path.is_file()
        else None
        for path in sorted(folder.rglob("*"))
    }


def stamps(folder: Path) -> Mapping[str, tuple[int, ...]]:
    """Inode, mode, owner, size and times of ``folder`` and of all that is in it."""
    found = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        s = path.lstat()
        times = (s.st_mtime_ns, s.st_ctime_ns)
        name = path.relative_to(folder).as_posix()
        found[name] = (s.st_ino, s.st_mode, s.st_uid, s.st_gid, s.st_size, *times)
    return found
