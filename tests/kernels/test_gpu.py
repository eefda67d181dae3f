# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show: real sizes, graph capture and replay, no wait.

On a machine with a GPU the small cases of the other files run on it too,
compiled; this file adds the rest.
"""

import pytest
import reference
import torch
from cases import LARGE_CASES, PAGE, ROW_DIM, Case
from compare import MismatchError, check_lse, check_out
from ops.triton_sparse_mla import sparse_mla
from ops.triton_sparse_slots import slots_from_positions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ids = [case.name for case in LARGE_CASES]


@pytest.mark.parametrize("case", LARGE_CASES, ids=ids)
def test_real_sizes_agree_with_the_reference(case: Case) -> None:
    inputs = case.build("cuda")
    out, lse = sparse_mla(inputs.q, inputs.kv_cache, inputs.slots, inputs.scale)
    # On the CPU in float64 a whole batch takes minutes; a spread of tokens, first
    # and last among them, takes seconds.
    some = torch.linspace(0, case.tokens - 1, min(case.tokens, 12)).long().unique()
    expected_out, expected_lse = reference.sparse_mla(
        inputs.q[some.cuda()], inputs.kv_cache, inputs.slots[some.cuda()], inputs.scale
    )
    error = check_out(case.name, out[some.cuda()], expected_out)
    lse_error = check_lse(case.name, lse[some.cuda()], expected_lse)
    print(f"{case.name}: worst row {error:.2e}, LSE {lse_error:.2e}")
    with pytest.raises(MismatchError):
        check_out("shifted", out[some.cuda()].roll(1, dims=0), expected_out)


def test_8192_tokens() -> None:
    """The largest batch; the first and the last token are looked at."""
    inputs = Case("8192", tokens=8192, heads=3, topk=64, num_blocks=40).build("cuda")
    out, lse = sparse_mla(inputs.q, inputs.kv_cache, inputs.slots, inputs.scale)
    ends = torch.tensor([0, 8191], device="cuda")
    expected_out, expected_lse = reference.sparse_mla(
        inputs.q[ends], inputs.kv_cache, inputs.slots[ends], inputs.scale
    )
    check_out("8192", out[ends], expected_out)
    check_lse("8192", lse[ends], expected_lse)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_a_captured_graph_follows_its_inputs(tokens: int, dtype: torch.dtype) -> None:
    """Lookup and attention in one graph, replayed over new picks and queries."""
    generator = torch.Generator().manual_seed(tokens)
    heads, topk, pages = 8, 256, 20
    q = torch.empty(tokens, heads, ROW_DIM, dtype=dtype, device="cuda")
    picks = torch.full((tokens, topk), -1, dtype=torch.int32, device="cuda")
    table = torch.empty(tokens, pages, dtype=torch.int32, device="cuda")
    owners = torch.arange(tokens, dtype=torch.int32, device="cuda")
    cache = torch.randn(tokens * pages, PAGE, ROW_DIM, generator=generator)
    cache = cache.to(dtype).cuda()
    q.zero_()
    table.zero_()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        slots = slots_from_positions(picks, table, owners, PAGE)
        return sparse_mla(q, cache, slots, 256**-0.5)

    step()  # compiles; a capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()

    for empty in (0, 100, topk):
        fresh = torch.rand(tokens, pages * PAGE, generator=generator).argsort(dim=1)
        fresh = fresh[:, :topk].int()
        fresh[:, topk - empty :] = -1
        picks.copy_(fresh)
        blocks = torch.randperm(tokens * pages, generator=generator)
        table.copy_(blocks.view(tokens, pages))
        q.copy_(torch.randn(q.shape, generator=generator))
        graph.replay()
        torch.cuda.synchronize()
        slots = reference.slots_from_positions(fresh, table.cpu(), owners.cpu(), PAGE)
        expected_out, expected_lse = reference.sparse_mla(
            q, cache, slots.cuda(), 256**-0.5
        )
        check_out(f"replay, {empty} empty", out, expected_out)
        check_lse(f"replay, {empty} empty", lse, expected_lse)


def test_nothing_waits_for_the_gpu() -> None:
    inputs = Case("warm", heads=8, tokens=4).build("cuda")
    sparse_mla(inputs.q, inputs.kv_cache, inputs.slots, inputs.scale)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sparse_mla(inputs.q, inputs.kv_cache, inputs.slots, inputs.scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_two_runs_are_bit_identical() -> None:
    inputs = LARGE_CASES[0].build("cuda")
    first, _ = sparse_mla(inputs.q, inputs.kv_cache, inputs.slots, inputs.scale)
    second, _ = sparse_mla(inputs.q, inputs.kv_cache, inputs.slots, inputs.scale)
    assert torch.equal(first, second)
