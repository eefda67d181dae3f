# SPDX-License-Identifier: Apache-2.0
"""Load the weights of a GLM-5 GGUF file into vLLM's model.

Tensors are mapped, not read: what a rank does not need is never fetched, and host
memory holds about one tensor at a time.
"""

import importlib
import math
import mmap
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)
from vllm.transformers_utils.glm_dsa.config import MODEL_TYPE, Model, read_model
from vllm.transformers_utils.glm_dsa.ggml import PLAIN, TYPES
from vllm.transformers_utils.glm_dsa.header import GgufError, Tensor
from vllm.transformers_utils.glm_dsa.plan import (
    Load,
    Plan,
    Target,
    make_plan,
    plain_modules,
)
from vllm.transformers_utils.glm_dsa.shards import read_checkpoint
from vllm.utils.torch_utils import set_default_torch_dtype

_PLAIN_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

# What the config says in these fields changes results; the rest may be overridden.
_CHECKED_FIELDS = (
    "num_hidden_layers",
    "first_k_dense_replace",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "norm_topk_prob",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "vocab_size",
    "rms_norm_eps",
    "indexer_rope_interleave",
    "topk_method",
    "scoring_func",
)


def is_glm_dsa(model_config: ModelConfig) -> bool:
    return model_config.hf_config.model_type == MODEL_TYPE


def load_glm_dsa_model(
    path: str, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str
) -> nn.Module:
    """Build the model and fill it from the files that `path` belongs to.

    Raises:
        GgufError: the files are unusable, do not fit the config, or hold what this
            release cannot compute with; before any weight is read.
    """
    weights = GlmDsaWeights(path, model_config, vllm_config.parallel_config)
    vllm_config.quant_config.unquantized_modules.extend(plain_modules(weights.plan))
    device = torch.device(vllm_config.device_config.device)
    with set_default_torch_dtype(model_config.dtype):
        with device:
            model = initialize_model(vllm_config=vllm_config, prefix=prefix)
        weights.fill(model)
        process_weights_after_loading(model, model_config, device)
    return model


class GlmDsaWeights:
    """The weights of one checkpoint, checked and ready to be streamed.

    Raises:
        GgufError: as for `load_glm_dsa_model`.
    """

    def __init__(
        self, path: str, model_config: ModelConfig, parallel_config: ParallelConfig
    ) -> None:
        checkpoint = read_checkpoint(Path(path))
        self.dtype = model_config.dtype
        self.model = read_model(checkpoint)
        target = Target(
            "skip_topk" in _names_in(_model_code().MultiHeadLatentAttentionWrapper),
            "wk_weights_proj" in _names_in(_model_code().Indexer),
            get_tensor_model_parallel_world_size(),
            parallel_config.data_parallel_size
            * parallel_config.prefill_context_parallel_size,
            parallel_config.enable_expert_parallel,
        )
        self.plan = make_plan(checkpoint, self.model, target)
        problems = [
            *map(str, self.plan.problems),
            *_config_problems(model_config.hf_config, self.model),
            *_dequantisation_problems(self.plan),
        ]
        if problems:
            raise GgufError(
                f"vLLM cannot serve {path}:\n"
                + "\n".join(f"- {problem}" for problem in problems)
            )

    def fill(self, model: nn.Module) -> None:
        """Load every parameter of `model`, which may be one rank's part."""
        unused = self._unused_indexers(model)
        loaded = model.load_weights(self.stream())
        for name, parameter in model.named_parameters():
            if name.startswith(unused):
                _blank(parameter)
            elif name not in loaded:
                raise GgufError(f"no tensor of the files fills the parameter {name}")

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and values as vLLM's GGUF layers expect them: all types, then all
        weights, packed ones as uint8 [..., bytes of a row]."""
        for load in self.plan.loads:
            if load.packed:
                yield (
                    load.name.removesuffix("weight") + "qweight_type",
                    torch.tensor(load.tensors[0].type_id),
                )
        files = _MappedFiles()
        for load in self.plan.loads:
            if load.packed:
                name = load.name.removesuffix("weight") + "qweight"
                yield name, files.blocks(load.tensors[0])
            else:
                yield load.name, self._numbers(load, files)
            for tensor in load.tensors:
                files.release(tensor)

    def _numbers(self, load: Load, files: "_MappedFiles") -> torch.Tensor:
        if len(load.tensors) == 1:
            return files.numbers(load.tensors[0])
        # In the model's type at once, so that no more than one half is in float32.
        k_b, v_b = (files.numbers(tensor).to(self.dtype) for tensor in load.tensors)
        return join_kv_b(k_b, v_b)

    def _unused_indexers(self, model: nn.Module) -> tuple[str, ...]:
        """The prefixes of parameters that no layer ever uses.

        vLLM builds an indexer in the layers that share another's selection as well.
        """
        unused = []
        for name, module in model.named_modules():
            if not isinstance(module, _model_code().MultiHeadLatentAttentionWrapper):
                continue
            layer = int(name.split(".layers.")[1].split(".")[0])
            shares = getattr(module, "skip_topk", False)
            if shares == self.model.full_layers[layer]:
                raise GgufError(
                    f"layer {layer} {'shares' if shares else 'has'} an indexer by the "
                    f"config, but by the files it {'has' if shares else 'shares'} "
                    "one; without --hf-config-path the config comes from the files"
                )
            if shares:
                attention = name.removesuffix(".mla_attn")
                unused += [f"{name}.indexer.", f"{attention}.indexer."]
        return tuple(unused)


def join_kv_b(k_b: torch.Tensor, v_b: torch.Tensor) -> torch.Tensor:
    """kv_b_proj [heads * (nope + value), rank] of k_b [heads, rank, nope] and v_b
    [heads, value, rank], which llama.cpp's converter makes of it."""
    return torch.cat([k_b.transpose(1, 2), v_b], dim=1).flatten(0, 1)


