# SPDX-License-Identifier: Apache-2.0
"""One vLLM in a process of its own: engine.py OUT.json RUN, where RUN is JSON.

Answers fixed random prompts, of lengths that share a batch, and saves what it said:
the log-probability of each token of each prompt, the greedy continuation, and the
log-probabilities of the likeliest tokens at each step of it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PROMPTS = (48, 300, 700, 2040, 4000)
NEW_TOKENS = 24
LIKELIEST = 20


@dataclass(frozen=True)
class Run:
    """What one vLLM is asked to do.

    Attributes:
        model: folder or GGUF file; `tokenizer` its HF folder.
        mode: "eager", "graphs" (whole decode steps captured, nothing compiled) or
            "compiled" (what vLLM does by default).
        batch_tokens: prompts are cut to pieces of at most so many tokens.
        cached: answer the prompts twice, and save how the second answers go on, from
            the keys that the first left behind.
        picks: "stock"; "sorted": the indexer's picks for prompts in ascending order;
            "stable": picked anew, of equal scores the earliest tokens.
    """

    model: str
    tokenizer: str
    dtype: str
    backend: str
    kv_cache: str = "auto"
    mode: str = "eager"
    batch_tokens: int = 4096
    cached: bool = False
    picks: str = "stock"


def prompts(vocabulary: int = 1024) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(5, vocabulary, n).tolist() for n in PROMPTS]


def answer(run: Run) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    compilation: dict[str, Any] = {}
    if run.mode != "eager":
        compilation["cudagraph_capture_sizes"] = [1, 2, 4, 8]
    if run.mode == "graphs":
        compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if run.picks != "stock":
        change_picks(stable=run.picks == "stable")
    llm = LLM(
        model=run.model,
        tokenizer=run.tokenizer,
        skip_tokenizer_init=True,
        dtype=run.dtype,
        attention_backend=run.backend,
        kv_cache_dtype=run.kv_cache,
        max_model_len=8192,
        max_num_batched_tokens=run.batch_tokens,
        max_num_seqs=8,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=run.cached,
        enforce_eager=run.mode == "eager",
        compilation_config=compilation,
    )
    ids = [{"prompt_token_ids": prompt} for prompt in prompts()]

    def ask(**parameters: Any) -> list[Any]:
        wanted = SamplingParams(
            temperature=0,
            max_tokens=NEW_TOKENS,
            logprobs=LIKELIEST,
            detokenize=False,
            ignore_eos=True,
            **parameters,
        )
        return llm.generate(ids, wanted, use_tqdm=False)

    first = ask(prompt_logprobs=1)
    # A request for the prompt's log-probabilities uses no cached keys.
    last = ask() if run.cached else first
    return {
        "cached_tokens": [result.num_cached_tokens for result in last],
        "answers": [
            {
                "prompt": prompt,
                "prompt_logprobs": [
                    asked.prompt_logprobs[i][prompt[i]].logprob
                    for i in range(1, len(prompt))
                ],
                "tokens": list(result.outputs[0].token_ids),
                "likeliest": [
                    {token: entry.logprob for token, entry in step.items()}
                    for step in result.outputs[0].logprobs
                ],
            }
            for prompt, asked, result in zip(prompts(), first, last, strict=True)
        ],
    }


def change_picks(*, stable: bool) -> None:
    """Have the indexer's picks for prompts depend on nothing but the scores' values.

    vLLM's top-k writes them in whatever order its threads come by, and takes any of
    those that are equal. Decode steps are left as they are.
    """
    import torch
    from vllm import _custom_ops as ops

    stock = ops.top_k_per_row_prefill

    def picked(
        logits: torch.Tensor,
        starts: torch.Tensor,
        ends: torch.Tensor,
        indices: torch.Tensor,
        rows: int,
        *rest: Any,
    ) -> None:
        stock(logits, starts, ends, indices, rows, *rest)
        if stable:
            width = min(indices.shape[1], logits.shape[1])
            columns = torch.arange(logits.shape[1], device=logits.device)
            visible = (columns >= starts[:, None]) & (columns < ends[:, None])
            order = logits.masked_fill(~visible, -torch.inf).sort(
                dim=1, descending=True, stable=True
            )
            found = (order.indices - starts[:, None])[:, :width].int()
            indices[:, :width] = found.masked_fill(
                torch.arange(width, device=found.device) >= (ends - starts)[:, None], -1
            )
        last = torch.iinfo(torch.int32).max  # where no token was picked
        ascending = indices.masked_fill(indices < 0, last).sort(dim=1).values
        indices.copy_(ascending.masked_fill(ascending == last, -1))

    ops.top_k_per_row_prefill = picked


if __name__ == "__main__":
    result = answer(Run(**json.loads(sys.argv[2])))
    Path(sys.argv[1]).write_text(json.dumps(result))
