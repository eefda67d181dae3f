# SPDX-License-Identifier: Apache-2.0
"""Nothing is left to compile after the warm-up, whatever batch comes first."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ops import triton_sparse_warmup
from specialisations import CHIPS, HEADS

SCRIPT = Path(__file__).with_name("specialisations.py")


@pytest.fixture(scope="module")
def binaries() -> dict[str, Any]:
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    child = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, env=environment
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


def test_every_batch_finds_its_binaries(binaries: dict[str, Any]) -> None:
    """1 to 8192 tokens, on five chips, by Triton's own keys; and none for nothing."""
    assert len(binaries["chips"]) == len(CHIPS) * len(HEADS) * 2
    for found in binaries["chips"]:
        assert (found["missed"], found["idle"]) == (0, 0), found
        assert 7 < found["needed"] < 20, found


def test_a_warm_up_that_is_too_short_is_seen(binaries: dict[str, Any]) -> None:
    for found in binaries["chips"]:
        assert found["missed_after_one_token"] > 4, found


def test_triton_would_compile_more_lookups_if_it_were_not_told(
    binaries: dict[str, Any],
) -> None:
    assert binaries["plain_lookups"] == 4


def test_it_runs_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    monkeypatch.setattr(
        triton_sparse_warmup, "sparse_mla", lambda q, *_: runs.append(list(q.shape))
    )
    triton_sparse_warmup.warm_up.cache_clear()
    how = (8, 64, torch.float16, False, 64, 200, torch.device(device))
    for _ in range(2):
        triton_sparse_warmup.warm_up(*how)
    triton_sparse_warmup.warm_up.cache_clear()
    assert runs[0] == [1, 8, 576]
    assert len(runs) == len({tuple(shape) for shape in runs}) > 1
    assert runs[-1][0] <= 200