class _MappedFiles:
    """Tensors as views of the files, which are mapped when first needed."""

    def __init__(self) -> None:
        self.maps: dict[Path, mmap.mmap] = {}

    def view(
        self, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """`shape` values of `dtype` at the tensor's place. Not to be written to."""
        if tensor.path not in self.maps:
            with tensor.path.open("rb") as file:
                self.maps[tensor.path] = mmap.mmap(
                    file.fileno(), 0, access=mmap.ACCESS_READ
                )
        data = self.maps[tensor.path]
        self._advise(tensor, mmap.MADV_WILLNEED)
        with warnings.catch_warnings():
            # That the buffer cannot be written to.
            warnings.simplefilter("ignore", UserWarning)
            flat = torch.frombuffer(
                data, dtype=dtype, count=math.prod(shape), offset=tensor.offset
            )
        return flat.view(shape)

    def blocks(self, tensor: Tensor) -> torch.Tensor:
        """Packed blocks: uint8 [..., bytes of a row]."""
        kind = TYPES[tensor.type_id]
        row = tensor.shape[-1] // kind.block * kind.size
        return self.view(tensor, (*tensor.shape[:-1], row), torch.uint8)

    def numbers(self, tensor: Tensor) -> torch.Tensor:
        """The tensor's values: in the file's own type, or float32 if quantised."""
        if tensor.type in PLAIN:
            return self.view(tensor, tensor.shape, _PLAIN_DTYPES[tensor.type])
        return torch.from_numpy(_dequantise(self.blocks(tensor).numpy(), tensor.type))

    def release(self, tensor: Tensor) -> None:
        """Let go of the memory behind the tensor; views of it stay valid."""
        self._advise(tensor, mmap.MADV_DONTNEED)

    def _advise(self, tensor: Tensor, advice: int) -> None:
        assert tensor.size is not None  # only known types get this far
        start = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
        length = tensor.offset + tensor.size - start
        self.maps[tensor.path].madvise(advice, start, length)


def _model_code() -> ModuleType:
    """vLLM's code of this model. It imports the loaders, so it cannot be imported
    together with this module."""
    return importlib.import_module("vllm.model_executor.models.deepseek_v2")


def _names_in(module: type[nn.Module]) -> tuple[str, ...]:
    """The attributes that the constructor sets or uses: how releases are told apart
    that have the same class but not the same parts in it."""
    return module.__init__.__code__.co_names


def _dequantise(blocks: "np.ndarray[Any, Any]", kind: str) -> "np.ndarray[Any, Any]":
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])


def _dequantisation_problems(plan: Plan) -> Iterator[str]:
    """What the installed gguf package does not know how to dequantise."""
    kinds = {
        tensor.type_id: tensor
        for load in plan.loads
        if not load.packed
        for tensor in load.tensors
        if tensor.type not in PLAIN and tensor.type_id in TYPES
    }
    for type_id, tensor in kinds.items():
        kind = TYPES[type_id]
        try:
            _dequantise(np.zeros((1, kind.size), np.uint8), kind.name)
        except (KeyError, NotImplementedError):
            yield (
                f"{tensor.name}: the installed gguf package cannot dequantise "
                f"{kind.name}; upgrade it"
            )


def _config_problems(config: Any, model: Model) -> Iterator[str]:
    """Where the config in use, which may be a user's, contradicts the files."""
    from_file = model.config()
    expected = {name: from_file[name] for name in _CHECKED_FIELDS}
    found = {name: getattr(config, name, None) for name in _CHECKED_FIELDS}
    expected["rope_theta"] = model.rope_base
    found["rope_theta"] = (config.rope_parameters or {}).get("rope_theta")
    for name, value in expected.items():
        other = found[name]
        # Files keep floats in single precision.
        same = (
            math.isclose(value, other, rel_tol=1e-6)
            if isinstance(value, float) and isinstance(other, int | float)
            else value == other
        )
        if not same:
            yield (
                f"the config has {name} = {other!r}, but these files need {value!r}; "
                "without --hf-config-path the config comes from the files"
            )


def _blank(parameter: nn.Parameter) -> None:
    """Give a parameter that is never used as little memory as can be."""
    if isinstance(parameter, UninitializedParameter):
        parameter.materialize((0, 0), dtype=torch.uint8)
    else:
        parameter.data.zero_()
