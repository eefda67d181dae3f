# SPDX-License-Identifier: Apache-2.0
"""Times of GPU calls, from CUDA graphs: launch gaps of the host stay out of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Rotation(Generic[T]):
    """Calls ``run`` on one input after the other, so that none stays in L2."""

    def __init__(self, run: Callable[[T], object], inputs: Sequence[T]) -> None:
        self._run = run
        self._inputs = inputs
        self._next = 0

    def __call__(self) -> object:
        self._next = (self._next + 1) % len(self._inputs)
        return self._run(self._inputs[self._next])


def graph_us(run: Callable[[], object], calls: int, repeats: int) -> float:
    """Median microseconds of one call, from graphs of ``calls`` calls each."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    for i in range(repeats + 3):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:  # clocks and caches settle
            times.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)
