# SPDX-License-Identifier: Apache-2.0
"""Which vLLMs are run, and which reference each is held against."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

TRITON, FLASHMLA = "TRITON_MLA_SPARSE", "FLASHMLA_SPARSE"
PLAIN, Q8_0, Q4_K = "plain", "Q8_0", "Q4_K"
TOPKS = (64, 256, 2048)


@dataclass(frozen=True)
class Case:
    """One vLLM.

    Attributes:
        weights: "plain" is the HF checkpoint, the others are GGUF files.
        options: fields of engine.Run, where they are not its defaults.
        environment: variables for its process.
    """

    dtype: str
    topk: int
    backend: str = TRITON
    weights: str = PLAIN
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def fp8_cache(self) -> bool:
        return self.options.get("kv_cache") == "fp8_ds_mla"


TRITON_INDEXER = {"GLM5_PATCH_INDEXER": "triton"}
FP8_CACHE = {"kv_cache": "fp8_ds_mla"}


def cases() -> dict[str, Case]:
    """By name; those that take longest to start come first."""
    found = {
        "float16-2048-compiled": Case("float16", 2048, options={"mode": "compiled"}),
        "bfloat16-256-compiled": Case("bfloat16", 256, options={"mode": "compiled"}),
    }
    for dtype in ("float16", "bfloat16"):
        for topk in TOPKS:
            found[f"{dtype}-{topk}-eager"] = Case(dtype, topk)
            found[f"{dtype}-{topk}-graphs"] = Case(
                dtype, topk, options={"mode": "graphs"}
            )
        found[f"{dtype}-256-cached"] = Case(
            dtype, 256, options={"mode": "graphs", "cached": True}
        )
        found[f"{dtype}-256-chunked"] = Case(dtype, 256, options={"batch_tokens": 512})
        found[f"{dtype}-2048-indexer"] = Case(
            dtype, 2048, options={"mode": "graphs"}, environment=TRITON_INDEXER
        )
        found[f"{dtype}-2048-fp8"] = Case(
            dtype, 2048, options={"mode": "graphs", **FP8_CACHE}
        )
        found[f"{dtype}-256-Q8_0"] = Case(
            dtype, 256, weights=Q8_0, options={"mode": "graphs"}
        )
        found[f"{dtype}-256-Q4_K"] = Case(
            dtype, 256, weights=Q4_K, options={"mode": "graphs"}
        )
    found["float16-64-indexer"] = Case("float16", 64, environment=TRITON_INDEXER)
    found["float16-256-fp8"] = Case("float16", 256, options=FP8_CACHE)
    for topk in (256, 2048):
        found[f"bfloat16-{topk}-flashmla"] = Case("bfloat16", topk, FLASHMLA)
    found["bfloat16-2048-flashmla-fp8"] = Case(
        "bfloat16", 2048, FLASHMLA, options=FP8_CACHE
    )
    for picks in ("sorted", "stable"):
        found[f"float16-256-{picks}"] = Case("float16", 256, options={"picks": picks})
    for name in (
        "float16-256-eager",
        "bfloat16-2048-flashmla",
        "float16-256-sorted",
        "float16-256-stable",
    ):
        found[again(name)] = found[name]
    return found


def unserved(case: Case) -> str | None:
    """Why a case does not run on this GPU, or with this patch set."""
    import torch
    from vllm.v1.attention.backends.mla.triton_mla_sparse import TritonMLASparseBackend

    if case.backend == FLASHMLA and torch.cuda.get_device_capability()[0] not in (
        9,
        10,
    ):
        return "FLASHMLA_SPARSE runs on SM90 and SM100 only"
    served = TritonMLASparseBackend.supported_kv_cache_dtypes
    if case.backend == TRITON and case.fp8_cache and "fp8_ds_mla" not in served:
        return "TRITON_MLA_SPARSE has no fp8 cache yet"
    return None


def emulation(case: Case) -> dict[str, bool]:
    """What of the quantisation on a case's way the reference models."""
    return {"latent": case.fp8_cache, "activations": case.weights != PLAIN}


# References that are wrong on purpose, and where that must show.
CONTROLS = {
    "indexer rotates halves": ({"neox": True}, ("above",)),
    "every token attended to": ({"topk": 1 << 20}, ("above",)),
    "rope before the latent": ({"rolled": True}, ("below", "above")),
}
CONTROLLED = "float16-256-eager"


# What vLLM as it was says to two of the models, in float16.
REFUSALS = {
    f"{PLAIN}-256": "No valid attention backend found for cuda",
    f"{Q8_0}-256.gguf": "GGUF model with architecture glm-dsa is not supported yet",
}


def again(name: str) -> str:
    """The name of a case's second run."""
    return f"{name}-again"


def asked_for(parameters: Iterable[Any]) -> set[str]:
    """The cases, controls and refusals among a test's parameters."""
    return {*cases(), *CONTROLS, *REFUSALS}.intersection(parameters)


def modelled(case: Case) -> str:
    """The name of the reference that models all of a case's quantisation."""
    return f"{case.weights} {case.topk} {case.dtype} {emulation(case)}"


def modelled_plainly(case: Case) -> bool:
    """Whether transformers without any of it is of interest, too."""
    return case.weights == PLAIN and not case.fp8_cache
