# SPDX-License-Identifier: Apache-2.0
"""Asks the `vllm.utils.deep_gemm` of a tree about simulated GPUs; prints JSON.

    python deep_gemm_child.py ROOT OVERLAY [FOLDER]

ROOT holds `vllm/`, and OVERLAY is a JSON object of the modules that come from other
files. FOLDER, if given, is put before everything else on the path: it holds a
`deep_gemm` package. Run in a process of its own, with the packages that vLLM imports
at that point, but neither a GPU nor its compiled code.
"""

import contextlib
import functools
import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from glm5_patch.probe.child import cuda, importing

CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
CAPABILITIES += [(12, 1)]
NAMES = (
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "get_paged_mqa_logits_metadata",
)
HOOKS = ("bounded_chunks", "has_mqa_logits", "one_query_each", "persistent_topk_fits")
# How many arguments each takes, for a call that only shows who answers.
COUNT = (6, 8, 6, 8, 3)


def forget_cached_answers() -> None:
    """One process has one GPU, but this one has many."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "vllm":
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


def refused(hook: Any) -> str | None:
    """What the hook's first question says of a wrong setting, if it does."""
    try:
        hook.has_mqa_logits()
    except ValueError as error:
        return str(error)
    return None


def called(module: Any, name: str, count: int) -> str:
    """Who answers a call: "ours", or the name of the stock function."""
    heard: list[str] = []

    def listen(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            heard.append(frame.f_code.co_filename + ":" + frame.f_code.co_name)

    sys.setprofile(listen)
    try:
        # Numbers are no tensors; who was asked is all that counts.
        with contextlib.suppress(Exception):
            getattr(module, name)(*range(count))
    finally:
        sys.setprofile(None)
    ours = {"_mqa_logits", "_paged_mqa_logits", "_paged_mqa_logits_metadata"}
    for call in heard:
        file, _, function = call.rpartition(":")
        if file.endswith("/indexer_logits.py") and function in ours:
            return "ours"
        if file.endswith("/deep_gemm.py") and function == name:
            return "stock"
    return "nobody"


def main() -> None:
    root = Path(sys.argv[1])
    overlay = {
        name: file and Path(file) for name, file in json.loads(sys.argv[2]).items()
    }
    importing.install(root, overlay)
    sys.path[:0] = sys.argv[3:4]
    import torch

    cuda.Device.capability = (9, 0)
    cuda.install_platform()
    with cuda.without_device(torch):
        import vllm.utils.deep_gemm as module
        from vllm.platforms import current_platform

        hook: Any = None
        with contextlib.suppress(ModuleNotFoundError):
            hook = importlib.import_module("vllm.utils.indexer_logits")
        refusal = refused(hook) if hook else None
        if refusal is not None:
            json.dump({"refusal": refusal}, sys.stdout)
            return
        answers = {}
        for capability in CAPABILITIES:
            cuda.Device.capability = capability
            forget_cached_answers()
            support = getattr(current_platform, "support_deep_gemm", None)
            answers["{}.{}".format(*capability)] = {
                "facts": {
                    "support_deep_gemm": support and support(),
                    "is_deep_gemm_supported": module.is_deep_gemm_supported(),
                    "is_deep_gemm_e8m0_used": module.is_deep_gemm_e8m0_used(),
                    "has_deep_gemm": module.has_deep_gemm(),
                },
                "guard": hook and hook.has_mqa_logits(),
                "persistent_topk": hook and hook.persistent_topk_fits(),
                "pieces": hook and pieces(hook, torch),
                "called": {
                    name: called(module, name, count)
                    for name, count in zip(NAMES, COUNT, strict=True)
                    if hasattr(module, name)
                },
            }
        cuda.Device.capability = (8, 0)
        forget_cached_answers()
        layer = importlib.import_module(
            "vllm.model_executor.layers.sparse_attn_indexer"
        )
        builder = importlib.import_module("vllm.v1.attention.backends.mla.indexer")
        from_hook = sorted(
            name
            for user in (layer, builder)
            for name, value in vars(user).items()
            if hook and value is getattr(hook, name, user) and name in HOOKS
        )
        handed_on, later = {}, {}
        if hook and hook.uses_triton():
            handed_on, later = hand_on(module, torch), hand_on_later(hook, torch)
    own = {
        name: value
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__
    }
    json.dump(
        {
            "answers": answers,
            "functions": {name: code_of(value) for name, value in own.items()},
            "handed_on": handed_on,
            "handed_on_later": later,
            "from_hook": from_hook,
            "cuda_initialised": torch.cuda.is_initialized(),
        },
        sys.stdout,
    )


def code_of(function: Any) -> str:
    """The file of a function's code, not of what it wraps, and whether it is cached."""
    if isinstance(function, functools._lru_cache_wrapper):
        return "cached " + Path(function.__wrapped__.__code__.co_filename).name
    code = getattr(function, "__code__", None)
    return Path(code.co_filename).name if code else "no code"


@dataclass
class Chunk:
    """The fields of a prefill chunk that are cut, and one that is not."""

    token_start: int
    token_end: int
    cu_seqlen_ks: Any
    cu_seqlen_ke: Any
    total_seq_lens: Any
    block_table: str = "kept"


def pieces(hook: Any, torch: Any) -> list[list[Any]]:
    """Two chunks, cut: 5 rows of 30 million keys (4 fit 512 MB), 3 rows of few."""
    ks, ke = torch.arange(8), torch.arange(8) + 100
    large = Chunk(2, 7, ks[:5], ke[:5], torch.tensor(30_000_000))
    small = Chunk(7, 10, ks[5:], ke[5:], torch.tensor(10))
    return [
        [
            piece.token_start,
            piece.token_end,
            piece.cu_seqlen_ks.tolist(),
            piece.cu_seqlen_ke.tolist(),
            piece.block_table,
        ]
        for piece in hook.bounded_chunks([large, small])
    ]


def listen(kernels: Any) -> None:
    """Have the kernels only tell what they are given."""
    for name in ("mqa_logits", "paged_mqa_logits"):
        setattr(
            kernels,
            name,
            lambda *a, **k: [*map(str, a), *(f"{n}={v}" for n, v in sorted(k.items()))],
        )


def hand_on_later(hook: Any, torch: Any) -> dict[str, list[str]]:
    """The same for functions with the parameters, and calls, of vLLM 0.33.0."""

    def fp8_fp4_mqa_logits(
        q: Any,
        kv: Any,
        weights: Any,
        cu_seqlen_ks: Any,
        cu_seqlen_ke: Any,
        max_seqlen_k: int,
    ) -> None: ...

    def fp8_fp4_paged_mqa_logits(
        q: Any,
        kv_cache: Any,
        weights: Any,
        context_lens: Any,
        block_tables: Any,
        schedule_metadata: Any,
        max_model_len: int,
        indices: Any = None,
    ) -> None: ...

    def get_paged_mqa_logits_metadata(
        context_lens: Any, block_size: int, num_sms: int, indices: Any = None
    ) -> None: ...

    listen(importlib.import_module("vllm.v1.attention.ops.triton_mqa_logits"))
    later: dict[str, Any] = {
        f.__name__: f
        for f in (
            fp8_fp4_mqa_logits,
            fp8_fp4_paged_mqa_logits,
            get_paged_mqa_logits_metadata,
        )
    }
    hook.install(later)
    q = (torch.ones(1), None)
    schedule = later["get_paged_mqa_logits_metadata"](
        torch.ones(3, 1), 64, 132, indices="rows"
    )
    return {
        "prefill": later["fp8_fp4_mqa_logits"](q, ("k", "ks"), "w", "start", "end", 77),
        "decode": later["fp8_fp4_paged_mqa_logits"](
            q, "cache", "w", "lens", "table", schedule, max_model_len=99, indices="rows"
        ),
        "schedule": [str(list(schedule.shape)), str(schedule.dtype)],
    }


def hand_on(module: Any, torch: Any) -> dict[str, list[str]]:
    """What the kernels are given for a call with vLLM's own argument names."""
    kernels = importlib.import_module("vllm.v1.attention.ops.triton_mqa_logits")
    listen(kernels)
    tuples = hasattr(module, "fp8_fp4_mqa_logits")
    prefix = "fp8_fp4" if tuples else "fp8"
    q = torch.ones(1)
    q_given = (q, None) if tuples else q
    prefill = getattr(module, f"{prefix}_mqa_logits")(
        q_given, ("k", "ks"), "w", "start", "end", clean_logits=False
    )
    decode = getattr(module, f"{prefix}_paged_mqa_logits")(
        q_given,
        "cache",
        "w",
        "lens",
        "table",
        "schedule",
        max_model_len=99,
        clean_logits=True,
    )
    schedule = module.get_paged_mqa_logits_metadata(torch.ones(3, 1), 64, 132)
    return {
        "prefill": prefill,
        "decode": decode,
        "schedule": [str(list(schedule.shape)), str(schedule.dtype)],
    }


if __name__ == "__main__":
    main()
