# SPDX-License-Identifier: Apache-2.0
"""The patch as overlays, and what the real vLLM answers on both sides of it."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from probe_target import Answers, Overlay, ask
from targets import RELEASE, MakeTarget, Target

from glm5_patch import diff, overlay, plan, tree
from glm5_patch.manifest import Series
from glm5_patch.plan import Plan
from glm5_patch.probe.judge import BLOCK_SIZE_ON, CASES
from glm5_patch.probe.model import Request

PATCHES = Path(__file__).parents[2] / "patches"


@pytest.fixture(scope="session")
def stock_target(make_target: MakeTarget) -> Target:
    return make_target()


@pytest.fixture(scope="session")
def patching(stock_target: Target) -> Plan:
    """What the repository's patch files make of the release."""
    texts = sorted(PATCHES.glob(f"vllm/*/{RELEASE}.patch"))
    files = PATCHES / "files"
    series = Series(
        release=RELEASE,
        tested=False,
        features=(),
        diffs=tuple(d for text in texts for d in diff.parse(text.read_text(), "")),
        new_files={
            str(file.relative_to(files)): file.read_bytes()
            for file in files.rglob("*.py")
        },
        hashes={},
    )
    return plan.make(series, lambda path: tree.read(stock_target.root, path))


@pytest.fixture(scope="session")
def sides(patching: Plan) -> Iterator[tuple[Overlay, Overlay]]:
    """The overlays (stock, patched)."""
    with overlay.sides(patching) as (stock, patched):
        yield stock, patched


@pytest.fixture(scope="session")
def our_modules(patching: Plan) -> tuple[str, ...]:
    return tuple(overlay.module_of(added.path) for added in patching.additions)


@pytest.fixture(scope="session")
def answers(
    stock_target: Target,
    sides: tuple[Overlay, Overlay],
    our_modules: tuple[str, ...],
) -> Answers:
    """Every case put to an unpatched tree, as it is and through the patched overlay."""
    request = Request(stock_target.root, cases=CASES, block_size_on=BLOCK_SIZE_ON)
    patched = dataclasses.replace(request, overlay=sides[1], modules=our_modules)
    return ask(stock_target, request, patched)
