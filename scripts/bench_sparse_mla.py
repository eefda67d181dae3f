# SPDX-License-Identifier: Apache-2.0
"""Time the sparse-MLA kernel beside the ceiling of the same run.

    python scripts/bench_sparse_mla.py [--dtype bf16|fp16] [--json FILE]
                                       [--flashmla vllm/_flashmla_C.abi3.so]
                                       [--sweep]

The ceiling is a kernel that reads the same random rows and does nothing else:
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
from typing import Any

import torch
import triton
import triton.language as tl
from graph_timing import graph_us

sys.path.insert(0, str(Path(__file__).parents[1] / "patches/files/vllm/v1/attention"))

from ops import triton_sparse_mla as mla
from ops.triton_sparse_launch import (
    ROW_DIM,
    LaunchConfig,
    launch_config,
    num_splits,
)

REPEATS = 30  # replays of a graph

PAGE, TOPK = 64, 2048
POOL_BLOCKS = 65_536  # 4.8 GB of 1152-byte rows
PREFILL_BLOCKS = 512  # 32k tokens of context
SCALE = 256**-0.5


@triton.jit
def _gather_kernel(
    kv_cache,  # [num_slots, 576], contiguous
    slots,  # [T, topk]
    out,  # [T * splits]
    topk,
    PER_PROGRAM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    splits = topk // PER_PROGRAM
    i_t = (tl.program_id(0) // splits).to(tl.int64)
    i_s = tl.program_id(0) % splits
    o_d = tl.arange(0, 512)
    o_r = 512 + tl.arange(0, 64)
    b_latent = tl.zeros([BLOCK_N, 512], dtype=tl.float32)
    b_rope = tl.zeros([BLOCK_N, 64], dtype=tl.float32)
    for i_n in range(0, PER_PROGRAM, BLOCK_N):
        o_n = i_s * PER_PROGRAM + i_n + tl.arange(0, BLOCK_N)
        # [BLOCK_N]
        b_slot = tl.load(slots + i_t * topk + o_n).to(tl.int64)
        # [BLOCK_N, 512], [BLOCK_N, 64]
        b_latent += tl.load(kv_cache + b_slot[:, None] * 576 + o_d[None, :])
        b_rope += tl.load(kv_cache + b_slot[:, None] * 576 + o_r[None, :])
    total = tl.sum(b_latent) + tl.sum(b_rope)
    tl.store(out + tl.program_id(0), total)


def gather(kv_cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Read every named row once; keep a sum, so that no load is dead."""
    per_program = 64 if slots.shape[0] <= 128 else 256
    grid = (slots.shape[0] * slots.shape[1] // per_program,)
    _gather_kernel[grid](
        kv_cache,
        slots,
        out,
        slots.shape[1],
        PER_PROGRAM=per_program,
        BLOCK_N=16,
        num_warps=4,
        num_stages=3,
    )


class Rotation:
    """Calls `run` on one input after the other, so that none stays in L2."""

    def __init__(self, run: Callable[[torch.Tensor], object], inputs: torch.Tensor):
        self.run, self.inputs, self.next = run, inputs, 0

    def __call__(self) -> object:
        self.next = (self.next + 1) % len(self.inputs)
        return self.run(self.inputs[self.next])


# What launch_config could have chosen on an H200; docs/kernels.md has the outcome.
OTHER_SHAPES = {
    8: [
        LaunchConfig(16, 32, 4, 3, False, 2),
        LaunchConfig(16, 32, 4, 2, False, 4, 128),
        LaunchConfig(16, 64, 8, 2, True, 2),
        LaunchConfig(16, 64, 8, 2, True, 1),
        LaunchConfig(16, 32, 8, 5, True, 2),
    ],
    64: [
        LaunchConfig(64, 64, 8, 2, True, 1),
        LaunchConfig(32, 64, 8, 2, True, 2),
        LaunchConfig(32, 64, 8, 2, False, 1),
    ],
}


def draw_slots(sets: int, tokens: int, num_slots: int, shared: float) -> torch.Tensor:
    """`[sets, tokens, TOPK]` rows, of which neighbours in 16 tokens share a part."""
    slots = torch.randint(
        num_slots, (sets, tokens, TOPK), dtype=torch.int32, device="cuda"
    )
    common = round(shared * TOPK)
    if common:
        groups = slots.view(sets, -1, 16, TOPK)
        groups[..., :common] = groups[:, :, :1, :common].clone()
    return slots


def measure(
    dtype: torch.dtype,
    tokens: int,
    heads: int,
    pool: torch.Tensor,
    shared: float,
    shape: LaunchConfig,
    with_flashmla: bool,
) -> dict[str, float]:
    """Ceiling, kernel and FlashMLA, in microseconds, for one shape."""
    mla.launch_config = lambda *_: shape
    decode = tokens <= 128
    slots = draw_slots(10 if decode else 1, tokens, pool.shape[0] * PAGE, shared)
    q = torch.randn(tokens, heads, ROW_DIM, device="cuda").to(dtype)
    sums = torch.empty(tokens * TOPK, dtype=torch.float32, device="cuda")
    calls = 10 if decode else 1
    row = {
        "read_us": graph_us(
            Rotation(lambda s: gather(pool, s, sums), slots), calls, REPEATS
        ),
        "ours_us": graph_us(
            Rotation(lambda s: mla.sparse_mla(q, pool, s, SCALE), slots), calls, REPEATS
        ),
    }
    if with_flashmla:
        padded = torch.zeros(tokens, max(heads, 64), ROW_DIM, device="cuda")
        padded = padded.to(dtype)
        padded[:, :heads] = q
        rows = pool.view(-1, 1, ROW_DIM)
        forward = torch.ops._flashmla_C.sparse_prefill_fwd

        def flashmla(s: torch.Tensor) -> list[torch.Tensor]:
            return forward(padded, rows, s[:, None], SCALE, 512, None, None, None)

        theirs = flashmla(slots[0])[0][:, :heads].float()
        ours = mla.sparse_mla(q, pool, slots[0], SCALE)[0].float()
        row["difference"] = float((ours - theirs).norm() / theirs.norm())
        row["flashmla_us"] = graph_us(Rotation(flashmla, slots), calls, REPEATS)
    return row


def line(row: dict[str, Any]) -> str:
    """One measurement as a line of the table."""
    ours, read = row["ours_us"], row["read_us"]
    gb_s = row["tokens"] * TOPK * 1152 / ours / 1000
    text = f"{row['tokens']:6} {row['heads']:5} {read:7.1f} {ours:7.1f} "
    text += f"{ours / read:9.2f} {gb_s:6.0f} "
    if "flashmla_us" in row:
        theirs = row["flashmla_us"]
        text += f"{theirs:8.1f} {ours / theirs:13.2f}"
    else:
        text += " " * 22
    text += f"  {row['config']} x{row['splits']}"
    return text + f" {row['shared']:.0%} shared" * (row["shared"] > 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
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
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, ", end="")
    print(f"triton {triton.__version__}, {arguments.dtype}, top-k {TOPK}, microseconds")
    torch.manual_seed(0)
    pool = torch.empty(POOL_BLOCKS, PAGE, ROW_DIM, dtype=dtype, device="cuda")
    for piece in pool.split(4096):
        piece.normal_()

    rows = []
    print("tokens heads    read    ours ours/read   GB/s FlashMLA ours/FlashMLA")
    capability = torch.cuda.get_device_capability()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for tokens, shared in ((1, 0), (8, 0), (32, 0), (128, 0), (2048, 0), (2048, 0.8)):
        context = pool if tokens <= 128 else pool[:PREFILL_BLOCKS]
        for heads in (8, 16, 64, 128):
            shapes = [launch_config(capability, heads, tokens)]
            if arguments.sweep and not shared:
                shapes += [s for s in OTHER_SHAPES.get(heads, ()) if s not in shapes]
            for shape in shapes:
                with_flashmla = bool(arguments.flashmla) and shape == shapes[0]
                row = measure(
                    dtype, tokens, heads, context, shared, shape, with_flashmla
                )
                splits = num_splits(shape, heads, tokens, TOPK, sms)
                rows.append({"tokens": tokens, "heads": heads, "shared": shared, **row})
                rows[-1] |= {"config": tuple(shape), "splits": splits}
                print(line(rows[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
