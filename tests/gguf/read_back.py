# SPDX-License-Identifier: Apache-2.0
"""Turn a GGUF file back into an HF checkpoint: the loader's plan, gguf's own means."""

from pathlib import Path

import gguf
import numpy as np
from glm_dsa.config import read_model
from glm_dsa.ggml import PLAIN
from glm_dsa.header import Tensor
from glm_dsa.plan import Target, make_plan
from glm_dsa.shards import read_checkpoint
from tiny_glm import Arrays


def values(tensor: Tensor) -> np.ndarray:
    """The numbers of one tensor, float32, read with the gguf package's own means."""
    kind = gguf.GGMLQuantizationType(tensor.type_id)
    data = np.fromfile(tensor.path, np.uint8, tensor.size, offset=tensor.offset)
    if kind.name in PLAIN:
        dtype = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[kind.name]
        stored = data.view(dtype).reshape(tensor.shape)
        if kind.name == "BF16":
            return (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(np.float32)
    rows = data.reshape(*tensor.shape[:-1], -1)
    return gguf.quants.dequantize(rows, kind)


def from_file(path: Path) -> tuple[dict, Arrays]:
    """The config and the HF checkpoint that the file's plan amounts to."""
    checkpoint = read_checkpoint(path)
    model = read_model(checkpoint)
    plan = make_plan(checkpoint, model, Target(True, True))
    assert not plan.problems
    arrays: Arrays = {}
    for load in plan.loads:
        found = [values(tensor) for tensor in load.tensors]
        if len(found) == 2:
            k_b, v_b = found
            heads = np.concatenate([k_b.swapaxes(1, 2), v_b], axis=1)
            arrays[load.name] = heads.reshape(-1, model.kv_rank)
        elif ".experts.0." in load.name:
            for expert, matrix in enumerate(found[0]):
                name = load.name.replace(".experts.0.", f".experts.{expert}.")
                arrays[name] = matrix
        else:
            (arrays[load.name],) = found
    return model.config(), arrays
