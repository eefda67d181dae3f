# SPDX-License-Identifier: Apache-2.0
"""The backend inside a real vLLM tree: its real base classes, our files laid over.

GLM5_PATCH_RELEASE chooses the release, 0.16.0 unless set; test_backend_releases.py
runs this file for each. The interpreter needs what
tests/releases/requirements-select.txt lists. What is not real here: the
configuration, of which the builder reads a few values, and the indexer, whose
picks are drawn. The layer around the backend does not run, nor does vLLM's write of
the cache.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import reference
import torch
from cases import PAGE, ROW_DIM
from compare import MismatchError, check_lse, check_out

FILES = Path(__file__).parents[2] / "patches" / "files"
RELEASE = os.environ.get("GLM5_PATCH_RELEASE", "0.16.0")
TOPK, MAX_TOKENS, HEADS = 48, 64, 8
SCALE = 256**-0.5


@pytest.fixture(scope="module")
def vllm_backend(release_tree: Callable[[str], Path]) -> ModuleType:
    """Our backend module, imported into the tree's own vllm package."""
    tree = release_tree(RELEASE)
    sys.dont_write_bytecode = True  # the tree is every test's
    sys.path.insert(0, str(tree))
    assert Path(importlib.import_module("vllm").__file__).is_relative_to(tree)
    for package in ("vllm.v1.attention.ops", "vllm.v1.attention.backends.mla"):
        module = importlib.import_module(package)
        module.__path__.append(str(FILES / package.replace(".", "/")))
    return importlib.import_module("vllm.v1.attention.backends.mla.triton_mla_sparse")


@pytest.fixture
def make_builder(vllm_backend: ModuleType, device: str) -> Callable[..., Any]:
    def make(
        dtype: torch.dtype = torch.float16, kv: str = "auto", fused_write: bool = False
    ) -> Any:
        config = SimpleNamespace(
            cache_config=SimpleNamespace(cache_dtype=kv),
            speculative_config=None,
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=MAX_TOKENS),
            model_config=SimpleNamespace(
                hf_text_config=SimpleNamespace(index_topk=TOPK),
                dtype=dtype,
                get_num_attention_heads=lambda parallel_config: HEADS,
            ),
            compilation_config=SimpleNamespace(
                pass_config=SimpleNamespace(fuse_rope_kvcache_cat_mla=fused_write)
            ),
        )
        backend = vllm_backend.TritonMLASparseBackend
        return backend.get_builder_cls()(
            SimpleNamespace(block_size=PAGE), ["layer"], config, torch.device(device)
        )

    return make


@pytest.fixture
def builder(make_builder: Callable[..., Any]) -> Any:
    return make_builder()


def make_impl(vllm_backend: ModuleType, **changes: Any) -> Any:
    arguments = {
        "num_heads": HEADS,
        "head_size": ROW_DIM,
        "scale": SCALE,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "qk_head_dim": 256,
        "v_head_dim": 256,
        "kv_b_proj": None,
        "indexer": None,
        **changes,
    }
    return vllm_backend.TritonMLASparseBackend.get_impl_cls()(**arguments)


def common_metadata(device: str, query_lens: list[int], padding: int = 0) -> Any:
    """vLLM's own metadata for requests of these query lengths, 128 tokens of context.

    `padding` tokens follow that belong to no request, as in a captured graph.
    """
    backend = importlib.import_module("vllm.v1.attention.backend")
    ends = torch.tensor([0, *query_lens]).cumsum(0).int()
    num_tokens = int(ends[-1]) + padding
    table = torch.randperm(
        4 * len(query_lens), generator=torch.Generator().manual_seed(2)
    )
    return backend.CommonAttentionMetadata(
        query_start_loc=ends.to(device),
        query_start_loc_cpu=ends,
        seq_lens=torch.tensor([128 + n for n in query_lens]).int().to(device),
        num_reqs=len(query_lens),
        num_actual_tokens=num_tokens,
        max_query_len=max(query_lens),
        max_seq_len=128 + max(query_lens),
        block_table_tensor=table.view(-1, 4).int().to(device),
        slot_mapping=torch.arange(num_tokens, device=device),
    )


