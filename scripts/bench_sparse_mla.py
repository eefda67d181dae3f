# SPDX-License-Identifier: Apache-2.0
"""Time the sparse-MLA kernel beside the ceiling of the same run.

    python scripts/bench_sparse_mla.py [--dtype bf16|fp16] [--sweep] [--json FILE]

The ceiling is a kernel that reads the same random rows and does nothing else:
no attention kernel that reads them can be faster. Each time is the median of
CUDA-graph replays (decode) or of single launches (prefill), over a cache of
several GB, so that decode rows come from memory and not from L2. --sweep times
other launch shapes too; the table in launch_config is argued from such runs.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton
import triton.language as tl

OPS = Path(__file__).parents[1] / "patches/files/vllm/v1/attention/ops"
sys.path.insert(0, str(OPS))

import triton_sparse_mla as mla  # noqa: E402

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


def graph_us(run: Callable[[], object], calls: int, repeats: int = 30) -> float:
    """Median microseconds of one call, from graphs of `calls` calls each."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for i in range(repeats + 3):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:  # clocks and caches settle
            times.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


class Rotation:
    """Calls `run` on one input after the other, so that none stays in L2."""

    def __init__(self, run: Callable[[torch.Tensor], object], inputs: torch.Tensor):
        self.run, self.inputs, self.next = run, inputs, 0

    def __call__(self) -> object:
        self.next = (self.next + 1) % len(self.inputs)
        return self.run(self.inputs[self.next])


def measure(
    dtype: torch.dtype, tokens: int, heads: int, pool: torch.Tensor
) -> dict[str, float]:
    """Ceiling and kernel, in microseconds, for one shape."""
    decode = tokens <= 128
    sets = 10 if decode else 1
    num_slots = pool.shape[0] * PAGE
    slots = torch.randint(
        num_slots, (sets, tokens, TOPK), dtype=torch.int32, device="cuda"
    )
    q = torch.randn(tokens, heads, mla.ROW_DIM, device="cuda").to(dtype)
    sums = torch.empty(tokens * TOPK, dtype=torch.float32, device="cuda")
    calls = 10 if decode else 1
    read = graph_us(Rotation(lambda s: gather(pool, s, sums), slots), calls)
    ours = graph_us(Rotation(lambda s: mla.sparse_mla(q, pool, s, SCALE), slots), calls)
    return {"read_us": read, "ours_us": ours}


def sweep_configs(heads: int) -> list[mla.LaunchConfig]:
    """Launch shapes around the chosen one."""
    block_hs = (16,) if heads <= 16 else (16, 32, 64)
    return [
        mla.LaunchConfig(block_h, block_n, warps, stages)
        for block_h in block_hs
        for block_n in (16, 32, 64)
        for warps in (4, 8)
        for stages in (2, 3, 5)
        if not (block_h == 64 and warps == 4)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--sweep", action="store_true", help="try other shapes too")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device, found none")

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[arguments.dtype]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, ", end="")
    print(f"triton {triton.__version__}, {arguments.dtype}, top-k {TOPK}")
    torch.manual_seed(0)
    pool = torch.empty(POOL_BLOCKS, PAGE, mla.ROW_DIM, dtype=dtype, device="cuda")
    for piece in pool.split(4096):
        piece.normal_()

    rows = []
    heading = f"{'tokens':>6} {'heads':>5} {'read us':>8} {'ours us':>8} {'ratio':>6}"
    print(f"{heading} {'GB/s':>6}  shape")
    chosen = mla.launch_config
    for tokens in (1, 8, 32, 128, 2048):
        context = pool if tokens <= 128 else pool[:PREFILL_BLOCKS]
        for heads in (8, 16, 64, 128):
            shapes = [chosen(torch.cuda.get_device_capability(), heads)]
            if arguments.sweep and heads in (8, 64):
                shapes += [s for s in sweep_configs(heads) if s != shapes[0]]
            for shape in shapes:
                mla.launch_config = lambda *_, shape=shape: shape
                try:
                    row = measure(dtype, tokens, heads, context)
                except triton.runtime.errors.OutOfResources:
                    continue  # a shape of the sweep that this chip cannot hold
                gb_s = tokens * TOPK * 1152 / row["ours_us"] / 1000
                ratio = row["ours_us"] / row["read_us"]
                print(
                    f"{tokens:6} {heads:5} {row['read_us']:8.1f} "
                    f"{row['ours_us']:8.1f} {ratio:6.2f} {gb_s:6.0f}  {tuple(shape)}",
                    flush=True,
                )
                rows.append(
                    {"tokens": tokens, "heads": heads, "shape": tuple(shape), **row}
                )
    mla.launch_config = chosen
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
