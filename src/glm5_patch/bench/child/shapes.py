# SPDX-License-Identifier: Apache-2.0
"""Goes through the shapes that were asked for, on the GPU that is there."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from . import attention, indexer
from .answer import NotRun
from .kernels import from_installed, kernel_module
from .timing import Rotation, graph_us

OLDEST_MAJOR = 8
HEADROOM_BYTES = 1 << 30
"""For queries, results and the kernels themselves: the largest batch takes 0.4 GB."""
LEAST_BYTES = HEADROOM_BYTES + (
    attention.PREFILL_BLOCKS * attention.PAGE * attention.ROW_BYTES
)
INDEXER_POOL_BYTES = 4 << 30
_FAULT_LENGTH = 300

Row = dict[str, Any]


def run(request: Mapping[str, Any]) -> dict[str, Any]:
    """Every shape of the request; raises NotRun where no kernel could run."""
    chip = _chip()
    free = _free_bytes()
    from_installed(Path(request["root"]))
    torch.manual_seed(0)
    bench = _Bench(free, request["repeats"])
    rows = [_guarded(bench, *shape) for shape in request["shapes"]]
    return {"chip": chip | {"pool_blocks": bench.pool_blocks}, "rows": rows}


def _chip() -> dict[str, Any]:
    if torch.version.cuda is None:
        raise NotRun(f"torch {torch.__version__} there is not built for CUDA")
    if not torch.cuda.is_available():
        raise NotRun(
            f"torch {torch.__version__} there sees no GPU: the driver does not answer, "
            "or CUDA_VISIBLE_DEVICES hides it"
        )
    properties = torch.cuda.get_device_properties(0)
    capability = f"{properties.major}.{properties.minor}"
    if properties.major < OLDEST_MAJOR:
        raise NotRun(
            f"{properties.name} has compute capability {capability}; the kernels need "
            f"{OLDEST_MAJOR}.0"
        )
    return {
        "name": properties.name,
        "capability": capability,
        "processors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }


def _free_bytes() -> int:
    """Memory that a pool may take: what is free, less the headroom."""
    free, total = torch.cuda.mem_get_info(0)
    if free < LEAST_BYTES:
        raise NotRun(
            f"{LEAST_BYTES / 1e9:.1f} GB of GPU memory are needed, and "
            f"{free / 1e9:.1f} of {total / 1e9:.1f} GB are free: stop what else runs "
            "on this GPU"
        )
    return int(free) - HEADROOM_BYTES


def _guarded(
    bench: _Bench, kernel: str, dtype: str, tokens: int, keys: int, heads: int
) -> Row:
    """A row, or what kept it from being one; the next shape may fare better."""
    row: Row = {
        "shape": [kernel, dtype, tokens, keys, heads],
        "launch": "",
        "bytes": 0,
        "flop": 0,
        "error": None,
        "us": None,
        "read_us": None,
        "fault": None,
    }
    try:
        getattr(bench, kernel)(row, dtype, tokens, keys, heads)
    except torch.OutOfMemoryError:
        row["fault"] = "out of GPU memory"
        torch.cuda.empty_cache()
    except Exception as error:  # what a compiler or a driver may raise has no bound
        text = " ".join(f"{type(error).__name__}: {error}".split())
        row["fault"] = text[:_FAULT_LENGTH]
    return row


def _is_right(row: Row, error: float) -> bool:
    """Note the error, a share of what is allowed; a wrong kernel is not timed."""
    if not math.isfinite(error):
        row["fault"] = "wrong: NaN or infinity, or a token without keys is not 0"
    else:
        row["error"] = error
        if error > 1.0:
            row["fault"] = "wrong: the error is larger than is allowed"
    return row["fault"] is None


class _Bench:
    """One method for each kernel, by its name in a request. ``repeats`` 0: check only.

    ``pool_blocks`` is the size of the last cache that attention read from.
    """

    def __init__(self, free: int, repeats: int, device: str = "cuda") -> None:
        self._free = free
        self._repeats = repeats
        self._device = device
        self._pool: torch.Tensor | None = None
        self._pool_kind: tuple[torch.dtype, bool] | None = None
        self.pool_blocks = 0

    def attention(
        self, row: Row, dtype: str, tokens: int, keys: int, heads: int
    ) -> None:
        launch = kernel_module("triton_sparse_launch")
        kernel = kernel_module("triton_sparse_mla").sparse_mla
        pool = self._pool_of(getattr(torch, dtype), fp8=False)
        self._attend(row, kernel, launch.launch_config, pool)

    def attention_fp8(
        self, row: Row, dtype: str, tokens: int, keys: int, heads: int
    ) -> None:
        launch = kernel_module("triton_sparse_launch")
        kernel = kernel_module("triton_sparse_mla_fp8").sparse_mla_fp8
        pool = self._pool_of(getattr(torch, dtype), fp8=True)
        self._attend(row, kernel, launch.launch_config_fp8, pool)

    def _attend(
        self,
        row: Row,
        operator: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        launch_config: Any,
        pool: torch.Tensor,
    ) -> None:
        _, dtype, tokens, keys, heads = row["shape"]
        tickets = kernel_module("triton_sparse_merge").new_tickets(pool.device)
        kernel = partial(operator, tickets=tickets)
        row["bytes"] = tokens * keys * pool.shape[2] * pool.element_size()
        launch = kernel_module("triton_sparse_launch")
        capability, processors = launch.chip(pool.device)
        config = launch_config(capability, heads, tokens)
        splits = launch.num_splits(config, heads, tokens, keys, processors)
        row["launch"] = (
            f"{config.block_h} x {config.block_n}, {config.num_warps} warps, "
            f"{config.num_stages} stages, {splits} split{'s' * (splits > 1)}"
        )
        decode = tokens <= attention.DECODE_TOKENS
        if not decode:
            pool = pool[: attention.PREFILL_BLOCKS]
        sets = 10 if decode and self._repeats else 1
        slots = attention.draw_slots(sets, tokens, pool, topk=keys)
        q = attention.draw_queries(tokens, heads, getattr(torch, dtype), self._device)
        error = attention.check(kernel, q, pool, slots[0])
        if _is_right(row, error) and self._repeats:
            row["read_us"] = attention.read_us(pool, slots, self._repeats)
            row["us"] = attention.kernel_us(kernel, q, pool, slots, self._repeats)

    def decode(self, row: Row, dtype: str, tokens: int, keys: int, heads: int) -> None:
        row["bytes"] = tokens * keys * indexer.ROW_BYTES
        mqa = kernel_module("triton_mqa_logits")
        config = mqa.decode_config(torch.cuda.get_device_capability(), heads)
        row["launch"] = _indexer_launch(config)
        self._drop_pool()
        pool_bytes = min(INDEXER_POOL_BYTES, self._free) if self._repeats else 0
        inputs = indexer.decode_inputs(tokens, keys, heads, pool_bytes, self._device)
        error = indexer.check_decode(mqa.paged_mqa_logits(**inputs[0]), inputs[0])
        if _is_right(row, error) and self._repeats:
            ours = Rotation(lambda i: mqa.paged_mqa_logits(**i), inputs)
            row["us"] = graph_us(ours, len(inputs), self._repeats)

    def prefill(self, row: Row, dtype: str, tokens: int, keys: int, heads: int) -> None:
        row["flop"] = 2 * tokens * keys * heads * indexer.DIM
        mqa = kernel_module("triton_mqa_logits")
        config = mqa.prefill_config(torch.cuda.get_device_capability())
        row["launch"] = _indexer_launch(config)
        self._drop_pool()
        inputs = indexer.prefill_inputs(tokens, keys, heads, self._device)
        error = indexer.check_prefill(mqa.mqa_logits(**inputs), inputs)
        if _is_right(row, error) and self._repeats:
            row["us"] = graph_us(lambda: mqa.mqa_logits(**inputs), 1, self._repeats)

    def _pool_of(self, dtype: torch.dtype, fp8: bool) -> torch.Tensor:
        if self._pool is None or self._pool_kind != (dtype, fp8):
            self._drop_pool()
            row_bytes = attention.FP8_ROW_BYTES if fp8 else attention.ROW_BYTES
            blocks = attention.PREFILL_BLOCKS
            if self._repeats:
                affordable = self._free // (attention.PAGE * row_bytes)
                blocks = max(blocks, min(attention.POOL_BLOCKS, affordable))
            self._pool = attention.draw_pool(blocks, dtype, self._device, fp8)
            self._pool_kind = (dtype, fp8)
            self.pool_blocks = blocks
        return self._pool

    def _drop_pool(self) -> None:
        """Make room for another."""
        self._pool = None
        torch.cuda.empty_cache()


def _indexer_launch(config: Any) -> str:
    return (
        f"{config.columns} x {config.block_n}, {config.num_warps} warps, "
        f"{config.num_stages} stages"
    )
