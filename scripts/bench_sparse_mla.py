# SPDX-License-Identifier: Apache-2.0
"""Time the sparse-MLA kernels beside the ceiling of the same run.

    python scripts/bench_sparse_mla.py [--dtype bf16|fp16] [--kv auto|fp8] [--sweep]
                                       [--flashmla vllm/_flashmla_C.abi3.so]
                                       [--json FILE]

--kv fp8 is the cache `fp8_ds_mla`, 656 bytes a row; else rows are 1152 bytes. The
ceiling is a kernel that reads the same random rows and does nothing else:
no attention kernel that reads them can be faster. Each time is the median of
CUDA-graph replays (decode) or of single launches (prefill), over a cache of
several GB, so that decode rows come from memory and not from L2. --flashmla loads
the extension of an unpacked vLLM 0.23.0 wheel and times FlashMLA on the same rows
(bfloat16; it wants at least 64 heads, so fewer are padded, as vLLM pads them).
--sweep times other launch shapes too, on 8 and 64 heads.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1] / "patches/files/vllm/v1/attention"))

from ops import triton_sparse_mla as mla
from ops import triton_sparse_mla_fp8 as mla_fp8
from ops.triton_sparse_launch import (
    ROW_DIM,
    LaunchConfig,
    launch_config,
    launch_config_fp8,
    num_splits,
)
from ops.triton_sparse_merge import new_tickets

from glm5_patch.bench.child import attention
from glm5_patch.bench.child.attention import PREFILL_BLOCKS, SCALE, TOPK
from glm5_patch.bench.child.timing import Rotation, graph_us

REPEATS = 30  # replays of a graph


def flashmla(q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """FlashMLA over 1152-byte rows; `[T, H, 512]`."""
    forward = torch.ops._flashmla_C.sparse_prefill_fwd
    rows = pool.view(-1, 1, ROW_DIM)
    return forward(q, rows, slots[:, None], SCALE, 512, None, None, None)[0]


class FlashMLAFp8:
    """FlashMLA over 656-byte rows; `[T, H, 512]`.

    Its schedule comes out of the first call and goes into all others, as in vLLM,
    which makes one for all layers of a step.
    """

    def __init__(self) -> None:
        self.schedule = (None, None)

    def __call__(
        self, q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        # Decode: each token a request; prefill: all tokens one request.
        by_request = 1 if len(q) <= attention.DECODE_TOKENS else 0
        out, _, *self.schedule = torch.ops._flashmla_C.sparse_decode_fwd(
            q.unsqueeze(by_request),
            pool[:, :, None],
            slots.unsqueeze(by_request),
            *(None, None),  # lengths, sinks
            *self.schedule,
            *(None, None, None),  # a second cache
            512,
            SCALE,
            None,
        )
        return out.flatten(0, 1)


class Kind(NamedTuple):
    """One of the two caches, and what runs on it."""

    row_bytes: int
    ours: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    config_of: Callable[[tuple[int, int], int, int], LaunchConfig]
    theirs: Callable[[], Callable[..., torch.Tensor]]
    # What config_of could have chosen on an H200; docs/kernels.md has the outcome.
    other_shapes: dict[int, list[LaunchConfig]]


KINDS = {
    "auto": Kind(
        2 * ROW_DIM,
        mla.sparse_mla,
        launch_config,
        lambda: flashmla,
        {
            8: [
                LaunchConfig(16, 32, 4, 5, 1),
                LaunchConfig(16, 32, 4, 5, 2),
                LaunchConfig(16, 32, 8, 5, 1),
                LaunchConfig(16, 64, 4, 5, 1),
                LaunchConfig(16, 64, 8, 5, 1),
                LaunchConfig(16, 64, 4, 2, 2),
                LaunchConfig(16, 32, 2, 2, 4),
            ],
            64: [
                LaunchConfig(64, 64, 8, 3, 1),
                LaunchConfig(32, 64, 4, 2, 2),
                LaunchConfig(32, 32, 4, 5, 1),
                LaunchConfig(32, 16, 4, 5, 1),
                LaunchConfig(32, 16, 8, 5, 1),
            ],
        },
    ),
    "fp8": Kind(
        mla_fp8.ROW_BYTES,
        mla_fp8.sparse_mla_fp8,
        launch_config_fp8,
        FlashMLAFp8,
        {
            8: [
                LaunchConfig(16, 32, 4, 3, 2),
                LaunchConfig(16, 32, 4, 5, 1),
                LaunchConfig(16, 64, 4, 3, 2),
                LaunchConfig(16, 64, 4, 5, 2),
                LaunchConfig(16, 64, 4, 5, 1),
                LaunchConfig(16, 32, 2, 3, 4),
            ],
            64: [
                LaunchConfig(32, 64, 4, 3, 1),
                LaunchConfig(32, 64, 8, 5, 1),
                LaunchConfig(32, 32, 4, 3, 2),
                LaunchConfig(64, 32, 8, 3, 1),
            ],
        },
    ),
}


def use_shape(shape: LaunchConfig) -> None:
    """Launch both kernels in this shape from now on."""
    mla.launch_config = lambda *_: shape
    mla_fp8.launch_config_fp8 = lambda *_: shape


def measure(
    kind: Kind,
    dtype: torch.dtype,
    tokens: int,
    heads: int,
    pool: torch.Tensor,
    shared: float,
    shapes: list[LaunchConfig],
    with_flashmla: bool,
) -> list[dict[str, Any]]:
    """Ceiling, kernel and FlashMLA, in microseconds; a row for each launch shape.

    FlashMLA is measured beside the first. Every other shape is compared with the
    first: it must compute the same.
    """
    sets = 10 if tokens <= attention.DECODE_TOKENS else 1
    slots = attention.draw_slots(sets, tokens, pool, shared)
    q = attention.draw_queries(tokens, heads, dtype, "cuda")

    def microseconds(run: Callable[[torch.Tensor], object]) -> float:
        return graph_us(Rotation(run, slots), sets, REPEATS)

    def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
        return float((actual - expected).norm() / expected.norm())

    tickets = new_tickets(q.device)
    read_us = attention.read_us(pool, slots, REPEATS)
    rows = []
    for shape in shapes:
        use_shape(shape)
        out = kind.ours(q, pool, slots[0], SCALE, tickets)[0].float()
        row: dict[str, Any] = {"config": tuple(shape), "read_us": read_us}
        if not rows:
            first = out
        row["wrong"] = not relative(out, first) < 5e-3
        row["ours_us"] = microseconds(lambda s: kind.ours(q, pool, s, SCALE, tickets))
        rows.append(row)
    if with_flashmla:
        padded = torch.zeros(tokens, max(heads, 64), ROW_DIM, device="cuda")
        padded = padded.to(dtype)
        padded[:, :heads] = q
        theirs = kind.theirs()
        expected = theirs(padded, pool, slots[0])[:, :heads].float()
        rows[0]["difference"] = relative(first, expected)
        rows[0]["flashmla_us"] = microseconds(lambda s: theirs(padded, pool, s))
    return rows


def line(row: dict[str, Any]) -> str:
    """One measurement as a line of the table."""
    ours, read = row["ours_us"], row["read_us"]
    gb_s = row["tokens"] * TOPK * row["row_bytes"] / ours / 1000
    text = f"{row['tokens']:6} {row['heads']:5} {read:7.1f} {ours:7.1f} "
    text += f"{ours / read:9.2f} {gb_s:6.0f} "
    if "flashmla_us" in row:
        theirs = row["flashmla_us"]
        text += f"{theirs:8.1f} {ours / theirs:13.2f}"
    else:
        text += " " * 22
    text += f"  {row['config']} x{row['splits']}"
    text += f" {row['shared']:.0%} shared" * (row["shared"] > 0)
    return text + " WRONG: not what the table's shape computes" * row["wrong"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--kv", choices=KINDS, default="auto", help="the cache")
    parser.add_argument("--sweep", action="store_true", help="try other shapes too")
    parser.add_argument("--flashmla", type=Path, help="vLLM's _flashmla_C.abi3.so")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device, found none")
    if arguments.flashmla:
        torch.ops.load_library(arguments.flashmla)
        if arguments.dtype != "bf16":
            sys.exit("FlashMLA takes bfloat16 only: leave out --flashmla or --dtype")

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[arguments.dtype]
    kind = KINDS[arguments.kv]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, ", end="")
    print(
        f"triton {triton.__version__}, {arguments.dtype}, cache {arguments.kv}, ",
        end="",
    )
    print(f"top-k {TOPK}, microseconds")
    torch.manual_seed(0)
    fp8 = arguments.kv == "fp8"
    pool = attention.draw_pool(attention.POOL_BLOCKS, dtype, "cuda", fp8)

    rows = []
    print("tokens heads    read    ours ours/read   GB/s FlashMLA ours/FlashMLA")
    capability = torch.cuda.get_device_capability()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for tokens, shared in ((1, 0), (8, 0), (32, 0), (128, 0), (2048, 0), (2048, 0.8)):
        context = pool if tokens <= attention.DECODE_TOKENS else pool[:PREFILL_BLOCKS]
        for heads in (8, 16, 64, 128):
            shapes = [kind.config_of(capability, heads, tokens)]
            if arguments.sweep and not shared:
                others = kind.other_shapes.get(heads, ())
                shapes += [shape for shape in others if shape not in shapes]
            for shape, row in zip(
                shapes,
                measure(
                    kind,
                    dtype,
                    tokens,
                    heads,
                    context,
                    shared,
                    shapes,
                    bool(arguments.flashmla),
                ),
                strict=True,
            ):
                row |= {"tokens": tokens, "heads": heads, "shared": shared}
                row |= {"row_bytes": kind.row_bytes}
                row["splits"] = num_splits(shape, heads, tokens, TOPK, sms)
                rows.append(row)
                print(line(row), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    if any(row["wrong"] for row in rows):
        sys.exit("a launch shape computes something else than the table's")


if __name__ == "__main__":
    main()
