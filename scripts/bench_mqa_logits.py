# SPDX-License-Identifier: Apache-2.0
"""Time the indexer's logits beside DeepGEMM's, in one run, where DeepGEMM is there.

    python scripts/bench_mqa_logits.py [--quick] [--sweep] [--json FILE]

DeepGEMM is `deep_gemm`, or the copy in an installed vLLM; without either, only ours
is timed. Each time is the median of CUDA-graph replays. Both kinds of our kernels
are timed: float8, and integers, which is what SM80 and SM86 run. --sweep times other
launch shapes too.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from graph_timing import graph_us

sys.path.insert(0, str(Path(__file__).parents[1] / "patches/files/vllm/v1/attention"))

from ops import triton_mqa_logits as mqa

REPEATS = 20  # replays of a graph

DIM, PAGE = mqa.HEAD_DIM, mqa.PAGE
FP8 = torch.float8_e4m3fn
# (requests, tokens of context)
DECODE = [(b, n * 1024) for n in (8, 32, 128) for b in (1, 8, 32)]
# (queries, keys)
PREFILL = [(2048, 8192), (2048, 32_768)]
POOL_BYTES = 4 << 30  # of pages, so that decode reads memory and not L2


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


def decode_inputs(requests: int, context: int, heads: int) -> list[dict[str, Any]]:
    """Some batches over one pool; replayed in turn, none stays in L2."""
    blocks = POOL_BYTES // (PAGE * mqa.ROW_BYTES)
    pool = torch.empty(blocks, PAGE * mqa.ROW_BYTES, dtype=torch.uint8, device="cuda")
    keys, scales = pool[:, : PAGE * DIM].view(FP8), pool[:, PAGE * DIM :]
    for piece in keys.split(8192):
        piece.copy_(torch.randn(piece.shape, device="cuda") * 100)
    scales.view(torch.float32).uniform_(0, 0.01)
    pages = context // PAGE
    sets = max(1, min(10, blocks // (requests * pages)))
    order = torch.randperm(blocks, device="cuda", dtype=torch.int32)
    return [
        {
            "q": torch.randn(requests, 1, heads, DIM, device="cuda").to(FP8),
            "kv_cache": pool.view(blocks, PAGE, 1, mqa.ROW_BYTES),
            "weights": torch.randn(requests, heads, device="cuda"),
            "context_lens": torch.full(
                (requests, 1), context, dtype=torch.int32, device="cuda"
            ),
            "block_table": order[i * requests * pages :][: requests * pages].view(
                requests, pages
            ),
            "max_len": context,
        }
        for i in range(sets)
    ]


def bench_decode(
    library: Any, requests: int, context: int, heads: int
) -> dict[str, float]:
    inputs = decode_inputs(requests, context, heads)
    calls = len(inputs)
    found: dict[str, float] = {}

    def in_turn(run: Callable[[dict[str, Any]], object]) -> Callable[[], object]:
        turn = iter(range(10**9))
        return lambda: run(inputs[next(turn) % calls])

    found["ours_us"] = graph_us(
        in_turn(lambda i: mqa.paged_mqa_logits(**i)), calls, REPEATS
    )
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

    found["deep_gemm_us"] = graph_us(in_turn(theirs), calls, REPEATS)
    found["difference"] = relative(mqa.paged_mqa_logits(**inputs[0]), theirs(inputs[0]))
    return found


def bench_prefill(
    library: Any, queries: int, keys: int, heads: int
) -> dict[str, float]:
    q = torch.randn(queries, heads, DIM, device="cuda").to(FP8)
    k = (torch.randn(keys, DIM, device="cuda") * 100).to(FP8)
    k_scale = torch.rand(keys, device="cuda") / 100
    weights = torch.randn(queries, heads, device="cuda")
    starts = torch.zeros(queries, dtype=torch.int32, device="cuda")
    ends = torch.full_like(starts, keys)
    ours = lambda: mqa.mqa_logits(q, k, k_scale, weights, starts, ends)  # noqa: E731
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
            mqa.LaunchConfig(columns, PAGE, warps, stages, span)
            for columns in (32, 64)
            for warps in (4, 8)
            for stages in (4, 5, 7, 9)
            for span in (2, 4, 6)
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
    kinds = (True, False) if mqa.has_float8(capability) else (False,)
    rows = []
    for decode, sizes in ((True, DECODE), (False, PREFILL)):
        for first, second in sizes:
            for heads in (32,) if arguments.quick else mqa.HEADS:
                for native in kinds:
                    mqa.has_float8 = lambda _, native=native: native
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
                            "kind": "float8" if native else "integers",
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
