# SPDX-License-Identifier: Apache-2.0
"""Time the indexer's logits beside DeepGEMM's, in one run, where DeepGEMM is there.

    python scripts/bench_mqa_logits.py [--quick] [--sweep] [--json FILE]

DeepGEMM is `deep_gemm`, or the copy in an installed vLLM; without either, only ours
is timed. Each time is the median of CUDA-graph replays. Both kinds of our kernels
are timed: float8, and integers, as SM80 runs them. --sweep times other launch shapes
too.
"""

import argparse
import importlib
import json
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1] / "patches/files/vllm/v1/attention"))

from ops import triton_mqa_logits as mqa

from glm5_patch.bench.child import indexer
from glm5_patch.bench.child.timing import Rotation, graph_us

REPEATS = 20  # replays of a graph

DIM, PAGE = mqa.HEAD_DIM, mqa.PAGE
# (requests, tokens of context)
DECODE = [(b, n * 1024) for n in (8, 32, 128) for b in (1, 8, 32)]
# (queries, keys)
PREFILL = [(2048, 8192), (2048, 32_768)]
POOL_BYTES = 4 << 30  # of pages, so that decode reads memory and not L2

# The pool takes longer to draw than to read.
decode_inputs = lru_cache(maxsize=1)(indexer.decode_inputs)


def deep_gemm() -> Any:
    """DeepGEMM, or None; the reason goes to stderr."""
    for name in ("deep_gemm", "vllm.third_party.deep_gemm"):
        try:
            return importlib.import_module(name)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
    return None


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative RMS difference of two results."""
    a, b = a.double(), b.double()
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt())


def bench_decode(
    library: Any, requests: int, context: int, heads: int
) -> dict[str, float]:
    inputs = decode_inputs(requests, context, heads, POOL_BYTES, "cuda")
    calls = len(inputs)
    ours = Rotation(lambda i: mqa.paged_mqa_logits(**i), inputs)
    found = {"ours_us": graph_us(ours, calls, REPEATS)}
    if library is None:
        return found
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    new = hasattr(library, "fp8_fp4_paged_mqa_logits")
    name = "fp8_fp4_paged_mqa_logits" if new else "fp8_paged_mqa_logits"
    call = getattr(library, name)
    lens = inputs[0]["context_lens"] if new else inputs[0]["context_lens"].view(-1)
    schedule = library.get_paged_mqa_logits_metadata(lens, PAGE, processors)

    def theirs(i: dict[str, Any]) -> torch.Tensor:
        q = (i["q"], None) if new else i["q"]
        return call(
            q,
            i["kv_cache"],
            i["weights"],
            lens,
            i["block_table"],
            schedule,
            context,
            clean_logits=False,
        )

    found["deep_gemm_us"] = graph_us(Rotation(theirs, inputs), calls, REPEATS)
    found["difference"] = relative(mqa.paged_mqa_logits(**inputs[0]), theirs(inputs[0]))
    return found


def bench_prefill(
    library: Any, queries: int, keys: int, heads: int
) -> dict[str, float]:
    inputs = indexer.prefill_inputs(queries, keys, heads, "cuda")
    q, k, k_scale, weights, starts, ends = inputs.values()
    ours = lambda: mqa.mqa_logits(**inputs)  # noqa: E731
    found = {"ours_us": graph_us(ours, 1, REPEATS)}
    if library is None:
        return found
    new = hasattr(library, "fp8_fp4_mqa_logits")
    call = library.fp8_fp4_mqa_logits if new else library.fp8_mqa_logits

    def theirs() -> torch.Tensor:
        given = (q, None) if new else q
        return call(given, (k, k_scale), weights, starts, ends, clean_logits=False)

    found["deep_gemm_us"] = graph_us(theirs, 1, REPEATS)
    found["difference"] = relative(ours(), theirs())
    return found


def shapes(decode: bool, sweep: bool) -> list[mqa.LaunchConfig | None]:
    """None is the pinned shape."""
    if not sweep:
        return [None]
    if decode:
        return [None] + [
            mqa.LaunchConfig(columns, PAGE, 4, buffers, span, 168)
            for columns in mqa.HEADS
            for buffers in (2, 3, 4, 6)
            for span in (1, 2, 3, 4, 6)
        ]
    return [None] + [
        mqa.LaunchConfig(columns, block_n, warps, stages, span)
        for columns, block_n, warps in (
            (128, 64, 4),
            (128, 128, 4),
            (128, 128, 8),
            (256, 64, 4),
            (256, 64, 8),
            (256, 128, 8),
        )
        for stages in (2, 3, 4)
        for span in (1024, 4096)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="32 heads only")
    parser.add_argument("--sweep", action="store_true", help="try other shapes too")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device, found none")
    capability = torch.cuda.get_device_capability()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, ", end="")
    print(f"triton {triton.__version__}")
    torch.manual_seed(0)
    library = deep_gemm()
    pinned = {True: mqa.decode_config, False: mqa.prefill_config}
    kinds = {"integers": (8, 0) if mqa.has_float8(capability) else capability}
    if mqa.has_float8(capability):
        kinds = {"float8": capability, **kinds}
    rows = []
    for decode, sizes in ((True, DECODE), (False, PREFILL)):
        for first, second in sizes:
            for heads in (32,) if arguments.quick else mqa.HEADS:
                for kind, shaped_for in kinds.items():
                    mqa._capability = lambda _, chip=shaped_for: chip
                    for shape in shapes(decode, arguments.sweep):
                        chosen = (lambda *_, s=shape: s) if shape else pinned[decode]
                        if shape and shape.columns < heads:
                            continue
                        mqa.decode_config = chosen if decode else pinned[True]
                        mqa.prefill_config = pinned[False] if decode else chosen
                        bench = bench_decode if decode else bench_prefill
                        beside = library if shape is None else None
                        try:
                            found = bench(beside, first, second, heads)
                        except triton.runtime.errors.OutOfResources:
                            continue  # a shape of the sweep this chip cannot hold
                        row = {
                            "case": "decode" if decode else "prefill",
                            "size": [first, second],
                            "heads": heads,
                            "kind": kind,
                            "shape": shape and list(shape),
                            **found,
                        }
                        rows.append(row)
                        print(line(row), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


def line(row: dict[str, Any]) -> str:
    """One row of the report: time, rate, and DeepGEMM's time beside it."""
    first, second = row["size"]
    if row["case"] == "decode":
        rate = f"{first * second * mqa.ROW_BYTES / row['ours_us'] / 1e3:7.0f} GB/s"
    else:
        flop = 2 * first * second * row["heads"] * DIM
        rate = f"{flop / row['ours_us'] / 1e6:7.0f} TFLOP/s"
    text = (
        f"{row['case']:8}{first:5} x {second:6} heads {row['heads']} "
        f"{row['kind']:9}{row['ours_us']:9.1f} us {rate}"
    )
    if "deep_gemm_us" in row:
        text += (
            f"  DeepGEMM {row['deep_gemm_us']:8.1f} us, "
            f"ratio {row['ours_us'] / row['deep_gemm_us']:.2f}, "
            f"difference {row['difference']:.1e}"
        )
    return f"{text}  {tuple(row['shape'])}" if row["shape"] else text


if __name__ == "__main__":
    main()
