# SPDX-License-Identifier: Apache-2.0
"""Where DeepGEMM has no logits kernels for a chip, the indexer gets Triton ones.

`vllm.utils.deep_gemm` hands its namespace to `install`, which puts a switch before
each of the functions that only the DSA indexer calls. A switch asks on its first
call, when the GPU is in use anyway, never at import. On SM90 and SM100 it always
calls what vLLM had there. Nothing else of that module changes: what it says about
DeepGEMM for GEMM and MoE is as true as before.
"""

import functools
from collections.abc import Callable, MutableMapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.utils.import_utils import has_deep_gemm

# Chips that vLLM gives to DeepGEMM whatever else holds. Below 8 Triton has no kernel.
DEEP_GEMM_MAJORS = (9, 10)
OLDEST_MAJOR = 8

Function = Callable[..., Any]


@functools.cache
def uses_triton() -> bool:
    """Whether the indexer's logits come from Triton on this chip."""
    if not current_platform.is_cuda():
        return False
    capability = current_platform.get_device_capability()
    if capability is None or capability.major in DEEP_GEMM_MAJORS:
        return False
    return capability.major >= OLDEST_MAJOR and not _deep_gemm_serves(capability.major)


def has_mqa_logits() -> bool:
    """Whether the indexer can have its logits at all; stands in for its guard."""
    return uses_triton() or has_deep_gemm()


def install(module: MutableMapping[str, Any]) -> None:
    """Put a switch before the indexer's functions of `vllm.utils.deep_gemm`."""
    for name, ours in (
        ("fp8_mqa_logits", _mqa_logits),  # up to 0.19.1
        ("fp8_paged_mqa_logits", _paged_mqa_logits),
        ("fp8_fp4_mqa_logits", _mqa_logits),  # from 0.20.0
        ("fp8_fp4_paged_mqa_logits", _paged_mqa_logits),
        ("get_paged_mqa_logits_metadata", _paged_mqa_logits_metadata),
    ):
        if name in module:
            module[name] = _switch(module[name], ours)
    module["has_mqa_logits"] = has_mqa_logits


def _switch(stock: Function, ours: Function) -> Function:
    @functools.wraps(stock)
    def switch(*args: Any, **kwargs: Any) -> Any:
        return (ours if uses_triton() else stock)(*args, **kwargs)

    return switch


def _deep_gemm_serves(major: int) -> bool:
    """Whether the DeepGEMM that vLLM would import has logits kernels for the chip.

    It compiles them when they are first called, from headers that name the chip:
    120 for SM120 and SM121. They come and go between releases, so only the files
    can tell.
    """
    for package in ("deep_gemm", "vllm.third_party.deep_gemm"):
        try:
            spec = find_spec(package)
        except ModuleNotFoundError:  # of a parent
            continue
        if spec is None or not spec.submodule_search_locations:
            continue
        headers = [
            header.name
            for folder in spec.submodule_search_locations
            for header in Path(folder, "include").rglob(f"sm{major}0_*mqa_logits*.cuh")
        ]
        paged = [name for name in headers if "paged" in name]
        return 0 < len(paged) < len(headers)
    return False


def _mqa_logits(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor | None],
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    clean_logits: bool,
) -> torch.Tensor:
    from vllm.v1.attention.ops.triton_mqa_logits import mqa_logits

    k, k_scale = kv
    return mqa_logits(
        _fp8(q), k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke, clean=clean_logits
    )


def _paged_mqa_logits(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor | None],
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    schedule_metadata: torch.Tensor,
    max_model_len: int,
    clean_logits: bool,
) -> torch.Tensor:
    from vllm.v1.attention.ops.triton_mqa_logits import paged_mqa_logits

    # schedule_metadata is unused: the kernel makes its own schedule on the GPU.
    return paged_mqa_logits(
        _fp8(q),
        kv_cache,
        weights,
        context_lens,
        block_tables,
        max_model_len,
        clean=clean_logits,
    )


def _paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_size: int, num_sms: int
) -> torch.Tensor:
    """Something of the shape that DeepGEMM's schedule has."""
    return torch.zeros((num_sms + 1, 2), dtype=torch.int32, device=context_lens.device)


def _fp8(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor | None],
) -> torch.Tensor:
    """The query itself; from 0.20.0 on it comes with the block scales of float4."""
    if isinstance(q, torch.Tensor):
        return q
    values, scales = q
    if scales is not None:
        raise ValueError(
            "the indexer's query must be float8 on this GPU, found float4 with block "
            "scales: turn use_fp4_indexer_cache off"
        )
    return values
