# SPDX-License-Identifier: Apache-2.0
"""The tests of loading can fail: each fault below, put into the loader, is found."""

import json
from pathlib import Path

import gguf
import pytest
import torch
from patched_vllm import RELEASES, patched_tree, run_vllm, stock_tree
from test_load import JOBS, prepare, wrong_layers, wrong_parameters

LOADER = "vllm/model_executor/model_loader/glm_dsa_gguf.py"
NAMES = "vllm/transformers_utils/glm_dsa/names.py"

# What to change where, and a part of the parameters, layers or errors that must
# come of it.
FAULTS = {
    "file-order": (
        LOADER,
        "files = _MappedFiles()\n        for load in self.plan.loads:",
        "files = _MappedFiles()\n        for load in reversed(self.plan.loads):",
        "fused_qkv_a_proj",
    ),
    "k_b-not-transposed": (
        LOADER,
        "k_b.transpose(1, 2)",
        "k_b.reshape(len(k_b), k_b.shape[2], k_b.shape[1])",
        "kv_b_proj.weight",
    ),
    "halves-of-kv_b-swapped": (
        LOADER,
        "torch.cat([k_b.transpose(1, 2), v_b], dim=1)",
        "torch.cat([v_b, k_b.transpose(1, 2)], dim=1)",
        "kv_b_proj.weight",
    ),
    "gate-is-up": (
        NAMES,
        '"ffn_gate_exps.weight"',
        '"ffn_up_exps.weight"',
        "ffn_gate_exps.weight and 2 more: no part of this architecture",
    ),
    "types-mixed-up": (
        LOADER,
        "torch.tensor(load.tensors[0].type_id)",
        # IQ4_NL for Q4_0: blocks of the same size, but other values.
        "torch.tensor({2: 20}.get(k := load.tensors[0].type_id, k))",
        "q_b_proj",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name: str, tmp_path: Path) -> None:
    file, right, wrong, spoilt = FAULTS[name]
    release = "0.23.0"
    job = JOBS["llama-quantize"]
    tree = patched_tree(release, tmp_path / "tree")
    text = (tree / file).read_text()
    assert text.count(right) == 1
    (tree / file).write_text(text.replace(right, wrong))
    run_vllm(release, tree, [prepare(job, tmp_path / "job")])
    error = tmp_path / "job" / "error.json"
    if error.exists():
        assert spoilt in json.loads(error.read_text())["text"]
        return
    result = torch.load(tmp_path / "job" / "rank0.pt", weights_only=False)
    found = wrong_parameters(job, release, 0, result)
    found += wrong_layers(job, release, 0, result)
    assert any(spoilt in item for item in found)


def text_of_error(folder: Path) -> str:
    return json.loads((folder / "error.json").read_text())["text"]


@pytest.mark.parametrize("release", RELEASES)
def test_stock_vllm_cannot(release: str, tmp_path: Path) -> None:
    tree = stock_tree(release, tmp_path / "tree")
    run_vllm(release, tree, [prepare(JOBS["Q8_0"], tmp_path / "job")])
    assert "glm-dsa is not supported yet" in text_of_error(tmp_path / "job")


def write_llama(path: Path) -> None:
    """As much of another model as vLLM reads before it decides on the dtype."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("release", RELEASES)
def test_other_models_are_treated_as_before(release: str, tmp_path: Path) -> None:
    """Stock vLLM bans bfloat16 with GGUF on this GPU; the patch lifts that for GLM-5
    only."""
    request = prepare(JOBS["Q8_0"], tmp_path / "job")
    write_llama(tmp_path / "job" / "llama.gguf")
    request["model"] = str(tmp_path / "job" / "llama.gguf")
    run_vllm(release, patched_tree(release, tmp_path / "tree"), [request])
    assert (
        "torch.bfloat16 is not supported for quantization method gguf"
        in text_of_error(tmp_path / "job")
    )
