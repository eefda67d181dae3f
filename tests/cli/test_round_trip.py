# SPDX-License-Identifier: Apache-2.0
"""Several commands in a row on the real tree, as a container start runs them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from scene import (
    ADDED,
    PATCHED,
    STATE,
    TARGET,
    Done,
    Scene,
    contents,
    patched,
    stamps,
)

Make = Callable[[str], Scene]


@pytest.mark.parametrize("release", ["0.16.0", "0.23.0"])
def test_revert_gives_back_what_pip_installed(release: str, make_scene: Make) -> None:
    scene = make_scene(release)
    before = contents(scene.root)
    scene.must("apply")
    after = contents(scene.root)
    assert {path for path in before if after[path] != before[path]} == {
        *patched(release),
        f"vllm-{release}.dist-info/RECORD",
    }
    scene.must("status")
    scene.must("verify", "--level", "files")
    scene.must("revert")
    assert contents(scene.root) == before


def test_the_second_apply_writes_nothing(scene: Scene) -> None:
    scene.must("apply")
    before = stamps(scene.home)
    for command in (["apply"], ["status"], ["verify"], ["apply", "--dry-run"]):
        scene.must(*command)
        assert stamps(scene.home) == before


def test_revert_twice_and_apply_after_it(scene: Scene) -> None:
    before = contents(scene.root)
    digest = scene.must("apply", "--json").json["plan"]["digest"]
    scene.must("revert")
    stamped = stamps(scene.home)
    scene.must("revert")
    assert stamps(scene.home) == stamped
    assert scene.must("apply", "--json").json["plan"]["digest"] == digest
    scene.must("revert")
    assert contents(scene.root) == before


def test_compiled_files_come_back(scene: Scene) -> None:
    """Those of patched modules would be stale; those of others are left alone."""
    caches = {}
    for path in (*PATCHED, "vllm/envs.py"):
        file = Path(path)
        cache = f"{file.parent}/__pycache__/{file.stem}.cpython-312.pyc"
        scene.write(cache, b"compiled")
        caches[path] = scene.root / cache
    before = contents(scene.root)
    scene.must("apply")
    assert {path for path, cache in caches.items() if cache.exists()} == {
        "vllm/envs.py"
    }
    scene.must("revert")
    assert contents(scene.root) == before


def test_an_edited_file_can_be_given_up(scene: Scene) -> None:
    """What the message says to do must work: delete the file, then revert."""
    before = contents(scene.root)
    scene.must("apply")
    scene.write(TARGET, b"# an edit\n")
    done = scene.run("revert")
    assert done.code == 1
    assert "delete it here" in done.err
    (scene.root / TARGET).unlink()
    scene.must("revert")
    assert contents(scene.root) == before


def test_an_unlisted_build_comes_back_too(scene: Scene) -> None:
    scene.label("0.16.0rc2.dev313+g662205d34")
    scene.write(TARGET, b"# shifts every line\n" + scene.read(TARGET))
    before = contents(scene.root)
    applied = scene.must("apply", "--allow-unlisted", "--json").json
    assert applied["plan"]["tested"] is False
    status = scene.must("status", "--json").json
    assert (status["condition"], status["tested"]) == ("applied", False)
    assert "on a release that is not tested" in status["summary"]
    scene.must("verify", "--level", "files")
    scene.must("revert")
    assert contents(scene.root) == before


def test_the_label_does_not_count_for_the_digest(make_scene: Make) -> None:
    """All nodes with the same files state the same digest, whatever pip calls them."""
    scene = make_scene("0.16.0")
    plain = scene.must("apply", "--dry-run", "--json").json["plan"]["digest"]
    scene.label("0.16.0+cu130")
    assert scene.must("apply", "--dry-run", "--json").json["plan"]["digest"] == plain


def test_a_failing_apply_leaves_nothing_behind(scene: Scene) -> None:
    """The last target is wrong, so all that comes before it was planned in vain."""
    scene.write(PATCHED[-1], b"# nothing that a hunk could find\n")
    before = stamps(scene.home)
    for option in ((), ("--allow-unlisted",)):
        assert scene.run("apply", *option).code == 5
        assert stamps(scene.home) == before


@pytest.mark.parametrize(
    ("prepare", "args", "code"),
    [
        ("", "apply", 0),
        ("", "apply --dry-run", 0),
        ("", "status", 0),
        ("", "list", 0),
        ("apply", "verify", 0),
        ("apply", "verify --level import", 1),
        ("apply", "revert --dry-run", 0),
        ("apply", "revert", 0),
        ("", "revert", 0),
        ("", "verify", 1),
        ("", "explain", 1),
        ("", "apply --feature none", 2),
        ("", "apply --force", 2),
        ("", "frobnicate", 2),
        ("", "status --site-packages nowhere", 2),
    ],
)
def test_json_is_one_object(prepare: str, args: str, code: int, scene: Scene) -> None:
    if prepare:
        scene.must(prepare)
    command = args.split()
    place = () if command[0] in ("list", "frobnicate") else ("--site-packages",)
    if place and place[0] not in command:
        command += [*place, str(scene.root)]
    done = scene.run_exactly(*command, "--json")
    found = done.json
    assert done.code == found["exit_code"] == code
    known = command[0] if command[0] != "frobnicate" else None
    assert found["command"] == known
    assert ("error" in found) is bool(done.err)
    assert "error" in found or found["summary"]
    # nothing but ASCII digits, letters and signs: no colour, no drawing
    assert "\x1b" not in done.out


@pytest.mark.parametrize(
    "args", ["apply", "status", "verify", "revert", "list", "apply --dry-run"]
)
def test_quiet_says_nothing(args: str, scene: Scene) -> None:
    scene.must("apply")
    command = args.split()
    if args != "list":
        command += ["--site-packages", str(scene.root)]
    assert scene.run_exactly(*command, "-q") == Done((*command, "-q"), 0, "", "")


def test_quiet_still_states_a_failure(scene: Scene) -> None:
    scene.write(TARGET, b"")
    done = scene.run("apply", "-q")
    assert (done.code, done.out) == (5, "")
    assert "error: a file is not as vLLM 0.16.0 released it" in done.err


def test_colour_is_for_terminals_that_want_it(scene: Scene) -> None:
    coloured = {"TERM": "xterm-256color", "FORCE_COLOR": "1"}
    plain = scene.must("status").out
    del_no_color = {**coloured, "NO_COLOR": ""}
    scene.env = del_no_color
    assert "\x1b[" in scene.must("status").out
    scene.env = {**coloured, "NO_COLOR": "1"}
    scene.env.pop("FORCE_COLOR")
    assert scene.must("status").out == plain


def test_a_vllm_in_the_working_directory_is_not_ours(scene: Scene) -> None:
    decoy = scene.home / "decoy"
    (decoy / "vllm").mkdir(parents=True)
    (decoy / "vllm" / "__init__.py").write_text("raise SystemExit('imported')\n")
    before = stamps(decoy)
    assert scene.run("apply", cwd=decoy).code == 0
    # and with no place named, the tests' own interpreter has none, or another one
    done = scene.run_exactly("status", "--json", cwd=decoy)
    assert str(decoy) not in done.out + done.err
    assert stamps(decoy) == before


def test_state_of_a_newer_version_is_not_guessed_at(scene: Scene) -> None:
    scene.must("apply")
    state = json.loads(scene.read(STATE))
    scene.write(STATE, json.dumps({**state, "format": 2}).encode())
    before = stamps(scene.home)
    for command in ("status", "apply", "revert", "verify"):
        done = scene.run(command)
        assert done.code == 1
        assert "written by another version of glm5-patch" in done.err
    assert stamps(scene.home) == before


def test_files_that_outlived_an_uninstall_are_taken_over(scene: Scene) -> None:
    """Our module is there already, with our bytes: it is ours, and goes with revert."""
    patches = Path(__file__).resolve().parents[2] / "patches" / "files"
    scene.write(ADDED, (patches / ADDED).read_bytes())
    scene.must("apply")
    scene.must("revert")
    assert not (scene.root / ADDED).exists()
