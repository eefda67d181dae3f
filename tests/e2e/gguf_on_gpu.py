# SPDX-License-Identifier: Apache-2.0
"""On a GPU: a GGUF file and the HF checkpoint that it stands for give the same model.

usage: python tests/e2e/gguf_on_gpu.py FOLDER [DTYPE]

Needs a patched vLLM that has a sparse-attention backend for this GPU and DTYPE
(bfloat16 by default). For each case, writes a tiny random model twice into FOLDER: as
a GGUF file, whose config comes from its metadata, and as safetensors of what that file
dequantises to. vLLM runs both, each in a process of its own, and the log-probabilities
of the prompts are compared, below and above `index_topk` tokens. A different model is
the control. Exits with 1 if a pair is too far apart, or the control is not.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "gguf"))

# The one that is patched into this vLLM.
sys.modules["glm_dsa"] = importlib.import_module("vllm.transformers_utils.glm_dsa")

from read_back import from_file  # noqa: E402
from tiny_glm import (  # noqa: E402
    SHARING,
    Tiny,
    mixed,
    to_gguf,
    uniform,
    weights,
    write,
)

PROMPTS = (64, 700, 2040, 4000)
TINY = dataclasses.replace(
    Tiny(), draft_layers=0, vocabulary=1024, index_topk=2048, context=16384
)
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
# Medians of |difference of log-probability|: GGUF kernels quantise activations to 8
# bits, and a selection of tokens or experts flips here and there.
LIMIT, FAR = 0.25, 1.0


def write_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """The GGUF file of a case, and the folder of its HF checkpoint."""
    import torch
    from safetensors.torch import save_file

    tiny, types = CASES[name]
    hf = folder / name
    hf.mkdir(parents=True, exist_ok=True)
    path = write(
        folder / f"{name}.gguf",
        tiny,
        to_gguf(tiny, weights(tiny)),
        types,
        indexer_types=tiny.full_layers is not None,
    )
    config, arrays = from_file(path)
    (hf / "config.json").write_text(json.dumps(config))
    save_file(
        {
            key: torch.from_numpy(np.ascontiguousarray(array)).to(torch.bfloat16)
            for key, array in arrays.items()
        },
        hf / "model.safetensors",
        {"format": "pt"},
    )
    return path, hf


def run(model: str, tokenizer: str, dtype: str, out: str) -> None:
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
        gpu_memory_utilization=0.08,
        num_gpu_blocks_override=1024,
        enable_prefix_caching=False,
        enforce_eager=True,
    )
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, TINY.vocabulary, n).tolist() for n in PROMPTS]
    parameters = SamplingParams(
        temperature=0, max_tokens=8, prompt_logprobs=1, detokenize=False
    )
    results = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False
    )
    saved = [
        [result.prompt_logprobs[i][prompt[i]].logprob for i in range(1, len(prompt))]
        for prompt, result in zip(prompts, results, strict=True)
    ]
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


def main(folder: Path, dtype: str) -> int:
    started = []
    for name in CASES:
        path, hf = write_pair(folder, name)
        for kind, model in (("gguf", path), ("hf", hf)):
            out = folder / f"{name}-{kind}.json"
            log = (folder / f"{name}-{kind}.log").open("w")
            command = [sys.executable, __file__, "--run", model, hf, dtype, out]
            environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            process = subprocess.Popen(
                list(map(str, command)), env=environment, stdout=log, stderr=log
            )
            started.append((name, kind, process))
    failed = [f"{n}-{kind}" for n, kind, process in started if process.wait()]
    report: dict[str, object] = {"failed": failed}
    good = not failed
    for name in CASES:
        if any(item.startswith(f"{name}-") for item in failed):
            continue
        pair = medians(folder / f"{name}-gguf.json", folder / f"{name}-hf.json")
        report[name] = pair
        good &= max(pair.values()) < LIMIT
    if not failed:
        control = medians(folder / "Q4_K-gguf.json", folder / "Q8_0-hf.json")
        report["control: Q4_K against Q8_0's"] = control
        good &= min(control.values()) > FAR
    print(json.dumps(report, indent=2))
    return not good


if __name__ == "__main__":
    if sys.argv[1] == "--run":
        run(*sys.argv[2:])
    else:
        sys.exit(main(Path(sys.argv[1]), (*sys.argv[2:], "bfloat16")[0]))
