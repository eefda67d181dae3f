# SPDX-License-Identifier: Apache-2.0
"""File systems that refuse, links that are shared, and a second run at work."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from scene import ADDED, PATCHED, STATE, Scene, contents, environment, stamps

Snapshot = Callable[..., None]


def without(*capabilities: int) -> None:
    """Take from a child of root powers that others don't have."""
    libc = ctypes.CDLL(None)
    drop_from_bounding_set = 24
    for capability in capabilities:
        libc.prctl(drop_from_bounding_set, capability, 0, 0, 0)


def without_override() -> None:
    """The power to ignore modes: CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH."""
    without(1, 2)


def without_chown() -> None:
    """The power to give files to anyone: CAP_CHOWN."""
    without(0)


@pytest.fixture
def own_tree(scene: Scene) -> Scene:
    """A scene with no inode that is anyone else's."""
    shared = scene.root.rename(scene.home / "shared")
    shutil.copytree(shared, scene.root)
    shutil.rmtree(shared)
    return scene


@pytest.fixture
def make_read_only(own_tree: Scene) -> Iterator[Callable[[], Scene]]:
    """Takes away the write permission of every folder and file of the tree."""
    paths = [own_tree.root]

    def make() -> Scene:
        paths.extend(own_tree.root.rglob("*"))
        for path in paths:
            path.chmod(path.stat().st_mode & ~0o222)
        own_tree.stand_in = without_override
        return own_tree

    yield make
    for path in paths:
        path.chmod(path.stat().st_mode | 0o200)


@pytest.fixture
def mount() -> Iterator[Callable[..., None]]:
    """Mounts, if the tests may do that."""
    done: list[Path] = []

    def at(target: Path, *options: str) -> None:
        command = ["mount", *options, str(target)]
        if os.geteuid() != 0 or shutil.which("mount") is None:
            pytest.skip("only root can mount")
        tried = subprocess.run(command, capture_output=True, text=True, check=False)
        if tried.returncode:
            pytest.skip(f"may not mount here: {tried.stderr.strip()}")
        if target not in done:
            done.append(target)

    yield at
    for target in reversed(done):
        subprocess.run(["umount", str(target)], check=True)


def test_no_permission(make_read_only: Callable[[], Scene], snapshot: Snapshot) -> None:
    scene = make_read_only()
    before = stamps(scene.root)
    snapshot("not-permitted-apply", scene.run("apply"))
    assert scene.run("apply").code == 6
    assert scene.run("apply", "--dry-run").code == 0
    assert scene.run("status").code == 0
    assert scene.run("revert").code == 0  # there is nothing to do
    assert stamps(scene.root) == before


def test_a_read_only_tree_that_is_patched_already(
    own_tree: Scene, make_read_only: Callable[[], Scene], snapshot: Snapshot
) -> None:
    """A start script runs 'apply' on every node: there, it must be no error."""
    own_tree.must("apply")
    scene = make_read_only()
    before = stamps(scene.root)
    for command in ("apply", "status", "verify"):
        assert scene.run(command).code == 0
    snapshot("not-permitted-revert", scene.run("revert"))
    assert scene.run("revert").code == 6
    assert stamps(scene.root) == before


def test_a_read_only_mount(
    own_tree: Scene, mount: Callable[..., None], snapshot: Snapshot
) -> None:
    mount(own_tree.root, "--bind", str(own_tree.root))
    mount(own_tree.root, "-o", "remount,bind,ro")
    before = contents(own_tree.root)
    snapshot("not-permitted-read-only", own_tree.run("apply"))
    assert own_tree.run("apply").code == 6
    assert own_tree.run("apply", "--dry-run").code == 0
    assert contents(own_tree.root) == before


def small_tree(scene: Scene, folder: Path) -> Scene:
    """The files that a run reads, in ``folder``: a tree of 21 MB is slow to fill."""
    for path in (
        *PATCHED,
        "vllm/__init__.py",
        "vllm/model_executor/models/registry.py",
    ):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(scene.root / path, folder / path)
    for path in ("vllm/v1/attention/ops", "vllm/v1/attention/backends/mla"):
        (folder / path).mkdir(parents=True, exist_ok=True)
    info = "vllm-0.16.0.dist-info"
    shutil.copytree(scene.root / info, folder / info)
    return Scene(scene.home, folder)


