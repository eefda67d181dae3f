# SPDX-License-Identifier: Apache-2.0
"""Which binaries do batches need, and which does the warm-up launch? Print JSON.

No GPU: every launch ends at Triton's own key, under which it looks for a binary. Run
in a process of its own, since under TRITON_INTERPRET=1 there are no such keys.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from chips import PROCESSORS
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import compute_cache_key, create_function_from_signature

sys.path.insert(0, str(Path(__file__).parents[2] / "patches/files/vllm/v1/attention"))

from ops import triton_mqa_logits as mqa
from ops import triton_mqa_warmup as mqa_warming
from ops import triton_sparse_merge as merging
from ops import triton_sparse_mla as mla
from ops import triton_sparse_mla_fp8 as mla_fp8
from ops import triton_sparse_slots as lookup
from ops import triton_sparse_warmup as warming

# Compute capability and multiprocessors.
CHIPS = tuple((divmod(arch, 10), number) for arch, number in PROCESSORS.items())
HEADS = (8, 16, 64)
MAX_TOKENS = 8192
TOPK, PAGE = 2048, 64
DTYPE = torch.bfloat16
INDEX_HEADS = (32, 64)
MAX_REQUESTS = 1024
NEXT_N = (1, 2)  # tokens of a request in decode, without drafts and with one

Chip = tuple[tuple[int, int], int]
Keys = set[tuple[str, str]]


def record(kernel: triton.JITFunction, keys: Keys, capability: tuple[int, int]) -> None:
    """Note the key of each launch of the kernel from now on, and launch nothing."""
    backend = make_backend(GPUTarget("cuda", 10 * capability[0] + capability[1], 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)

    def run(*args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        _, specialization, options = bind(*args, **kwargs)
        keys.add((kernel.__name__, compute_cache_key({}, specialization, options)))

    kernel.run = run


def serve(
    heads: int, fp8: bool, tokens: int, picks: torch.Tensor, table: torch.Tensor
) -> None:
    """One batch as vLLM hands it over: query in two parts, corners of larger tables.

    The requests are as many as the tokens, and start anywhere in the table.
    """
    requests = min(tokens, 1000)
    owners = torch.empty(tokens + 1, dtype=torch.int32)[1:]
    first = tokens % 3
    lookup.slots_from_positions(
        picks[:tokens], table[first : first + requests], owners, PAGE
    )
    latent = torch.empty(heads, tokens, 512, dtype=DTYPE, device="meta").transpose(0, 1)
    rope = torch.empty(tokens, heads, 256, dtype=DTYPE, device="meta")[..., 192:]
    slots = torch.empty(tokens, TOPK, dtype=torch.int32, device="meta")
    row, dtype = (656, torch.uint8) if fp8 else (576, DTYPE)
    cache = torch.empty(5000, PAGE, row, dtype=dtype, device="meta")
    attend = mla_fp8.sparse_mla_fp8 if fp8 else mla.sparse_mla
    tickets = merging.new_tickets(torch.device("meta"))
    attend((latent, rope), cache, slots, 256**-0.5, tickets)


def score(heads: int, tokens: int, keys: int) -> None:
    """A piece of a prefill: its ranges start anywhere in those of the batch."""
    first = tokens // 2 % 3
    mqa.mqa_logits(
        torch.empty(tokens, heads, 128, dtype=torch.float8_e4m3fn),
        torch.empty(keys, 128, dtype=torch.float8_e4m3fn),
        torch.empty(keys, 4, dtype=torch.uint8).view(torch.float32).squeeze(-1),
        torch.empty(tokens, heads),
        *torch.empty(2, first + tokens, dtype=torch.int32)[:, first:],
    )


def score_pages(heads: int, next_n: int, requests: int) -> None:
    """A decode batch: its requests start anywhere, with lengths in each shape."""
    first = requests % 3
    pages = (1, 16, 157, 160)[requests % 4]
    columns = (1, next_n)[requests % 5 % 2]
    lens = torch.empty(first + requests * columns, dtype=torch.int32)[first:]
    mqa.paged_mqa_logits(
        torch.empty(requests, next_n, heads, 128, dtype=torch.float8_e4m3fn),
        torch.empty(3, PAGE, 1, 132, dtype=torch.uint8),
        torch.empty(requests * next_n, heads),
        lens if requests % 7 == 0 and columns == 1 else lens.view(requests, columns),
        torch.empty(first + requests, pages, dtype=torch.int32)[first:],
        max_len=1000,
    )


def keys_of(run: Callable[[], object], chip: Chip) -> Keys:
    """The keys of all launches of `run`."""
    keys: Keys = set()
    for kernel in (
        mla._sparse_mla_kernel,
        mla_fp8._sparse_mla_fp8_kernel,
        merging._merge_kernel,
        lookup._slots_kernel,
        mqa._mqa_logits_kernel,
        mqa._paged_mqa_logits_kernel,
    ):
        record(kernel, keys, chip[0])
    merging.chip = warming.chip = lambda _: chip
    mqa._capability, mqa._processors = lambda _: chip[0], lambda _: chip[1]
    run()
    return keys


def serve_attention(
    heads: int, fp8: bool, picks: torch.Tensor, table: torch.Tensor
) -> None:
    for tokens in range(1, MAX_TOKENS + 1):
        serve(heads, fp8, tokens, picks, table)


def warm_up_attention(heads: int, fp8: bool, max_tokens: int) -> None:
    warming.warm_up.cache_clear()
    device = torch.device("meta")
    warming.warm_up(heads, TOPK, DTYPE, fp8, PAGE, max_tokens, device)


def serve_prefill(heads: int) -> None:
    """Of 1 token or more, over 1 key or more, each a multiple of 16 or not."""
    for tokens, keys in product(range(1, 70), (1, 33, 48, 5000)):
        score(heads, tokens, keys)


def serve_indexer(heads: int) -> None:
    serve_prefill(heads)
    for next_n, requests in product(NEXT_N, range(1, MAX_REQUESTS + 1)):
        score_pages(heads, next_n, requests)


def warm_up_indexer(heads: int, max_requests: int) -> None:
    mqa_warming.warm_up_prefill.cache_clear()
    mqa_warming.warm_up_decode.cache_clear()
    device = torch.device("meta")
    mqa_warming.warm_up_prefill(heads, device)
    for next_n in NEXT_N:
        mqa_warming.warm_up_decode(heads, next_n, max_requests, device)


def compare(
    name: str,
    chip: Chip,
    serve_all: Callable[[], object],
    warm_up: Callable[[], object],
    short: Callable[[], object],
) -> dict[str, object]:
    """How many binaries are needed, and how many of them each warm-up misses."""
    needed, warm = keys_of(serve_all, chip), keys_of(warm_up, chip)
    return {
        "name": f"sm{chip[0][0]}{chip[0][1]}-{name}",
        "needed": len(needed),
        "missed": len(needed - warm),
        "idle": len(warm - needed),
        "missed_by_the_short": len(needed - keys_of(short, chip)),
    }


def main() -> None:
    picks = torch.empty(MAX_TOKENS, TOPK, dtype=torch.int32)
    table = torch.empty(1003, 157, dtype=torch.int32)
    attention = [
        compare(
            f"heads{heads}-fp8={fp8}",
            chip,
            partial(serve_attention, heads, fp8, picks, table),
            partial(warm_up_attention, heads, fp8, MAX_TOKENS),
            partial(warm_up_attention, heads, fp8, 1),
        )
        for chip, heads, fp8 in product(CHIPS, HEADS, (False, True))
    ]
    indexer = [
        compare(
            f"indexer-heads{heads}",
            chip,
            partial(serve_indexer, heads),
            partial(warm_up_indexer, heads, MAX_REQUESTS),
            partial(warm_up_indexer, heads, 1),
        )
        for chip, heads in product(CHIPS, INDEX_HEADS)
    ]

    # The same kernels, as Triton specialises them if it is not told otherwise.
    lookup._slots_kernel = triton.jit(lookup._slots_kernel.fn)
    mqa._mqa_logits_kernel = triton.jit(mqa._mqa_logits_kernel.fn)

    def serve_some() -> None:
        for tokens in range(1, 40):
            serve(HEADS[0], False, tokens, picks, table)
        serve_prefill(INDEX_HEADS[0])

    plain = Counter(name for name, _ in keys_of(serve_some, CHIPS[0]))
    json.dump(
        {
            "attention": attention,
            "indexer": indexer,
            "plain_lookups": plain[lookup._slots_kernel.__name__],
            "plain_prefills": plain[mqa._mqa_logits_kernel.__name__],
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
