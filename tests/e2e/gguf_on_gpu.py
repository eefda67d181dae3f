# SPDX-License-Identifier: Apache-2.0
"""On a GPU: vLLM with a GGUF file, vLLM with the HF checkpoint, and transformers agree.

usage: python tests/e2e/gguf_on_gpu.py FOLDER [DTYPE ...]

Needs a patched vLLM that has a sparse-attention backend for this GPU and each DTYPE
(bfloat16 by default). For each case, writes a tiny random model twice into FOLDER: as
a GGUF file, whose config comes from its metadata, and as float32 safetensors of what
that file dequantises to. vLLM runs both and transformers runs the latter in float32,
each in a process of its own, and the log-probabilities of the prompts are compared,
below and above `index_topk` tokens. Checkpoints with one thing wrong are the controls.
Exits with 1 if a pair is too far apart, or a control is not.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import models
import numpy as np
from tiny_glm import SHARING, mixed, to_gguf, uniform, weights, write

PROMPTS = (64, 700, 2040, 4000)
TINY = dataclasses.replace(models.TINY, context=16384)
SHARED = dataclasses.replace(
    TINY, full_layers=SHARING.full_layers, context=SHARING.context
)
Q4_K = mixed("Q8_0", ffn_gate_exps="Q4_K", ffn_up_exps="Q4_K", ffn_down_exps="Q5_K")
CASES = {
    "BF16": (TINY, uniform("BF16")),
    "Q8_0": (TINY, uniform("Q8_0")),
    "Q4_K": (TINY, Q4_K),
    "kv_a-unlike-q_a": (TINY, mixed("Q8_0", attn_q_a__="Q4_0")),
    "sharing": (SHARED, uniform("Q8_0")),
}
# What is wrong with the checkpoint of a control, and where it must show.
CONTROLS = {
    "scale": ({"routed_scaling_factor": 1.0}, ("below", "above")),
    "gate-and-up-swapped": ({}, ("below", "above")),
    "index-reversed": ({}, ("above",)),
}
BASE = "BF16"
# Medians of |difference of log-probability|. On an H200, GGUF against HF came to 0.06
# at most, where rounding activations to 8 bits is nearly all of it, and a selection of
# the wrong tokens, the control that shows least, to 0.33.
LIMIT, FAR = 0.1, 0.25


def swapped(name: str) -> str:
    other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    return re.sub("gate_proj|up_proj", lambda found: other[found[0]], name)


def write_pair(folder: Path, name: str) -> None:
    """The GGUF file of a case, and its HF checkpoint."""
    tiny, types = CASES[name]
    original = weights(tiny)
    path = write(
        folder / f"{name}.gguf",
        tiny,
        to_gguf(tiny, original),
        types,
        indexer_types=tiny.full_layers is not None,
    )
    config, arrays = models.dequantised(path)
    # vLLM asks a checkpoint, unlike a GGUF file, for the indexers that no layer uses.
    unused = {n: a for n, a in original.items() if n not in arrays and "indexer" in n}
    models.save(folder / name, config, arrays | unused)
    if name != BASE:
        return
    for control, (wrong, _) in CONTROLS.items():
        altered = arrays
        if control == "gate-and-up-swapped":
            altered = {swapped(key): array for key, array in arrays.items()}
        elif control == "index-reversed":
            altered = {
                key: -array if "weights_proj" in key else array
                for key, array in arrays.items()
            }
        models.save(folder / f"control-{control}", config | wrong, altered)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, TINY.vocabulary, n).tolist() for n in PROMPTS]


def run_vllm(model: str, tokenizer: str, out: str, dtype: str, backend: str) -> None:
    """Save the log-probability of every token of every prompt."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        tokenizer=tokenizer,
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=8192,
        max_num_batched_tokens=4096,
        max_num_seqs=4,
        gpu_memory_utilization=0.04,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
        enforce_eager=True,
        attention_backend=backend,
    )
    parameters = SamplingParams(
        temperature=0, max_tokens=8, prompt_logprobs=1, detokenize=False
    )
    results = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts()],
        parameters,
        use_tqdm=False,
    )
    saved = [
        [result.prompt_logprobs[i][prompt[i]].logprob for i in range(1, len(prompt))]
        for prompt, result in zip(prompts(), results, strict=True)
    ]
    Path(out).write_text(json.dumps(saved))