@pytest.mark.parametrize("left_kib", [0, 4, 40, 120, 250, 400])
def test_no_space(left_kib: int, scene: Scene, mount: Callable[..., None]) -> None:
    """Wherever the space ends, the tree is as it was; with enough, it is patched."""
    disk = scene.home / "disk"
    disk.mkdir()
    mount(disk, "-t", "tmpfs", "-o", "size=8m", "tmpfs")
    tiny = small_tree(scene, disk / "site-packages")
    before = contents(tiny.root)
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with (disk / "filler").open("wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, free - 1024 * left_kib)
    done = tiny.run("apply")
    assert done.code == 6, done
    assert "No space left on device" in done.err
    assert contents(tiny.root) == before
    (disk / "filler").unlink()
    tiny.must("apply")
    tiny.must("revert")
    assert contents(tiny.root) == before


@pytest.mark.parametrize("command", ["revert", "apply --feature=gguf"])
def test_a_failure_half_way_is_not_taken_for_another_run(
    own_tree: Scene, command: str
) -> None:
    """By then this run has written the state itself."""
    before = contents(own_tree.root)
    own_tree.must("apply")
    folder = (own_tree.root / PATCHED[0]).parent
    folder.chmod(0o555)
    own_tree.stand_in = without_override
    done = own_tree.run(*command.split())
    assert (done.code, "another run" in done.err) == (6, False), done
    assert "Permission denied" in done.err, done
    folder.chmod(0o755)
    own_tree.must("revert")
    assert contents(own_tree.root) == before


def test_a_hard_link_keeps_the_old_bytes(own_tree: Scene) -> None:
    """uv links the files of all environments to those of its cache."""
    cache = own_tree.home / "cache"
    shutil.copytree(own_tree.root, cache, copy_function=os.link)
    before = contents(cache)
    own_tree.must("apply")
    assert contents(cache) == before
    own_tree.must("revert")
    assert contents(cache) == before


def test_modes_and_owners_stay(own_tree: Scene) -> None:
    modes = itertools.cycle((0o600, 0o644, 0o755))
    for path, mode in zip(PATCHED, modes, strict=False):
        (own_tree.root / path).chmod(mode)
    if os.geteuid() == 0:
        os.chown(own_tree.root / PATCHED[0], 1234, 5678)

    def found() -> list[tuple[int, int, int]]:
        stats = [(own_tree.root / path).stat() for path in PATCHED]
        return [(s.st_mode, s.st_uid, s.st_gid) for s in stats]

    before = found()
    for command in ("apply", "revert"):
        own_tree.must(command)
        assert found() == before


def test_others_may_read_whatever_the_umask(own_tree: Scene) -> None:
    """As they may read the package: one user applies, others ask for the status."""
    modes = {0o755: 0o644, 0o750: 0o640}
    for folder, file in modes.items():
        (own_tree.root / "vllm").chmod(folder)
        (own_tree.root / "vllm/__init__.py").chmod(file)
        if os.geteuid() == 0:
            os.chown(own_tree.root / "vllm", 1234, 5678)
        own_tree.stand_in = lambda: os.umask(0o077) and None
        own_tree.must("apply")
        state = own_tree.root / ".glm5-patch"
        found = {p.name: p.stat() for p in (state, *state.iterdir())}
        assert {name: s.st_mode & 0o777 for name, s in found.items()} == {
            ".glm5-patch": folder,
            "originals": folder,
            "state.json": file,
            "lock": file,
        }
        if os.geteuid() == 0:
            assert (found["lock"].st_uid, found[".glm5-patch"].st_gid) == (1234, 5678)
        assert (own_tree.root / ADDED).stat().st_mode & 0o777 == file
        own_tree.must("revert")


def test_a_group_that_the_owner_is_not_in(own_tree: Scene) -> None:
    """To make the tree writable, as it is already, would not help."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(own_tree.root / PATCHED[0], 0, 5678)
    own_tree.stand_in = without_chown
    before = contents(own_tree.root)
    done = own_tree.run("apply")
    assert done.code == 6, done
    assert PATCHED[0].rpartition("/")[2] in done.err
    assert "to give it to user 0, group 5678" in done.err
    assert "only root, or a member of the group who owns the file" in done.err
    assert contents(own_tree.root) == before


@pytest.fixture
def held(scene: Scene) -> Iterator[Scene]:
    """A scene whose lock is another process's."""
    (scene.root / ".glm5-patch").mkdir()
    descriptor = os.open(scene.root / ".glm5-patch/lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield scene
    os.close(descriptor)


def test_a_second_process_is_waited_for_then_named(
    held: Scene, snapshot: Snapshot
) -> None:
    before = stamps(held.root)
    start = time.monotonic()
    done = held.run("apply")
    assert 10 <= time.monotonic() - start < 30
    snapshot("busy-apply", done)
    assert done.code == 7
    assert stamps(held.root) == before


def test_status_while_another_run_writes(scene: Scene, snapshot: Snapshot) -> None:
    scene.must("apply")
    scene.edit(STATE, '"phase": "applied"', '"phase": "applying"')
    with (scene.root / ".glm5-patch/lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = scene.run("status")
    snapshot("busy-status", done)
    assert done.code == 7


def test_a_run_that_reads_while_another_takes_the_patch_back(scene: Scene) -> None:
    """Half-way, an original is back in its place and the state has not said so yet."""
    before = contents(scene.root)
    scene.must("apply")
    target = scene.root / PATCHED[0]
    kept = scene.root / ".glm5-patch/originals" / PATCHED[0].replace("/", "%2F")
    patched = target.read_bytes()
    with (scene.root / ".glm5-patch/lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept.rename(scene.home / "on its way")
        for command in ("status", "verify", "revert --dry-run", "apply --dry-run"):
            done = scene.run(*command.split())
            assert (done.code, "another run" in done.err) == (7, True), done
        command = [sys.executable, "-m", "glm5_patch", "revert"]
        command += ["--site-packages", str(scene.root)]
        waiting = subprocess.Popen(
            command, env=environment(scene.library), stderr=subprocess.PIPE, text=True
        )
        time.sleep(2)
        assert waiting.poll() is None
        assert target.read_bytes() == patched
        (scene.home / "on its way").rename(target)
    assert waiting.communicate(timeout=60)[1] == ""
    assert waiting.returncode == 0
    assert contents(scene.root) == before


@pytest.mark.parametrize(
    "commands",
    [("revert",) * 4, ("revert", "apply", "revert", "apply --feature=gguf")],
    ids=["reverts", "both"],
)
def test_runs_at_once_on_a_patched_tree(
    commands: tuple[str, ...], scene: Scene
) -> None:
    """Whoever comes second finds the work done, or does its own after it."""
    before = contents(scene.root)
    start = [sys.executable, "-m", "glm5_patch"]
    for _ in range(4):
        scene.must("apply")
        runs = [
            subprocess.Popen(
                [*start, *command.split(), "--site-packages", str(scene.root)],
                env=environment(scene.library),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for command in commands
        ]
        errors = [run.communicate(timeout=120)[1] for run in runs]
        assert [run.returncode for run in runs] == [0] * len(runs), errors
        scene.must("revert")
        assert contents(scene.root) == before


def test_many_at_once_all_end_well(scene: Scene) -> None:
    """Workers that start together: one writes, and the others find it done."""
    before = contents(scene.root)
    command = [sys.executable, "-m", "glm5_patch", "apply", "--json"]
    command += ["--site-packages", str(scene.root)]
    runs = [
        subprocess.Popen(
            command, env=environment(scene.library), stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    outputs = [run.communicate(timeout=120)[0] for run in runs]
    assert [run.returncode for run in runs] == [0] * 4
    assert len(set(re.findall(r'"digest": "(\w+)"', "".join(outputs)))) == 1
    scene.must("verify", "--level", "files")
    scene.must("revert")
    assert contents(scene.root) == before
