# SPDX-License-Identifier: Apache-2.0
"""The indexer's logits at real sizes, in a CUDA graph, without a wait for the GPU."""

from itertools import product

import mqa_reference as reference
import pytest
import torch
from compare import MismatchError
from mqa_cases import Decode, Prefill
from mqa_compare import check_logits, topk_overlap
from ops import triton_mqa_logits as mqa
from ops import triton_mqa_warmup as warming

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LARGE_DECODE = [
    Decode("32x8k", lens=(8192,) * 32, max_len=8192),
    Decode("8x32k-64", heads=64, lens=(32_768,) * 8, max_len=65_536),
    Decode("mixed", lens=(120_000, 17, 3000, 1, 0, 64) * 4, max_len=131_072),
    Decode("next-4", next_n=4, lens=(9000, 20, 700), shape="Bn", max_len=9000),
]


@pytest.mark.parametrize("native", [True, False], ids=["float8", "integers"])
@pytest.mark.parametrize("case", LARGE_DECODE, ids=lambda case: case.name)
def test_decode_at_real_sizes(
    case: Decode, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native and not mqa.has_float8(torch.cuda.get_device_capability()):
        pytest.skip("this GPU has no float8")
    if not native:
        monkeypatch.setattr(mqa, "_capability", lambda _: (8, 0))
    arguments = case.build("cuda")
    logits = mqa.paged_mqa_logits(**arguments, clean=True)
    expected = reference.paged_mqa_logits(**arguments)
    error = check_logits(case.name, logits, expected)
    print(f"{case.name}: {error:.2e} of the largest logit")
    with pytest.raises(MismatchError):
        check_logits("shifted", logits.roll(1, dims=1), expected)


@pytest.mark.parametrize("native", [True, False], ids=["float8", "integers"])
@pytest.mark.parametrize("heads", [32, 64])
def test_prefill_and_top_k_at_real_sizes(
    heads: int, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native and not mqa.has_float8(torch.cuda.get_device_capability()):
        pytest.skip("this GPU has no float8")
    if not native:
        monkeypatch.setattr(mqa, "_capability", lambda _: (8, 0))
    case = Prefill("16k", heads=heads, requests=((16_000, 200), (900, 57)))
    arguments = case.build("cuda")
    logits = mqa.mqa_logits(**arguments, clean=True)
    expected = reference.mqa_logits(**arguments)
    error = check_logits(case.name, logits, expected)
    share, wrong = topk_overlap(logits[:200], expected[:200], 2048)
    print(f"heads {heads}: {error:.2e} of the largest logit, top-k share {share:.5f}")
    assert share >= 0.999
    assert wrong == 0


@pytest.mark.parametrize("next_n", [1, 2])
def test_a_captured_graph_follows_the_lengths(next_n: int) -> None:
    case = Decode("graph", next_n=next_n, lens=(500, 300, 64, 1000), max_len=1024)
    arguments = case.build("cuda")
    full = arguments["context_lens"].clone()
    mqa.paged_mqa_logits(**arguments)  # compiles; a capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = mqa.paged_mqa_logits(**arguments)
    for lens in (full, full // 2, 0 * full, full - 63):
        arguments["context_lens"].copy_(lens)
        logits.fill_(-torch.inf)  # what `clean` would have done
        graph.replay()
        torch.cuda.synchronize()
        expected = reference.paged_mqa_logits(**arguments)
        check_logits(f"lengths {lens.tolist()}", logits, expected)


def test_nothing_waits_for_the_gpu() -> None:
    prefill = Prefill("warm", requests=((100, 9),)).build("cuda")
    decode = Decode("warm", lens=(100, 20)).build("cuda")
    mqa.mqa_logits(**prefill)
    mqa.paged_mqa_logits(**decode)
    torch.cuda.set_sync_debug_mode("error")
    try:
        mqa.mqa_logits(**prefill)
        mqa.paged_mqa_logits(**decode)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_million_keys_and_rows_beyond_two_to_the_31() -> None:
    """Logits of 2**31 elements and more; the first and the last row are looked at."""
    num_keys, num_queries = 1_000_000, 2300
    generator = torch.Generator().manual_seed(1)
    k = torch.randn(num_keys, 128, generator=generator).to(torch.float8_e4m3fn)
    q = torch.randn(num_queries, 32, 128, generator=generator).to(torch.float8_e4m3fn)
    every = {
        "q": q,
        "k": k,
        "k_scale": torch.rand(num_keys, generator=generator),
        "weights": torch.randn(num_queries, 32, generator=generator),
        "starts": torch.full((num_queries,), num_keys - 5000, dtype=torch.int32),
        "ends": torch.full((num_queries,), num_keys, dtype=torch.int32),
    }
    logits = mqa.mqa_logits(**{name: t.cuda() for name, t in every.items()})
    rows = torch.tensor([0, num_queries - 1])
    some = {
        name: t[rows] if t.shape[0] == num_queries else t for name, t in every.items()
    }
    expected = reference.mqa_logits(**some)[:, -5000:]
    check_logits("2**31", logits[rows.cuda(), -5000:], expected)


def test_two_runs_are_bit_identical() -> None:
    arguments = LARGE_DECODE[0].build("cuda")
    first = mqa.paged_mqa_logits(**arguments, clean=True)
    assert torch.equal(first, mqa.paged_mqa_logits(**arguments, clean=True))


def test_nothing_compiles_after_the_warm_up() -> None:
    heads, next_n, device = 32, 2, torch.device("cuda", 0)
    kernels = (mqa._mqa_logits_kernel, mqa._paged_mqa_logits_kernel)

    def binaries() -> int:
        return sum(len(kernel.device_caches[0][0]) for kernel in kernels)

    for kernel in kernels:  # of what other tests have compiled
        kernel.device_caches[0][0].clear()
    warming.warm_up_prefill.cache_clear()
    warming.warm_up_decode.cache_clear()
    warming.warm_up_prefill(heads, device)
    warming.warm_up_decode(heads, next_n, 200, device)
    warm = binaries()
    assert warm == 1 + 3, "one of prefill; decode for 32, 128 and 512 requests"

    for requests in (((0, 1),), ((8, 1),), ((9, 16), (0, 16)), ((700, 33), (0, 7))):
        arguments = Prefill("any", requests=requests).build("cuda")
        mqa.mqa_logits(**arguments)
        last = {name: tensor[-1:] for name, tensor in arguments.items() if name != "k"}
        last["k_scale"] = arguments["k_scale"]
        mqa.mqa_logits(k=arguments["k"], **last)
    for count, shape in product((1, 2, 16, 32, 33, 128, 129, 200), ("B", "B1", "Bn")):
        case = Decode("any", next_n=next_n, lens=(70,) * count, shape=shape)
        mqa.paged_mqa_logits(**case.build("cuda"))
    assert binaries() == warm
    mqa.paged_mqa_logits(**Decode("new", next_n=3, lens=(70,)).build("cuda"))
    assert binaries() > warm, "what was not warmed up must show"
