# SPDX-License-Identifier: Apache-2.0
"""The logits of the DSA indexer, in portable Triton, over plain and paged keys.

The indexer scores every earlier token against a query token; the sparse
attention then looks at the best of them only. Query and key are float8 e4m3,
a key carries one float32 scale, and a query one float32 weight a head:

    logit[m, n] = k_scale[n] * sum_h weights[m, h] * relu(q[m, h] . k[n])

Two orders decide the shape of a program. All heads of some query tokens lie
side by side as the columns of one matrix product, so that a key is read once
for all of them; keys are its rows, so that the sum over the heads stays within
the four lanes that hold a row.

A column that is not a key of its row is not written: what it holds is whatever
the memory held, unless `clean` asks for -inf. The top-k that follows must keep
within the same bounds, as vLLM's do.

Nothing here imports vLLM: the kernels are built for SM80 and later, and run
under TRITON_INTERPRET=1 on the CPU.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

HEAD_DIM = 128
HEADS = (32, 64)  # GLM-5 has 32 index heads, DeepSeek-V3.2 has 64
PAGE = 64  # tokens in one block of the indexer's cache
ROW_BYTES = HEAD_DIM + 4  # a token's share of a page: its key and its scale

# What TRITON_INTERPRET=1 on the CPU pretends to be: a chip without float8, with
# three multiprocessors, so that the work of one request is cut at odd places.
INTERPRETED_CAPABILITY = (8, 6)
INTERPRETED_PROCESSORS = 3

# Chips with 160 KB of shared memory or more a multiprocessor. All others,
# unknown ones included, are held to the 99 KB of SM86, SM89, SM120 and SM121.
LARGE_SHARED_MEMORY = frozenset({(8, 0), (9, 0), (10, 0), (10, 3)})

# Block numbers that a decode program reads at once: what one warp holds.
BLOCK_T = 32
# Rows of logits start at multiples of this many elements: 1 KB, as DeepGEMM's.
ROW_ALIGNMENT = 256


class LaunchConfig(NamedTuple):
    """How one program of a kernel is shaped."""

    columns: int  # query tokens of one program times their heads
    block_n: int  # keys of one step
    num_warps: int
    num_stages: int
    span: int  # prefill: keys of one program; decode: programs a multiprocessor
    max_registers: int | None = None  # of one thread; None leaves it to the compiler


def has_float8(capability: tuple[int, int]) -> bool:
    """Whether Triton has the type e4m3 and its matrix product there."""
    return capability >= (8, 9)


def prefill_config(capability: tuple[int, int]) -> LaunchConfig:
    """Pick the launch shape of `mqa_logits`; pure, so that tests can compile it.

    128 columns by 64 keys are 64 accumulators a thread. Two or three programs
    fit a multiprocessor on every chip: while one sums over its heads, another
    keeps the tensor cores busy. On an H200 twice the columns were 11 % faster,
    the best of 48 shapes; the others have been reasoned.
    """
    if capability == (9, 0):
        return LaunchConfig(
            columns=256, block_n=64, num_warps=4, num_stages=3, span=4096
        )
    return LaunchConfig(columns=128, block_n=64, num_warps=4, num_stages=3, span=2048)


def decode_config(capability: tuple[int, int], columns: int) -> LaunchConfig:
    """Pick the launch shape of `paged_mqa_logits` for `next_n * heads` columns.

    Decode waits for memory: what counts is how many bytes are on their way,
    buffers times programs times the 8 KB of a page's keys. On an H200 four
    programs with three buffers were the best of 16 shapes, with float8 and
    without; chips with less shared memory have room for three programs.
    """
    large = capability in LARGE_SHARED_MEMORY
    # SM89 and SM120 spill registers at 128 columns; they read keys again instead,
    # from L2.
    widest = 64 if has_float8(capability) and not large else 128
    return LaunchConfig(
        columns=max(min(HEADS), min(widest, triton.next_power_of_2(columns))),
        block_n=PAGE,
        num_warps=4,
        num_stages=3,
        span=4 if large else 3,
        # Three programs of 128 threads share 65,536 registers. Left alone, the
        # compiler stops at 128 on some chips and spills two words.
        max_registers=168,
    )


def request_block(num_requests: int) -> int:
    """Requests whose lengths a decode program reads; each number is a compilation.

    Few requests fit one warp, and then no warp waits for another.
    """
    block = 32
    while block < num_requests:
        block *= 4
    return block


@triton.jit
def _decoded(b_x, NATIVE: tl.constexpr):
    """The tile as matrix operand: itself, or float16 of 2**-8 times its values.

    e4m3 is float16 with three exponent bits and seven mantissa bits less: the
    same seven bits, moved up by seven places, are the value times 2**-8, for
    subnormal numbers too. The sign fills the bits above it, and one of them has
    to go. The NaN of e4m3 comes out as 480, which no quantiser writes.
    """
    if not NATIVE:
        b_bits = (b_x.to(tl.int16) << 7) & -16385
        b_x = b_bits.to(tl.float16, bitcast=True)
    return b_x


@triton.jit
def _tile(
    b_k,  # [BLOCK_N, DIM]
    b_q,  # [QUERIES * HEADS, DIM], decoded
    b_w,  # [QUERIES * HEADS]
    b_scale,  # [BLOCK_N]
    BLOCK_N: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Logits [BLOCK_N, QUERIES] of a block of keys."""
    # [BLOCK_N, QUERIES * HEADS]
    b_s = tl.dot(_decoded(b_k, NATIVE), tl.trans(b_q))
    # Weights stay float32: rounding them swaps keys that nearly tie.
    b_s = tl.maximum(b_s, 0.0) * b_w[None, :]
    b_l = tl.sum(tl.reshape(b_s, [BLOCK_N, QUERIES, HEADS]), axis=2)
    if not NATIVE:
        b_scale = b_scale * 65536.0  # the 2**-8 of both operands
    return b_l * b_scale[:, None]


