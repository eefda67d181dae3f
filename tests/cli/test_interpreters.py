# SPDX-License-Identifier: Apache-2.0
"""Environments: what pip does over a patch, and the levels that start vLLM's Python."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scene import ADDED, Scene, contents, patched, stamps
from targets import MakeTarget

REGISTRY = "vllm/model_executor/models/registry.py"


def wheel(tree: Path, version: str, folder: Path) -> Path:
    """A wheel of the files of ``tree`` that the patch looks at: pip takes no longer."""
    info = f"vllm-{version}.dist-info"
    files = {p: (tree / p).read_bytes() for p in ("vllm/__init__.py", REGISTRY)}
    files |= {p: (tree / p).read_bytes() for p in patched(version)}
    for package in ("vllm/v1/attention/ops", "vllm/v1/attention/backends/mla"):
        files[f"{package}/__init__.py"] = b""
    head = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    files[f"{info}/METADATA"] = head.encode()
    files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: test\n"
        b"Root-Is-Purelib: true\nTag: py3-none-any\n"
    )
    rows = []
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
        rows.append(f"{path},sha256={digest.decode()},{len(data)}\n")
    files[f"{info}/RECORD"] = ("".join(rows) + f"{info}/RECORD,,\n").encode()
    made = folder / f"vllm-{version}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for path, data in files.items():
            archive.writestr(path, data)
    return made


class Environment:
    """A virtual environment without pip, and the tests' pip to fill it."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
        subprocess.run(command, check=True)
        self.python = folder / "bin" / "python"
        (self.root,) = folder.glob("lib/python3.*/site-packages")
        self.scene = Scene(folder.parent, self.root)

    def pip(self, *args: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", str(self.python), *args]
        subprocess.run(command, check=True, capture_output=True)

    def install(self, made: Path, how: str = "--upgrade") -> None:
        self.pip("install", "--no-index", "--no-deps", how, str(made))

    def brought(self) -> dict[str, bytes | None]:
        """All that is there but the state of the patch."""
        found = contents(self.root).items()
        return {path: data for path, data in found if ".glm5-patch" not in path}

    def run(self, *args: str) -> dict[str, Any]:
        done = self.scene.run(*args, "--json", "--python", str(self.python))
        return done.json


@pytest.fixture
def environment(tmp_path: Path, release_tree: Callable[[str], Path]) -> Environment:
    made = Environment(tmp_path / "environment")
    made.install(wheel(release_tree("0.16.0"), "0.16.0", tmp_path))
    assert made.run("apply")["changed"]
    return made


def test_pip_removes_what_was_added(environment: Environment) -> None:
    environment.pip("uninstall", "--yes", "vllm")
    left = {
        path for path, data in contents(environment.root).items() if data is not None
    }
    assert all(path.startswith(".glm5-patch/") for path in left)
    assert environment.run("status")["exit_code"] == 3


def test_a_fresh_install_after_an_uninstall(
    environment: Environment, tmp_path: Path, release_tree: Callable[[str], Path]
) -> None:
    environment.pip("uninstall", "--yes", "vllm")
    environment.install(wheel(release_tree("0.16.0"), "0.16.0", tmp_path))
    before = environment.brought()
    assert environment.run("status")["condition"] == "replaced"
    assert environment.run("revert")["changed"]
    assert contents(environment.root) == before
    assert environment.run("status")["condition"] == "not applied"


def test_an_upgrade_underneath(
    environment: Environment, tmp_path: Path, release_tree: Callable[[str], Path]
) -> None:
    environment.install(wheel(release_tree("0.23.0"), "0.23.0", tmp_path))
    assert not (environment.root / ADDED).exists()
    before = environment.brought()
    found = environment.run("status")
    assert (found["exit_code"], found["condition"]) == (1, "replaced")
    assert "vLLM 0.23.0 was installed over it" in found["summary"]
    applied = environment.run("apply")
    assert applied["plan"]["release"] == "0.23.0"
    assert environment.run("verify", "--level", "files")["exit_code"] == 0
    environment.run("revert")
    assert contents(environment.root) == before


def test_a_reinstall_of_the_same_release(
    environment: Environment, tmp_path: Path, release_tree: Callable[[str], Path]
) -> None:
    made = wheel(release_tree("0.16.0"), "0.16.0", tmp_path)
    environment.pip(
        "install", "--no-index", "--no-deps", "--force-reinstall", str(made)
    )
    before = environment.brought()
    assert environment.run("status")["condition"] == "replaced"
    assert environment.run("apply")["changed"]
    assert environment.run("status")["condition"] == "applied"
    environment.run("revert")
    assert contents(environment.root) == before


def test_the_running_interpreters_own_vllm(
    environment: Environment, tmp_path: Path
) -> None:
    """With no place named; from a working directory with a decoy."""
    libraries = Path(sys.executable).parent.parent.glob("lib/python3.*/site-packages")
    (environment.root / "tests.pth").write_text("".join(f"{p}\n" for p in libraries))
    (tmp_path / "decoy" / "vllm").mkdir(parents=True)
    (tmp_path / "decoy" / "vllm" / "__init__.py").write_text("raise SystemExit(9)\n")
    done = environment.scene.run_exactly(
        "status", "--json", cwd=tmp_path / "decoy", python=environment.python
    )
    assert done.json["installation"]["root"] == str(environment.root)
    assert done.json["condition"] == "applied"


def test_verify_and_explain_ask_the_real_vllm(
    make_target: MakeTarget, snapshot: Callable[..., None], tmp_path: Path
) -> None:
    """All levels, on the release's tree with torch for a CPU."""
    target = make_target()
    place = ("--python", str(target.python))
    scene = Scene(tmp_path, target.root)
    before = contents(target.root)
    one = ("--capability", "12.0", "--dtype", "float16", "--kv-cache-dtype", "auto")
    hopper = ("--capability", "9.0", "--dtype", "bfloat16", "--kv-cache-dtype", "auto")
    explained = scene.must("explain", *one, *place)
    assert contents(target.root) == before
    scene.must("apply", *place)
    applied = stamps(target.root)
    verified = scene.must("verify", *place)
    served = scene.must("explain", *hopper, *place)
    assert stamps(target.root) == applied
    folder = target.python.parents[1]
    snapshot("interpreter-explain", explained, served, also=folder)
    snapshot("interpreter-verify", verified, also=folder)
    scene.must("revert", *place)
    assert contents(target.root) == before


def test_verify_without_torch(
    make_target: MakeTarget, snapshot: Callable[..., None], tmp_path: Path
) -> None:
    """A build stage without torch: what cannot run is not called passed."""
    target = make_target(with_packages=False)
    place = ("--python", str(target.python))
    scene = Scene(tmp_path, target.root)
    scene.must("apply", *place)
    commands = [
        scene.run("verify", *place),
        scene.run("verify", "--level", "import", *place),
        scene.run("explain", *place),
    ]
    snapshot("interpreter-no-torch", *commands, also=target.python.parents[1])
    assert [done.code for done in commands] == [0, 1, 1]


def test_explain_without_triton(make_target: MakeTarget, tmp_path: Path) -> None:
    """What stock vLLM does is known without it; that ours refuses is not an answer."""
    target = make_target()
    (target.root / "triton.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'triton'\", name='triton')\n"
    )
    few = ("--dtype", "bfloat16", "--kv-cache-dtype", "auto")
    gpus = ("--capability", "12.0", "--capability", "9.0")
    scene = Scene(tmp_path, target.root)
    done = scene.run("explain", *gpus, *few, "--python", str(target.python))
    assert done.code == 1
    assert "nothing serves this" not in done.out
    assert "stock vLLM does not serve this; not known of TRITON_MLA_SPARSE" in done.out
    assert "stock vLLM serves this; the patch is not needed" in done.out
    assert "is not known: No module named 'triton'; next: install into" in done.out


def test_explain_a_kv_cache_dtype_that_vllm_does_not_know(
    make_target: MakeTarget, snapshot: Callable[..., None], tmp_path: Path
) -> None:
    """vLLM is asked, since releases know different ones; the rest is answered."""
    target = make_target()
    cases = ("--capability", "9.0", "--dtype", "bfloat16", "--kv-cache-dtype", "fp3")
    also = ("--kv-cache-dtype", "auto", "--python", str(target.python))
    done = Scene(tmp_path, target.root).run("explain", *cases, *also)
    snapshot("interpreter-kv-cache-dtype", done, also=target.python.parents[1])
    assert done.code == 1
    unknown, known = (
        line.split() for line in done.out.splitlines() if line.startswith("9.0 ")
    )
    assert unknown[3:7] == ["none", "none", "not", "known:"]
    assert known[3:5] == ["FLASHMLA_SPARSE", "FLASHMLA_SPARSE"]
