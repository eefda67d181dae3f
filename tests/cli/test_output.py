# SPDX-License-Identifier: Apache-2.0
"""Ends without a report: output that takes nothing, and Ctrl-C. No traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scene import IMPORTED_FROM, Scene, environment


def started(args: str, out: int | None, where: Path) -> tuple[int, str]:
    """Run glm5-patch with ``out`` as its stdout, or none; the exit code and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "glm5_patch", *args.split()],
        stdout=out,
        stderr=subprocess.PIPE,
        cwd=where,
        env=environment(IMPORTED_FROM),
        text=True,
        check=False,
        preexec_fn=None if out is not None else lambda: os.close(1),
    )
    return done.returncode, done.stderr


COMMANDS = ["list", "list --json", "--help", "--version", "frobnicate --json"]


@pytest.mark.parametrize("args", COMMANDS)
def test_a_full_disk(args: str, tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        code, err = started(args, full.fileno(), tmp_path)
    assert_told(code, err, "No space left on device")


@pytest.mark.parametrize("args", ["list", "list --json", "--version"])
def test_closed(args: str, tmp_path: Path) -> None:
    assert_told(*started(args, None, tmp_path), "Bad file descriptor")


@pytest.mark.parametrize("args", ["list", "list --json"])
def test_a_reader_that_went_away(args: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code, err = started(args, writer, tmp_path)
    os.close(writer)
    assert_told(code, err, "Broken pipe")


def assert_told(code: int, err: str, why: str) -> None:
    *before, last = err.splitlines()
    assert last.startswith("error: standard output cannot be written: ")
    assert why in last
    assert code == 6
    assert "Traceback" not in err
    assert not before or before[0].startswith("error: No such command")


def test_what_was_written_before_stays(scene: Scene) -> None:
    """The report is lost, not the work; and no file took the place of stdout."""
    args = f"apply --site-packages {scene.root}"
    assert started(args, None, scene.home)[0] == 6
    assert scene.must("status", "--json").json["condition"] == "applied"
    quiet = f"revert -q --site-packages {scene.root}"
    assert started(quiet, None, scene.home) == (0, "")


def test_ctrl_c_ends_it_in_silence(scene: Scene) -> None:
    slow = scene.home / "python"
    slow.write_text(f"#!/bin/sh\ntouch {scene.home}/started\nexec sleep 60\n")
    slow.chmod(0o755)
    running = subprocess.Popen(
        [sys.executable, "-m", "glm5_patch", "status", "--python", str(slow)],
        env=environment(IMPORTED_FROM),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 30
    while not (scene.home / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    assert running.communicate(timeout=30)[0] == b""
    assert running.returncode == 130
