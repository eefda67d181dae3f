# SPDX-License-Identifier: Apache-2.0
"""Starts every vLLM that the chosen tests ask about at once, where there is a GPU.

Needs one of SM80 or later and a patched vLLM 0.23.0 with transformers 5.13 or later;
scripts/enter-bundle makes the latter. GLM5_PATCH_E2E names a folder that keeps models,
answers, logs and evidence.json.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
from evidence import Evidence
from plan import asked_for


def why_not() -> str | None:
    """Why the tests of this folder that need a GPU cannot run here."""
    if find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return "no GPU"
    if find_spec("vllm") is None:
        return "vLLM is not installed"
    if find_spec("vllm.utils.indexer_logits") is None:
        return "vLLM is not patched: run glm5-patch apply"
    return None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "served: needs a GPU and a patched vLLM")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("served")]
    reason = why_not() if marked else None
    for item in marked:
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def evidence(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Evidence]:
    named = os.environ.get("GLM5_PATCH_E2E")
    folder = Path(named) if named else tmp_path_factory.mktemp("e2e")
    folder.mkdir(parents=True, exist_ok=True)
    pool = ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 2))
    found = Evidence(folder, pool)
    found.start(
        {
            name
            for item in request.session.items
            if isinstance(item, pytest.Function) and hasattr(item, "callspec")
            for name in asked_for(item.callspec.params.values())
        }
    )
    yield found
    pool.shutdown(cancel_futures=True)
