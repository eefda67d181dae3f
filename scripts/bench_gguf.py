# SPDX-License-Identifier: Apache-2.0
"""Time vLLM's patched GGUF loader beside a plain read of the same file.

usage: PYTHONPATH=PATCHED_TREE python scripts/bench_gguf.py FOLDER

Writes a model of a few layers with GLM-5's own dimensions into FOLDER, about 6 GiB,
unless it is there. Takes every tensor from the loader, as vLLM does, and copies it to
memory that is there already: what vLLM's own layers do with it is not measured. Run
it in the environment of a vLLM whose files are patched; no GPU is needed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/gguf"))

import in_vllm
import raw_gguf as raw

in_vllm.stand_in_for_compiled_code()
in_vllm.simulate_gpu(9, 0)

from vllm.config import ParallelConfig  # noqa: E402
from vllm.model_executor.model_loader import glm_dsa_gguf  # noqa: E402
from vllm.model_executor.model_loader.glm_dsa_gguf import (  # noqa: E402
    GlmDsaWeights,
)

CHUNK = 16 << 20
MODEL = dataclasses.replace(
    raw.FULL, layers=5, draft_layers=0, experts=64, context=202752
)


def fill(path: Path, start: int) -> None:
    """Put random bytes in place of the hole that the file is."""
    rng = np.random.default_rng(0)
    with path.open("r+b") as file:
        file.seek(start)
        left = path.stat().st_size - start
        while left > 0:
            left -= file.write(rng.bytes(min(CHUNK, left)))


def write(path: Path) -> None:
    """One file of MODEL: experts Q4_K, matrices Q8_0, the rest F32."""
    infos, offset = [], 0
    for name, shape in raw.names_and_shapes(MODEL):
        kind = raw.kind_of(name, shape, "Q4_K")
        infos.append(raw.tensor(name, shape, raw.KINDS[kind][0], offset))
        offset += raw.padded_size(shape, kind)
    head = raw.header(raw.glm_keys(MODEL), infos)
    start = -(-len(head) // 32) * 32
    raw.write_sparse(path, head, start + offset)
    fill(path, start)


def plain_read(path: Path) -> float:
    """Seconds to read the file into one buffer over and over."""
    buffer = bytearray(CHUNK)
    begin = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - begin


def copy_all(weights: GlmDsaWeights, buffer: torch.Tensor) -> float:
    """Seconds to copy every tensor that the loader yields over one buffer."""
    begin = time.perf_counter()
    for _, tensor in weights.stream():
        if tensor.ndim:
            flat = tensor.reshape(-1).view(torch.uint8)
            buffer[: flat.numel()].copy_(flat)
    return time.perf_counter() - begin


def memory(key: str) -> int:
    """Bytes that /proc gives for this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) << 10
    raise KeyError(key)


class Peak(threading.Thread):
    """Watches how much memory the process holds, between `with` and its end."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.now()
        self.peak = self.before
        self.stopped = threading.Event()

    @staticmethod
    def now() -> tuple[int, int]:
        return memory("RssAnon"), memory("RssFile")

    def run(self) -> None:
        while not self.stopped.wait(0.002):
            now = self.now()
            self.peak = max(self.peak[0], now[0]), max(self.peak[1], now[1])

    def __enter__(self) -> Peak:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.join()

    def growth(self) -> list[int]:
        """MiB above the beginning: memory of its own, and mapped pages of files."""
        return [
            (peak - before) >> 20
            for peak, before in zip(self.peak, self.before, strict=True)
        ]


def main() -> None:
    folder = Path(sys.argv[1])
    path = folder / "bench.gguf"
    if not path.exists():
        write(path)
    config = SimpleNamespace(dtype=torch.bfloat16, hf_config=SimpleNamespace())
    glm_dsa_gguf._config_problems = lambda config, model: ()
    glm_dsa_gguf.get_tensor_model_parallel_world_size = lambda: 1
    weights = GlmDsaWeights(str(path), config, ParallelConfig())
    size = path.stat().st_size
    plain_read(path)  # from here on the file is in the page cache
    # Stands for memory of a GPU: it is there already.
    buffer = torch.zeros(2 << 30, dtype=torch.uint8)
    plain, loader = [], []
    with Peak() as peak:
        for _ in range(3):
            plain.append(size / plain_read(path) / 1e9)
            loader.append(size / copy_all(weights, buffer) / 1e9)
    report = {
        "GiB": round(size / 2**30, 2),
        "plain read, GB/s": [round(rate, 2) for rate in plain],
        "loader, GB/s": [round(rate, 2) for rate in loader],
        "largest tensor, MiB": max(
            tensor.size >> 20 for load in weights.plan.loads for tensor in load.tensors
        ),
        "host memory of its own and mapped, MiB": peak.growth(),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
