# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel variant for every chip, without a GPU; print JSON.

Run in a process of its own: under TRITON_INTERPRET=1 `@triton.jit` makes
objects that cannot be compiled.

    python tests/kernels/compile_variants.py [ARCH ...]
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import NamedTuple

import triton
from chips import PROCESSORS
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[2] / "patches/files/vllm/v1/attention"))

from ops import triton_indexer_keys as key_writing
from ops import triton_mqa_logits as mqa
from ops import triton_sparse_launch as launch
from ops import triton_sparse_merge as merging
from ops import triton_sparse_mla as mla
from ops import triton_sparse_mla_fp8 as mla_fp8
from ops import triton_sparse_rows_fp8 as writing
from ops import triton_sparse_slots as lookup

# One head and token count on each side of every decision of a launch table.
SHAPES = ((8, 1), (8, 128), (8, 129), (32, 1), (32, 33), (64, 1))
# Powers of two between 2 and the most that any chip has room for.
MERGES = (2, 32, 128)
# Index heads, and tokens a request in decode, on each side of a decision there.
INDEX_HEADS = (32, 64)
NEXT_N = (1, 2, 4)
REQUESTS = (32, 512)  # one warp's, and vLLM's usual most
# What vLLM passes is 16-aligned; a pool with odd strides is not, and then the
# loads are narrower. Strides of a giant pool do not fit 32 bits.
LAYOUTS = ("aligned", "odd", "wide")

# Strides that are no multiple of 16 even there.
ANY_STRIDE = (
    "stride_lens_b",
    "stride_lens_n",
    "stride_table_b",
    "stride_table_r",
)


def compile_for(
    kernel: triton.JITFunction,
    arch: int,
    pointers: dict[str, str],
    constants: dict[str, int],
    integer: str,
    aligned: bool,
    options: dict[str, int],
) -> dict[str, int]:
    """Compile one variant; give its shared memory, registers and stack.

    `pointers` gives a type to every argument that `integer` does not suit. A stack is
    where spilled registers go: this kernel has no arrays, so 0 means none.
    """
    signature, hints = {}, {}
    for position, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = pointers.get(name, integer)
        any_address = kernel.params[position].do_not_specialize_on_alignment
        is_pointer = signature[name].startswith("*") and not any_address
        is_stride = name.startswith("stride_") and name not in ANY_STRIDE
        if is_pointer or (is_stride and aligned):
            hints[(position,)] = [["tt.divisibility", 16]]
    built = triton.compile(
        ASTSource(kernel, signature, constants, hints),
        target=GPUTarget("cuda", arch, 32),
        options=options,
    )
    return {"shared": built.metadata.shared, **resources(built.asm["cubin"])}


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and stack of the kernel in a cubin, from Triton's own cuobjdump."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", usage)
    if match is None:
        raise ValueError(f"cuobjdump must report REG, STACK and LOCAL, found {usage!r}")
    registers, stack, local = map(int, match.groups())
    return {"registers": registers, "stack": stack, "local": local}


class Attention(NamedTuple):
    """One of the two attention kernels."""

    kernel: triton.JITFunction
    config_of: Callable[[tuple[int, int], int, int], launch.LaunchConfig]
    rows: str | None  # the type of the cache, where it is not that of the query
    constants: Callable[[int, launch.LaunchConfig], dict[str, int]]


ATTENTION = {
    "sparse_mla": Attention(
        mla._sparse_mla_kernel,
        launch.launch_config,
        None,
        lambda arch, config: {
            "LATENT": launch.LATENT_DIM,
            "ROPE": launch.ROPE_DIM,
            "CHUNKS": launch.CHUNKS,
        },
    ),
    "sparse_mla_fp8": Attention(
        mla_fp8._sparse_mla_fp8_kernel,
        launch.launch_config_fp8,
        "*u8",
        lambda arch, config: {"NATIVE": launch.converts_e4m3(divmod(arch, 10))},
    ),
}


