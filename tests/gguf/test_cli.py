# SPDX-License-Identifier: Apache-2.0
"""The command line around GGUF files, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patched_vllm import RELEASES, stock_tree
from raw_gguf import write_full_size
from tiny_glm import Tiny, to_gguf, uniform, weights, write

IMAGE = "0.1.dev20051+g487ecf187"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "glm5_patch", *map(str, arguments)]
    environment = os.environ | {"NO_COLOR": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = Tiny()
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return write(path, model, to_gguf(model, weights(model)), uniform("Q8_0"))


def install(release: str, folder: Path) -> Path:
    """The release as pip leaves it, as far as glm5-patch looks."""
    root = stock_tree(release, folder)
    metadata = root / f"vllm-{release}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: vllm\nVersion: {release}\n")
    return root


def files(root: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(root)): file.read_bytes() if file.is_file() else b""
        for file in sorted(root.rglob("*"))
    }


def test_inspect_without_a_vllm(tiny: Path) -> None:
    found = run("inspect", tiny)
    assert found.returncode == 0, found.stderr
    assert "note: no vLLM here; this is what 0.23.0 would do" in found.stdout
    assert "loads every parameter" in found.stdout


def test_inspect_as_json(tiny: Path) -> None:
    found = json.loads(run("inspect", "--json", tiny).stdout)
    assert found["command"] == "inspect"
    assert found["release"] == "0.23.0"
    assert found["types"]["Q8_0"]["tensors"] == 70


def test_what_cannot_load_ends_with_1(tmp_path: Path) -> None:
    path = write_full_size(tmp_path, experts="TQ1_0")
    assert run("inspect", path).returncode == 1
    assert run("inspect", "-q", path).stdout == ""


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "No such file or directory"),
        (b"x" * 100, "not a GGUF file: it begins with b'xxxx'"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 100, "more than the file can hold"),
    ],
    ids=["missing", "foreign", "hostile"],
)
def test_bad_file_ends_in_a_message(
    content: bytes | None, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.gguf"
    if content is not None:
        path.write_bytes(content)
    found = run("inspect", path)
    assert found.returncode == 1
    assert expected in found.stderr
    assert "Traceback" not in found.stderr
    assert found.stdout == ""


@pytest.mark.parametrize("release", RELEASES)
def test_apply_verify_revert(release: str, tiny: Path, tmp_path: Path) -> None:
    """All the way and back: nothing is left, the added folder neither."""
    root = install(release, tmp_path / "site")
    before = files(root)
    at = ("--site-packages", root)
    assert run("apply", *at, "--feature", "gguf").returncode == 0
    found = run("verify", "--level", "files", "--gguf", tiny, *at)
    assert found.returncode == 0, found.stderr
    assert f"vLLM {release}, patched, loads every parameter" in found.stdout
    assert f"vLLM {release}" in run("inspect", tiny, *at).stdout
    # What Python leaves behind where the new modules were imported.
    cache = root / "vllm/transformers_utils/glm_dsa/__pycache__"
    cache.mkdir()
    (cache / "names.cpython-312.pyc").write_bytes(b"compiled")
    assert run("revert", *at).returncode == 0
    assert files(root) == before


def test_verify_of_a_file_that_cannot_load(tmp_path: Path) -> None:
    root = install("0.16.0", tmp_path / "site")
    at = ("--site-packages", root)
    assert run("apply", *at).returncode == 0
    model = write_full_size(tmp_path)
    found = run("verify", "--level", "files", "--gguf", model, *at)
    assert found.returncode == 1
    assert "verification failed: gguf" in found.stdout
    assert "shares indexers" in found.stdout


def label(root: Path, version: str) -> None:
    """Have the metadata of vLLM 0.23.0 call it ``version``, as an image's may."""
    metadata = root / "vllm-0.23.0.dist-info"
    (metadata / "METADATA").write_text(f"Name: vllm\nVersion: {version}\n")
    metadata.rename(root / f"vllm-{version}.dist-info")


@pytest.mark.parametrize("version", [IMAGE, "0.16.0", "0.33.0", "mine_1"])
def test_the_release_counts_and_not_its_label(
    version: str, tiny: Path, tmp_path: Path
) -> None:
    """Before an apply and after it: what the files are is known all the same."""
    root = install("0.23.0", tmp_path / "site")
    label(root, version)
    at = ("--site-packages", root)
    told = [run("inspect", tiny, *at)]
    assert run("apply", *at).returncode == 0
    told.append(run("inspect", tiny, *at))
    told.append(run("verify", "--level", "files", "--gguf", tiny, *at))
    for found in told:
        assert found.returncode == 0, found.stdout + found.stderr
        assert "vLLM 0.23.0, patched, loads every parameter" in found.stdout
        assert "note: " not in found.stdout


@pytest.mark.parametrize(
    ("version", "release"), [(IMAGE, "0.23.0"), ("0.23.1", "0.23.1")]
)
def test_inspect_for_a_build_that_no_release_is(
    version: str, release: str, tiny: Path, tmp_path: Path
) -> None:
    """The release is the one whose patches ``apply --allow-unlisted`` would try."""
    root = install("0.23.0", tmp_path / "site")
    label(root, version)
    with (root / "vllm/platforms/cuda.py").open("a") as module:
        module.write("# a local change\n")
    at = ("--site-packages", root)
    note = (
        f"note: the files of this vLLM, {version}, are those of no tested release; "
        f"this is what {release} would do"
    )
    before = files(root)
    told = run("inspect", tiny, *at)
    assert files(root) == before
    assert told.returncode == 0, told.stderr
    assert note in told.stdout
    assert f"vLLM {release}, patched, loads every parameter" in told.stdout
    applied = run("apply", "--allow-unlisted", "--json", *at)
    assert json.loads(applied.stdout)["plan"]["release"] == release
    assert note in run("inspect", tiny, *at).stdout


def test_verify_without_the_feature(tiny: Path, tmp_path: Path) -> None:
    root = install("0.23.0", tmp_path / "site")
    at = ("--site-packages", root)
    assert run("apply", *at, "--feature", "sparse-backend").returncode == 0
    found = run("verify", "--level", "files", "--gguf", tiny, *at)
    assert found.returncode == 1
    assert "the feature gguf is not applied" in found.stderr