def batch(device: str, tokens: int, blocks: int, dtype: torch.dtype) -> Any:
    """Query in two parts as vLLM passes it, a cache, and the indexer's picks."""
    generator = torch.Generator().manual_seed(tokens)
    latent = torch.randn(HEADS, tokens, 512, generator=generator).transpose(0, 1)
    rope = torch.randn(tokens, HEADS, 256, generator=generator)[..., 192:]
    cache = torch.randn(blocks, PAGE, ROW_DIM, generator=generator)
    picks = torch.rand(MAX_TOKENS, 128, generator=generator).argsort(dim=1)
    picks = picks[:, :TOPK].int().contiguous()
    picks[::3, 30:] = -1
    return SimpleNamespace(
        q=(latent.to(dtype).to(device), rope.to(dtype).to(device)),
        cache=cache.to(dtype).to(device),
        picks=picks.to(device),
    )


def in_fp8(data: Any) -> Any:
    """The same batch with a cache of bytes, and the numbers that these stand for."""
    dtype = data.q[0].dtype
    cache = reference.encode_fp8(data.cache, dtype)
    rows = reference.decode_fp8(cache.cpu(), dtype).to(cache.device)
    return SimpleNamespace(q=data.q, picks=data.picks, cache=cache, rows=rows)


def expect(data: Any, table: torch.Tensor, req_of_token: list[int]) -> Any:
    slots = reference.slots_from_positions(
        data.picks[: len(req_of_token)],
        table.cpu(),
        torch.tensor(req_of_token),
        PAGE,
    )
    q = torch.cat(data.q, dim=-1)[: len(req_of_token)]
    rows = getattr(data, "rows", data.cache)
    return reference.sparse_mla(q, rows, slots.to(q.device), SCALE)


@pytest.mark.parametrize("kv", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [3, 3], [5, 1, 9]], ids=str)
def test_a_batch_agrees_with_the_reference(
    query_lens: list[int],
    dtype: torch.dtype,
    kv: str,
    vllm_backend: ModuleType,
    builder: Any,
    device: str,
) -> None:
    """Decode, speculative decode, and prefill beside decode; then a padding token."""
    cm = common_metadata(device, query_lens, padding=1)
    metadata = builder.build(0, cm)
    owners = [r for r, n in enumerate(query_lens) for _ in range(n)]
    assert metadata.req_of_token.tolist() == [*owners, len(query_lens)]
    assert metadata.num_decode_tokens == metadata.num_actual_tokens

    data = batch(device, len(owners) + 1, 4 * len(query_lens), dtype)
    if kv == "fp8_ds_mla":
        data = in_fp8(data)
    indexer = SimpleNamespace(topk_indices_buffer=data.picks)
    impl = make_impl(vllm_backend, indexer=indexer, kv_cache_dtype=kv)
    out, lse = impl.forward_mqa(data.q, data.cache, metadata, None)
    wanted_out, wanted_lse = expect(data, cm.block_table_tensor, [*owners, -1])
    check_out("batch", out, wanted_out)
    check_lse("batch", lse, wanted_lse)
    assert torch.equal(out[-1], torch.zeros_like(out[-1])), "padding has no keys"

    # The same numbers under another request's table must not pass.
    swapped = cm.block_table_tensor.roll(1, dims=0)
    with pytest.raises(MismatchError):
        check_out("swapped", out, expect(data, swapped, [*owners, -1])[0])


def test_one_query_tensor_equals_two_parts(
    vllm_backend: ModuleType, builder: Any, device: str
) -> None:
    metadata = builder.build(0, common_metadata(device, [2, 1]))
    data = batch(device, 3, 8, torch.float16)
    impl = make_impl(vllm_backend, topk_indices_buffer=data.picks)
    two, _ = impl.forward_mqa(data.q, data.cache, metadata, None)
    one, _ = impl.forward_mqa(torch.cat(data.q, dim=-1), data.cache, metadata, None)
    assert torch.equal(one, two)


def test_q_may_have_fewer_rows_than_the_metadata(
    vllm_backend: ModuleType, builder: Any, device: str
) -> None:
    metadata = builder.build(0, common_metadata(device, [5, 2]))
    data = batch(device, 7, 8, torch.float16)
    impl = make_impl(vllm_backend, topk_indices_buffer=data.picks)
    whole, _ = impl.forward_mqa(data.q, data.cache, metadata, None)
    few = tuple(part[:4] for part in data.q)
    first, lse = impl.forward_mqa(few, data.cache, metadata, None)
    assert list(lse.shape) == [4, HEADS]
    # Not bit for bit: fewer tokens may split their keys over more programs.
    check_out("fewer rows", first, whole[:4])


