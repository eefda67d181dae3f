# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of whole vLLMs: bench_serving.py FOLDER [MODEL ...]

For each MODEL (all by default) vLLM with TRITON_MLA_SPARSE beside vLLM with its own
FLASHMLA_SPARSE, in bfloat16, on one GPU. All are started together, then measured one
after the other while the rest wait. Weights are random. Needs a patched vLLM 0.23.0 and
an SM90 or SM100 with some 100 GB.

    tiny    4 layers, hidden size 256
    share   12 layers with what one GPU of eight has of GLM-5's: hidden size 6144, 8
            heads, 256 experts of an eighth of their width
    q4_k    4 such layers from a GGUF file, Q4_K experts; in float16, too

Decoding is timed with 1, 8, 32 and 128 requests behind prompts of 3072 tokens, as the
difference between answers of 65 tokens and of 1; prefill with 32 such prompts. Decode
steps are captured as CUDA graphs, nothing is compiled. Writes FOLDER/serving.json, and
each figure into the log of its vLLM as soon as it is known.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gguf"))

from tiny_glm import (
    Tiny,
    encode,
    mixed,
    to_gguf,
    weights,
    write,
    write_config,
)

BATCHES = (1, 8, 32, 128)
PROMPT = 3072
PREFILLED = 32  # prompts that prefill is timed with
NEW = 64
REPEATS = 3
START_SECONDS = 120
# Bytes for a layer: 1152 for the latent of each token and 132 for the indexer's key.
CACHE = (max(BATCHES) + 8) * (PROMPT + 256) * (1152 + 132)

TINY = Tiny(draft_layers=0, vocabulary=1024, index_topk=2048, context=8192)
SHARE = Tiny(
    layers=12,
    draft_layers=0,
    hidden=6144,
    dense_intermediate=1536,
    expert_intermediate=256,
    experts=256,
    experts_used=8,
    q_rank=2048,
    index_topk=2048,
    vocabulary=19360,
    context=8192,
)
BACKENDS = ("TRITON_MLA_SPARSE", "FLASHMLA_SPARSE")
MODELS = {
    "tiny": TINY,
    "share": SHARE,
    "q4_k": dataclasses.replace(SHARE, layers=4),
}
OURS, STOCK = "TRITON_MLA_SPARSE", "FLASHMLA_SPARSE"


def kinds(name: str) -> list[tuple[str, str]]:
    """Dtypes and backends."""
    both = [("bfloat16", OURS), ("bfloat16", STOCK)]
    return [*both, ("float16", OURS)] if name == "q4_k" else both


def write_q4_k(path: Path, tiny: Tiny) -> Path:
    """A GGUF file whose experts are all alike, which is quick to make."""
    one = dataclasses.replace(tiny, experts=1)
    tensors = to_gguf(one, weights(one))
    rng = np.random.default_rng(0)
    for name, values in tensors.items():
        shape = (tiny.experts, *values.shape[1:])
        if "_exps" in name:
            tensors[name] = np.broadcast_to(values, shape)
        elif "ffn_gate_inp" in name or "exp_probs" in name:
            tensors[name] = rng.standard_normal(shape, dtype=np.float32) / 64

    def encoder(name: str, values: np.ndarray, kind: str) -> np.ndarray:
        if "_exps" not in name:
            return encode(name, values, kind)
        first = encode(name, np.ascontiguousarray(values[:1]), kind)
        return np.repeat(first, len(values), 0)

    types = mixed("Q8_0", _exps="Q4_K")
    return write(path, tiny, tensors, types, encoder=encoder)


def measure(model: str, tokenizer: str, dtype: str, backend: str, out: Path) -> None:
    """Start one vLLM, say so, wait for the turn, and write what was measured."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        tokenizer=tokenizer,
        skip_tokenizer_init=True,
        load_format="auto" if model.endswith(".gguf") else "dummy",
        dtype=dtype,
        attention_backend=backend,
        max_model_len=PROMPT + 256,
        max_num_batched_tokens=8192,
        max_num_seqs=max(BATCHES),
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=MODELS[out.stem.partition("-")[0]].layers * CACHE,
        enable_prefix_caching=True,
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": list(BATCHES),
        },
    )
    rng = np.random.default_rng(0)
    prompts = rng.integers(5, 1000, (max(BATCHES) + 4, PROMPT)).tolist()

    def seconds(rows: list[list[int]], tokens: int) -> float:
        asked = SamplingParams(
            temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True
        )
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": row} for row in rows], asked, use_tqdm=False)
        return time.perf_counter() - began

    seconds(prompts[-4:], 4)  # compiles kernels
    out.with_suffix(".ready").touch()
    while not out.with_suffix(".go").exists():
        time.sleep(0.05)
    found: dict[str, Any] = {"model": out.stem}

    def note(figure: str, value: float) -> None:
        found[figure] = value
        print(json.dumps({"model": out.stem, figure: value}), flush=True)

    prefill = seconds(prompts[:PREFILLED], 1)
    note("prefill tokens/s", round(PREFILLED * PROMPT / prefill))
    seconds(prompts[PREFILLED : max(BATCHES)], 1)
    for batch in BATCHES:
        rows = prompts[:batch]
        seconds(rows, 2)
        differences = [
            seconds(rows, NEW + 1) - seconds(rows, 1) for _ in range(REPEATS)
        ]
        rate = batch * NEW / statistics.median(differences)
        note(f"decode tokens/s at {batch}", round(rate, 1))
        spread = (max(differences) - min(differences)) / statistics.median(differences)
        note(f"spread at {batch}", round(spread, 3))
    out.with_suffix(".part").write_text(json.dumps(found))
    out.with_suffix(".part").rename(out)


def main(folder: Path, names: list[str]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    children: dict[Path, subprocess.Popen[bytes]] = {}
    for name in names:
        tokenizer = model = write_config(folder / name, MODELS[name])
        if name == "q4_k":
            model = write_q4_k(folder / f"{name}.gguf", MODELS[name])
        for dtype, backend in kinds(name):
            out = folder / f"{name}-{dtype}-{backend}.json"
            for left in folder.glob(f"{out.stem}.*"):
                left.unlink()
            arguments = [str(model), str(tokenizer), dtype, backend, str(out)]
            log = out.with_suffix(".log").open("w")
            children[out] = subprocess.Popen(
                [sys.executable, __file__, "--measure", *arguments],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "2"},
            )
    # Nobody starts any more while somebody is measured.
    deadline = time.monotonic() + START_SECONDS
    waiting = set(children)
    while waiting and time.monotonic() < deadline:
        waiting = {
            out
            for out in waiting
            if children[out].poll() is None and not out.with_suffix(".ready").exists()
        }
        time.sleep(0.1)
    results = []
    for out, child in children.items():
        if out in waiting:
            child.kill()
        out.with_suffix(".go").touch()
        code = child.wait()
        if out.exists():
            results.append(json.loads(out.read_text()))
            print(json.dumps(results[-1]), flush=True)
            (folder / "serving.json").write_text(json.dumps(results, indent=1))
        else:
            log = out.with_suffix(".log").read_text(errors="replace").splitlines()
            print(f"{out.stem}: exit {code}", *log[-5:], sep="\n", flush=True)
    return len(results) < len(children)


if __name__ == "__main__":
    if sys.argv[1] == "--measure":
        measure(*sys.argv[2:6], Path(sys.argv[6]))
    else:
        sys.exit(main(Path(sys.argv[1]), sys.argv[2:] or list(MODELS)))
