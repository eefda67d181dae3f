# SPDX-License-Identifier: Apache-2.0
"""TRITON_MLA_SPARSE: sparse MLA (GLM-5, DeepSeek-V3.2) on any GPU from SM80 on.

vLLM glue only; the work is in `vllm.v1.attention.ops.triton_sparse_mla`. One
file serves vLLM 0.16.0 to 0.33.0. It defines everything that any of them asks
for, takes sizes and strides from the tensors, and asks for a version nowhere;
the one thing it must branch on is the base class below.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
)
from vllm.v1.attention.ops.triton_sparse_launch import LATENT_DIM, ROW_DIM
from vllm.v1.attention.ops.triton_sparse_mla import sparse_mla
from vllm.v1.attention.ops.triton_sparse_slots import slots_from_positions

try:  # 0.16.0 to 0.25.1: the layer asks for this class by isinstance
    from vllm.v1.attention.backend import SparseMLAAttentionImpl as _ImplBase
except ImportError:  # 0.26.0 on: the layer reads `is_sparse`
    from vllm.v1.attention.backend import MLAAttentionImpl as _ImplBase

# The indexer's cache accepts pages of 64 only, and both share one page table.
PAGE = 64


class TritonMLASparseBackend(AttentionBackend):
    """What the selector asks: which configurations this backend serves."""

    accept_output_buffer = True  # read up to 0.19.1
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "TRITON_MLA_SPARSE"

    @staticmethod
    def get_impl_cls() -> type["TritonMLASparseImpl"]:
        return TritonMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type["TritonMLASparseMetadataBuilder"]:
        return TritonMLASparseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return [PAGE]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return (num_blocks, block_size, head_size)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [ROW_DIM]

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        # SM80 brought what the kernel is made of: bfloat16 matrix instructions
        # and asynchronous copies into shared memory.
        return capability.major >= 8

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        *args: Any,
        **kwargs: Any,
    ) -> str | None:
        """Say in a sentence what the selector's own reasons leave unclear.

        The parameters after the third differ between releases and none of them
        matters here.
        """
        # For GLM-5 "bfloat16" means "16 bits, not quantised": the patch's hook in
        # models/config.py turns it into "auto" before a layer is built, as vLLM does
        # for DeepSeek-V3.2. So it is right for either dtype; "float16" is not turned.
        if kv_cache_dtype in (None, "auto", "bfloat16", _dtype_name(dtype)):
            return None
        return (
            f"TRITON_MLA_SPARSE keeps the KV cache in the model's own dtype, "
            f"{_dtype_name(dtype)}, but kv_cache_dtype is {kv_cache_dtype!r} (a "
            f"checkpoint can set that by itself): pass --kv-cache-dtype bfloat16, "
            f"which stands for any 16-bit cache"
        )


@dataclass
class TritonMLASparseMetadata(AttentionMetadata):
    """One batch. Tokens are all treated alike: each attends to its own picks."""

    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    query_start_loc: torch.Tensor  # [num_reqs + 1] int32
    seq_lens: torch.Tensor  # [num_reqs] int32
    slot_mapping: torch.Tensor  # [num_actual_tokens] int64
    block_table: torch.Tensor  # [num_reqs, max_blocks] int32
    req_of_token: torch.Tensor  # [num_actual_tokens] int32
    topk_tokens: int

    # From 0.26.0 the layer splits a batch by these. All tokens count as decode
    # tokens, so none takes the dense prefill path, which this backend lacks.
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0
    prefill_max_seq_len: int = 0
    prefill: None = None
    decode: None = None


class TritonMLASparseMetadataBuilder(AttentionMetadataBuilder[TritonMLASparseMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.topk_tokens: int = vllm_config.model_config.hf_text_config.index_topk

        # A captured graph keeps the addresses that it saw, so every batch writes
        # into the same buffer.
        max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._token_ids = torch.arange(max_tokens, dtype=torch.int32, device=device)
        self._req_of_token = torch.zeros(max_tokens, dtype=torch.int32, device=device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,
    ) -> TritonMLASparseMetadata:
        cm = common_attn_metadata
        num_tokens = cm.num_actual_tokens
        if num_tokens > self._token_ids.shape[0]:
            raise ValueError(
                f"batch must have at most max_num_batched_tokens = "
                f"{self._token_ids.shape[0]} tokens, found {num_tokens}"
            )
        # The request of token t is the number of requests that end at or before
        # t. On the device, from the device's own boundaries: no copy, no wait,
        # and right also where the CPU's copy runs behind. A padding token lands
        # on num_reqs, which the slot lookup answers with "no key".
        req_of_token = self._req_of_token[:num_tokens]
        torch.searchsorted(
            cm.query_start_loc[1 : cm.num_reqs + 1],
            self._token_ids[:num_tokens],
            right=True,
            out_int32=True,
            out=req_of_token,
        )
        return TritonMLASparseMetadata(
            num_reqs=cm.num_reqs,
            max_query_len=cm.max_query_len,
            max_seq_len=cm.max_seq_len,
            num_actual_tokens=num_tokens,
            query_start_loc=cm.query_start_loc,
            seq_lens=cm.seq_lens,
            slot_mapping=cm.slot_mapping,
            block_table=cm.block_table_tensor,
            req_of_token=req_of_token,
            topk_tokens=self.topk_tokens,
            num_decodes=cm.num_reqs,
            num_decode_tokens=num_tokens,
        )


class TritonMLASparseImpl(_ImplBase[TritonMLASparseMetadata]):
    is_sparse = True  # 0.26.0 on
    supports_dense_mha_prefill = False  # 0.27.0 on
    masked_mha_available = False  # 0.27.0 on

    # The kernel returns the LSE, but decode context parallelism needs more than
    # that: the indexer picks positions of the whole request, and nothing maps
    # them to the part of the cache that a rank holds. Saying True would turn
    # vLLM's refusal into wrong answers.
    can_return_lse_for_decode = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        indexer: Any = None,
        topk_indices_buffer: torch.Tensor | None = None,
        **mla_args: Any,
    ) -> None:
        unsupported = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
        }
        found = [f"{name}={value}" for name, value in unsupported.items() if value]
        if found:
            raise NotImplementedError(
                f"TRITON_MLA_SPARSE supports none of {', '.join(unsupported)}, "
                f"found {', '.join(found)}"
            )
        kv_lora_rank = mla_args["kv_lora_rank"]
        if (head_size, kv_lora_rank) != (ROW_DIM, LATENT_DIM):
            raise NotImplementedError(
                f"TRITON_MLA_SPARSE needs head_size {ROW_DIM} and kv_lora_rank "
                f"{LATENT_DIM}, found {head_size} and {kv_lora_rank}"
            )
        if indexer is None and topk_indices_buffer is None:
            raise ValueError(
                "TRITON_MLA_SPARSE needs an indexer or a topk_indices_buffer, "
                "found neither"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank = kv_lora_rank
        self._indexer = indexer
        self._topk_indices_buffer = topk_indices_buffer

    @property
    def topk_indices_buffer(self) -> torch.Tensor:
        """The indexer's picks, `[max_tokens, topk]` int32.

        Looked up at every use: a draft model's indexer is pointed at the target
        model's buffer after this object is made. A layer that reuses the picks
        of an earlier one has no indexer and keeps the buffer it was given.
        """
        if self._indexer is not None:
            return self._indexer.topk_indices_buffer
        return self._topk_indices_buffer

    def record_logical_topk_ready(self) -> None:
        """Called from 0.30.0 on; nothing waits for the picks here."""

    def forward_mha(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "TRITON_MLA_SPARSE has no dense prefill: every token takes forward_mqa"
        )

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: TritonMLASparseMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend; gives `[T, H, 512]` and the `[T, H]` LSE, base e.

        The number of tokens is that of `q`: metadata and buffers may be longer.
        """
        num_tokens = (q if isinstance(q, torch.Tensor) else q[0]).shape[0]
        slots = slots_from_positions(
            self.topk_indices_buffer[:num_tokens, : attn_metadata.topk_tokens],
            attn_metadata.block_table,
            attn_metadata.req_of_token[:num_tokens],
            page=kv_c_and_k_pe_cache.shape[1],
        )
        return sparse_mla(q, kv_c_and_k_pe_cache, slots, self.scale)


def _dtype_name(dtype: torch.dtype) -> str:
    """torch.float16 -> float16, vLLM's name for the same."""
    return str(dtype).removeprefix("torch.")
