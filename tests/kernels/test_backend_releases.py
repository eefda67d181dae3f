# SPDX-License-Identifier: Apache-2.0
"""Backend and indexer inside each release's real vLLM, each in its own process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.mark.parametrize("tests", ["test_backend.py", "test_indexer_layer.py"])
@pytest.mark.parametrize("release", ["0.16.0", "0.23.0"])
def test_in_the_release(release: str, tests: str) -> None:
    if tests == "test_indexer_layer.py" and torch.cuda.is_available():
        pytest.skip("a GPU runs tests/e2e/indexer_on_gpu.py instead")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / tests],
        env=os.environ | {"GLM5_PATCH_RELEASE": release},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout.splitlines()[-1]
    assert "skipped" not in done.stdout.splitlines()[-1]
