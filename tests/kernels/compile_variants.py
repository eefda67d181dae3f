# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel variant for every chip, without a GPU; print JSON.

Run in a process of its own: under TRITON_INTERPRET=1 `@triton.jit` makes
objects that cannot be compiled.

    python tests/kernels/compile_variants.py [ARCH ...]
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[2] / "patches/files/vllm/v1/attention"))

from ops import triton_mqa_logits as mqa
from ops import triton_sparse_launch as launch
from ops import triton_sparse_merge as merging
from ops import triton_sparse_mla as mla
from ops import triton_sparse_slots as lookup

# Shared memory that one program may have, in bytes (CUDA programming guide).
SHARED_LIMIT = {
    80: 166_912,
    86: 101_376,
    89: 101_376,
    90: 232_448,
    120: 101_376,
    121: 101_376,
}
# One head and token count on each side of every decision of launch_config.
SHAPES = ((8, 1), (8, 128), (32, 1), (64, 1))
# Powers of two between 2 and the most that any chip has room for.
MERGES = (2, 32, 128)
# Index heads, and tokens a request in decode, on each side of a decision there.
INDEX_HEADS = (32, 64)
NEXT_N = (1, 2, 4)
# What vLLM passes is 16-aligned; a pool with odd strides is not, and then the
# loads are narrower. Strides of a giant pool do not fit 32 bits.
LAYOUTS = ("aligned", "odd", "wide")

# Strides that are no multiple of 16 even there.
ANY_STRIDE = (
    "stride_lse_t",
    "stride_lse_s",
    "stride_lens_b",
    "stride_lens_n",
    "stride_table_b",
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
        is_pointer = signature[name].startswith("*")
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


def attention_variants(
    arch: int, layout: str, dtype: str, integer: str, aligned: bool
) -> list[dict[str, object]]:
    results = []
    shapes = {
        launch.launch_config(divmod(arch, 10), *shape): shape
        for shape in reversed(SHAPES)
    }
    for config, (heads, tokens) in shapes.items():
        # Whole; split (float32 out) with several steps, and with one.
        for splits in (1, 4, 2048 // config.block_n) if layout == "aligned" else (4,):
            steps = 2048 // config.block_n // splits
            data = dict.fromkeys(("q_nope", "q_pe", "kv_cache"), f"*{dtype}")
            measured = compile_for(
                mla._sparse_mla_kernel,
                arch,
                {
                    **data,
                    "out": f"*{dtype}" if splits == 1 else "*fp32",
                    "slots": "*i32",
                    "lse": "*fp32",
                    "scale_log2": "fp32",
                },
                {
                    "TOPK": 2000 if layout == "odd" else 2048,
                    "KEYS": steps * config.block_n,
                    "PAGE": 64,
                    "PAGES_ADJOIN": layout == "aligned",
                    "LATENT": launch.LATENT_DIM,
                    "ROPE": launch.ROPE_DIM,
                    "BLOCK_H": config.block_h,
                    "BLOCK_N": config.block_n,
                    "LATENT_DOWN": config.latent_down,
                    "INTERPRETED": False,
                },
                integer,
                aligned,
                {
                    "num_warps": config.num_warps,
                    "num_stages": config.num_stages,
                    "maxnreg": config.max_registers,
                },
            )
            name = f"sm{arch}-sparse_mla-{dtype}-h{heads}-t{tokens}-s{splits}-{layout}"
            results.append({"name": name, "arch": arch, **measured})
    if layout == "aligned" and dtype == "fp16":  # all its strides are its own
        for splits in MERGES:
            measured = compile_for(
                merging._merge_kernel,
                arch,
                {"part": "*fp32", "part_lse": "*fp32", "out": f"*{dtype}"}
                | {"lse": "*fp32"},
                {
                    "SPLITS": splits,
                    "LATENT": launch.LATENT_DIM,
                    "BLOCK_D": merging.merge_block(splits),
                },
                integer,
                aligned,
                {"num_warps": 4},
            )
            name = f"sm{arch}-merge-s{splits}"
            results.append({"name": name, "arch": arch, **measured})
    return results


def mqa_variants(arch: int, layout: str) -> list[dict[str, object]]:
    """The two kernels of the indexer, with float8 where the chip has it."""
    capability = divmod(arch, 10)
    native = mqa.has_float8(capability)
    eight_bits = "*fp8e4nv" if native else "*i8"
    floats = dict.fromkeys(("k_scale", "scales", "weights", "logits"), "*fp32")
    whole = dict.fromkeys(("starts", "ends", "context_lens", "block_table"), "*i32")
    # Counts fit 32 bits whatever the strides are.
    counts = dict.fromkeys(
        ("num_queries", "num_keys", "num_requests", "next_n", "num_blocks", "longest"),
        "i32",
    )
    keys = dict.fromkeys(("q", "k", "keys"), eight_bits)
    types = {**keys, **floats, **whole, **counts}
    shared = {"DIM": mqa.HEAD_DIM, "NATIVE": native}
    kernels = []
    for heads in INDEX_HEADS:
        config = mqa.prefill_config(capability)
        constants = {
            "QUERIES": config.columns // heads,
            "BLOCK_N": config.block_n,
            "SPAN": config.span,
        }
        kernels.append(("mqa_logits", mqa._mqa_logits_kernel, heads, config, constants))
        for next_n in NEXT_N:
            config = mqa.decode_config(capability, next_n * heads)
            constants = {
                "QUERIES": max(1, config.columns // heads),
                "PAGE": mqa.PAGE,
                "BLOCK_B": mqa.BLOCK_B,
                # Triton makes a constant of an argument that is 1.
                **({"next_n": 1} if next_n == 1 else {}),
            }
            name = f"paged_logits-next{next_n}"
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
        for layout in LAYOUTS:
            if layout != "odd":  # the indexer's kernels refuse such a cache
                results += mqa_variants(arch, layout)
            integer = "i64" if layout == "wide" else "i32"
            aligned = layout != "odd"
            for dtype in ("fp16", "bf16") if aligned else ("bf16",):
                results += attention_variants(arch, layout, dtype, integer, aligned)
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
    archs = [int(arch) for arch in sys.argv[1:]] or list(SHARED_LIMIT)
    json.dump({"triton": triton.__version__, "variants": variants(archs)}, sys.stdout)
