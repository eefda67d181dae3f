# SPDX-License-Identifier: Apache-2.0
"""Where DeepGEMM has no logits kernels for a chip, the indexer gets Triton ones.

`vllm.utils.deep_gemm` hands its namespace to `install`, which puts a switch before
each of the functions that only the DSA indexer calls. A switch asks on its first
call, when the GPU is in use anyway, never at import. On SM90 and SM100 it calls what
vLLM had there, unless the user asks for Triton. Nothing else of that module changes:
what it says about DeepGEMM for GEMM and MoE is as true as before.

The remaining functions stand in, on such chips alone, for what else in the indexer
of some release takes an SM90 for granted.
"""

import functools
import inspect
import os
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.import_utils import has_deep_gemm

logger = init_logger(__name__)

# Environment variable: the library that makes the logits. Unset, the chip decides.
LIBRARY = "GLM5_PATCH_INDEXER"
TRITON, DEEP_GEMM = "triton", "deepgemm"

# Chips that vLLM gives to DeepGEMM whatever else holds. Below 8 Triton has no kernel.
DEEP_GEMM_MAJORS = (9, 10)
OLDEST_MAJOR = 8

# `_C.persistent_topk` falls back to a kernel that needs 128 KB of shared memory when
# its programs do not all fit the chip at once, and raises where there is less.
LARGE_SHARED_MEMORY = frozenset({(8, 0), (8, 7), (9, 0), (10, 0), (10, 3)})

# From 0.20.0 on vLLM bounds the logits of a prefill by this variable of its own.
MAX_LOGITS_MB = "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB"

# Arguments of vLLM up to 0.19.1, by their names since.
OLD_NAMES = {"q_fp8": "q", "kv_cache_fp8": "kv_cache"}

Function = Callable[..., Any]


@functools.cache
def uses_triton() -> bool:
    """Whether the indexer's logits come from Triton here.

    Raises:
        ValueError: GLM5_PATCH_INDEXER names no library.
    """
    library = os.environ.get(LIBRARY, "")
    if library not in ("", TRITON, DEEP_GEMM):
        raise ValueError(
            f"{LIBRARY} must be {TRITON} or {DEEP_GEMM}, found {library!r}: "
            "unset it and the GPU decides"
        )
    if library == DEEP_GEMM or not current_platform.is_cuda():
        return False
    capability = current_platform.get_device_capability()
    if capability is None or capability.major < OLDEST_MAJOR:
        return False
    chosen = library == TRITON or not (
        capability.major in DEEP_GEMM_MAJORS or _deep_gemm_serves(capability.major)
    )
    if chosen:
        logger.info("The DSA indexer's logits come from Triton kernels.")
    return chosen


def has_mqa_logits() -> bool:
    """Whether the indexer can have its logits at all; stands in for its guard."""
    return uses_triton() or has_deep_gemm()


def persistent_topk_fits() -> bool:
    """Whether `_C.persistent_topk` may be called; stands in for `is_cuda()`."""
    if not uses_triton():
        return bool(current_platform.is_cuda())
    capability = current_platform.get_device_capability()
    return (capability.major, capability.minor) in LARGE_SHARED_MEMORY


def write_index_keys(
    k: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    quant_block_size: int,
    scale_fmt: str,
) -> None:
    """Write a batch's keys into the indexer's cache; vLLM does, except in float16.

    Its operator takes float16 bits for integers when it looks for the largest of a
    key. Stock vLLM serves this model in no float16, so nobody noticed.
    """
    if k.dtype != torch.float16:
        from vllm import _custom_ops as ops

        ops.indexer_k_quant_and_cache(
            k, kv_cache, slot_mapping, quant_block_size, scale_fmt
        )
        return
    from vllm.v1.attention.ops.triton_indexer_keys import write_index_keys as write

    write(k, kv_cache, slot_mapping, power_of_two=scale_fmt == "ue8m0")


