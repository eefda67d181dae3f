# SPDX-License-Identifier: Apache-2.0
"""Real loaders of real releases, patched, fill the model with exactly what they should.

One process a release loads all files below; see `in_vllm` for what is real in it.
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import gguf
import pytest
import torch
from expected_parameters import Case
from patched_vllm import RELEASES, patched_tree, run_vllm
from tiny_glm import (
    SHARING,
    Arrays,
    Tiny,
    Types,
    mixed,
    to_gguf,
    uniform,
    weights,
    write,
    write_config,
)

TINY = Tiny()


def unchanged(tensors: Arrays) -> Arrays:
    return tensors


@dataclass(frozen=True)
class Job:
    """One file and how to load it.

    Attributes:
        change: made to the tensors before they are written.
        open: the file to pass, of those written; a function of the first.
        config: changes to the HF config to pass, or None to pass none.
        error: what the refusal must say; None if the file loads.
    """

    types: Types
    tiny: Tiny = TINY
    dtype: str = "bfloat16"
    tp: int = 1
    change: Callable[[Arrays], Arrays] = unchanged
    write: dict = field(default_factory=dict)
    open: Callable[[Path], Path] = lambda path: path
    config: dict | None = None
    expert_parallel: bool = False
    copies: int = 1
    error: str | None = None
    release: str | None = None


def renamed(old: str, new: str) -> Callable[[Arrays], Arrays]:
    return lambda tensors: {n.replace(old, new): v for n, v in tensors.items()}


def without(start: str) -> Callable[[Arrays], Arrays]:
    return lambda tensors: {n: v for n, v in tensors.items() if not n.startswith(start)}


def with_extra(tensors: Arrays) -> Arrays:
    return tensors | {"blk.1.ffn_surprise.weight": tensors["blk.1.attn_norm.weight"]}


def misshapen(tensors: Arrays) -> Arrays:
    name = "blk.1.attn_q_a.weight"
    return tensors | {name: tensors[name][:-1]}


def third_shard(first: Path) -> Path:
    return first.with_name(first.name.replace("-00001-", "-00003-"))


def lost_shard(first: Path) -> Path:
    third_shard(first).unlink()
    return first


def cut_short(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-5000])
    return path


LIKE_UNSLOTH = mixed(
    "Q8_0",
    ffn_gate_exps="Q4_K",
    ffn_up_exps="Q4_K",
    ffn_down_exps="Q5_K",
)
LIKE_LLAMA_QUANTIZE = mixed(
    "Q4_0",
    attn_k_b="Q5_0",
    attn_v_b="Q4_K",
    attn_output="Q6_K",
    indexer__proj="Q4_K",
    indexer__attn_k="Q3_K",
    ffn_down_exps="Q6_K",
    ffn_gate_exps="IQ4_XS",
    ffn_up_exps="IQ4_XS",
    token_embd="Q2_K",
)

LOADS = {
    "F32": Job(uniform("F32"), dtype="float32"),
    "F32-tp2": Job(uniform("F32"), dtype="float32", tp=2),
    "F32-tp8": Job(uniform("F32"), dtype="float32", tp=8),
    "F16": Job(uniform("F16"), dtype="float16"),
    "BF16": Job(uniform("BF16"), tp=2),
    "Q8_0": Job(uniform("Q8_0")),
    "Q8_0-float16": Job(uniform("Q8_0"), dtype="float16"),
    "Q8_0-tp2": Job(uniform("Q8_0"), tp=2),
    "Q8_0-tp4": Job(uniform("Q8_0"), tp=4),
    "Q8_0-tp8": Job(uniform("Q8_0"), tp=8),
    "Q4_0-tp4": Job(uniform("Q4_0"), tp=4),
    "unsloth": Job(LIKE_UNSLOTH),
    "llama-quantize": Job(LIKE_LLAMA_QUANTIZE),
    "llama-quantize-float16": Job(LIKE_LLAMA_QUANTIZE, dtype="float16"),
    "plain-experts": Job(mixed("Q8_0", _exps="BF16"), tp=2),
    "fused-of-two-types": Job(mixed("Q8_0", attn_q_a="Q4_0", ffn_up__="Q5_1"), tp=2),
    "fused-half-plain": Job(
        mixed("Q8_0", attn_q_a__="F16", ffn_gate__="BF16", ffn_up_shexp="F32"), tp=2
    ),
    "split": Job(uniform("Q8_0"), write={"shard_tensors": 40}),
    "split-opened-in-the-middle": Job(
        uniform("Q8_0"), write={"shard_tensors": 40}, open=third_shard
    ),
    "bias-by-its-other-name": Job(
        uniform("Q8_0"), change=renamed("exp_probs_b.bias", "exp_probs_b")
    ),
    "no-draft-layer": Job(uniform("Q8_0"), dataclasses.replace(TINY, draft_layers=0)),
    "trunk-only": Job(uniform("Q8_0"), change=without("blk.4.")),
    "config-of-hf": Job(uniform("Q8_0"), config={}),
    "sharing-by-key": Job(
        uniform("Q8_0"), SHARING, write={"indexer_types": True}, release="0.23.0"
    ),
    "sharing-by-context": Job(uniform("Q8_0"), SHARING, release="0.23.0"),
    "sharing-without-duplicates": Job(
        uniform("Q8_0"), SHARING, change=without("blk.3.indexer"), release="0.23.0"
    ),
    "sharing-config-of-hf": Job(uniform("Q8_0"), SHARING, config={}, release="0.23.0"),
}

REFUSALS = {
    "ternary": Job(
        mixed("Q8_0", _exps="TQ1_0"),
        error="ffn_down_exps.weight and 8 more: is TQ1_0, for which vLLM has no kernel",
    ),
    "mxfp4": Job(mixed("Q8_0", _exps="MXFP4"), error="UD-Q4_K_XL"),
    "gate-unlike-up": Job(
        mixed("Q8_0", ffn_gate_exps="Q4_0"), error="are of two types, Q4_0 and Q8_0"
    ),
    "half-plain-experts": Job(
        mixed("Q8_0", ffn_down_exps="F16"), error="some are not, which vLLM cannot mix"
    ),
    "expert-parallel": Job(
        uniform("Q8_0"), expert_parallel=True, error="without --enable-expert-parallel"
    ),
    "tp3": Job(uniform("Q8_0"), tp=3, error="8 heads cannot be divided over 3 ranks"),
    "blocks-too-wide": Job(
        LIKE_UNSLOTH, tp=2, error="blocks of 256 inputs cannot be divided over 2 ranks"
    ),
    "blocks-too-wide-for-all-copies": Job(
        LIKE_UNSLOTH, copies=2, error="blocks of 256 inputs cannot be divided over 2 ra"
    ),
    "missing": Job(
        uniform("Q8_0"),
        change=without("blk.2.attn_v_b"),
        error="blk.2.attn_v_b.weight: missing from the files",
    ),
    "no-lm-head": Job(
        uniform("Q8_0"),
        change=without("output.weight"),
        error="output.weight: missing from the files",
    ),
    "surprise": Job(
        uniform("Q8_0"),
        change=with_extra,
        error="blk.1.ffn_surprise.weight: no part of this architecture",
    ),
    "misshapen": Job(
        uniform("Q8_0"), change=misshapen, error="blk.1.attn_q_a.weight: has the shape"
    ),
    "lost-shard": Job(
        uniform("Q8_0"),
        write={"shard_tensors": 40},
        open=lost_shard,
        error="-00003-of-00004.gguf",
    ),
    "cut-short": Job(
        uniform("Q8_0"), open=cut_short, error="not downloaded to the end"
    ),
    "other-rotation": Job(
        uniform("Q8_0"),
        config={"indexer_rope_interleave": False},
        error="indexer_rope_interleave = False, but these files need True",
    ),
    "other-model": Job(
        uniform("Q8_0"),
        config={"rope_parameters": {"rope_type": "default", "rope_theta": 8e6}},
        error="rope_theta = 8000000.0, but these files need 1000000.0",
    ),
    "sharing-unknown-to-release": Job(
        uniform("Q8_0"),
        SHARING,
        error="this model shares indexers between layers",
        release="0.16.0",
    ),
    "sharing-unknown-to-config": Job(
        uniform("Q8_0"),
        SHARING,
        config={"index_topk_pattern": "FFFF"},
        error="layer 3 has an indexer by the config, but by the files it shares one",
        release="0.23.0",
    ),
}
JOBS = LOADS | REFUSALS


@cache
def checkpoint(tiny: Tiny) -> Arrays:
    return weights(tiny)


def prepare(job: Job, folder: Path) -> dict:
    """Write the files of a job; returns the request for `in_vllm`."""
    folder.mkdir()
    tensors = job.change(to_gguf(job.tiny, checkpoint(job.tiny)))
    path = write(folder / "tiny.gguf", job.tiny, tensors, job.types, **job.write)
    config = None
    if job.config is not None:
        config = str(write_config(folder / "hf", job.tiny, **job.config))
    return {
        "model": str(job.open(path)),
        "hf_config_path": config,
        "dtype": job.dtype,
        "capability": (12, 0),
        "tp": job.tp,
        "ranks": list(range(job.tp)),
        "expert_parallel": job.expert_parallel,
        "copies": job.copies,
        "out": str(folder),
    }


@pytest.fixture(scope="session", params=RELEASES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """All jobs of a release, done: the release and the folder of results."""
    release = request.param
    folder = tmp_path_factory.mktemp(release)
    tree = patched_tree(release, folder / "tree")
    requests = []
    for name, job in JOBS.items():
        if job.release not in (None, release):
            continue
        requests.append(prepare(job, folder / name))
    run_vllm(release, tree, requests)
    return release, folder


def results(loaded: tuple[str, Path], name: str) -> list[dict]:
    release, folder = loaded
    job = JOBS[name]
    if job.release not in (None, release):
        pytest.skip(f"of vLLM {job.release} only")
    error = folder / name / "error.json"
    assert not error.exists(), json.loads(error.read_text())["text"]
    return [
        torch.load(folder / name / f"rank{rank}.pt", weights_only=False)
        for rank in range(job.tp)
    ]


def unused(tiny: Tiny, name: str) -> bool:
    """Whether vLLM builds this parameter but no layer ever uses it."""
    layers = tiny.full_layers or (True,) * tiny.layers
    return any(
        f"layers.{layer}.self_attn.indexer." in name and not full
        for layer, full in enumerate(layers)
    )


def case(job: Job, release: str, rank: int, **changes: object) -> Case:
    dtype = getattr(torch, job.dtype)
    fused_index = release != "0.16.0"
    weights = checkpoint(job.tiny)
    whole = Case(job.tiny, weights, job.types, fused_index, job.tp, rank, dtype)
    return dataclasses.replace(whole, **changes)


def wrong_parameters(job: Job, release: str, rank: int, result: dict) -> list[str]:
    """The names of parameters that are not bit for bit what they should be."""
    expected = case(job, release, rank).parameters()
    found = {
        name: values
        for name, values in result["parameters"].items()
        if not name.endswith("qweight_type") and not unused(job.tiny, name)
    }
    return sorted(
        name
        for name in found.keys() | expected.keys()
        if name not in found
        or name not in expected
        or found[name].dtype != expected[name].dtype
        or not torch.equal(found[name], expected[name])
    )


def wrong_layers(job: Job, release: str, rank: int, result: dict) -> list[str]:
    """The GGUF layers that multiply with another matrix than they should."""
    expected = case(job, release, rank, dense=True, dtype=torch.float32).parameters()
    return sorted(
        module
        for module, matrix in result["dense"].items()
        if not torch.equal(matrix, expected[f"{module}.weight"])
    )


@pytest.mark.parametrize("name", LOADS)
def test_every_parameter_is_exactly_right(loaded, name) -> None:
    for rank, result in enumerate(results(loaded, name)):
        assert wrong_parameters(JOBS[name], loaded[0], rank, result) == []


@pytest.mark.parametrize("name", LOADS)
def test_layers_multiply_with_the_right_matrix(loaded, name) -> None:
    """Types and the order of fused parts, which the bytes alone do not show."""
    for rank, result in enumerate(results(loaded, name)):
        assert wrong_layers(JOBS[name], loaded[0], rank, result) == []


@pytest.mark.parametrize("name", ["unsloth", "llama-quantize", "Q8_0-tp8"])
def test_experts_and_vocabulary_know_their_types(loaded, name) -> None:
    job = JOBS[name]
    sources = {
        "mlp.experts.w13_": "ffn_gate_exps.weight",
        "mlp.experts.w2_": "ffn_down_exps.weight",
        "embed_tokens.": "token_embd.weight",
        "lm_head.": "output.weight",
    }
    for result in results(loaded, name):
        checked = 0
        for parameter, kind in result["types"].items():
            for target, source in sources.items():
                if target in parameter:
                    assert gguf.GGMLQuantizationType(kind).name == job.types(source)
                    checked += 1
        assert checked == 2 + 2 * (job.tiny.layers - job.tiny.dense_layers)


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_with_a_sentence(loaded, name) -> None:
    release, folder = loaded
    if JOBS[name].release not in (None, release):
        pytest.skip(f"of vLLM {JOBS[name].release} only")
    error = json.loads((folder / name / "error.json").read_text())
    assert JOBS[name].error in error["text"]
    assert not list((folder / name).glob("*.pt"))
