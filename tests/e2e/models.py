# SPDX-License-Identifier: Apache-2.0
"""The tiny models that vLLM and transformers are given: GGUF files and HF folders."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "gguf"))

from tiny_glm import Arrays, Tiny, Types, to_gguf, weights, write

TINY = dataclasses.replace(
    Tiny(), draft_layers=0, vocabulary=1024, index_topk=2048, context=65536
)


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Round to what bfloat16 can hold, to nearest; the last half of the bits is 0."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def save(folder: Path, config: dict, arrays: Arrays) -> Path:
    """An HF checkpoint of float32 tensors."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {n: torch.from_numpy(np.ascontiguousarray(a)) for n, a in arrays.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_hf(parent: Path, name: str, *, topk: int) -> Path:
    """A model whose weights every dtype of 16 bits or more holds exactly, or nearly."""
    tiny = dataclasses.replace(TINY, index_topk=topk)
    arrays = {key: bfloat16(array) for key, array in weights(tiny).items()}
    return save(parent / name, tiny.config(), arrays)


def write_gguf(parent: Path, name: str, types: Types, *, topk: int) -> Path:
    """A GGUF file, and beside it (without the suffix) what it dequantises to."""
    tiny = dataclasses.replace(TINY, index_topk=topk)
    path = write(parent / f"{name}.gguf", tiny, to_gguf(tiny, weights(tiny)), types)
    save(parent / name, *dequantised(path))
    return path


def dequantised(path: Path) -> tuple[dict, Arrays]:
    """The config and the float32 arrays of a GGUF file, by the names of this vLLM."""
    # The one that is patched into it.
    sys.modules["glm_dsa"] = importlib.import_module("vllm.transformers_utils.glm_dsa")
    from read_back import from_file

    return from_file(path)


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Words `token0`, `token1`, ... between spaces, for an HF folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"token{i}": i for i in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="token0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
