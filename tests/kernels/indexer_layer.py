# SPDX-License-Identifier: Apache-2.0
"""Drives a release's own indexer: its metadata builder, its layer, its op.

vLLM must be importable, on a real GPU or on one that is pretended. What is not real:
the configuration, of which the builder reads a few values, and the forward context,
which hands the op its metadata.
"""

import dataclasses
import importlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import mqa_reference as reference
import torch
from compare import MismatchError

HEADS, HEAD_DIM, PAGE, ROW_BYTES = 32, 128, 64, 132
LAYER = "layer"


@dataclass(frozen=True)
class Batch:
    """Requests of one step; those that decode come first, as vLLM sorts them."""

    name: str
    before: tuple[int, ...]  # tokens of each request that the cache holds
    now: tuple[int, ...]  # and those of this step
    drafts: int = 0  # speculative tokens a request may have
    seed: int = 0

    @property
    def lens(self) -> list[int]:
        """Keys of each request when the step is done."""
        return [b + n for b, n in zip(self.before, self.now, strict=True)]


@dataclass(frozen=True)
class Inputs:
    """Tensors of a batch on its device, and the cache that holds the older keys."""

    q: torch.Tensor  # [T, HEADS, HEAD_DIM] float8
    k: torch.Tensor  # [T, HEAD_DIM] bfloat16
    weights: torch.Tensor  # [T, HEADS] float32
    cache: torch.Tensor  # [blocks, PAGE, ROW_BYTES] uint8
    table: torch.Tensor  # [B, pages] int32
    slots: torch.Tensor  # [T] int64


