# SPDX-License-Identifier: Apache-2.0
"""Where the tests of GGUF loading find a vLLM, and how they run it.

GLM5_PATCH_TREES is a folder with `<release>/vllm` of each release, as unpacked from its
wheel; GLM5_PATCH_PYTHONS names an interpreter for each, which has what that release
imports: `0.16.0=/path/python 0.23.0=/path/python`. Tests that need them are skipped
without.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from glm5_patch import manifest, plan, tree

RELEASES = ("0.16.0", "0.23.0")


def python_of(release: str) -> str:
    pairs = os.environ.get("GLM5_PATCH_PYTHONS", "").split()
    found = dict(pair.split("=", 1) for pair in pairs)
    if release not in found:
        pytest.skip(f"GLM5_PATCH_PYTHONS names no interpreter for vLLM {release}")
    return found[release]


def stock_tree(release: str, into: Path) -> Path:
    """A copy of the release."""
    trees = os.environ.get("GLM5_PATCH_TREES")
    if not trees or not (source := Path(trees) / release / "vllm").is_dir():
        pytest.skip(f"GLM5_PATCH_TREES holds no vLLM {release}")
    shutil.copytree(source, into / "vllm")
    return into


def patched_tree(release: str, into: Path) -> Path:
    """A copy of the release with the gguf feature applied."""
    stock_tree(release, into)
    patches = manifest.load(manifest.bundled_root())
    features = [feature for feature in patches.features if feature.name == "gguf"]
    series = manifest.series(patches, features, release, tested=True)
    made = plan.make(series, lambda path: tree.read(into, path))
    for edit in made.edits:
        (into / edit.path).write_bytes(edit.after)
    for addition in made.additions:
        target = into / addition.path
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(addition.data)
    return into


def run_vllm(release: str, root: Path, jobs: list[dict]) -> None:
    """Have the release in `root` do the jobs of `in_vllm`."""
    python = python_of(release)
    request = root.parent / f"{root.name}.json"
    request.write_text(json.dumps(jobs))
    done = subprocess.run(
        [python, Path(__file__).with_name("in_vllm.py"), request],
        env={"PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1", "HOME": str(root.parent)},
        cwd=root.parent,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
