# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show: real sizes, graph capture and replay, no wait.

On a machine with a GPU the small cases of the other files run on it too,
compiled; this file adds the rest.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import reference
import torch
from cases import LARGE_CASES, PAGE, ROW_DIM, Case, Inputs, in_fp8
from compare import MismatchError, check_lse, check_out
from ops import (
    triton_sparse_merge,
    triton_sparse_mla,
    triton_sparse_mla_fp8,
    triton_sparse_slots,
)
from ops.triton_sparse_merge import new_tickets
from ops.triton_sparse_mla import sparse_mla
from ops.triton_sparse_mla_fp8 import sparse_mla_fp8
from ops.triton_sparse_slots import slots_from_positions
from ops.triton_sparse_warmup import warm_up

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ids = [case.name for case in LARGE_CASES]


@cache
def tickets() -> torch.Tensor:
    """One set for all tests, as for all layers of a model."""
    return new_tickets(torch.device("cuda"))


class Operator(NamedTuple):
    """A kernel, the cache that it takes, and the numbers that the cache stands for."""

    run: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    with_cache: Callable[[Inputs], Inputs]
    rows: Callable[[Inputs], torch.Tensor]

    def __call__(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        return self.run(
            inputs.q, inputs.kv_cache, inputs.slots, inputs.scale, tickets()
        )

    def expect(
        self, inputs: Inputs, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the reference gives for some of the tokens."""
        return reference.sparse_mla(
            inputs.q.cpu()[tokens],
            self.rows(inputs).cpu(),
            inputs.slots.cpu()[tokens],
            inputs.scale,
        )


OPERATORS = {
    "16-bit": Operator(sparse_mla, lambda i: i, lambda i: i.kv_cache),
    "fp8": Operator(
        sparse_mla_fp8,
        in_fp8,
        lambda i: reference.decode_fp8(i.kv_cache.cpu(), i.q.dtype),
    ),
}
both_operators = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)


@both_operators
@pytest.mark.parametrize("case", LARGE_CASES, ids=ids)
def test_real_sizes_agree_with_the_reference(case: Case, operator: Operator) -> None:
    inputs = operator.with_cache(case.build("cuda"))
    out, lse = operator(inputs)
    # On the CPU in float64 a whole batch takes minutes; a spread of tokens, first
    # and last among them, takes seconds.
    some = torch.linspace(0, case.tokens - 1, min(case.tokens, 12)).long().unique()
    expected_out, expected_lse = operator.expect(inputs, some)
    error = check_out(case.name, out[some.cuda()], expected_out)
    lse_error = check_lse(case.name, lse[some.cuda()], expected_lse)
    print(f"{case.name}: worst row {error:.2e}, LSE {lse_error:.2e}")
    with pytest.raises(MismatchError):
        check_out("shifted", out[some.cuda()].roll(1, dims=0), expected_out)


@both_operators
def test_8192_tokens(operator: Operator) -> None:
    """The largest batch; the first and the last token are looked at."""
    case = Case("8192", tokens=8192, heads=3, topk=64, num_blocks=40)
    inputs = operator.with_cache(case.build("cuda"))
    out, lse = operator(inputs)
    ends = torch.tensor([0, 8191])
    expected_out, expected_lse = operator.expect(inputs, ends)
    check_out("8192", out[ends.cuda()], expected_out)
    check_lse("8192", lse[ends.cuda()], expected_lse)
    assert torch.isfinite(out).all()


@both_operators
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_a_captured_graph_follows_its_inputs(
    tokens: int, dtype: torch.dtype, operator: Operator
) -> None:
    """Lookup and attention in one graph, replayed over new picks and queries."""
    generator = torch.Generator().manual_seed(tokens)
    heads, topk, pages = 8, 256, 20
    q = torch.empty(tokens, heads, ROW_DIM, dtype=dtype, device="cuda")
    picks = torch.full((tokens, topk), -1, dtype=torch.int32, device="cuda")
    table = torch.empty(tokens, pages, dtype=torch.int32, device="cuda")
    owners = torch.arange(tokens, dtype=torch.int32, device="cuda")
    rows = torch.randn(tokens * pages, PAGE, ROW_DIM, generator=generator)
    q.zero_()
    table.zero_()
    inputs = operator.with_cache(Inputs(q, rows.to(dtype).cuda(), picks))

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        slots = slots_from_positions(picks, table, owners, PAGE)
        return operator(replace(inputs, slots=slots))

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
        expected_out, expected_lse = operator.expect(
            replace(inputs, slots=slots), torch.arange(tokens)
        )
        check_out(f"replay, {empty} empty", out, expected_out)
        check_lse(f"replay, {empty} empty", lse, expected_lse)


@both_operators
def test_nothing_waits_for_the_gpu(operator: Operator) -> None:
    inputs = operator.with_cache(Case("warm", heads=8, tokens=4).build("cuda"))
    operator(inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        operator(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@both_operators
def test_nothing_compiles_after_the_warm_up(operator: Operator) -> None:
    heads, topk = 24, 320  # that no other test has compiled
    kernels = (
        triton_sparse_mla._sparse_mla_kernel,
        triton_sparse_mla_fp8._sparse_mla_fp8_kernel,
        triton_sparse_merge._merge_kernel,
        triton_sparse_slots._slots_kernel,
    )

    def binaries() -> int:
        return sum(len(kernel.device_caches[0][0]) for kernel in kernels)

    before = binaries()
    fp8 = operator.run is sparse_mla_fp8
    warm_up(heads, topk, torch.bfloat16, fp8, PAGE, 1024, torch.device("cuda", 0))
    warm = binaries()
    assert warm > before
    for tokens in (1, 2, 3, 5, 8, 13, 16, 21, 33, 48, 100, 127, 128, 255, 700, 1024):
        case = Case("any", torch.bfloat16, tokens, heads, topk)
        inputs = operator.with_cache(case.build("cuda"))
        operator(inputs)
        owners = torch.zeros(tokens, dtype=torch.int32, device="cuda")
        table = torch.zeros(tokens + 1, 7, dtype=torch.int32, device="cuda")[1:]
        slots_from_positions(inputs.slots, table, owners, PAGE)
    assert binaries() == warm
    operator(replace(inputs, slots=inputs.slots[:, :64]))
    assert binaries() > warm, "what was not warmed up must show"


@both_operators
def test_a_second_call_takes_no_memory_from_the_driver(operator: Operator) -> None:
    """The scratch of the splits comes from PyTorch's pool; a replay asks nobody."""
    case = Case("pool", heads=8, tokens=8, topk=256)
    inputs = operator.with_cache(case.build("cuda"))

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return operator(inputs)

    def taken(what: str) -> int:
        return torch.cuda.memory_stats()[f"{what}.all.allocated"]

    call()
    segments = taken("segment")
    call()
    assert taken("segment") == segments
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = call()
    asked = taken("allocation")
    graph.replay()
    torch.cuda.synchronize()
    assert taken("allocation") == asked
    check_out("replay", out, call()[0].double())
    assert taken("allocation") > asked, "a call outside of the graph does ask"


@both_operators
@pytest.mark.parametrize("tokens", [1, 8, 33, 64, 130, 600])
def test_runs_are_bit_identical(tokens: int, operator: Operator) -> None:
    """Whichever split is the last: they are merged in their own order."""
    case = Case("again", tokens=tokens, heads=16, topk=2048, num_blocks=128)
    inputs = operator.with_cache(case.build("cuda"))
    first = operator(inputs)
    for _ in range(20):
        for actual, expected in zip(operator(inputs), first, strict=True):
            assert torch.equal(actual, expected)
    assert not tickets().any()