def run_transformers(model: str, out: str) -> None:
    """The same from transformers, in float32."""
    import torch
    from transformers import GlmMoeDsaForCausalLM

    made = GlmMoeDsaForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = made.to(device).eval()
    saved = []
    for prompt in prompts():
        tokens = torch.tensor(prompt, device=device)
        with torch.no_grad():
            logits = made(tokens[None], use_cache=False).logits[0, :-1]
        found = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        saved.append(found.tolist())
    Path(out).write_text(json.dumps(saved))


def medians(a: Path, b: Path) -> dict[str, float]:
    """For positions below and above index_topk."""
    pairs = [json.loads(path.read_text()) for path in (a, b)]
    found: dict[str, list[float]] = {"below": [], "above": []}
    for one, other in zip(*pairs, strict=True):
        for position, (x, y) in enumerate(zip(one, other, strict=True), 1):
            part = "below" if position < TINY.index_topk else "above"
            found[part].append(abs(x - y))
    return {part: round(float(np.median(values)), 4) for part, values in found.items()}


def start(folder: Path, name: str, *arguments: object) -> subprocess.Popen:
    """Another process of this script, which leaves NAME.json and NAME.log."""
    log = (folder / f"{name}.log").open("w")
    command = [sys.executable, __file__, *map(str, arguments)]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def compare(folder: Path, dtype: str, started: dict[str, subprocess.Popen]) -> dict:
    """Run everything in one dtype; what differs by how much, and whether it should."""

    def vllm(name: str, model: str, backend: str = "auto") -> None:
        name, hf = f"{dtype}-{name}", folder / model.removesuffix(".gguf")
        out = folder / f"{name}.json"
        started[name] = start(
            folder, name, "--vllm", folder / model, hf, out, dtype, backend
        )

    for case in CASES:
        vllm(f"{case}-gguf", f"{case}.gguf")
        vllm(f"{case}-hf", case)
    for control in CONTROLS:
        vllm(f"control-{control}", f"control-{control}")
    vllm("again", BASE)
    vllm("triton", BASE, "TRITON_MLA_SPARSE")
    failed = {name for name, process in started.items() if process.wait()}

    def pair(a: str, b: str) -> dict[str, float] | None:
        if {a, b} & failed:
            return None
        return medians(folder / f"{a}.json", folder / f"{b}.json")

    report: dict[str, object] = {"failed": sorted(failed)}
    good = not failed
    for case in CASES:
        ours, hf = f"{dtype}-{case}-gguf", f"{dtype}-{case}-hf"
        report[case] = {
            "gguf - hf": (near := pair(ours, hf)),
            "gguf - transformers": pair(ours, f"transformers-{case}"),
            "hf - transformers": pair(hf, f"transformers-{case}"),
        }
        good &= near is not None and max(near.values()) < LIMIT
    for control, (_, parts) in CONTROLS.items():
        far = pair(f"{dtype}-{BASE}-gguf", f"{dtype}-control-{control}")
        report[f"control: {control}"] = far
        good &= far is not None and min(far[part] for part in parts) > FAR
    report["hf - itself"] = pair(f"{dtype}-{BASE}-hf", f"{dtype}-again")
    report["hf - TRITON_MLA_SPARSE"] = pair(f"{dtype}-{BASE}-hf", f"{dtype}-triton")
    return report | {"good": good}


def main(folder: Path, dtypes: list[str]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    started = {}
    for case in CASES:
        write_pair(folder, case)
        name = f"transformers-{case}"
        started[name] = start(
            folder, name, "--transformers", folder / case, folder / f"{name}.json"
        )
    good = True
    for dtype in dtypes:
        report = compare(folder, dtype, started)
        print(json.dumps({dtype: report}, indent=2), flush=True)
        good &= report["good"]
    return not good


if __name__ == "__main__":
    if sys.argv[1] == "--vllm":
        run_vllm(*sys.argv[2:])
    elif sys.argv[1] == "--transformers":
        run_transformers(*sys.argv[2:])
    else:
        sys.exit(main(Path(sys.argv[1]), sys.argv[2:] or ["bfloat16"]))