def splits_of(
    attention: str, arch: int, heads: int, config: launch.LaunchConfig
) -> list[int]:
    """Fewest, merged in place, and most splits of this shape on a chip of its kind."""
    possible = {
        launch.num_splits(config, heads, tokens, 2048, PROCESSORS[arch])
        for tokens in range(1, 600)
        if ATTENTION[attention].config_of(divmod(arch, 10), heads, tokens) == config
    }
    merged = [n for n in possible if 1 < n <= launch.MERGED_BY_THE_LAST]
    return sorted({min(possible), *merged[-1:], max(possible)})


def attention_variants(
    attention: str, arch: int, layout: str, dtype: str, integer: str, aligned: bool
) -> list[dict[str, object]]:
    results = []
    kernel, config_of, rows, constants_of = ATTENTION[attention]
    shapes = {config_of(divmod(arch, 10), *shape): shape for shape in reversed(SHAPES)}
    for config, (heads, tokens) in shapes.items():
        possible = splits_of(attention, arch, heads, config)
        for splits in possible if layout == "aligned" else possible[:1]:
            measured = compile_for(
                kernel,
                arch,
                {
                    **dict.fromkeys(("q_nope", "q_pe", "out"), f"*{dtype}"),
                    "kv_cache": rows or f"*{dtype}",
                    **dict.fromkeys(("lse", "part", "part_lse"), "*fp32"),
                    **dict.fromkeys(("slots", "tickets"), "*i32"),
                    "scale_log2": "fp32",
                },
                {
                    "TOPK": 2000 if layout == "odd" else 2048,
                    "SPLITS": splits,
                    "MERGE": 1 < splits <= launch.MERGED_BY_THE_LAST,
                    "PAGE": 64,
                    "PAGES_ADJOIN": layout == "aligned",
                    "BLOCK_H": config.block_h,
                    "BLOCK_N": config.block_n,
                    "INTERPRETED": False,
                    **constants_of(arch, config),
                },
                integer,
                aligned,
                {
                    "num_warps": config.num_warps,
                    "num_stages": config.num_stages,
                },
            )
            name = f"sm{arch}-{attention}-{dtype}-h{heads}-t{tokens}-s{splits}-{layout}"
            results.append({"name": name, "arch": arch, **measured})
    return results


def merge_variants(arch: int) -> list[dict[str, object]]:
    """The strides of the merge are its own, so there is one layout."""
    results = []
    for splits in MERGES:
        measured = compile_for(
            merging._merge_kernel,
            arch,
            {"part": "*fp32", "part_lse": "*fp32", "out": "*fp16", "lse": "*fp32"},
            {
                "SPLITS": splits,
                "LATENT": launch.LATENT_DIM,
                "BLOCK_D": merging.merge_block(splits),
            },
            "i32",
            True,
            {"num_warps": 4},
        )
        results.append({"name": f"sm{arch}-merge-s{splits}", "arch": arch, **measured})
    return results


def write_variants(arch: int) -> list[dict[str, object]]:
    """float16 alone is written; its layout does not matter to one row at a time."""
    common = {"kv_cache": "*u8", "slots": "*i64"}
    kernels = {
        "write_rows_fp8": (
            writing._write_rows_fp8_kernel,
            {"latents": "*fp16", "rope": "*fp16"},
            {"PAGE": 64},
            4,
        ),
        "write_keys": (
            key_writing._write_keys_kernel,
            {"keys": "*fp16"},
            {"PAGE": 64, "DIM": key_writing.HEAD_DIM, "POWER_OF_TWO": True},
            1,
        ),
    }
    return [
        {
            "name": f"sm{arch}-{name}-aligned",
            "arch": arch,
            **compile_for(
                kernel,
                arch,
                common | pointers,
                constants,
                "i32",
                True,
                {"num_warps": warps},
            ),
        }
        for name, (kernel, pointers, constants, warps) in kernels.items()
    ]


