# SPDX-License-Identifier: Apache-2.0
"""What a command costs, as a whole process.

The limits are what the README promises, or twice that for a slow machine; medians of
some runs, of processor time, so that a busy machine does not count.
"""

from __future__ import annotations

import resource
import statistics

import pytest
from scene import Scene


def cpu_s(scene: Scene, *args: str) -> float:
    """The processor time of one command that succeeds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert scene.run_exactly(*args).code == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(
    ("command", "limit_s"),
    [("--help", 0.4), ("status", 1.0), ("apply --dry-run", 1.0), ("apply", 1.0)],
)
def test_processor_time(command: str, limit_s: float, scene: Scene) -> None:
    place = ["--site-packages", str(scene.root)] if command != "--help" else []
    seconds = []
    for _ in range(5):
        seconds.append(cpu_s(scene, *command.split(), *place))
        scene.must("revert")
    assert statistics.median(seconds[1:]) < limit_s


def test_nothing_heavy_is_imported(scene: Scene) -> None:
    """Neither vLLM nor torch is needed to apply, and --help needs none of our work."""
    scene.env["PYTHONPROFILEIMPORTTIME"] = "1"
    for args, forbidden in (
        (["--help"], ("rich", "unidiff", "packaging", "glm5_patch.commands")),
        (["status", "--site-packages", str(scene.root)], ("vllm", "torch", "triton")),
        (["apply", "--site-packages", str(scene.root)], ("vllm", "torch", "triton")),
    ):
        done = scene.run_exactly(*args)
        assert done.code == 0
        imported = {line.rpartition("|")[2].strip() for line in done.err.splitlines()}
        assert "glm5_patch.cli" in imported
        assert not imported.intersection(forbidden)