def bounded_chunks(chunks: Sequence[Any]) -> Sequence[Any]:
    """Cut the indexer's prefill chunks where their logits would take too much memory.

    A chunk has `token_end - token_start` rows of `total_seq_lens` logits. vLLM before
    0.20.0 does not look at the product: 8192 tokens behind a context of a million
    would ask for 32 GB. Each piece gathers its keys again, 132 bytes a key, which is
    small beside scoring them.
    """
    if not uses_triton():
        return chunks
    most = int(os.environ.get(MAX_LOGITS_MB, "512")) * 2**20 // 4
    pieces = []
    for chunk in chunks:
        rows = chunk.token_end - chunk.token_start
        step = max(1, most // max(1, int(chunk.total_seq_lens)))
        pieces += [
            replace(
                chunk,
                token_start=chunk.token_start + first,
                token_end=chunk.token_start + min(first + step, rows),
                cu_seqlen_ks=chunk.cu_seqlen_ks[first : first + step],
                cu_seqlen_ke=chunk.cu_seqlen_ke[first : first + step],
            )
            for first in range(0, rows, step)
        ]
    return pieces


def one_query_each(decode: Any | None, num_tokens: int) -> Any | None:
    """Make each token of a decode batch a request, if the requests have unequal many.

    vLLM 0.16.0 pads such a batch, of speculative decoding: by a kernel that needs
    float8, which SM80 and SM86 do not have, and it pads neither the weights nor the
    lengths alike, so that a token is scored with another's. Requests of one token
    need no padding. The keys of a request are read once for each of its tokens then.

    Args:
        decode: the batch, or None where there is none. `block_table` `[B, num_pages]`,
            `seq_lens` `[B]` and `decode_lens` `[B]`, tokens to decode, int32.
        num_tokens: the sum of `decode_lens`, so that nobody waits for the GPU.
    """
    if decode is None or not decode.requires_padding or not uses_triton():
        return decode
    lens = decode.decode_lens
    owner = torch.repeat_interleave(lens, output_size=num_tokens)
    last = lens.cumsum(0)[owner]  # the token after the last one of the same request
    token = torch.arange(num_tokens, device=lens.device)
    return replace(
        decode,
        block_table=decode.block_table[owner],
        seq_lens=decode.seq_lens[owner] - (last - 1 - token).int(),
        decode_lens=torch.ones_like(owner, dtype=lens.dtype),
        requires_padding=False,
    )


def warm_up(builder: Any) -> None:
    """Compile what the batches of a metadata builder of the indexer will launch.

    vLLM makes its builders before it captures or serves anything, after the profile
    run. At most `max_num_seqs` requests decode, of up to `reorder_batch_threshold`
    tokens each; where they have unequal many, or more than DeepGEMM takes
    (`use_flattening`), each token is a request.
    """
    from vllm.v1.attention.ops.triton_mqa_warmup import (
        warm_up_decode,
        warm_up_keys,
        warm_up_prefill,
    )

    config = builder.vllm_config
    if config.model_config.dtype == torch.float16:
        warm_up_keys(torch.float16, builder.device)
    if not uses_triton():
        return
    num_heads = config.model_config.hf_text_config.index_n_heads
    seqs = config.scheduler_config.max_num_seqs
    tokens = config.scheduler_config.max_num_batched_tokens
    longest = builder.reorder_batch_threshold
    warm_up_prefill(num_heads, builder.device)
    warm_up_decode(num_heads, 1, min(seqs * longest, tokens), builder.device)
    if not getattr(builder, "use_flattening", False):
        for next_n in range(2, longest + 1):
            most = min(seqs, tokens // next_n)
            warm_up_decode(num_heads, next_n, most, builder.device)


def install(module: MutableMapping[str, Any]) -> None:
    """Put a switch before the indexer's functions of `vllm.utils.deep_gemm`."""
    for name, ours in (
        ("fp8_mqa_logits", _mqa_logits),  # up to 0.19.1
        ("fp8_paged_mqa_logits", _paged_mqa_logits),
        ("fp8_fp4_mqa_logits", _mqa_logits),  # from 0.20.0
        ("fp8_fp4_paged_mqa_logits", _paged_mqa_logits),
        ("get_paged_mqa_logits_metadata", _paged_mqa_logits_metadata),
    ):
        if name in module:
            module[name] = _switch(module[name], ours)


def _switch(stock: Function, ours: Function) -> Function:
    # Later releases name an argument alike, and put others in its place.
    parameters = inspect.signature(stock)

    @functools.wraps(stock)
    def switch(*args: Any, **kwargs: Any) -> Any:
        if not uses_triton():
            return stock(*args, **kwargs)
        given = parameters.bind(*args, **kwargs).arguments
        return ours(**{OLD_NAMES.get(name, name): given[name] for name in given})

    return switch


def _deep_gemm_serves(major: int) -> bool:
    """Whether the DeepGEMM that vLLM would import has logits kernels for the chip.

    It compiles them when they are first called, from headers that name the chip:
    120 for SM120 and SM121. They come and go between releases, so only the files
    can tell.
    """
    for package in ("deep_gemm", "vllm.third_party.deep_gemm"):
        try:
            spec = find_spec(package)
        except ModuleNotFoundError:  # of a parent
            continue
        if spec is None or not spec.submodule_search_locations:
            continue
        headers = [
            header.name
            for folder in spec.submodule_search_locations
            for header in Path(folder, "include").rglob(f"sm{major}0_*mqa_logits*.cuh")
        ]
        paged = [name for name in headers if "paged" in name]
        return 0 < len(paged) < len(headers)
    return False


def _mqa_logits(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor | None],
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    clean_logits: bool = False,  # up to 0.32.0
    max_seqlen_k: int | None = None,  # from 0.33.0, with logits that start at column 0
) -> torch.Tensor:
    from vllm.v1.attention.ops.triton_mqa_logits import mqa_logits

    k, k_scale = kv
    return mqa_logits(
        _fp8(q),
        k,
        k_scale,
        weights,
        cu_seqlen_ks,
        cu_seqlen_ke,
        width=max_seqlen_k,
        clean=clean_logits,
    )


def _paged_mqa_logits(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor | None],
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    schedule_metadata: torch.Tensor,
    max_model_len: int,
    clean_logits: bool = False,  # up to 0.32.0
    indices: torch.Tensor | None = None,  # from 0.28.0
) -> torch.Tensor:
    from vllm.v1.attention.ops.triton_mqa_logits import paged_mqa_logits

    # schedule_metadata is unused: the kernel makes its own schedule on the GPU.
    # indices, the request of every row, is too: where vLLM has it, each row is a
    # request here, with a line of its own in the block table.
    return paged_mqa_logits(
        _fp8(q),
        kv_cache,
        weights,
        context_lens,
        block_tables,
        max_model_len,
        clean=clean_logits,
    )


def _paged_mqa_logits_metadata(
    context_lens: torch.Tensor,
    block_size: int,
    num_sms: int,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Something of the shape that DeepGEMM's schedule has."""
    return torch.zeros((num_sms + 1, 2), dtype=torch.int32, device=context_lens.device)


def _fp8(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor | None],
) -> torch.Tensor:
    """The query itself; from 0.20.0 on it comes with the block scales of float4."""
    if isinstance(q, torch.Tensor):
        return q
    values, scales = q
    if scales is not None:
        raise ValueError(
            "Triton's indexer takes a float8 query without block scales, found "
            f"{values.dtype} with scales: turn use_fp4_indexer_cache off"
        )
    return values