def mqa_variants(arch: int, layout: str) -> list[dict[str, object]]:
    """The two kernels of the indexer, with float8 where the chip has it."""
    capability = divmod(arch, 10)
    native = mqa.has_float8(capability)
    eight_bits = "*fp8e4nv" if native else "*i8"
    floats = dict.fromkeys(("k_scale", "scales", "weights", "logits"), "*fp32")
    whole = dict.fromkeys(("starts", "ends", "context_lens", "block_table"), "*i32")
    # Counts fit 32 bits whatever the strides are.
    counts = dict.fromkeys(
        (
            "num_queries",
            "num_keys",
            "width",
            "num_requests",
            "next_n",
            "num_blocks",
            "longest",
        ),
        "i32",
    )
    keys = dict.fromkeys(("q", "k", "keys"), eight_bits)
    types = {**keys, **floats, **whole, **counts}
    shared = {"DIM": mqa.HEAD_DIM, "NATIVE": native}
    kernels = []
    for heads in INDEX_HEADS:
        config = mqa.prefill_config(capability)
        for shifted in (False, True):
            constants = {
                "QUERIES": config.columns // heads,
                "BLOCK_N": config.block_n,
                "SPAN": config.span,
                "SHIFTED": shifted,
            }
            name = f"mqa_logits{'-shifted' if shifted else ''}"
            kernels.append((name, mqa._mqa_logits_kernel, heads, config, constants))
        for next_n, requests in itertools.product(NEXT_N, REQUESTS):
            config = mqa.decode_config(capability, next_n * heads)
            constants = {
                "QUERIES": max(1, config.columns // heads),
                "PAGE": mqa.PAGE,
                "BLOCK_B": mqa.request_block(requests),
                "BLOCK_T": mqa.BLOCK_T,
                # Triton makes a constant of an argument that is 1.
                **({"next_n": 1} if next_n == 1 else {}),
            }
            name = f"paged_logits-next{next_n}-requests{requests}"
            kernels.append(
                (name, mqa._paged_mqa_logits_kernel, heads, config, constants)
            )
    return [
        {
            "name": f"sm{arch}-{name}-heads{heads}-{layout}",
            "arch": arch,
            **compile_for(
                kernel,
                arch,
                types,
                {**shared, **constants, "HEADS": heads, "STAGES": config.num_stages},
                "i64" if layout == "wide" else "i32",
                True,
                {"num_warps": config.num_warps, "maxnreg": config.max_registers},
            ),
        }
        for name, kernel, heads, config, constants in kernels
    ]


def variants(archs: list[int]) -> list[dict[str, object]]:
    results = []
    for arch in archs:
        results += merge_variants(arch) + write_variants(arch)
        for layout in LAYOUTS:
            if layout != "odd":  # the indexer's kernels refuse such a cache
                results += mqa_variants(arch, layout)
            integer = "i64" if layout == "wide" else "i32"
            aligned = layout != "odd"
            for dtype, attention in product(
                ("fp16", "bf16") if aligned else ("bf16",), ATTENTION
            ):
                results += attention_variants(
                    attention, arch, layout, dtype, integer, aligned
                )
            measured = compile_for(
                lookup._slots_kernel,
                arch,
                dict.fromkeys(
                    ("positions", "block_table", "req_of_token", "slots"), "*i32"
                ),
                {"PAGE": 64, "BLOCK": lookup.BLOCK},
                integer,
                aligned,
                {"num_warps": 8},
            )
            results.append(
                {"name": f"sm{arch}-slots-{layout}", "arch": arch, **measured}
            )
    return results


if __name__ == "__main__":
    archs = [int(arch) for arch in sys.argv[1:]] or list(PROCESSORS)
    json.dump({"triton": triton.__version__, "variants": variants(archs)}, sys.stdout)
