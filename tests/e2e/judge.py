# SPDX-License-Identifier: Apache-2.0
"""Holds what vLLMs said against transformers: judge.py JOB, where JOB is JSON.

    {"folder": HF checkpoint, "topk": its index_topk, "emulation": {...},
     "dtype": "float16", "answers": {name: file of engine.py}, "out": file}

Writes for each vLLM how far it is from transformers in float32 under the emulation,
and how far transformers in `dtype` is from that in the same places: what rounding
alone does. Without a dtype, only the first.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from emulation import Emulation, load, log_probabilities
from measure import of_continuation, of_prompt, split, summary

Tokens = tuple[int, ...]
Table = dict[Tokens, np.ndarray]


def tables(job: dict[str, Any], dtype: torch.dtype, wanted: set[Tokens]) -> Table:
    """Log-probabilities [S, vocabulary] for each sequence, from one model."""
    model = load(job["folder"], dtype, Emulation(**job["emulation"]))
    return {
        tokens: log_probabilities(model, list(tokens)).numpy()
        for tokens in sorted(wanted)
    }


def sequence(answer: dict[str, Any]) -> Tokens:
    return (*answer["prompt"], *answer["tokens"])


def verdict(
    answers: list[dict[str, Any]], exact: Table, rounded: Table | None, topk: int
) -> dict[str, Any]:
    """For prompts and continuations, below and above `topk` tokens."""
    gaps: dict[str, dict[str, list[np.ndarray]]] = {}
    greedy = {"same": 0, "same_rounded": 0, "same_both": 0, "of": 0}
    for answer in answers:
        reference = exact[sequence(answer)]
        for kind, said in (
            ("prompt", of_prompt(answer)),
            ("continuation", of_continuation(answer)),
        ):
            at = said.positions - 1, said.tokens
            found = {"vllm": said.values - reference[at]}
            if rounded is not None:
                found["rounding"] = rounded[sequence(answer)][at] - reference[at]
            for part, mask in split(said.positions, topk).items():
                place = gaps.setdefault(f"{kind} {part}", {})
                for who, differences in found.items():
                    place.setdefault(who, []).append(differences[mask])
        for step, token in enumerate(answer["tokens"]):
            at_step = len(answer["prompt"]) + step - 1
            likeliest = reference[at_step].argmax()
            greedy["of"] += 1
            greedy["same"] += int(likeliest == token)
            if rounded is not None:
                other = rounded[sequence(answer)][at_step].argmax()
                greedy["same_rounded"] += int(likeliest == other)
                greedy["same_both"] += int(likeliest == other == token)
    return {
        place: {who: summary(np.concatenate(list_)) for who, list_ in found.items()}
        for place, found in gaps.items()
    } | {"greedy": greedy}


def main(job: dict[str, Any]) -> None:
    said = {
        name: json.loads(Path(file).read_text())["answers"]
        for name, file in job["answers"].items()
    }
    wanted = {sequence(answer) for answers in said.values() for answer in answers}
    exact = tables(job, torch.float32, wanted)
    rounded = None
    if job["dtype"]:
        rounded = tables(job, getattr(torch, job["dtype"]), wanted)
    found = {
        name: verdict(answers, exact, rounded, job["topk"])
        for name, answers in said.items()
    }
    Path(job["out"]).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
