# SPDX-License-Identifier: Apache-2.0
"""Times of GPU calls, from CUDA graphs: launch gaps of the host stay out of them."""

import statistics
from collections.abc import Callable

import torch


def graph_us(run: Callable[[], object], calls: int, repeats: int) -> float:
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
