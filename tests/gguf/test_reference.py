# SPDX-License-Identifier: Apache-2.0
"""A model put together from the GGUF file alone computes what the HF model computes.

The file's metadata give the config and its plan the weights, as in vLLM; transformers
runs both models. Sequences are longer than `index_topk`, or faults of the indexer
would not show.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from read_back import from_file
from tiny_glm import SHARING, Arrays, Tiny, mixed, to_gguf, uniform, weights, write

transformers = pytest.importorskip("transformers", minversion="5.13")
TOKENS = 64


def logits(config: dict, arrays: Arrays) -> torch.Tensor:
    """[tokens, vocabulary] of transformers' model, float32."""
    made = transformers.GlmMoeDsaConfig(**config | {"dtype": "float32"})
    made._attn_implementation = "eager"
    model = transformers.GlmMoeDsaForCausalLM(made).float().eval()
    state = {name: torch.from_numpy(array) for name, array in arrays.items()}
    for layer in range(config["num_hidden_layers"]):
        experts = f"model.layers.{layer}.mlp.experts"
        if f"{experts}.0.up_proj.weight" not in state:
            continue
        stack = {
            part: torch.stack(
                [
                    state.pop(f"{experts}.{expert}.{part}_proj.weight")
                    for expert in range(config["n_routed_experts"])
                ]
            )
            for part in ("gate", "up", "down")
        }
        gate_up = torch.cat([stack["gate"], stack["up"]], dim=1)
        state[f"{experts}.gate_up_proj"] = gate_up
        state[f"{experts}.down_proj"] = stack["down"]
    missing, _ = model.load_state_dict(state, strict=False)
    assert not missing
    tokens = np.random.default_rng(5).integers(0, config["vocab_size"], (1, TOKENS))
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits[0]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The median over tokens of the difference relative to `b`.

    Not the mean: noise in the weights flips an expert or a selected token here and
    there, and those tokens are far off without meaning anything.
    """
    return float(((a - b).norm(dim=1) / b.norm(dim=1)).median())


def trunk(tiny: Tiny) -> Arrays:
    """The HF checkpoint without its draft layers, which transformers does not run,
    and without the indexers that it does not have."""
    full = tiny.full_layers or (True,) * tiny.layers
    unwanted = [f"layers.{tiny.layers + i}." for i in range(tiny.draft_layers)]
    unwanted += [f"layers.{i}.self_attn.indexer." for i, f in enumerate(full) if not f]
    return {
        name: array
        for name, array in weights(tiny).items()
        if not any(part in name for part in unwanted)
    }


@pytest.mark.parametrize("tiny", [Tiny(), SHARING], ids=["all-full", "sharing"])
def test_float32_file_is_the_model(tiny: Tiny, tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.gguf", tiny, to_gguf(tiny, weights(tiny)), uniform("F32")
    )
    config, arrays = from_file(path)
    assert arrays.keys() == trunk(tiny).keys()
    expected = logits(tiny.config(), trunk(tiny))
    assert torch.equal(logits(config, arrays), expected)


NEAR = {
    "BF16": (uniform("BF16"), 0.05),
    "Q8_0": (uniform("Q8_0"), 0.25),
    "mixed": (mixed("Q8_0", attn_k_b="Q5_1", attn_v_b="BF16", r__proj="Q8_0"), 0.3),
}


@pytest.mark.parametrize("name", NEAR)
def test_quantised_file_is_near(name: str, tmp_path: Path) -> None:
    tiny = Tiny()
    types, limit = NEAR[name]
    path = write(tmp_path / "x.gguf", tiny, to_gguf(tiny, weights(tiny)), types)
    expected = logits(tiny.config(), trunk(tiny))
    assert distance(logits(*from_file(path)), expected) < limit


CONTROLS = {
    "rotation": {"rope_parameters": {"rope_type": "default", "rope_theta": 8e6}},
    "dense": {"index_topk": TOKENS},
    "scale": {"routed_scaling_factor": 1.0},
    "sharing": {"index_topk_pattern": "FSSS", "indexer_types": None},
}


@pytest.mark.parametrize("name", CONTROLS)
def test_wrong_config_is_far(name: str) -> None:
    """What the limits above would miss if they were too wide."""
    tiny = Tiny()
    arrays = trunk(tiny)
    expected = logits(tiny.config(), arrays)
    assert distance(logits(tiny.config() | CONTROLS[name], arrays), expected) > 0.4
