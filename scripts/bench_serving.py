# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of whole vLLMs: bench_serving.py FOLDER [MODEL ...]

For each MODEL (all by default) vLLM with TRITON_MLA_SPARSE beside vLLM with its own
FLASHMLA_SPARSE, in bfloat16, on one GPU. All are started together and stay; then short
slices are measured by turns, in an order that turns round each time, while whoever has
no turn does nothing. Weights are random. Needs a patched vLLM 0.23.0 and an SM90 or
SM100 with some 100 GB.

    share   12 layers with what one GPU of eight has of GLM-5's: hidden size 6144, 8
            heads, 256 experts of an eighth of their width
    tiny    4 layers, hidden size 256
    q4_k    4 layers as in share, from a GGUF file, Q4_K experts; in float16, too

A slice of prefill is 16 new prompts of 3072 tokens. A slice of decoding is 48 steps of
1, 8, 32 or 128 requests behind such prompts, which go on where the last slice stopped;
four steps before them are not counted, nor is the first slice of each kind. Decode
steps are captured as CUDA graphs, nothing is compiled. Writes each slice as it ends to
FOLDER/slices.jsonl and what they come to (least, quartiles and most of tokens/s, and of
the ratios of slices of one round) to FOLDER/serving.jsonl.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import threading
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
PREFILLED = 16  # prompts of a slice
STEPS, SKIPPED = 48, 4
ROUNDS = 17  # the first is not counted
# The first requests of a batch go on while the last are prefilled: some 50 steps.
LENGTH = PROMPT + (ROUNDS + 3) * (STEPS + SKIPPED)
START_SECONDS = 150
# Bytes for a layer: 1152 for the latent of each token and 132 for the indexer's key.
CACHE = (max(BATCHES) + 4) * LENGTH * (1152 + 132)

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
MODELS = {
    "share": SHARE,
    "tiny": TINY,
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


class Turns:
    """A vLLM that works only while it has its turn."""

    def __init__(self, engine: Any, parameters: Any) -> None:
        """`parameters` makes sampling parameters of a number of tokens."""
        self.engine = engine
        self.parameters = parameters
        self.names: list[str] = []
        self.asked = 0

    def add(self, prompts: list[list[int]], tokens: int) -> None:
        self.names = [f"request-{self.asked + i}" for i in range(len(prompts))]
        self.asked += len(prompts)
        for name, prompt in zip(self.names, prompts, strict=True):
            self.engine.add_request(
                name, {"prompt_token_ids": prompt}, self.parameters(tokens)
            )

    def prefill(self, prompts: list[list[int]]) -> float:
        """Seconds until each prompt has its first token, and only token."""
        began = time.perf_counter()
        self.add(prompts, 1)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return time.perf_counter() - began

    def begin(self, prompts: list[list[int]]) -> None:
        """Requests that `decode` goes on with."""
        self.add(prompts, LENGTH - PROMPT)
        self.steps(2)

    def steps(self, count: int) -> list[float]:
        """The moments of so many steps in which every request got a token."""
        moments: list[float] = []
        while len(moments) < count:
            if not self.engine.has_unfinished_requests():
                raise RuntimeError("the requests ended before they were measured")
            if len(self.engine.step()) == len(self.names):
                moments.append(time.perf_counter())
        return moments

    def decode(self) -> list[float]:
        """Seconds of STEPS steps, behind SKIPPED others."""
        moments = self.steps(SKIPPED + STEPS)[SKIPPED - 1 :]
        return [b - a for a, b in itertools.pairwise(moments)]

    def end(self) -> None:
        self.engine.abort_request(self.names)
        while self.engine.has_unfinished_requests():
            self.engine.step()


def prompts(count: int, seed: int) -> list[list[int]]:
    """New ones for each seed."""
    return np.random.default_rng(seed).integers(5, 1000, (count, PROMPT)).tolist()


def serve(model: str, tokenizer: str, dtype: str, backend: str, layers: int) -> None:
    """Start one vLLM, say so, and do what the lines of stdin ask.

    Replies go to the file that stdout was; what else is printed goes to stderr.
    """
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import torch
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = LLM(
        model=model,
        tokenizer=tokenizer,
        skip_tokenizer_init=True,
        load_format="auto" if model.endswith(".gguf") else "dummy",
        dtype=dtype,
        attention_backend=backend,
        max_model_len=LENGTH,
        max_num_batched_tokens=8192,
        max_num_seqs=max(BATCHES),
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=layers * CACHE,
        enable_prefix_caching=False,
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": list(BATCHES),
        },
    )

    def parameters(tokens: int) -> Any:
        return SamplingParams(
            temperature=0,
            max_tokens=tokens,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )

    turns = Turns(llm.llm_engine, parameters)
    turns.prefill(prompts(4, 0))  # compiles kernels
    print(json.dumps("ready"), file=replies)
    for line in sys.stdin:
        order = json.loads(line)
        found: Any = None
        if order["do"] == "prefill":
            found = turns.prefill(prompts(PREFILLED, order["seed"]))
        elif order["do"] == "begin":
            turns.begin(prompts(order["batch"], order["batch"]))
        elif order["do"] == "decode":
            found = turns.decode()
        elif order["do"] == "end":
            turns.end()
        torch.cuda.synchronize()
        print(json.dumps(found), file=replies)


