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
from specialisations import CHIPS, HEADS, INDEX_HEADS, NEXT_N

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
    """1 to 8192 tokens, on each chip, by Triton's own keys; and none for nothing."""
    assert len(binaries["attention"]) == len(CHIPS) * len(HEADS) * 2
    for found in binaries["attention"]:
        assert (found["missed"], found["idle"]) == (0, 0), found
        assert 8 <= found["needed"] < 20, found


def test_the_indexer_finds_its_binaries(binaries: dict[str, Any]) -> None:
    """One for any prefill; for decode of up to 1024 requests four by their number.

    With and without a draft, which makes two of each of the four.
    """
    assert len(binaries["indexer"]) == len(CHIPS) * len(INDEX_HEADS)
    for found in binaries["indexer"]:
        assert (found["missed"], found["idle"]) == (0, 0), found
        assert found["needed"] == 1 + 4 * len(NEXT_N), found


def test_a_warm_up_that_is_too_short_is_seen(binaries: dict[str, Any]) -> None:
    for found in binaries["attention"]:
        assert found["missed_by_the_short"] > 4, found
    for found in binaries["indexer"]:
        assert found["missed_by_the_short"] == 3 * len(NEXT_N), found


def test_triton_would_compile_more_if_it_were_not_told(
    binaries: dict[str, Any],
) -> None:
    assert binaries["plain_lookups"] == 4
    # 3 by the number of queries, times 3 by that of keys, and where the ranges lie.
    assert binaries["plain_prefills"] > 9


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
