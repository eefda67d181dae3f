# SPDX-License-Identifier: Apache-2.0
"""vLLM's own indexer, patched, from the batch to the picks, on a GPU that is not there.

GLM5_PATCH_RELEASE chooses the release; test_backend_releases.py runs this file for
each. The builder, the layer, the op and vLLM's Triton kernels are the release's, the
logits ours, all interpreted. Three compiled operators have stand-ins in torch.
"""

import dataclasses
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compare import MismatchError
from indexer_layer import (
    HEAD_DIM,
    HEADS,
    PAGE,
    Batch,
    build_metadata,
    check_picks,
    make_inputs,
    reference_logits,
    run_layer,
)

from glm5_patch import manifest, overlay, plan, tree
from glm5_patch.probe.child import cuda, importing

ROOT = Path(__file__).parents[2]
RELEASE = os.environ.get("GLM5_PATCH_RELEASE", "0.16.0")
TOPK, MAX_MODEL_LEN = 48, 1024
TOLERANCE = 1e-5  # of the largest logit: float32 sums in another order

BATCHES = [
    Batch("prefill", before=(0,), now=(130,)),
    Batch("continued", before=(100, 0, 64), now=(9, 70, 3)),
    Batch("decode", before=(200, 0, 63, 128), now=(1, 1, 1, 1)),
    Batch("mixed", before=(300, 20, 90, 0), now=(1, 1, 40, 17)),
    Batch("one draft", before=(200, 70, 30), now=(2, 2, 2), drafts=1),
    Batch("three drafts", before=(200, 70), now=(4, 4), drafts=3),
    Batch("two of three", before=(200, 70), now=(2, 2), drafts=3),
    Batch("two, one of three", before=(200, 70), now=(2, 1), drafts=3),
    Batch("some drafts", before=(200, 70, 80), now=(2, 1, 2), drafts=1),
    Batch("three, some", before=(200, 70, 80), now=(4, 1, 3), drafts=3),
    Batch("drafts, mixed", before=(200, 70, 50, 0), now=(1, 2, 30, 9), drafts=1),
]


@pytest.fixture(scope="module", autouse=True)
def patched_vllm(release_tree: Callable[[str], Path]) -> Iterator[None]:
    """The release's vllm with the feature, on a simulated SM86 with CPU tensors."""
    patches = manifest.load(ROOT / "patches")
    features = manifest.choose(patches, ["indexer"])
    series = manifest.series(patches, features, RELEASE, tested=True)
    root = release_tree(RELEASE)
    made = plan.make(series, lambda path: tree.read(root, path))
    # vLLM 0.23.0's workspace imports it by way of the server, and needs none of it.
    sys.modules.setdefault("uvloop", ModuleType("uvloop"))
    # No GPU at all would turn vLLM's Triton off; none for now does not.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with overlay.sides(made) as (_, patched):
        importing.install(root, patched)
        importing.answer_for_ops(torch)
        cuda.Device.capability = (8, 6)
        platform = cuda.install_platform()
        type(platform).dispatch_key = "CPU"
        type(platform).num_compute_units = classmethod(lambda cls, device_id=0: 132)
        with cuda.without_device(torch):
            importlib.import_module("vllm.model_executor.layers.sparse_attn_indexer")
        torch.accelerator.empty_cache = lambda: None  # by the workspace, as it grows
        stand_in_for_compiled_ops()
        yield


def stand_in_for_compiled_ops() -> None:
    """What the indexer calls of vLLM's compiled code, by what it does."""
    top_k = "Tensor logits, {} Tensor(a!) picks, int rows, int s0, int s1, int k"
    for namespace, signature, function in (
        (
            "_C_cache_ops",
            "indexer_k_quant_and_cache(Tensor k, Tensor(a!) cache, Tensor slots, "
            "int block, str format)",
            write_keys,
        ),
        (
            "_C_cache_ops",
            "cp_gather_indexer_k_quant_cache(Tensor cache, Tensor(a!) k, "
            "Tensor(b!) scales, Tensor table, Tensor ends)",
            gather_keys,
        ),
        (
            "_C",
            f"top_k_per_row_prefill({top_k.format('Tensor low, Tensor high,')}) -> ()",
            top_k_prefill,
        ),
        (
            "_C",
            f"top_k_per_row_decode({top_k.format('int next_n, Tensor lens,')}) -> ()",
            top_k_decode,
        ),
    ):
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(signature if "->" in signature else f"{signature} -> ()")
        library.impl(signature.partition("(")[0], function, "CPU")
        LIBRARIES.append(library)


