# SPDX-License-Identifier: Apache-2.0
"""One command on one prepared tree: exit code, exact text, and what it wrote.

A case is a row. All of them start from the real tree of vLLM 0.16.0.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from scene import ADDED, PATCHED, STATE, TARGET, Scene, stamps

from glm5_patch.manifest import sha256

NIGHTLY = "0.16.0rc2.dev313+g662205d34"
IMAGE = "0.1.dev20051+g487ecf187"
PATCH = "vllm/sparse-backend/0.16.0.patch"


@dataclass(frozen=True)
class Case:
    """``writes`` is for the commands that are meant to change the tree."""

    name: str
    arrange: Callable[[Scene], object]
    args: str
    code: int
    writes: bool = False


def stock(scene: Scene) -> None:
    """As pip left it."""


def applied(scene: Scene) -> None:
    scene.must("apply")


def then(*steps: Callable[[Scene], object]) -> Callable[[Scene], None]:
    def arrange(scene: Scene) -> None:
        for step in steps:
            step(scene)

    return arrange


def labelled(version: str) -> Callable[[Scene], None]:
    return lambda scene: scene.label(version)


def edited(path: str = TARGET) -> Callable[[Scene], None]:
    return lambda scene: scene.write(path, scene.read(path) + b"# a local change\n")


def removed(path: str) -> Callable[[Scene], None]:
    return lambda scene: (scene.root / path).unlink()


def hunk_edited(scene: Scene) -> None:
    scene.edit(TARGET, "AttentionBackendEnum.FLASHMLA_SPARSE,", "# it was here")


def crlf(scene: Scene) -> None:
    for path in PATCHED:
        scene.write(path, scene.read(path).replace(b"\n", b"\r\n"))


def not_utf8(scene: Scene) -> None:
    scene.write(TARGET, scene.read(TARGET) + b"# \xff\n")


def occupied(scene: Scene) -> None:
    scene.write(ADDED, b"# somebody else's\n")


def linked_file(scene: Scene) -> None:
    (scene.root / TARGET).rename(scene.home / "cuda.py")
    (scene.root / TARGET).symlink_to(scene.home / "cuda.py")


def linked_folder(scene: Scene) -> None:
    (scene.root / "vllm" / "v1").rename(scene.home / "v1")
    (scene.root / "vllm" / "v1").symlink_to(scene.home / "v1")


def linked_state(scene: Scene) -> None:
    (scene.home / "elsewhere").mkdir()
    (scene.root / ".glm5-patch").symlink_to(scene.home / "elsewhere")


def folder_for_file(scene: Scene) -> None:
    (scene.root / TARGET).unlink()
    (scene.root / TARGET).mkdir()


def no_metadata(scene: Scene) -> None:
    shutil.rmtree(scene.root / "vllm-0.16.0.dist-info")


def no_package(scene: Scene) -> None:
    shutil.rmtree(scene.root / "vllm")


def nothing(scene: Scene) -> None:
    no_metadata(scene)
    no_package(scene)


def interrupted(scene: Scene) -> None:
    applied(scene)
    scene.edit(STATE, '"phase": "applied"', '"phase": "applying"')
    removed(ADDED)(scene)


def bad_state(scene: Scene) -> None:
    applied(scene)
    scene.write(STATE, b'{"format": 1, "phase"')


def bad_original(scene: Scene) -> None:
    applied(scene)
    name = ".glm5-patch/originals/" + TARGET.replace("/", "%2F")
    scene.write(name, scene.read(name) + b"#\n")


def upgraded(scene: Scene) -> None:
    """As an installer does it: other bytes in every file that it brings."""
    others = {path: scene.read(path) + b"# 0.16.1\n" for path in PATCHED}
    applied(scene)
    scene.label("0.16.1")
    for path, data in others.items():
        scene.write(path, data)
    scene.edit("vllm-0.16.1.dist-info/RECORD", ADDED, "vllm/other.py")


def patch_changed(
    change: Callable[[str], str], relock: bool = True
) -> Callable[[Scene], None]:
    """A project whose patch file was changed, and whose lock may know that."""

    def arrange(scene: Scene) -> None:
        patches = scene.own_project()
        file = patches / PATCH
        file.write_text(change(file.read_text()))
        if relock:
            lock = json.loads((patches / "lock.json").read_text())
            lock["sources"][PATCH] = sha256(file.read_bytes())
            (patches / "lock.json").write_text(json.dumps(lock))

    return arrange


def patches_with(path: str, old: str, new: str) -> Callable[[Scene], None]:
    def arrange(scene: Scene) -> None:
        file = scene.own_project() / path
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))

    return arrange


def half(text: str) -> str:
    return text[: len(text) // 2]


def to_other_path(path: str) -> Callable[[str], str]:
    return lambda text: text.replace(f"/{TARGET}", f"/{path}")


def patch_gone(scene: Scene) -> None:
    (scene.own_project() / PATCH).unlink()


def patches_empty(scene: Scene) -> None:
    shutil.rmtree(scene.own_project())


CASES = [
    Case("apply", stock, "apply", 0, writes=True),
    Case("apply-dry-run", stock, "apply --dry-run", 0),
    Case("apply-again", applied, "apply", 0),
    Case("apply-one-feature", stock, "apply --feature sparse-backend", 0, writes=True),
    Case("apply-quiet", stock, "apply -q", 0, writes=True),
    Case("apply-label-cu130", labelled("0.16.0+cu130"), "apply", 0, writes=True),
    Case("apply-label-nightly", labelled(NIGHTLY), "apply", 0, writes=True),
    Case("apply-label-image", labelled(IMAGE), "apply", 0, writes=True),
    Case(
        "apply-unlisted",
        then(labelled(NIGHTLY), edited()),
        "apply --allow-unlisted",
        0,
        writes=True,
    ),
    Case(
        "apply-restores-a-missing-file",
        then(applied, removed(ADDED)),
        "apply",
        0,
        writes=True,
    ),
    Case("apply-interrupted", interrupted, "apply", 0, writes=True),
    Case("apply-upgraded", upgraded, "apply --allow-unlisted", 0, writes=True),
    Case("status", stock, "status", 0),
    Case("status-applied", applied, "status", 0),
    Case("status-conflict", edited(), "status", 0),
    Case("status-drifted", then(applied, edited()), "status", 1),
    Case("status-interrupted", interrupted, "status", 1),
    Case("status-upgraded", upgraded, "status", 1),
    Case("status-quiet-drifted", then(applied, edited()), "status -q", 1),
    Case("verify-files", applied, "verify --level files", 0),
    Case("verify-no-interpreter", applied, "verify", 0),
    Case("verify-import-no-interpreter", applied, "verify --level import", 1),
    Case("verify-drifted", then(applied, edited()), "verify", 1),
    Case("verify-not-applied", stock, "verify", 1),
    Case("revert", applied, "revert", 0, writes=True),
    Case("revert-dry-run", applied, "revert --dry-run", 0),
    Case("revert-not-applied", stock, "revert", 0),
    Case("revert-interrupted", interrupted, "revert", 0, writes=True),
    Case("revert-upgraded", upgraded, "revert", 0, writes=True),
    Case("revert-edited", then(applied, edited()), "revert", 1),
    Case(
        "revert-record-edited",
        then(applied, edited("vllm-0.16.0.dist-info/RECORD")),
        "revert",
        0,
        writes=True,
    ),
    Case("revert-bad-original", bad_original, "revert", 0, writes=True),
    Case("revert-bad-state", bad_state, "revert", 0, writes=True),
    Case("usage-option", stock, "apply --force", 2),
    Case("usage-command", stock, "frobnicate", 2),
    Case("usage-feature", stock, "apply --feature fp4", 2),
    Case("usage-level", applied, "verify --level deep", 2),
    Case("usage-capability", stock, "explain --capability sm120", 2),
    Case("usage-dtype", stock, "explain --dtype float8", 2),
    Case("usage-two-places", stock, "status --python p --site-packages s", 2),
    Case("usage-no-folder", stock, "status --site-packages nowhere", 2),
    Case("usage-no-interpreter", stock, "status --python nowhere", 2),
    Case("inspect-no-file", stock, "inspect nowhere.gguf", 1),
    Case(
        "inspect-newer",
        then(labelled("0.24.0"), edited()),
        "inspect nowhere.gguf",
        4,
    ),
    Case("inspect-bad-state", bad_state, "inspect nowhere.gguf", 1),
    Case("not-found", nothing, "apply", 3),
    Case("not-found-package", no_package, "apply", 3),
    Case("not-found-metadata", no_metadata, "apply", 3),
    Case("not-supported-nightly", then(labelled(NIGHTLY), edited()), "apply", 4),
    Case("conflict-edited", edited(), "apply", 5),
    Case("conflict-hunk", hunk_edited, "apply --allow-unlisted", 5),
    Case("conflict-crlf", crlf, "apply", 5),
    Case("conflict-crlf-unlisted", crlf, "apply --allow-unlisted", 5),
    Case("conflict-not-utf8", not_utf8, "apply --allow-unlisted", 5),
    Case("conflict-missing", removed(TARGET), "apply", 5),
    Case("conflict-occupied", occupied, "apply", 5),
    Case("conflict-linked-file", linked_file, "apply", 5),
    Case("conflict-linked-folder", linked_folder, "apply", 5),
    Case("conflict-linked-state", linked_state, "apply", 5),
    Case("conflict-folder-for-file", folder_for_file, "apply", 5),
    Case("patches-truncated", patch_changed(half, relock=False), "apply", 1),
    Case("patches-truncated-relocked", patch_changed(half), "apply", 1),
    Case("patches-empty-file", patch_changed(lambda text: ""), "apply", 1),
    Case(
        "patches-edited",
        patch_changed(lambda text: text.replace("_SPARSE", "_SPARE"), relock=False),
        "apply",
        1,
    ),
    Case(
        "patches-edited-relocked",
        patch_changed(lambda text: text.replace("\n+  ", "\n+ # ")),
        "apply",
        1,
    ),
    Case(
        "patches-dot-dot",
        patch_changed(to_other_path("vllm/../../evil.py")),
        "apply",
        1,
    ),
    Case("patches-absolute", patch_changed(to_other_path("/etc/evil.py")), "apply", 1),
    Case(
        "patches-other-package",
        patch_changed(to_other_path("torch/__init__.py")),
        "apply",
        1,
    ),
    Case("patches-missing-file", patch_gone, "apply", 1),
    Case("patches-missing", patches_empty, "apply", 1),
    Case(
        "patches-manifest-dot-dot",
        patches_with("manifest.toml", f'"{ADDED}"', '"vllm/../../evil.py"'),
        "apply",
        1,
    ),
    Case(
        "patches-manifest-format",
        patches_with("manifest.toml", "format = 1", "format = 2"),
        "apply",
        1,
    ),
]


# What a failure tells below its first line, which says the rest of a wrong argument.
PARTS = {
    1: {"where", "expected", "found", "next"},
    2: {"next"},
    3: {"where", "expected", "found", "next"},
    4: {"expected", "found", "next"},
    5: {"where", "expected", "found", "next"},
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case, scene: Scene, snapshot: Callable[..., None]) -> None:
    case.arrange(scene)
    before = stamps(scene.home)
    done = scene.run(*case.args.split())
    snapshot(case.name, done)
    assert done.code == case.code
    assert (stamps(scene.home) != before) is case.writes
    # every failure says so on stderr, and nothing but a failure does
    assert bool(done.err) is (
        (done.code != 0 and not done.out) or "--quiet" in case.args
    )
    if done.err.startswith("error: "):
        assert PARTS[case.code] <= set(re.findall("(?m)^  ([a-z]+): ", done.err))


def test_a_release_before_glm5(
    make_scene: Callable[[str], Scene], snapshot: Callable[..., None]
) -> None:
    old = make_scene("0.15.1")
    before = stamps(old.root)
    commands = [
        old.run("apply"),
        old.run("apply", "--allow-unlisted"),
        old.run("status"),
        old.run("inspect", "nowhere.gguf"),
    ]
    snapshot("not-supported-0.15.1", *commands)
    assert [done.code for done in commands] == [4, 4, 0, 4]
    assert stamps(old.root) == before


def test_the_other_release(
    make_scene: Callable[[str], Scene], snapshot: Callable[..., None]
) -> None:
    scene = make_scene("0.23.0")
    snapshot("apply-0.23.0", scene.run("apply"), scene.run("status"))


@pytest.mark.parametrize("args", ["--help", "--version", "list", "apply --help", ""])
def test_commands_that_need_no_vllm(
    args: str, tmp_path: Path, snapshot: Callable[..., None]
) -> None:
    done = Scene(tmp_path, tmp_path).run_exactly(*args.split())
    snapshot("no-vllm-" + (args.replace("--", "").replace(" ", "-") or "bare"), done)
    assert done.code == (0 if args else 2)


def test_every_snapshot_has_a_case() -> None:
    """A case that is renamed must not leave its old text behind."""
    folder = Path(__file__).with_name("snapshots")
    sources = "".join(f.read_text() for f in folder.parent.glob("test_*.py"))
    stray = {
        file.stem
        for file in folder.glob("*.txt")
        if f'"{file.stem}"' not in sources and not file.stem.startswith("no-vllm-")
    }
    assert not stray
