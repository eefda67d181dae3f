# SPDX-License-Identifier: Apache-2.0
"""Which binaries do batches need, and which does the warm-up launch? Print JSON.

No GPU: every launch ends at Triton's own key, under which it looks for a binary. Run
in a process of its own, since under TRITON_INTERPRET=1 there are no such keys.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import compute_cache_key, create_function_from_signature

sys.path.insert(0, str(Path(__file__).parents[2] / "patches/files/vllm/v1/attention"))

from ops import triton_sparse_merge as merging
from ops import triton_sparse_mla as mla
from ops import triton_sparse_mla_fp8 as mla_fp8
from ops import triton_sparse_slots as lookup
from ops import triton_sparse_warmup as warming

# Compute capability and multiprocessors: A100, RTX 3090, H200, RTX PRO 6000, GB10.
CHIPS = (
    ((8, 0), 108),
    ((8, 6), 82),
    ((9, 0), 132),
    ((12, 0), 188),
    ((12, 1), 48),
)
HEADS = (8, 16, 64)
MAX_TOKENS = 8192
TOPK, PAGE = 2048, 64
DTYPE = torch.bfloat16

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


def keys_of(run: Callable[[], object], chip: tuple[tuple[int, int], int]) -> Keys:
    """The keys of all launches of `run`."""
    keys: Keys = set()
    for kernel in (
        mla._sparse_mla_kernel,
        mla_fp8._sparse_mla_fp8_kernel,
        merging._merge_kernel,
        lookup._slots_kernel,
    ):
        record(kernel, keys, chip[0])
    mla.chip = mla_fp8.chip = merging.chip = warming.chip = lambda _: chip
    run()
    return keys


def main() -> None:
    picks = torch.empty(MAX_TOKENS, TOPK, dtype=torch.int32)
    table = torch.empty(1003, 157, dtype=torch.int32)
    found = []
    for chip in CHIPS:
        for heads, fp8 in product(HEADS, (False, True)):

            def serve_all(heads: int = heads, fp8: bool = fp8) -> None:
                for tokens in range(1, MAX_TOKENS + 1):
                    serve(heads, fp8, tokens, picks, table)

            def warm_up(max_tokens: int, heads: int = heads, fp8: bool = fp8) -> None:
                warming.warm_up.cache_clear()
                device = torch.device("meta")
                warming.warm_up(heads, TOPK, DTYPE, fp8, PAGE, max_tokens, device)

            needed = keys_of(serve_all, chip)
            warm = keys_of(partial(warm_up, MAX_TOKENS), chip)
            short = keys_of(partial(warm_up, 1), chip)
            found.append(
                {
                    "name": f"sm{chip[0][0]}{chip[0][1]}-heads{heads}-fp8={fp8}",
                    "needed": len(needed),
                    "missed": len(needed - warm),
                    "idle": len(warm - needed),
                    "missed_after_one_token": len(needed - short),
                }
            )
    # The same lookup, as Triton specialises it if it is not told otherwise.
    plain = triton.jit(lookup._slots_kernel.fn)
    lookup._slots_kernel = plain

    def serve_some() -> None:
        for tokens in range(1, 40):
            serve(HEADS[0], False, tokens, picks, table)

    lookups = [key for key in keys_of(serve_some, CHIPS[0]) if key[0] == plain.__name__]
    json.dump({"chips": found, "plain_lookups": len(lookups)}, sys.stdout)


if __name__ == "__main__":
    main()