LIBRARIES: list[torch.library.Library] = []  # an op lives as long as its library


def write_keys(
    k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, block: int, fmt: str
) -> None:
    assert (block, fmt) == (HEAD_DIM, "ue8m0")
    k = k.float()
    scales = torch.exp2((k.abs().amax(dim=1) / 448).clamp(min=1e-10).log2().ceil())
    bits = (k / scales[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    pages = cache.view(len(cache), -1)
    for token, slot in enumerate(slots.tolist()):
        page, place = pages[slot // PAGE], slot % PAGE
        page[place * HEAD_DIM :][:HEAD_DIM] = bits[token]
        page[PAGE * HEAD_DIM + 4 * place :][:4] = scales[token, None].view(torch.uint8)


def gather_keys(
    cache: torch.Tensor,
    k: torch.Tensor,
    scales: torch.Tensor,
    table: torch.Tensor,
    ends: torch.Tensor,
) -> None:
    pages = cache.view(len(cache), -1)
    for row, (low, high) in enumerate(itertools.pairwise(ends)):
        for n in range(int(high - low)):
            page, place = pages[table[row, n // PAGE]], n % PAGE
            k.view(torch.uint8)[low + n] = page[place * HEAD_DIM :][:HEAD_DIM]
            scales[low + n] = page[PAGE * HEAD_DIM + 4 * place :][:4]


def top_k_prefill(
    logits: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    picks: torch.Tensor,
    rows: int,
    s0: int,
    s1: int,
    k: int,
) -> None:
    assert (rows, s0, s1) == (len(logits), logits.stride(0), logits.stride(1))
    for row in range(rows):
        keys = logits[row, low[row] : high[row]]
        count = min(k, len(keys))
        picks[row, :count] = keys.topk(count).indices.int()
        picks[row, count:] = -1


def top_k_decode(
    logits: torch.Tensor,
    next_n: int,
    lens: torch.Tensor,
    picks: torch.Tensor,
    rows: int,
    s0: int,
    s1: int,
    k: int,
) -> None:
    if lens.dim() == 2 and lens.shape[1] == next_n:
        ends = lens.reshape(-1)
    else:  # of the last row of each request
        ends = (lens.reshape(-1, 1) - next_n + 1 + torch.arange(next_n)).reshape(-1)
    top_k_prefill(logits, 0 * ends, ends, picks, rows, s0, s1, k)


def share_of(batch: Batch, **changes: torch.Tensor) -> float:
    inputs = make_inputs(batch, "cpu", MAX_MODEL_LEN)
    given = dataclasses.replace(inputs, **changes)
    metadata = build_metadata(batch, given, MAX_MODEL_LEN)
    picks = run_layer(given, metadata, TOPK, MAX_MODEL_LEN)
    return check_picks(picks, reference_logits(batch, inputs), TOLERANCE)


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: batch.name)
def test_the_layer_picks_the_best_keys(batch: Batch) -> None:
    assert share_of(batch) >= 0.999


def test_prefill_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """One MB of logits: 262,144 of them, and the batch has 350 rows of 800."""
    monkeypatch.setenv("VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", "1")
    batch = Batch("pieces", before=(450,), now=(350,))
    inputs = make_inputs(batch, "cpu", MAX_MODEL_LEN)
    metadata = build_metadata(batch, inputs, MAX_MODEL_LEN)
    assert len(metadata.prefill.chunks) == 2
    picks = run_layer(inputs, metadata, TOPK, MAX_MODEL_LEN)
    assert check_picks(picks, reference_logits(batch, inputs), TOLERANCE) >= 0.999


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: batch.name)
def test_another_tokens_weights_would_be_seen(batch: Batch) -> None:
    weights = make_inputs(batch, "cpu", MAX_MODEL_LEN).weights.roll(1, dims=0)
    if len(weights) == 1:
        weights = -weights
    with pytest.raises(MismatchError):
        share_of(batch, weights=weights)


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: batch.name)
def test_no_batch_is_left_to_pad(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """As 0.16.0 pads, tokens get the weights and lengths of others; 0.23.0 does not."""
    inputs = make_inputs(batch, "cpu", MAX_MODEL_LEN)
    decode = build_metadata(batch, inputs, MAX_MODEL_LEN).decode
    assert decode is None or not decode.requires_padding
    module = importlib.import_module("vllm.v1.attention.backends.mla.indexer")
    if hasattr(module, "one_query_each") and batch.name == "drafts, mixed":
        monkeypatch.setattr(module, "one_query_each", lambda decode, _: decode)
        assert build_metadata(batch, inputs, MAX_MODEL_LEN).decode.requires_padding
        with pytest.raises(MismatchError):
            share_of(batch)


def test_the_logits_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = importlib.import_module("vllm.v1.attention.ops.triton_mqa_logits")
    assert "glm5-patch" in kernels.__file__
    for name in ("mqa_logits", "paged_mqa_logits"):
        original = getattr(kernels, name)

        def negated(*a: object, original: Callable = original, **k: object) -> object:
            return -original(*a, **k)

        monkeypatch.setattr(kernels, name, negated)
        for batch in BATCHES[:1] if name == "mqa_logits" else BATCHES[2:3]:
            with pytest.raises(MismatchError):
                share_of(batch)


@pytest.mark.parametrize("batch", [BATCHES[0], BATCHES[3]], ids=lambda b: b.name)
def test_keys_in_float16_are_written_by_ours(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's operator, which is wrong there, is called for bfloat16 alone."""
    inputs = make_inputs(batch, "cpu", MAX_MODEL_LEN)
    expected = inputs.cache.clone()
    write_keys(inputs.k.half(), expected, inputs.slots, HEAD_DIM, "ue8m0")
    operators = importlib.import_module("vllm._custom_ops")
    called = []
    monkeypatch.setattr(
        operators, "indexer_k_quant_and_cache", lambda *given: called.append(given)
    )
    metadata = build_metadata(batch, inputs, MAX_MODEL_LEN)
    run_layer(inputs, metadata, TOPK, MAX_MODEL_LEN)
    assert len(called) == 1
    assert not torch.equal(inputs.cache, expected), "nothing was written"
    half = dataclasses.replace(inputs, k=inputs.k.half())
    run_layer(half, metadata, TOPK, MAX_MODEL_LEN)
    assert len(called) == 1
    assert torch.equal(inputs.cache, expected)


def test_the_builder_compiles_what_its_batches_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing else, and nothing at all where DeepGEMM makes the logits."""
    ops = "vllm.v1.attention.ops"
    kernels = importlib.import_module(f"{ops}.triton_mqa_logits")
    warming = importlib.import_module(f"{ops}.triton_mqa_warmup")
    glue = importlib.import_module("vllm.utils.indexer_logits")
    prefill: list[int] = []
    decode: dict[int, int] = {}  # most requests, by tokens of each
    launched: list[tuple[int, ...]] = []
    score = kernels.paged_mqa_logits

    def listen(q: torch.Tensor, *a: object, **k: object) -> torch.Tensor:
        launched.append(tuple(q.shape))
        return score(q, *a, **k)

    monkeypatch.setattr(kernels, "paged_mqa_logits", listen)
    monkeypatch.setattr(warming, "warm_up_prefill", lambda h, _: prefill.append(h))
    monkeypatch.setattr(
        warming, "warm_up_decode", lambda h, n, most, _: decode.update({n: most})
    )
    for drafts in {batch.drafts for batch in BATCHES}:
        launched.clear(), decode.clear(), prefill.clear()
        for batch in BATCHES:
            if batch.drafts == drafts:
                share_of(batch)
        assert set(prefill) == {HEADS}
        assert {shape[1] for shape in launched} == set(decode)
        assert all(shape[0] <= decode[shape[1]] for shape in launched)

    prefill.clear(), decode.clear()
    monkeypatch.setattr(glue, "uses_triton", lambda: False)
    keys: list[torch.dtype] = []
    monkeypatch.setattr(warming, "warm_up_keys", lambda dtype, _: keys.append(dtype))
    inputs = make_inputs(BATCHES[0], "cpu", 1024)
    build_metadata(BATCHES[0], inputs, MAX_MODEL_LEN)
    assert not prefill and not decode and not keys
    build_metadata(BATCHES[0], inputs, MAX_MODEL_LEN, torch.float16)
    assert keys == [torch.float16]


def test_vllm_is_the_release() -> None:
    assert RELEASE in sys.modules["vllm"].__file__
