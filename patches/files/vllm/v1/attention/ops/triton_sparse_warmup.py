# SPDX-License-Identifier: Apache-2.0
"""Compiling all that sparse MLA will need, before the first request asks for it.

Triton compiles a binary when it is first launched, which takes seconds. vLLM's own
warm-up runs the batch sizes that it captures, and none with `enforce_eager`; a longer
prompt may be the first of its class.
"""

from collections.abc import Callable, Iterator
from functools import cache

import torch

from .triton_sparse_launch import (
    LATENT_DIM,
    ROW_DIM,
    LaunchConfig,
    chip,
    launch_config,
    launch_config_fp8,
    num_splits,
)
from .triton_sparse_merge import new_tickets
from .triton_sparse_mla import sparse_mla
from .triton_sparse_mla_fp8 import ROW_BYTES, sparse_mla_fp8
from .triton_sparse_rows_fp8 import write_rows_fp8
from .triton_sparse_slots import slots_from_positions


@cache
def warm_up(
    num_heads: int,
    topk: int,
    dtype: torch.dtype,
    fp8: bool,
    page: int,
    max_tokens: int,
    device: torch.device,
) -> None:
    """Launch every binary that batches of up to `max_tokens` need, once a process.

    Args:
        num_heads, topk, dtype: of the queries, as in `sparse_mla`.
        fp8: whether the cache is one for `sparse_mla_fp8`.
        page: tokens in one cache block.
        max_tokens: the largest batch.
        device: where it will run.

    The launches take the smallest batch of each class, over a cache of one block, and
    read nothing: no place has a key.
    """
    if fp8:
        attend, config_of = sparse_mla_fp8, launch_config_fp8
        kv_cache = torch.zeros((1, page, ROW_BYTES), dtype=torch.uint8, device=device)
    else:
        attend, config_of = sparse_mla, launch_config
        kv_cache = torch.zeros((1, page, ROW_DIM), dtype=dtype, device=device)
    tickets = new_tickets(device)
    table = torch.zeros((1, 1), dtype=torch.int32, device=device)
    for tokens in _first_of_each_class(config_of, num_heads, topk, max_tokens, device):
        q = torch.zeros((tokens, num_heads, ROW_DIM), dtype=dtype, device=device)
        positions = torch.full((tokens, topk), -1, dtype=torch.int32, device=device)
        owners = torch.zeros(tokens, dtype=torch.int32, device=device)
        slots = slots_from_positions(positions, table, owners, page)
        attend(q, kv_cache, slots, 1.0, tickets)
    if fp8 and dtype == torch.float16:
        row = torch.zeros((1, ROW_DIM), dtype=dtype, device=device)
        nowhere = torch.full((1,), -1, dtype=torch.int64, device=device)
        write_rows_fp8(row[:, :LATENT_DIM], row[:, LATENT_DIM:], kv_cache, nowhere)


def _first_of_each_class(
    config_of: Callable[[tuple[int, int], int, int], LaunchConfig],
    num_heads: int,
    topk: int,
    max_tokens: int,
    device: torch.device,
) -> Iterator[int]:
    """The smallest of all batches that share their binaries, for each such class."""
    capability, num_sms = chip(device)
    known = set()
    for tokens in range(1, max_tokens + 1):
        config = config_of(capability, num_heads, tokens)
        splits = num_splits(config, num_heads, tokens, topk, num_sms)
        if (config, splits) not in known:
            known.add((config, splits))
            yield tokens
