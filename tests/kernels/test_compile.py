# SPDX-License-Identifier: Apache-2.0
"""Every variant compiles for every chip and fits it, on a machine without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compile_variants import (
    INDEX_HEADS,
    LAYOUTS,
    MERGES,
    NEXT_N,
    SHAPES,
    SHARED_LIMIT,
)
from ops.triton_sparse_launch import MAX_HEADS, launch_config

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
        configs = {launch_config(divmod(arch, 10), *shape) for shape in SHAPES}
        ours = [name for name in variants if name.startswith(f"sm{arch}-")]
        # aligned: 3 numbers of splits in 2 dtypes; wide: 2 dtypes; odd: one
        attention = len(configs) * 9 + len(MERGES)
        # prefill, and decode for each number of tokens; not in the odd layout
        indexer = len(INDEX_HEADS) * (1 + len(NEXT_N)) * (len(LAYOUTS) - 1)
        assert len(ours) == attention + indexer + len(LAYOUTS)


@pytest.mark.parametrize("arch", SHARED_LIMIT)
def test_the_shapes_stand_for_all(arch: int) -> None:
    capability = divmod(arch, 10)
    every = {
        launch_config(capability, heads, tokens)
        for heads in range(1, MAX_HEADS + 1)
        for tokens in (*range(1, 300), 8192)
    }
    assert every == {launch_config(capability, *shape) for shape in SHAPES}


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
