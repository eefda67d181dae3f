# SPDX-License-Identifier: Apache-2.0
"""Turns of the throughput benchmark, with a stand-in for vLLM, and what it sums up."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_serving
from bench_serving import LENGTH, PROMPT, SKIPPED, STEPS, Turns, spread, summaries


class Engine:
    """One request is prefilled in each step; those that are say a token in each."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.left: dict[str, int] = {}
        self.tokens: dict[str, int] = {}
        self.worked = 0

    def add_request(self, name: str, prompt: Any, tokens: int) -> None:
        assert len(prompt["prompt_token_ids"]) == PROMPT
        self.waiting.append(name)
        self.tokens[name] = tokens

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.left)

    def step(self) -> list[str]:
        self.worked += 1
        if self.waiting:
            name = self.waiting.pop(0)
            self.left[name] = self.tokens[name]
        said = list(self.left)
        self.left = {n: k - 1 for n, k in self.left.items() if k > 1}
        return said

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.left.pop(name, None)


def turns(engine: Engine) -> Turns:
    return Turns(engine, lambda tokens: tokens)


def test_all_rounds_fit_and_every_step_has_every_request() -> None:
    engine = Engine()
    ours = turns(engine)
    ours.begin(bench_serving.prompts(50, 1))
    assert engine.worked == 51
    for number in range(bench_serving.ROUNDS):
        assert len(ours.decode()) == STEPS
        assert engine.worked == 51 + (number + 1) * (STEPS + SKIPPED)
    ours.end()
    assert not engine.has_unfinished_requests()


def test_requests_that_end_too_early_are_an_error() -> None:
    ours = turns(Engine())
    ours.begin(bench_serving.prompts(1, 1))
    with pytest.raises(RuntimeError, match="ended before"):
        ours.steps(LENGTH)


def test_prefill_ends_with_nothing_left() -> None:
    engine = Engine()
    assert turns(engine).prefill(bench_serving.prompts(3, 1)) > 0
    assert engine.worked == 3
    assert not engine.has_unfinished_requests()


def test_prompts_are_new_for_each_seed() -> None:
    assert bench_serving.prompts(1, 1) == bench_serving.prompts(1, 1)
    assert bench_serving.prompts(1, 1) != bench_serving.prompts(1, 2)


def test_ratios_are_of_one_round() -> None:
    def row(vllm: str, number: int, rate: float) -> dict[str, Any]:
        key = {"model": "tiny", "kind": "prefill", "vllm": vllm}
        return {**key, "round": number, "tokens/s": rate}

    ours, stock = "bfloat16 TRITON_MLA_SPARSE", "bfloat16 FLASHMLA_SPARSE"
    rates = ((20.0, 10.0), (3.0, 2.0), (100.0, 200.0))
    slices = [
        row(name, number, rate)
        for number, pair in enumerate(rates, 1)
        for name, rate in zip((ours, stock), pair, strict=True)
    ]
    first, second = summaries(slices)
    assert first["tokens/s"]["median"] == 20
    ratios = first["ratio to FLASHMLA_SPARSE"]
    assert (ratios["least"], ratios["median"], ratios["most"]) == (0.5, 1.5, 2)
    assert first["rounds faster"] == "2/3"
    assert first["slices"] == second["slices"] == 3
    assert "rounds faster" not in second


def test_spread() -> None:
    found = spread([5.0, 1.0, 2.0, 4.0, 3.0])
    assert list(found.values()) == [1, 2, 3, 4, 5]