class Child:
    """A process that serves."""

    def __init__(self, name: str, arguments: list[str], log: Path) -> None:
        self.name = name
        self.ready = False
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "2",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            },
        )
        assert self.process.stdin and self.process.stdout
        self.orders, self.replies = self.process.stdin, self.process.stdout

    def reply(self) -> Any:
        """Raises EOFError if the process has ended."""
        line = self.replies.readline()
        if not line:
            raise EOFError(f"{self.name}: exit {self.process.wait()}")
        return json.loads(line)

    def do(self, what: str, **order: int) -> Any:
        print(json.dumps({"do": what, **order}), file=self.orders, flush=True)
        return self.reply()


def spread(values: list[float]) -> dict[str, float]:
    """Least, quartiles and most."""
    found = np.quantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist()
    names = ("least", "lower", "median", "upper", "most")
    return {n: float(f"{v:.5g}") for n, v in zip(names, found, strict=True)}


def summaries(slices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the slices of one model and kind, for each vLLM and beside FLASHMLA_SPARSE.

    A slice has model, kind, vllm, round and tokens/s. Ratios are of one round.
    """
    rates: dict[str, dict[int, float]] = {}
    for each in slices:
        rates.setdefault(each["vllm"], {})[each["round"]] = each["tokens/s"]
    base = {k: slices[0][k] for k in ("model", "kind")}
    found = []
    for name, by_round in rates.items():
        row = {**base, "vllm": name, "slices": len(by_round)}
        row["tokens/s"] = spread(list(by_round.values()))
        stock = rates.get(f"bfloat16 {STOCK}", {})
        common = sorted(by_round.keys() & stock.keys())
        if common and not name.endswith(STOCK):
            ratios = [by_round[r] / stock[r] for r in common]
            row["ratio to FLASHMLA_SPARSE"] = spread(ratios)
            row["rounds faster"] = f"{sum(r > 1 for r in ratios)}/{len(ratios)}"
        found.append(row)
    return found


def by_turns(model: str, children: list[Child], folder: Path) -> None:
    """Measure everything for the vLLMs of one model."""

    def append(file: str, row: dict[str, Any]) -> None:
        with (folder / file).open("a") as stream:
            print(json.dumps(row), file=stream)

    for batch in (0, *BATCHES):  # 0: prefill
        kind = f"decode, {batch} requests" if batch else "prefill"
        for child in children if batch else ():
            child.do("begin", batch=batch)
        slices = []
        for number in range(ROUNDS):
            for child in children[:: 1 if number % 2 else -1]:
                row = {"model": model, "kind": kind, "vllm": child.name}
                row["round"] = number
                if batch:
                    steps = child.do("decode")
                    row["tokens/s"] = batch * len(steps) / sum(steps)
                    row["steps_us"] = [round(1e6 * s) for s in steps]
                else:
                    took = child.do("prefill", seed=1000 + number)
                    row["tokens/s"] = PREFILLED * PROMPT / took
                append("slices.jsonl", row)
                slices += [row] if number else []
        for child in children if batch else ():
            child.do("end")
        for row in summaries(slices):
            append("serving.jsonl", row)
            print(json.dumps(row), flush=True)


def main(folder: Path, names: list[str]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("slices.jsonl", "serving.jsonl"):
        (folder / file).unlink(missing_ok=True)
    children: dict[str, list[Child]] = {}
    for name in names:
        tokenizer = model = write_config(folder / name, MODELS[name])
        if name == "q4_k":
            model = write_q4_k(folder / f"{name}.gguf", MODELS[name])
        children[name] = [
            Child(
                f"{dtype} {backend}",
                [str(model), str(tokenizer), dtype, backend, str(MODELS[name].layers)],
                folder / f"{name}-{dtype}-{backend}.log",
            )
            for dtype, backend in kinds(name)
        ]
    everyone = [child for group in children.values() for child in group]
    # Nobody starts any more while somebody is measured: all are ready, or dead.
    timer = threading.Timer(START_SECONDS, kill_unready, [everyone])
    timer.daemon = True
    timer.start()
    for child in everyone:
        try:
            child.reply()
        except EOFError as error:
            print(f"did not start: {error}", flush=True)
            child.process.kill()
        else:
            child.ready = True
    timer.cancel()
    failed = not all(child.ready for child in everyone)
    for name, group in children.items():
        try:
            if ready := [child for child in group if child.ready]:
                by_turns(name, ready, folder)
        except (EOFError, OSError) as error:
            print(f"{name}: {error!r}", flush=True)
            failed = True
        for child in group:
            child.process.kill()
            child.process.wait()
    return failed


def kill_unready(children: list[Child]) -> None:
    for child in children:
        if not child.ready:
            child.process.kill()


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(*sys.argv[2:6], layers=int(sys.argv[6]))
    else:
        sys.exit(main(Path(sys.argv[1]), sys.argv[2:] or list(MODELS)))