def make_inputs(batch: Batch, device: str, max_model_len: int) -> Inputs:
    """Draw a batch, and let vLLM write its older keys."""
    generator = torch.Generator().manual_seed(batch.seed)
    pages = [-(-n // PAGE) for n in batch.lens]
    blocks = torch.randperm(sum(pages) + 5, generator=generator).int()
    table = torch.zeros(len(pages), max_model_len // PAGE, dtype=torch.int32)
    for row, count in enumerate(pages):
        table[row, :count] = blocks[sum(pages[:row]) :][:count]
    every = [
        table[row].long().repeat_interleave(PAGE)[:n] * PAGE + torch.arange(n) % PAGE
        for row, n in enumerate(batch.lens)
    ]
    old = torch.cat([s[:b] for s, b in zip(every, batch.before, strict=True)])
    new = torch.cat([s[b:] for s, b in zip(every, batch.before, strict=True)])
    tokens = sum(batch.now)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    cache = torch.full((len(blocks), PAGE, ROW_BYTES), 0x7F, dtype=torch.uint8)
    made = Inputs(
        q=(normal(tokens, HEADS, HEAD_DIM) * 100)
        .clamp(-448, 448)
        .to(torch.float8_e4m3fn),
        k=normal(tokens, HEAD_DIM).bfloat16(),
        weights=normal(tokens, HEADS),
        cache=cache,
        table=table,
        slots=new,
    )
    names = [field.name for field in dataclasses.fields(Inputs)]
    made = Inputs(**{name: getattr(made, name).to(device) for name in names})
    if len(old):
        operators = importlib.import_module("vllm._custom_ops")
        keys = normal(len(old), HEAD_DIM).bfloat16().to(device)
        operators.indexer_k_quant_and_cache(
            keys, made.cache, old.to(device), HEAD_DIM, "ue8m0"
        )
    return made


def build_metadata(
    batch: Batch,
    inputs: Inputs,
    max_model_len: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Any:
    """What vLLM's builder makes of the batch."""
    device = inputs.q.device
    backend = importlib.import_module("vllm.v1.attention.backend")
    indexer = importlib.import_module("vllm.v1.attention.backends.mla.indexer")
    drafts = batch.drafts
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=max_model_len,
            dtype=dtype,
            hf_text_config=SimpleNamespace(index_n_heads=HEADS),
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=64, max_num_batched_tokens=max(64, len(inputs.q))
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts)
        if drafts
        else None,
        attention_config=SimpleNamespace(use_fp4_indexer_cache=False),
    )
    spec = SimpleNamespace(block_size=PAGE, storage_block_size=PAGE)
    builder = indexer.DeepseekV32IndexerMetadataBuilder(spec, [LAYER], config, device)
    starts = torch.tensor([0, *batch.now]).cumsum(0).int()
    lens = torch.tensor(batch.lens).int()
    given = {
        "query_start_loc": starts.to(device),
        "query_start_loc_cpu": starts,
        "seq_lens": lens.to(device),
        "num_reqs": len(lens),
        "num_actual_tokens": int(starts[-1]),
        "max_query_len": max(batch.now),
        "max_seq_len": max(batch.lens),
        "block_table_tensor": inputs.table,
        "slot_mapping": inputs.slots,
    }
    kind = backend.CommonAttentionMetadata
    if "seq_lens_cpu_upper_bound" in {f.name for f in dataclasses.fields(kind)}:
        given["seq_lens_cpu_upper_bound"] = lens
    return builder.build(0, kind(**given))


def run_layer(
    inputs: Inputs, metadata: Any, topk: int, max_model_len: int
) -> torch.Tensor:
    """`[T, topk]` int32, the picks of vLLM's layer; -1 fills what has no key."""
    module = importlib.import_module("vllm.model_executor.layers.sparse_attn_indexer")
    workspace = importlib.import_module("vllm.v1.worker.workspace")
    vllm_config = importlib.import_module("vllm.config")
    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(inputs.q.device)
    tokens = len(inputs.q)
    picks = torch.full((tokens, topk), -7, dtype=torch.int32, device=inputs.q.device)
    tensor = inputs.cache if _takes_tensor(module) else [inputs.cache]
    with vllm_config.set_current_vllm_config(vllm_config.VllmConfig()):
        layer = module.SparseAttnIndexer(
            k_cache=SimpleNamespace(prefix=LAYER, kv_cache=tensor),
            quant_block_size=HEAD_DIM,
            scale_fmt="ue8m0",
            topk_tokens=topk,
            head_dim=HEAD_DIM,
            max_model_len=max_model_len,
            max_total_seq_len=max_model_len * 40,
            topk_indices_buffer=picks,
        )
    context = SimpleNamespace(attn_metadata={LAYER: metadata})
    kept, module.get_forward_context = module.get_forward_context, lambda: context
    try:
        hidden = torch.empty(tokens, 1, device=inputs.q.device)
        return layer.forward_cuda(hidden, inputs.q, inputs.k, inputs.weights)
    finally:
        module.get_forward_context = kept


def _takes_tensor(module: Any) -> bool:
    """Whether the cache of a layer is a tensor, or, as it was, a list of one."""
    return "kv_cache_as_quant_view" in vars(module)


def reference_logits(batch: Batch, inputs: Inputs) -> list[torch.Tensor]:
    """For each token `[keys]` float64, over what the cache holds after the step."""
    found = []
    first = 0
    for row, (old, new) in enumerate(zip(batch.before, batch.now, strict=True)):
        pages = inputs.cache[inputs.table[row, : -(-(old + new) // PAGE)].long()].cpu()
        unpacked = [reference.unpack_page(page) for page in pages]
        keys = torch.cat([keys.float() for keys, _ in unpacked])[: old + new]
        scales = torch.cat([scales for _, scales in unpacked])[: old + new]
        part = slice(first, first + new)
        ends = old + 1 + torch.arange(new)
        logits = reference.mqa_logits(
            inputs.q[part], keys, scales, inputs.weights[part], 0 * ends, ends
        )
        found += [logits[j, : old + 1 + j] for j in range(new)]
        first += new
    return found


def check_picks(
    picks: torch.Tensor, logits: list[torch.Tensor], tolerance: float
) -> float:
    """Give the share of the best keys that was picked.

    Raises:
        MismatchError: a row picks no key, one twice, or one that the reference does
            not put among the best, nor within `tolerance` of the largest of them.
    """
    due = met = 0
    for row, (given, expected) in enumerate(zip(picks.cpu(), logits, strict=True)):
        count = min(len(given), len(expected))
        chosen = given[given != -1].long()
        if len(chosen) != count or len(chosen.unique()) != count:
            raise MismatchError(f"row {row}: {count} keys due, found {len(chosen)}")
        if not ((chosen >= 0) & (chosen < len(expected))).all():
            raise MismatchError(f"row {row}: a pick is none of {len(expected)} keys")
        best = expected.topk(count)
        picked, wanted = torch.zeros(2, len(expected), dtype=torch.bool)
        picked[chosen], wanted[best.indices] = True, True
        near = (expected - best.values[-1]).abs() <= tolerance * expected.abs().max()
        if ((picked ^ wanted) & ~near).any():
            raise MismatchError(f"row {row}: {int((picked & ~wanted).sum())} wrong")
        due, met = due + count, met + int((picked & wanted).sum())
    return met / due
