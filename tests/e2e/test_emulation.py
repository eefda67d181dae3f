# SPDX-License-Identifier: Apache-2.0
"""The second reference: off it is transformers itself, on it rounds as it says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the reference is made of torch")
pytest.importorskip(
    "transformers.models.glm_moe_dsa", reason="this transformers does not know GLM-5"
)
from emulation import (  # noqa: E402
    Emulation,
    activation_int8,
    indexer_fp8,
    latent_fp8,
    load,
    log_probabilities,
)
from models import TINY, write_hf  # noqa: E402

TOPK = 16
TOKENS = np.random.default_rng(5).integers(0, TINY.vocabulary, 90).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("tiny"), "tiny", topk=TOPK)


def answers(folder: Path, emulation: Emulation) -> torch.Tensor:
    return log_probabilities(load(str(folder), torch.float32, emulation), TOKENS)


def apart(a: torch.Tensor, b: torch.Tensor, positions: slice) -> float:
    return (a - b)[positions].abs().median().item()


@pytest.fixture(scope="module")
def plain(folder: Path) -> torch.Tensor:
    return answers(folder, Emulation(indexer=False))


def test_without_rounding_it_is_transformers(folder: Path, plain: torch.Tensor) -> None:
    from transformers import GlmMoeDsaForCausalLM

    model = GlmMoeDsaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    assert apart(log_probabilities(model, TOKENS), plain, slice(None)) < 1e-5
    assert json.loads((folder / "config.json").read_text())["index_topk"] == TOPK


@pytest.mark.parametrize(
    ("emulation", "changes_below"),
    [
        pytest.param(Emulation(), False, id="indexer"),
        pytest.param(Emulation(indexer=False, latent=True), True, id="latent"),
        pytest.param(
            Emulation(indexer=False, activations=True), True, id="activations"
        ),
        pytest.param(Emulation(indexer=False, topk=1000), False, id="dense"),
        pytest.param(Emulation(indexer=False, neox=True), False, id="neox"),
        pytest.param(Emulation(indexer=False, rolled=True), True, id="rolled"),
    ],
)
def test_what_each_option_changes(
    folder: Path, plain: torch.Tensor, emulation: Emulation, changes_below: bool
) -> None:
    # While fewer than TOPK tokens are there, all are attended to, whatever the scores.
    changed = answers(folder, emulation)
    assert (apart(changed, plain, slice(TOPK)) > 1e-4) == changes_below
    assert apart(changed, plain, slice(TOPK, None)) > 1e-4


def test_rounding() -> None:
    x = torch.tensor([[448.0, 1.0, 17.0, -300.0] * 32])
    assert indexer_fp8(x)[0, :4].tolist() == [448, 1, 16, -288]  # scale 1
    # the scale goes up to the next power of two
    assert indexer_fp8(2.1 * x)[0, 0] == 960  # of 940.8, in steps of 64
    assert latent_fp8(2.1 * x)[0, 0] == pytest.approx(940.8)
    y = torch.tensor([[127.0, 0.4, 0.6, -3.0] * 8])
    assert activation_int8(y)[0, :4].tolist() == [127, 0, 1, -3]
    assert activation_int8(torch.zeros(1, 32)).abs().max() == 0
