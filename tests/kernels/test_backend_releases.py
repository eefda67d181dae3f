# SPDX-License-Identifier: Apache-2.0
"""The backend inside each release's real vLLM, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).with_name("test_backend.py")


@pytest.mark.parametrize("release", ["0.16.0", "0.23.0"])
def test_backend(release: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS],
        env=os.environ | {"GLM5_PATCH_RELEASE": release},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout.splitlines()[-1]
    assert "skipped" not in done.stdout.splitlines()[-1]
