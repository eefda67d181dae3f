# SPDX-License-Identifier: Apache-2.0
"""A state that was lost or spoiled: what is said of it, and the way out."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable

import pytest
from scene import ADDED, PATCHED, STATE, TARGET, Scene, contents, stamps

Loss = Callable[[Scene], None]
ORIGINALS = ".glm5-patch/originals"


def folder(scene: Scene) -> None:
    shutil.rmtree(scene.root / ".glm5-patch")


def note(scene: Scene) -> None:
    (scene.root / STATE).unlink()


def originals(scene: Scene) -> None:
    shutil.rmtree(scene.root / ORIGINALS)


def one_original(scene: Scene) -> None:
    (scene.root / ORIGINALS / TARGET.replace("/", "%2F")).unlink()


def changed_original(scene: Scene) -> None:
    scene.write(f"{ORIGINALS}/{TARGET.replace('/', '%2F')}", b"# mine\n")


def garbled(data: bytes) -> Loss:
    return lambda scene: scene.write(STATE, data)


def cut_short(scene: Scene) -> None:
    scene.write(STATE, scene.read(STATE)[:300])


def all_but_the_folder(scene: Scene) -> None:
    originals(scene)
    cut_short(scene)


# What is lost, and what is found in its place.
LOSSES: dict[str, tuple[Loss, str]] = {
    "folder": (folder, "no such file"),
    "note": (note, "no such file"),
    "originals": (originals, f"missing or changed: {PATCHED[0]}, "),
    "one-original": (one_original, f"missing or changed: {TARGET}"),
    "changed-original": (changed_original, f"missing or changed: {TARGET}"),
    "note-cut-short": (cut_short, "Unterminated string"),
    "note-empty": (garbled(b""), "Expecting value"),
    "note-and-originals": (all_but_the_folder, "Unterminated string"),
}


@pytest.mark.parametrize("features", [(), ("gguf",), ("sparse-backend", "indexer")])
@pytest.mark.parametrize("release", ["0.16.0", "0.23.0"])
def test_revert_without_any_state(
    release: str, features: tuple[str, ...], make_scene: Callable[[str], Scene]
) -> None:
    """Whatever was applied: every byte comes back from the patched files alone."""
    scene = make_scene(release)
    before = contents(scene.root)
    scene.must("apply", *(f"--feature={name}" for name in features))
    folder(scene)
    scene.must("revert")
    assert contents(scene.root) == before


@pytest.mark.parametrize("loss", LOSSES)
def test_it_is_told_and_there_is_a_way_out(loss: str, scene: Scene) -> None:
    stock = contents(scene.root)
    scene.must("apply")
    patched = contents(scene.root)
    lose, instead = LOSSES[loss]
    lose(scene)
    before = stamps(scene.root)
    for command in ("status", "verify", "explain", "bench", "revert --dry-run"):
        told = scene.run(*command.split())
        assert told.code == 1, told
        assert "glm5-patch apply" in told.out + told.err
        assert "glm5-patch revert" in told.out + told.err
        if command != "status":  # which reports it; the others end in an error
            (found,) = re.findall("^  found: +(.+)$", told.err, re.MULTILINE)
            assert instead in found
            assert "  expected: " in told.err
    assert stamps(scene.root) == before
    lost = contents(scene.root)

    scene.must("revert")
    assert contents(scene.root) == stock

    shutil.rmtree(scene.root)
    for path, data in lost.items():
        if data is None:
            (scene.root / path).mkdir(parents=True)
        else:
            scene.write(path, data)
    scene.must("apply")
    scene.must("verify", "--level", "files")
    ours = (".glm5-patch/lock", STATE)
    kept = {p: d for p, d in contents(scene.root).items() if p not in ours}
    assert kept == {p: d for p, d in patched.items() if p not in ours}
    scene.must("revert")
    assert contents(scene.root) == stock


@pytest.mark.parametrize("loss", [folder, note, cut_short, all_but_the_folder])
@pytest.mark.parametrize("path", [TARGET, ADDED])
def test_an_edit_is_not_lost(loss: Loss, path: str, scene: Scene) -> None:
    scene.must("apply")
    loss(scene)
    scene.write(path, scene.read(path) + b"# mine\n")
    before = stamps(scene.root)
    for command in ("status", "apply", "revert"):
        refused = scene.run(command)
        assert refused.code == 1, refused
        assert "install vLLM" in refused.err and path in refused.err
    assert stamps(scene.root) == before


def test_an_original_that_nothing_leads_back_to(scene: Scene) -> None:
    scene.must("apply")
    one_original(scene)
    (scene.root / TARGET).unlink()
    before = stamps(scene.root)
    for command in ("status", "apply", "revert"):
        refused = scene.run(command)
        assert (refused.code, "cannot be made again" in refused.err) == (1, True)
        assert "install vLLM 0.16.0 again" in refused.err
    assert stamps(scene.root) == before


def test_a_note_that_outlived_the_patch(scene: Scene) -> None:
    """A spoiled note on a tree that is stock by every hash is of no use to anyone."""
    stock = contents(scene.root)
    scene.must("apply")
    state = {p: d for p, d in contents(scene.root).items() if ".glm5-patch/" in p}
    scene.must("revert")
    for path, data in state.items():
        if data is not None:
            scene.write(path, data)
    cut_short(scene)
    assert scene.run("status").code == 1
    scene.must("revert")
    assert contents(scene.root) == stock


def test_what_is_said(scene: Scene, snapshot: Callable[..., None]) -> None:
    scene.must("apply")
    one_original(scene)
    commands = [scene.run("status"), scene.run("verify"), scene.run("apply")]
    folder(scene)
    commands += [
        scene.run("status"),
        scene.run("verify"),
        scene.run("apply", "--dry-run"),
        scene.run("revert"),
    ]
    snapshot("lost-state", *commands)


def test_mode_and_owner_come_back(scene: Scene) -> None:
    for path in PATCHED:
        data = scene.read(path)
        scene.write(path, data)
        (scene.root / path).chmod(0o640)
    scene.must("apply")
    folder(scene)
    scene.must("revert")
    assert {(scene.root / p).stat().st_mode & 0o777 for p in PATCHED} == {0o640}
    assert not os.path.lexists(scene.root / ".glm5-patch")