# One binary for all batches of a shape: Triton would compile another one where a count
# is 1 or a multiple of 16, or where a pointer is not 16-aligned, as in a slice of rows.
# What is left to it are the rows that are read in wide loads, always aligned.
@triton.jit(
    do_not_specialize=["num_queries", "num_keys", "width"],
    do_not_specialize_on_alignment=["starts", "ends"],
)
def _mqa_logits_kernel(
    q,  # [M, HEADS, DIM] float8, or int8 of the same bits
    k,  # [N, DIM] likewise
    k_scale,  # [N] float32
    weights,  # [M, HEADS] float32
    starts,  # [M] int32
    ends,  # [M] int32
    logits,  # [M, width] float32
    num_queries,
    num_keys,
    width,
    stride_q_m,
    stride_q_h,
    stride_k_n,
    stride_weights_m,
    stride_logits_m,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
    SHIFTED: tl.constexpr,
    NATIVE: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Neighbours in the grid read the same keys: a long context does not fit L2,
    # and the queries of one program are read only once anyway.
    num_groups = tl.cdiv(num_queries, QUERIES)
    i_g = tl.program_id(0) % num_groups
    i_span = tl.program_id(0) // num_groups

    # [QUERIES]
    o_m = i_g * QUERIES + tl.arange(0, QUERIES)
    m_m = o_m < num_queries
    b_start = tl.maximum(tl.load(starts + o_m, mask=m_m, other=num_keys), 0)
    b_end = tl.minimum(tl.load(ends + o_m, mask=m_m, other=0), num_keys)
    if SHIFTED:
        b_end = tl.minimum(b_end, b_start + width)
    # An empty range must not widen the union of the others.
    m_some = b_start < b_end
    i_low = tl.min(tl.where(m_some, b_start, num_keys), axis=0)
    i_high = tl.max(tl.where(m_some, b_end, 0), axis=0)
    i_low = tl.maximum(i_low // BLOCK_N * BLOCK_N, i_span * SPAN)
    i_high = tl.minimum(i_high, (i_span + 1) * SPAN)

    if i_low < i_high:
        # [QUERIES * HEADS], 64-bit: a batch of 8192 x 64 x 128 is 2**26, but the
        # rows of logits pass 2**31 elements.
        o_c = tl.arange(0, QUERIES * HEADS)
        o_cm = (i_g * QUERIES + o_c // HEADS).to(tl.int64)
        m_c = o_cm < num_queries
        o_d = tl.arange(0, DIM)
        # [QUERIES * HEADS, DIM]
        o_qrow = o_cm * stride_q_m + (o_c % HEADS) * stride_q_h
        b_q = tl.load(q + o_qrow[:, None] + o_d[None, :], mask=m_c[:, None], other=0.0)
        b_q = _decoded(b_q, NATIVE)
        # [QUERIES * HEADS]
        p_w = weights + o_cm * stride_weights_m + o_c % HEADS
        b_w = tl.load(p_w, mask=m_c, other=0.0)
        # [QUERIES]
        p_row = logits + o_m.to(tl.int64) * stride_logits_m
        if SHIFTED:
            p_row -= b_start

        for i_n in tl.range(i_low, i_high, BLOCK_N, num_stages=STAGES):
            # [BLOCK_N]
            o_n = i_n + tl.arange(0, BLOCK_N)
            m_n = o_n < num_keys
            # [BLOCK_N, DIM]
            p_k = k + o_n.to(tl.int64)[:, None] * stride_k_n + o_d[None, :]
            b_k = tl.load(p_k, mask=m_n[:, None], other=0.0)
            b_scale = tl.load(k_scale + o_n, mask=m_n, other=0.0)
            # [BLOCK_N, QUERIES]
            b_l = _tile(b_k, b_q, b_w, b_scale, BLOCK_N, QUERIES, HEADS, NATIVE)
            m_l = (o_n[:, None] >= b_start[None, :]) & (o_n[:, None] < b_end[None, :])
            tl.store(p_row[None, :] + o_n[:, None], b_l, mask=m_l & m_m[None, :])


@triton.jit
def _pages(context_lens, o_b, m_b, next_n, stride_lens_b, stride_lens_n, longest, PAGE):
    """Pages that some row of each request has keys in."""
    b_len = tl.zeros_like(o_b)
    # One column (its stride is 0 then) holds the length of the longest row.
    for i_j in range(0, tl.where(stride_lens_n == 0, 1, next_n)):
        p_len = context_lens + o_b * stride_lens_b + i_j * stride_lens_n
        b_len = tl.maximum(b_len, tl.load(p_len, mask=m_b, other=0))
    return tl.cdiv(tl.minimum(b_len, longest), PAGE)


@triton.jit(
    do_not_specialize=[
        "num_requests",
        "num_blocks",
        "longest",
        "stride_lens_b",
        "stride_lens_n",
        "stride_table_b",
    ],
    do_not_specialize_on_alignment=["context_lens", "block_table"],
)
def _paged_mqa_logits_kernel(
    q,  # [B, next_n, HEADS, DIM] float8, or int8 of the same bits
    keys,  # the cache as bytes of the type of q: [num_blocks, PAGE * (DIM + 4)]
    scales,  # the cache as float32: [num_blocks, PAGE * (DIM + 4) / 4]
    weights,  # [B * next_n, HEADS] float32
    context_lens,  # [B] or [B, 1] or [B, next_n] int32
    block_table,  # [B, num_pages] int32
    logits,  # [B * next_n, max_len] float32
    num_requests,
    next_n,
    num_blocks,
    longest,
    stride_q_b,
    stride_q_n,
    stride_q_h,
    stride_keys_block,
    stride_scales_block,
    stride_weights_m,
    stride_lens_b,
    stride_lens_n,
    stride_table_b,
    stride_logits_m,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_T: tl.constexpr,
    NATIVE: tl.constexpr,
    STAGES: tl.constexpr,
):
    # The pages of all requests, one after the other, are dealt out evenly: the
    # grid never changes under a CUDA graph, and one long request among short
    # ones keeps every multiprocessor busy.
    # [BLOCK_B]
    o_b = tl.arange(0, BLOCK_B)
    b_pages = _pages(
        context_lens,
        o_b,
        o_b < num_requests,
        next_n,
        stride_lens_b,
        stride_lens_n,
        longest,
        PAGE,
    )
    b_until = tl.cumsum(b_pages, axis=0)
    total = tl.sum(b_pages, axis=0)
    share = tl.cdiv(total, tl.num_programs(0))
    i_first = tl.program_id(0) * share
    left = tl.minimum(share, total - i_first)

    # The request that the first page belongs to, and which of its pages that is.
    m_past = b_until <= i_first
    i_b = tl.sum(m_past.to(tl.int32), axis=0)
    i_p = i_first - tl.max(tl.where(m_past, b_until, 0), axis=0)

    # [QUERIES], [QUERIES * HEADS], [DIM], [PAGE], [BLOCK_T]
    i_j = tl.program_id(1) * QUERIES
    o_j = i_j + tl.arange(0, QUERIES)
    m_j = o_j < next_n
    o_c = tl.arange(0, QUERIES * HEADS)
    o_cj = i_j + o_c // HEADS
    m_c = o_cj < next_n
    o_d = tl.arange(0, DIM)
    o_n = tl.arange(0, PAGE)
    o_k = o_n[:, None] * DIM + o_d[None, :]
    o_t = tl.arange(0, BLOCK_T)

    while left > 0:
        i_b64 = i_b.to(tl.int64)
        pages = tl.sum(tl.where(o_b == i_b, b_pages, 0), axis=0)
        steps = tl.minimum(tl.minimum(pages - i_p, left), BLOCK_T)
        # [BLOCK_T], on its way while the query is: a load in the loop below would
        # start only after that has arrived.
        p_table = block_table + i_b64 * stride_table_b + i_p
        b_blocks = tl.load(p_table + o_t, mask=o_t < steps, other=-1)
        # [QUERIES], the keys of each row
        p_len = context_lens + i_b64 * stride_lens_b + o_j * stride_lens_n
        b_end = tl.load(p_len, mask=m_j, other=0)
        if stride_lens_n == 0:
            # One length a request is that of its last row.
            b_end = b_end + (o_j + 1 - next_n)
        b_end = tl.minimum(b_end, longest)

        # [QUERIES * HEADS, DIM]
        o_qrow = i_b64 * stride_q_b + o_cj * stride_q_n + (o_c % HEADS) * stride_q_h
        b_q = tl.load(q + o_qrow[:, None] + o_d[None, :], mask=m_c[:, None], other=0.0)
        b_q = _decoded(b_q, NATIVE)
        # [QUERIES * HEADS]
        p_w = weights + (i_b64 * next_n + o_cj) * stride_weights_m + o_c % HEADS
        b_w = tl.load(p_w, mask=m_c, other=0.0)
        # [QUERIES]
        p_row = logits + (i_b64 * next_n + o_j) * stride_logits_m

        for i_t in tl.range(0, steps, num_stages=STAGES):
            i_block = tl.sum(tl.where(o_t == i_t, b_blocks, 0), axis=0)
            # A block that does not exist is not read, and its keys not picked.
            m_block = (i_block >= 0) & (i_block < num_blocks)
            i_block = i_block.to(tl.int64)
            # [PAGE, DIM], [PAGE]
            p_k = keys + i_block * stride_keys_block + o_k
            b_k = tl.load(p_k, mask=m_block, other=0.0)
            p_scale = scales + i_block * stride_scales_block + (PAGE * DIM // 4 + o_n)
            b_scale = tl.load(p_scale, mask=m_block, other=0.0)
            # [PAGE, QUERIES]
            b_l = _tile(b_k, b_q, b_w, b_scale, PAGE, QUERIES, HEADS, NATIVE)
            b_l = tl.where(m_block, b_l, float("-inf"))
            o_l = (i_p + i_t) * PAGE + o_n
            m_l = (o_l[:, None] < b_end[None, :]) & m_j[None, :]
            tl.store(p_row[None, :] + o_l[:, None], b_l, mask=m_l)

        left -= steps
        i_p += steps
        i_b += (i_p == pages).to(tl.int32)
        i_p = tl.where(i_p == pages, 0, i_p)


def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    width: int | None = None,
    clean: bool = False,
) -> torch.Tensor:
    """Score a contiguous run of keys for every query token (prefill).

    Args:
        q: `[M, H, 128]` float8_e4m3fn, H 32 or 64; last dimension contiguous.
        k: `[N, 128]` float8_e4m3fn, the keys of all requests one after another.
        k_scale: `[N]` float32.
        weights: `[M, H]` float32, with every other factor folded in.
        starts, ends: `[M]` int32; the keys of row m are `starts[m] <= n <
            ends[m]`, cut to 0 .. N; a range may be empty.
        width: None, and column n is key n. Or the columns of the result: column
            0 of a row is the first of its keys, and a longer row is cut off.
        clean: fill all other columns with -inf. Otherwise they are not written.

    Returns:
        `[M, N]` or `[M, width]` float32; its rows start 1 KB apart or a multiple of it.

    Raises:
        ValueError: an argument breaks this contract; the message names both
            what was expected and what was found.
    """
    _check_query(q, 3, "[M, H, 128]")
    num_queries, heads, _ = q.shape
    num_keys = k.shape[0]
    _check("k", k, q.device, torch.float8_e4m3fn, [num_keys, HEAD_DIM])
    _check("k_scale", k_scale, q.device, torch.float32, [num_keys])
    _check("weights", weights, q.device, torch.float32, [num_queries, heads])
    _check("starts", starts, q.device, torch.int32, [num_queries])
    _check("ends", ends, q.device, torch.int32, [num_queries])

    columns = num_keys if width is None else width
    logits = _empty_logits(num_queries, columns, q.device, clean)
    if logits.numel() == 0 or num_keys == 0:
        return logits
    capability = _capability(q.device)
    config = prefill_config(capability)
    native = has_float8(capability)
    queries = config.columns // heads
    groups = triton.cdiv(num_queries, queries)
    _mqa_logits_kernel[(groups * triton.cdiv(num_keys, config.span),)](
        q if native else q.view(torch.int8),
        k if native else k.view(torch.int8),
        k_scale,
        weights,
        starts,
        ends,
        logits,
        num_queries,
        num_keys,
        columns,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        weights.stride(0),
        logits.stride(0),
        HEADS=heads,
        DIM=HEAD_DIM,
        QUERIES=queries,
        BLOCK_N=config.block_n,
        SPAN=config.span,
        SHIFTED=width is not None,
        NATIVE=native,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        maxnreg=config.max_registers,
    )
    return logits


def paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_len: int,
    clean: bool = False,
) -> torch.Tensor:
    """Score the cached keys of every request for its last tokens (decode).

    Nothing on the host depends on the lengths, so a CUDA graph may hold the call.

    Args:
        q: `[B, next_n, H, 128]` float8_e4m3fn, H 32 or 64, any next_n.
        kv_cache: `[num_blocks, 64, 1, 132]` uint8. A block is 64 keys of 128
            e4m3 bytes, then 64 float32 scales, whatever its last two dimensions
            suggest. Blocks may lie apart, by a multiple of 16 bytes.
        weights: `[B * next_n, H]` float32.
        context_lens: int32. `[B, next_n]`: the keys of each row. `[B]` or
            `[B, 1]`: those of the last row; row j has next_n - 1 - j fewer. A
            length of 0 or less has no keys.
        block_table: `[B, num_pages]` int32, the block of every page in use. A
            block outside of the cache gives -inf.
        max_len: columns of the result; a longer context is cut off.
        clean: fill all other columns with -inf. Otherwise they are not written.

    Returns:
        `[B * next_n, max_len]` float32; its rows start 1 KB apart or a multiple
        of it.

    Raises:
        ValueError: an argument breaks this contract; the message names both
            what was expected and what was found.
    """
    _check_query(q, 4, "[B, next_n, H, 128]")
    num_requests, next_n, heads, _ = q.shape
    rows = num_requests * next_n
    if kv_cache.dim() != 4 or list(kv_cache.shape[1:]) != [PAGE, 1, ROW_BYTES]:
        raise ValueError(
            f"kv_cache must be [num_blocks, {PAGE}, 1, {ROW_BYTES}], "
            f"found {list(kv_cache.shape)}"
        )
    num_blocks = kv_cache.shape[0]
    _check("kv_cache", kv_cache, q.device, torch.uint8, list(kv_cache.shape))
    if kv_cache.stride(1) != ROW_BYTES or kv_cache.stride(0) % 16:
        raise ValueError(
            f"kv_cache must have {ROW_BYTES} bytes a token and blocks a multiple of "
            f"16 bytes apart, found strides {list(kv_cache.stride())}"
        )
    _check("weights", weights, q.device, torch.float32, [rows, heads])
    lens = context_lens.view(-1, 1) if context_lens.dim() == 1 else context_lens
    if lens.shape not in ((num_requests, 1), (num_requests, next_n)):
        raise ValueError(
            f"context_lens must be [{num_requests}], [{num_requests}, 1] or "
            f"[{num_requests}, {next_n}], found {list(context_lens.shape)}"
        )
    _check("context_lens", lens, q.device, torch.int32, list(lens.shape))
    num_pages = block_table.shape[-1]
    _check("block_table", block_table, q.device, torch.int32, [num_requests, num_pages])

    logits = _empty_logits(rows, max_len, q.device, clean)
    if logits.numel() == 0 or num_pages == 0:
        return logits
    capability = _capability(q.device)
    config = decode_config(capability, next_n * heads)
    native = has_float8(capability)
    queries = max(1, config.columns // heads)
    grid = (_processors(q.device) * config.span, triton.cdiv(next_n, queries))
    _paged_mqa_logits_kernel[grid](
        q if native else q.view(torch.int8),
        kv_cache.view(torch.float8_e4m3fn if native else torch.int8),
        kv_cache.view(torch.float32),
        weights,
        lens,
        block_table,
        logits,
        num_requests,
        next_n,
        num_blocks,
        min(max_len, num_pages * PAGE),
        q.stride(0),
        q.stride(1),
        q.stride(2),
        kv_cache.stride(0),
        kv_cache.stride(0) // 4,
        weights.stride(0),
        lens.stride(0),
        lens.stride(1) if lens.shape[1] == next_n > 1 else 0,
        block_table.stride(0),
        logits.stride(0),
        HEADS=heads,
        DIM=HEAD_DIM,
        PAGE=PAGE,
        QUERIES=queries,
        BLOCK_B=request_block(num_requests),
        BLOCK_T=BLOCK_T,
        NATIVE=native,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        maxnreg=config.max_registers,
    )
    return logits


def _empty_logits(
    rows: int, columns: int, device: torch.device, clean: bool
) -> torch.Tensor:
    """Room for the logits, its rows on boundaries that wide loads like."""
    width = triton.cdiv(columns, ROW_ALIGNMENT) * ROW_ALIGNMENT
    if clean:
        memory = torch.full((rows, width), -torch.inf, device=device)
    else:
        memory = torch.empty((rows, width), dtype=torch.float32, device=device)
    return memory[:, :columns]


def _check_query(q: torch.Tensor, dim: int, shape: str) -> None:
    """Raise ValueError unless q is what both kernels take."""
    if q.dim() != dim or q.shape[-1] != HEAD_DIM:
        raise ValueError(f"q must be {shape}, found {list(q.shape)}")
    if q.shape[-2] not in HEADS:
        raise ValueError(f"q must have 32 or 64 heads, found {q.shape[-2]}")
    _check("q", q, q.device, torch.float8_e4m3fn, list(q.shape))


def _check(
    name: str,
    tensor: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype,
    shape: list[int],
) -> None:
    """Raise ValueError unless the tensor is of this kind, its rows contiguous."""
    if list(tensor.shape) != shape:
        raise ValueError(f"{name} must be {shape}, found {list(tensor.shape)}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, found {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} like q, found {tensor.device}")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(
            f"{name} must be contiguous in its last dimension, "
            f"found stride {tensor.stride(-1)}"
        )


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of the device; asked once, it costs microseconds."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)
    return INTERPRETED_CAPABILITY


@cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of the device; asked once."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return INTERPRETED_PROCESSORS
