# SPDX-License-Identifier: Apache-2.0
"""Every variant compiles for every chip and fits it, on a machine without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compile_variants import (
    ATTENTION,
    INDEX_HEADS,
    LAYOUTS,
    MERGES,
    NEXT_N,
    REQUESTS,
    SHAPES,
    SHARED_LIMIT,
    splits_of,
)
from ops.triton_sparse_launch import MAX_HEADS

SCRIPT = Path(__file__).with_name("compile_variants.py")

# Bytes of stack of a variant that was measured to be faster than the one without:
# 170 against 180 us for 128 tokens and 64 heads on an H200.
SPILLS_FASTER = {
    f"sm90-sparse_mla-{dtype}-h64-t1-s1-aligned": 40 for dtype in ("fp16", "bf16")
}

Variants = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Variants:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("t"))}
    environment.pop("TRITON_INTERPRET", None)
    child = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, env=environment
    )
    assert child.returncode == 0, child.stderr
    report = json.loads(child.stdout)
    print(f"\ntriton {report['triton']}: bytes of shared memory, registers, stack")
    for v in report["variants"]:
        print(f"{v['name']:42} {v['shared']:7} {v['registers']:4} {v['stack']:4}")
    return {v["name"]: v for v in report["variants"]}


def test_all_chips_dtypes_shapes_and_layouts_are_there(variants: Variants) -> None:
    for arch in SHARED_LIMIT:
        # aligned: every number of splits, in 2 dtypes; wide: one of them; odd: one
        attention = sum(
            2 * len(splits_of(name, arch, heads, config)) + 3
            for name, kind in ATTENTION.items()
            for config, heads in {
                kind.config_of(divmod(arch, 10), *shape): shape[0]
                for shape in reversed(SHAPES)
            }.items()
        )
        ours = [name for name in variants if name.startswith(f"sm{arch}-")]
        # two of prefill, and decode for each number of tokens and of requests; not in
        # the odd layout
        decode = len(NEXT_N) * len(REQUESTS)
        indexer = len(INDEX_HEADS) * (2 + decode) * (len(LAYOUTS) - 1)
        # the lookup in each layout, and the write of rows
        assert len(ours) == attention + len(MERGES) + indexer + len(LAYOUTS) + 1


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("arch", SHARED_LIMIT)
def test_the_shapes_stand_for_all(arch: int, attention: str) -> None:
    capability = divmod(arch, 10)
    config_of = ATTENTION[attention].config_of
    every = {
        config_of(capability, heads, tokens)
        for heads in range(1, MAX_HEADS + 1)
        for tokens in (*range(1, 300), 8192)
    }
    assert every == {config_of(capability, *shape) for shape in SHAPES}


@pytest.mark.parametrize("arch", SHARED_LIMIT)
def test_shared_memory_fits_the_chip(arch: int, variants: Variants) -> None:
    too_large = {
        name: v["shared"]
        for name, v in variants.items()
        if v["arch"] == arch and v["shared"] > SHARED_LIMIT[arch]
    }
    assert not too_large, f"sm{arch} has {SHARED_LIMIT[arch]} bytes"


def test_no_register_is_spilled(variants: Variants) -> None:
    """In the layout that exists. Odd strides and 64-bit ones are correct, and slow."""
    spilled = {
        name: (v["stack"], v["local"])
        for name, v in variants.items()
        if name.endswith("aligned")
        and (v["stack"] > SPILLS_FASTER.get(name, 0) or v["local"])
    }
    assert not spilled