def test_the_buffers_of_a_captured_graph_stay_where_they_are(
    builder: Any, device: str
) -> None:
    first = builder.build(0, common_metadata(device, [1, 1])).req_of_token
    second = builder.build(0, common_metadata(device, [9, 1, 3])).req_of_token
    assert first.data_ptr() == second.data_ptr()


@pytest.mark.parametrize("kv", ["auto", "fp8_ds_mla"])
def test_a_builder_has_the_kernels_compiled_for_all_its_batches(
    vllm_backend: ModuleType,
    make_builder: Callable[..., Any],
    kv: str,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    monkeypatch.setattr(vllm_backend, "warm_up", lambda *how: asked.append(how))
    make_builder(kv=kv)
    fp8 = kv == "fp8_ds_mla"
    wanted = (HEADS, TOPK, torch.float16, fp8, PAGE, MAX_TOKENS, torch.device(device))
    assert asked == [wanted]


def test_a_batch_beyond_the_buffers_is_refused(builder: Any, device: str) -> None:
    with pytest.raises(ValueError, match="= 64 tokens, found 65"):
        builder.build(0, common_metadata(device, [65]))


def test_the_indexer_is_asked_at_every_use(vllm_backend: ModuleType) -> None:
    """A draft model's indexer is pointed at the target's buffer after the fact."""
    indexer = SimpleNamespace(topk_indices_buffer=torch.zeros(1))
    impl = make_impl(vllm_backend, indexer=indexer)
    indexer.topk_indices_buffer = torch.ones(1)
    assert impl.topk_indices_buffer is indexer.topk_indices_buffer


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({}, ValueError, "an indexer or a topk_indices_buffer, found neither"),
        (
            {"sliding_window": 128},
            NotImplementedError,
            "none of alibi_slopes, sliding_window, logits_soft_cap, "
            "found sliding_window=128",
        ),
        ({"kv_lora_rank": 256}, NotImplementedError, "512, found 576 and 256"),
    ],
    ids=["no-picks", "sliding-window", "other-model"],
)
def test_what_cannot_be_served_is_refused(
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
    vllm_backend: ModuleType,
) -> None:
    with pytest.raises(error, match=message):
        make_impl(vllm_backend, **changes)


def reasons(vllm_backend: ModuleType, **changes: Any) -> list[str]:
    """The reasons of vLLM's own validation."""
    capability = SimpleNamespace(major=12, minor=0)
    arguments = {
        "head_size": 576,
        "dtype": torch.float16,
        "kv_cache_dtype": "auto",
        "block_size": None,  # as the platform passes it
        "use_mla": True,
        "has_sink": False,
        "use_sparse": True,
        "use_mm_prefix": False,
        "device_capability": capability,
        "attn_type": "decoder",
        **changes,
    }
    validate = vllm_backend.TritonMLASparseBackend.validate_configuration
    # Releases add questions, all of them about features that are off.
    for name, parameter in inspect.signature(validate).parameters.items():
        if parameter.default is parameter.empty:
            arguments.setdefault(name, False)
    return validate(**arguments)


@pytest.mark.parametrize("major", [8, 9, 10, 12])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_both_dtypes_are_served_from_sm80_on(
    dtype: torch.dtype, major: int, vllm_backend: ModuleType
) -> None:
    capability = SimpleNamespace(major=major, minor=0)
    assert not reasons(vllm_backend, dtype=dtype, device_capability=capability)


def test_sm75_is_not_served(vllm_backend: ModuleType) -> None:
    capability = SimpleNamespace(major=7, minor=5)
    assert reasons(vllm_backend, device_capability=capability) == [
        "compute capability not supported"
    ]


@pytest.mark.parametrize("kv", ["fp8", "fp8_e4m3"])
def test_another_quantised_cache_is_refused_in_a_sentence(
    kv: str, vllm_backend: ModuleType
) -> None:
    assert reasons(vllm_backend, kv_cache_dtype=kv, dtype=torch.bfloat16) == [
        "kv_cache_dtype not supported",
        "TRITON_MLA_SPARSE keeps the KV cache in the model's own dtype, bfloat16, or "
        f"in fp8_ds_mla, but kv_cache_dtype is {kv!r} (a checkpoint can set that by "
        "itself): pass --kv-cache-dtype bfloat16, which stands for any 16-bit cache, "
        "or fp8_ds_mla",
    ]


# Up to 0.16.0 the layer writes the cache itself.
WRITES_CACHE = RELEASE != "0.16.0"


