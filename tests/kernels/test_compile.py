# SPDX-License-Identifier: Apache-2.0
"""Every variant compiles for every chip and fits it, on a machine without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from chips import SHARED_LIMIT
from compile_variants import (
    ATTENTION,
    INDEX_HEADS,
    LAYOUTS,
    MERGES,
    NEXT_N,
    REQUESTS,
    SHAPES,
    splits_of,
)
from ops.triton_sparse_launch import MAX_HEADS

SCRIPT = Path(__file__).with_name("compile_variants.py")

# Bytes of stack of variants that run at up to 128 tokens. On an H200, in us:
SPILLS = {
    # 162 for 128 tokens; blocks of 32 heads, without spills, 172.
    "sm90-sparse_mla-h64-t1-s1": 16,
    # 62 for 32 tokens; without merging in place, and without spills, 76.
    "sm90-sparse_mla-h64-t1-s4": 24,
    # 48 for 32 tokens; blocks of 64 keys, which spill more, 50.
    "sm90-sparse_mla-h32-t1-s4": 8,
    # 108 for 128 tokens; blocks of 32 keys 117.
    "sm90-sparse_mla-h32-t33-s1": 80,
    "sm90-sparse_mla-h32-t33-s4": 88,
    "sm90-sparse_mla-h32-t33-s8": 112,
    # 73 for 32 tokens and 64 heads; three stages, which spill as much, 79.
    "sm90-sparse_mla_fp8-h32-t1-s4": 8,
    # One register, stored and loaded once a program, outside of the loop.
    **{f"sm{arch}-sparse_mla-h8-t1-s64": 8 for arch in (80, 86, 89)},
}
# The shape for more than 128 tokens is free to spill.
LARGE_BATCHES = "-t129-"

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
        # the lookup in each layout, and the writers of rows and of keys
        assert len(ours) == attention + len(MERGES) + indexer + len(LAYOUTS) + 2


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
    spilled = {}
    for name, v in variants.items():
        if name.endswith("-aligned") and LARGE_BATCHES not in name:
            shape = name.removesuffix("-aligned")
            shape = shape.replace("-fp16-", "-").replace("-bf16-", "-")
            if v["stack"] > SPILLS.get(shape, 0) or v["local"]:
                spilled[name] = (v["stack"], v["local"])
    assert not spilled
