# SPDX-License-Identifier: Apache-2.0
"""Interpreters with a vLLM in them: Python files of a release, and torch for a CPU.

GLM5_PATCH_SELECT_PYTHON names an interpreter that has the packages of
tests/releases/requirements-select.txt; if unset, it is the one that runs the tests.
"""

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from probe_target import RELEASE, Answers, MakeTarget, Overlay, Target, ask

from glm5_patch import diff, overlay, plan, tree
from glm5_patch.manifest import Series
from glm5_patch.plan import Plan
from glm5_patch.probe.judge import BLOCK_SIZE_ON, CASES
from glm5_patch.probe.model import Request

PATCHES = Path(__file__).parents[2] / "patches"


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


@pytest.fixture(scope="session")
def stock_target(make_target: MakeTarget) -> Target:
    return make_target()


@pytest.fixture(scope="session")
def patching(stock_target: Target) -> Plan:
    """What the repository's patch files make of the release."""
    texts = sorted(PATCHES.glob(f"vllm/*/{RELEASE}.patch"))
    files = PATCHES / "files"
    series = Series(
        release=RELEASE,
        tested=False,
        features=(),
        diffs=tuple(d for text in texts for d in diff.parse(text.read_text(), "")),
        new_files={
            str(file.relative_to(files)): file.read_bytes()
            for file in files.rglob("*.py")
        },
        hashes={},
    )
    return plan.make(series, lambda path: tree.read(stock_target.root, path))


@pytest.fixture(scope="session")
def sides(patching: Plan) -> Iterator[tuple[Overlay, Overlay]]:
    """The overlays (stock, patched)."""
    with overlay.sides(patching) as (stock, patched):
        yield stock, patched


@pytest.fixture(scope="session")
def our_modules(patching: Plan) -> tuple[str, ...]:
    return tuple(overlay.module_of(added.path) for added in patching.additions)


@pytest.fixture(scope="session")
def answers(
    stock_target: Target,
    sides: tuple[Overlay, Overlay],
    our_modules: tuple[str, ...],
) -> Answers:
    """Every case put to an unpatched tree, as it is and through the patched overlay."""
    request = Request(stock_target.root, cases=CASES, block_size_on=BLOCK_SIZE_ON)
    patched = dataclasses.replace(request, overlay=sides[1], modules=our_modules)
    return ask(stock_target, request, patched)
