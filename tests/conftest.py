# SPDX-License-Identifier: Apache-2.0
"""What every test can have: the trees of vLLM's releases, and environments of them.

GLM5_PATCH_SELECT_PYTHON names an interpreter that has the packages of
tests/releases/requirements-select.txt; if unset, it is the one that runs the tests.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from targets import RELEASE, MakeTarget, Target

ROOT = Path(__file__).resolve().parents[1]


def _load(name: str, file: Path) -> object:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def release_tree() -> Callable[[str], Path]:
    """Gives the read-only tree of a release: ``vllm/`` and its metadata."""
    return _load("glm5_patch_fetch", ROOT / "scripts" / "fetch.py").release_tree


@pytest.fixture(scope="session")
def packages() -> tuple[Path, Path]:
    """The interpreter that has torch and vLLM's other needs, and its site-packages."""
    python = Path(os.environ.get("GLM5_PATCH_SELECT_PYTHON", sys.executable))
    program = (
        "import importlib.util as u, sysconfig; "
        "print(sysconfig.get_paths()['purelib'] if u.find_spec('torch') else '')"
    )
    found = subprocess.run(
        [python, "-c", program], cwd="/", capture_output=True, text=True, check=True
    ).stdout.strip()
    if not found:
        pytest.skip(f"{python} lacks the packages of requirements-select.txt")
    return python, Path(found)


@pytest.fixture(scope="session")
def make_target(
    tmp_path_factory: pytest.TempPathFactory,
    packages: tuple[Path, Path],
    release_tree: Callable[[str], Path],
) -> MakeTarget:
    """Builds a virtual environment around a copy of the release's tree."""
    python, site = packages

    def make(with_packages: bool = True) -> Target:
        folder = tmp_path_factory.mktemp("target")
        subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
        root = next(folder.glob("lib/python3.*/site-packages"))
        shutil.copytree(release_tree(RELEASE), root, dirs_exist_ok=True)
        if with_packages:
            (root / "packages.pth").write_text(f"{site}\n")
        return Target(folder / "bin" / "python", root)

    return make
