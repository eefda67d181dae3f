# SPDX-License-Identifier: Apache-2.0
"""Fetch a release of vLLM by name and keep its Python files: fetch.py VERSION ...

The wheel comes from wherever pip is set up to look; half a gigabyte of it is compiled
code that no test needs, so only Python files and metadata are unpacked, once, below
$GLM5_PATCH_CACHE or the user's cache folder. Prints the folder of each release.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# The oldest glibc that some release was built for comes last; pip takes the first fit.
PLATFORMS = ("manylinux_2_35", "manylinux_2_31", "manylinux_2_28")


def cache() -> Path:
    """The folder that outlives test runs, outside the repository."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("GLM5_PATCH_CACHE") or Path(base, "glm5-patch"))


def release_tree(version: str) -> Path:
    """The folder that holds ``vllm/`` and ``vllm-<version>.dist-info/``; read only."""
    tree = cache() / "releases" / version
    if tree.is_dir():
        return tree
    tree.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tree.parent) as scratch:
        wheel = download(version, Path(scratch))
        unpacked = Path(scratch, "tree")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(".py") or ".dist-info/" in name:
                    archive.extract(name, unpacked)
        shutil.move(unpacked, tree)
    return tree


def download(version: str, folder: Path) -> Path:
    """The wheel of ``version`` for Linux, in ``folder``."""
    machine = os.uname().machine
    command = [sys.executable, "-m", "pip", "download", f"vllm=={version}"]
    command += ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command += [f"--platform={name}_{machine}" for name in PLATFORMS]
    command += ["--python-version=3.12"]
    subprocess.run(command, check=True)
    return next(folder.glob("vllm-*.whl"))


if __name__ == "__main__":
    for each in sys.argv[1:]:
        print(release_tree(each))
