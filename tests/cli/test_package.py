# SPDX-License-Identifier: Apache-2.0
"""The wheel: what is in it, that it is reproducible, and every Python it is for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from scene import PROJECT, Scene, contents

OTHER_PYTHONS = ("3.10", "3.12", "3.13")


def build(folder: Path) -> Path:
    """The wheel of a copy of the project: a build must not write into the checkout."""
    copy = folder / "project"
    for name in ("src", "patches"):
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PROJECT / name, copy / name, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(PROJECT / name, copy / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), str(copy)]
    environment = os.environ | {"SOURCE_DATE_EPOCH": "1700000000"}
    environment.pop("PYTHONPATH", None)
    subprocess.run(command, check=True, env=environment, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    return build(tmp_path_factory.mktemp("wheel"))


def test_it_is_reproducible(wheel: Path, tmp_path: Path) -> None:
    assert build(tmp_path).read_bytes() == wheel.read_bytes()


def test_it_holds_the_patch_set(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for file in (PROJECT / "patches").rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                name = f"glm5_patch/{file.relative_to(PROJECT).as_posix()}"
                assert archive.read(name) == file.read_bytes()
    assert not [n for n in names if n.startswith("vllm") or "__pycache__" in n]
    assert {n.partition("/")[2] for n in names if "dist-info/licenses" in n} == {
        "licenses/LICENSE",
        "licenses/NOTICE",
    }


def find_python(version: str) -> Path | None:
    """An interpreter of this version that starts, on the path or among pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    on_path = shutil.which(f"python{version}")
    candidates = [Path(on_path)] if on_path else []
    candidates += sorted(pyenv.glob(f"versions/{version}.*/bin/python"))
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    for python in candidates:
        command = [str(python), "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return python
    return None


@pytest.mark.parametrize("version", OTHER_PYTHONS)
def test_it_works_on(version: str, wheel: Path, scene: Scene) -> None:
    """Installed with pip, as a user does it; the dependencies are the newest ones."""
    python = find_python(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    environment = scene.home / "environment"
    subprocess.run([str(python), "-m", "venv", str(environment)], check=True)
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    pip = [str(environment / "bin" / "pip"), "install", "--quiet", str(wheel)]
    subprocess.run(pip, check=True, env=clean)

    def run(*args: str) -> str:
        command = [str(environment / "bin" / "glm5-patch"), *args]
        done = subprocess.run(
            command, env=clean, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done
        return done.stdout

    place = ("--site-packages", str(scene.root))
    before = contents(scene.root)
    assert "apply" in run("--help")
    assert "0.16.0" in run("list")
    assert " to vLLM 0.16.0, digest " in run("apply", *place)
    assert "files    passed" in run("verify", *place)
    assert "reverted" in run("revert", *place)
    assert contents(scene.root) == before


def test_the_console_script(scene: Scene) -> None:
    """The command that pip makes is the module's own ``main``."""
    program = (
        "import sys; from glm5_patch.cli import main; sys.argv[0] = 'glm5-patch'; "
    )
    done = subprocess.run(
        [sys.executable, "-c", program + "main()", "--help"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(scene.library), "COLUMNS": "80"},
    )
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: glm5-patch [OPTIONS] COMMAND")
