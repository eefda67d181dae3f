# SPDX-License-Identifier: Apache-2.0
"""What every test can have: the trees of vLLM's releases, and the project's root."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _load(name: str, file: Path) -> object:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def release_tree() -> Callable[[str], Path]:
    """Gives the read-only tree of a release: ``vllm/`` and its metadata."""
    return _load("glm5_patch_fetch", ROOT / "scripts" / "fetch.py").release_tree
