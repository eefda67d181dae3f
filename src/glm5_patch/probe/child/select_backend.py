# SPDX-License-Identifier: Apache-2.0
"""Asks vLLM's own selector about a GLM-5 attention layer on the simulated GPU."""

from __future__ import annotations

import functools
import inspect
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from .cuda import Device

# A GLM-5 layer on one GPU. The selector looks at the size of a cache row
# (kv_lora_rank + qk_rope_head_dim) and at the number of query heads.
_HEAD_SIZE = 576
_NUM_HEADS = 64
_HF_CONFIG = SimpleNamespace(
    model_type="glm_moe_dsa",
    kv_lora_rank=512,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    index_topk=2048,
    index_head_dim=128,
    index_n_heads=32,
)

_CachedFunction = type(functools.cache(len))


class Simulation:
    """vLLM on the simulated GPU: the platform, its selector, its current config."""

    def __init__(self, torch: Any, platform: Any) -> None:
        self._torch = torch
        self._platform = platform
        self._config = glm5_config(torch.bfloat16, "auto")
        _use_config(lambda: self._config)
        self._selector = import_module("vllm.v1.attention.selector")
        registry = import_module("vllm.v1.attention.backends.registry")
        self.backends = registry.AttentionBackendEnum
        # Every MLA backend imports this one. Alone, a package that it lacks is named;
        # below a backend, vLLM would turn it into "this backend refuses".
        import_module("vllm.model_executor.layers.attention.mla_attention")

    def select(
        self, capability: tuple[int, int], dtype: str, kv_cache_dtype: str
    ) -> dict[str, Any]:
        """The backend picked, or the selector's message, and everyone's reasons."""
        self._enter(capability, dtype, kv_cache_dtype)
        wanted = inspect.signature(self._selector.get_attn_backend).parameters
        known = {
            "head_size": _HEAD_SIZE,
            "dtype": self._config.model_config.dtype,
            "kv_cache_dtype": kv_cache_dtype,
            "block_size": None,
            "num_heads": _NUM_HEADS,
            "use_mla": True,
            "use_sparse": True,
        }
        arguments = {name: known[name] for name in wanted if name in known}
        selected, error = None, None
        try:
            selected = self._selector.get_attn_backend(**arguments).get_name()
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        return {
            "case": [capability, dtype, kv_cache_dtype],
            "selected": selected,
            "error": error,
            "reasons": _reasons(Device.backends_asked),
        }

    def block_size(
        self, capability: tuple[int, int], requested: str | None
    ) -> dict[str, Any]:
        """The KV block size for a backend asked for by name, or left to vLLM."""
        self._enter(capability, "bfloat16", "auto")
        tokens, error = None, None
        try:
            if requested is not None:
                self._config.attention_config.backend = self.backends[requested]
            tokens = self._settle_block_size()
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        return {
            "capability": capability,
            "requested": requested,
            "tokens": tokens,
            "error": error,
        }

    def import_errors(self, backends: set[str]) -> dict[str, str]:
        """Why each of these backends does not import."""
        errors = {}
        for name in sorted(backends):
            try:
                self.backends[name].get_class()
            except ImportError as error:
                errors[name] = str(error)
        return errors

    def _enter(
        self, capability: tuple[int, int], dtype: str, kv_cache_dtype: str
    ) -> None:
        Device.capability = capability
        Device.backends_asked = None
        self._config = glm5_config(getattr(self._torch, dtype), kv_cache_dtype)
        _forget_cached_answers()

    def _settle_block_size(self) -> int:
        cache_config = self._config.cache_config
        self._platform.check_and_update_config(self._config)
        if cache_config.block_size is None:
            # From 0.18.0 on the platform leaves it to the backend that is selected.
            cache = import_module("vllm.config.cache").CacheConfig
            backend = self._selector.get_attn_backend(
                _HEAD_SIZE,
                self._config.model_config.dtype,
                "auto",
                use_mla=True,
                use_sparse=True,
            )
            preferred = backend.get_preferred_block_size(cache.DEFAULT_BLOCK_SIZE)
            cache_config.block_size = preferred
        return int(cache_config.block_size)


def glm5_config(dtype: Any, kv_cache_dtype: str) -> SimpleNamespace:
    """The fields of a VllmConfig that selection reads, as GLM-5 would have them."""
    return SimpleNamespace(
        attention_config=SimpleNamespace(
            backend=None,
            backend_per_kind=None,
            flash_attn_version=None,
            hisparse_config=None,
            mla_prefill_backend=None,
            sparse_mla_force_mqa=False,
            use_fp4_indexer_cache=False,
            use_non_causal=False,
        ),
        cache_config=SimpleNamespace(
            block_size=None,
            cache_dtype=kv_cache_dtype,
            user_specified_block_size=False,
        ),
        kv_transfer_config=None,
        model_config=SimpleNamespace(
            dtype=dtype,
            hf_config=_HF_CONFIG,
            hf_text_config=_HF_CONFIG,
            is_mm_prefix_lm=False,
            max_model_len=8192,
            rswa_window=None,
            use_mla=True,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            tensor_parallel_size=1,
            worker_cls="auto",
        ),
        scheduler_config=SimpleNamespace(),
        speculative_config=None,
    )


def _use_config(current: Any) -> None:
    """Let ``current()`` be vLLM's current config, without building a real one.

    A real VllmConfig wants a model on disk. Nothing has asked for the config yet, so
    every module will import these functions in place of vLLM's.
    """
    for name in ("vllm.config", "vllm.config.vllm"):
        module: Any = import_module(name)
        module.get_current_vllm_config = current
        module.get_current_vllm_config_or_none = current


def _forget_cached_answers() -> None:
    """Empty vLLM's function caches: one process has one GPU, but this one has many."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "vllm":
            continue
        for value in list(vars(module).values()):
            if isinstance(value, _CachedFunction):
                value.cache_clear()


def _reasons(asked: Any) -> dict[str, list[str]]:
    """Backend names in order of priority, each with the reasons that it gives.

    vLLM gives the valid ones with their place in the list, and the others in order.
    Newer releases give those their place, too: ``(place, reasons)``.
    """
    if asked is None:
        return {}
    valid, refusing = asked
    placed: dict[int, tuple[str, list[str]]] = {
        place: (backend.name, []) for backend, place in valid
    }
    free = (n for n in range(len(valid) + len(refusing)) if n not in placed)
    for place, (backend, why) in zip(free, refusing.items(), strict=True):
        placed[place] = (backend.name, list(why[1] if isinstance(why, tuple) else why))
    return dict(placed[place] for place in sorted(placed))