def test_fp8_ds_mla_is_served_wherever_it_is_written_right(
    vllm_backend: ModuleType,
) -> None:
    assert vllm_backend.WRITES_CACHE == WRITES_CACHE
    assert not reasons(vllm_backend, kv_cache_dtype="fp8_ds_mla", dtype=torch.bfloat16)
    refusal = (
        "vLLM's own operator writes fp8_ds_mla wrongly from float16, and this release "
        "lets no backend write its cache: pass --dtype bfloat16, or --kv-cache-dtype "
        "bfloat16, which stands for any 16-bit cache"
    )
    in_float16 = reasons(vllm_backend, kv_cache_dtype="fp8_ds_mla")
    assert in_float16 == ([] if WRITES_CACHE else [refusal])


def test_float16_rows_are_ours_and_all_others_vllms(
    vllm_backend: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_by_vllm = []
    monkeypatch.setattr(
        vllm_backend._ImplBase,
        "do_kv_cache_update",
        lambda _, *args, **kwargs: written_by_vllm.append((args, kwargs)),
        raising=WRITES_CACHE,
    )
    impl = make_impl(vllm_backend, topk_indices_buffer=torch.zeros(1))
    rows = torch.randn(3, ROW_DIM, generator=torch.Generator().manual_seed(3)).half()
    slots = torch.tensor([[70, -1, 3]], device=device)
    scale = torch.ones(())

    def update(dtype: torch.dtype, cache: torch.Tensor, kv: str) -> None:
        parts = rows.to(dtype).to(device).split([512, 64], dim=1)
        impl.do_kv_cache_update(parts[0], parts[1][:, None], cache, slots, kv, scale)

    cache = torch.zeros(2, PAGE, 656, dtype=torch.uint8, device=device)
    update(torch.float16, cache, "fp8_ds_mla")
    expected = torch.zeros_like(cache).cpu()
    encoded = reference.encode_fp8(rows, torch.float16)
    expected[1, 6], expected[0, 3] = encoded[0], encoded[2]
    assert torch.equal(cache.cpu(), expected)
    update(torch.float16, cache[:0], "fp8_ds_mla")  # the profile run
    assert not written_by_vllm

    update(torch.bfloat16, cache, "fp8_ds_mla")
    update(torch.float16, cache, "auto")
    assert torch.equal(cache.cpu(), expected)
    assert [args[4] for args, _ in written_by_vllm] == ["fp8_ds_mla", "auto"]
    assert all(args[2] is cache and args[5] is scale for args, _ in written_by_vllm)


def test_a_fused_write_of_float16_rows_is_refused(
    make_builder: Callable[..., Any],
) -> None:
    refused = {"kv": "fp8_ds_mla", "dtype": torch.float16, "fused_write": True}
    with pytest.raises(ValueError, match="the pass fuse_rope_kvcache_cat_mla writes"):
        make_builder(**refused)
    for change in ({"kv": "auto"}, {"dtype": torch.bfloat16}, {"fused_write": False}):
        make_builder(**(refused | change))


@pytest.mark.parametrize(("kv", "row"), [("auto", 576), ("fp8_ds_mla", 656)])
def test_the_cache_has_the_size_that_vllm_reserves(
    kv: str, row: int, vllm_backend: ModuleType
) -> None:
    """vLLM's page size is its own formula; a shape of another size cannot be viewed."""
    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    torch_utils = importlib.import_module("vllm.utils.torch_utils")
    model = SimpleNamespace(dtype=torch.bfloat16)
    dtype = torch_utils.kv_cache_dtype_str_to_dtype(kv, model)
    shape = vllm_backend.TritonMLASparseBackend.get_kv_cache_shape(
        7, PAGE, 1, ROW_DIM, cache_dtype_str=kv
    )
    assert shape == (7, PAGE, row)
    spec = interface.MLAAttentionSpec(
        block_size=PAGE,
        num_kv_heads=1,
        head_size=ROW_DIM,
        dtype=dtype,
        cache_dtype_str=kv,
    )
    assert 7 * spec.page_size_bytes == torch.empty(shape, dtype=dtype).nbytes


def test_bfloat16_names_any_16_bit_cache(vllm_backend: ModuleType) -> None:
    # The patch's hook in models/config.py makes it "auto" before a layer is built.
    assert not reasons(vllm_backend, kv_cache_dtype="bfloat16")
    assert not reasons(vllm_backend, kv_cache_dtype="bfloat16", dtype=torch.bfloat16)
