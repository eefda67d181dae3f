# SPDX-License-Identifier: Apache-2.0
"""Scenes to run commands on, and snapshots of what they print.

GLM5_PATCH_UPDATE_SNAPSHOTS=1 writes tests/cli/snapshots anew instead of comparing.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from scene import Done, Scene, contents, link_tree

SNAPSHOTS = Path(__file__).with_name("snapshots")
UPDATE = os.environ.get("GLM5_PATCH_UPDATE_SNAPSHOTS") == "1"

Snapshot = Callable[..., None]


@pytest.fixture(scope="session")
def pristine(
    tmp_path_factory: pytest.TempPathFactory, release_tree: Callable[[str], Path]
) -> Iterator[Callable[[str], Path]]:
    """Gives a release's tree whose inodes the scenes share; none may ever change."""
    made: dict[str, Path] = {}

    def tree(version: str) -> Path:
        if version not in made:
            folder = tmp_path_factory.mktemp("pristine") / version
            made[version] = shutil.copytree(release_tree(version), folder)
        return made[version]

    yield tree
    for version, folder in made.items():
        assert contents(folder) == contents(release_tree(version)), (
            f"a command wrote through a hard link into {version}"
        )


@pytest.fixture
def make_scene(
    tmp_path: Path, pristine: Callable[[str], Path]
) -> Callable[[str], Scene]:
    def make(version: str) -> Scene:
        root = tmp_path / "site-packages"
        link_tree(pristine(version), root)
        return Scene(tmp_path, root)

    return make


@pytest.fixture
def scene(make_scene: Callable[[str], Scene]) -> Scene:
    """The tree of vLLM 0.16.0."""
    return make_scene("0.16.0")


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    """Holds commands against the file of this name; only temporary paths may differ."""

    def check(name: str, *commands: Done, also: Path | None = None) -> None:
        text = "\n".join(_transcript(done) for done in commands)
        text = text.replace(str(tmp_path), "TMP")
        if also is not None:
            text = text.replace(str(also), "ENVIRONMENT")
            text = re.sub(r"(?<=/lib/python)3\.\d+", "3.X", text)
        file = SNAPSHOTS / f"{name}.txt"
        if UPDATE:
            file.write_text(text)
        assert file.exists(), f"no snapshot {file.name}; see {Path(__file__).name}"
        assert text == file.read_text()

    return check


def _transcript(done: Done) -> str:
    parts = [f"$ glm5-patch {' '.join(done.args)}\n"]
    if done.out:
        parts += ["--- stdout\n", done.out]
    if done.err:
        parts += ["--- stderr\n", done.err]
    return "".join(parts) + f"--- exit code {done.code}\n"
