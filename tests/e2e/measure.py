# SPDX-License-Identifier: Apache-2.0
"""How far apart two sets of log-probabilities are, and where."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

# Where sparse attention still sees every token, and where it leaves some out.
BELOW, ABOVE = "below", "above"


class Said(NamedTuple):
    """Log-probabilities of tokens; the token at position p follows p others."""

    positions: np.ndarray
    tokens: np.ndarray
    values: np.ndarray


def of_prompt(answer: dict[str, Any]) -> Said:
    """What an answer of engine.py says of its prompt, from its second token on."""
    return Said(
        np.arange(1, len(answer["prompt"])),
        np.array(answer["prompt"][1:]),
        np.array(answer["prompt_logprobs"]),
    )


def of_continuation(answer: dict[str, Any]) -> Said:
    """What it says of the likeliest tokens at each step after the prompt."""
    rows = [
        (len(answer["prompt"]) + step, int(token), value)
        for step, entries in enumerate(answer["likeliest"])
        for token, value in entries.items()
    ]
    positions, tokens, values = zip(*rows, strict=True)
    return Said(np.array(positions), np.array(tokens), np.array(values))


def split(positions: np.ndarray, topk: int) -> dict[str, np.ndarray]:
    """Masks of the positions with at most `topk` tokens before them, and with more."""
    return {BELOW: positions <= topk, ABOVE: positions > topk}


def summary(differences: np.ndarray) -> dict[str, float] | None:
    """Of their absolute values; None if there are none."""
    if not len(differences):
        return None
    sizes = np.abs(differences)
    found = {"median": np.median(sizes), "p90": np.quantile(sizes, 0.9)}
    found |= {"max": sizes.max(), "count": len(sizes)}
    return {name: round(float(value), 5) for name, value in found.items()}


def between(ours: list[Any], others: list[Any], topk: int) -> dict[str, Any]:
    """Two runs on the same prompts: the prompts' tokens, and the greedy ones.

    Returns, below and above `topk` tokens, a summary for the prompts, and how many
    greedy tokens were the same of those that followed the same tokens.
    """
    gaps: dict[str, list[np.ndarray]] = {BELOW: [], ABOVE: []}
    same, compared = {BELOW: 0, ABOVE: 0}, {BELOW: 0, ABOVE: 0}
    for one, other in zip(ours, others, strict=True):
        a, b = of_prompt(one), of_prompt(other)
        for part, mask in split(a.positions, topk).items():
            gaps[part].append((a.values - b.values)[mask])
        for step, pair in enumerate(zip(one["tokens"], other["tokens"], strict=True)):
            part = BELOW if len(one["prompt"]) + step <= topk else ABOVE
            compared[part] += 1
            same[part] += len(set(pair)) == 1
            if len(set(pair)) > 1:
                break
    return {
        part: {
            "prompt": summary(np.concatenate(gaps[part])),
            "greedy": f"{same[part]}/{compared[part]}",
        }
        for part in (BELOW, ABOVE)
    }
