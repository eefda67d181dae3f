# SPDX-License-Identifier: Apache-2.0
"""GLM-5 in transformers, with the quantisation that vLLM does on its way modelled.

What vLLM rounds to 8 bits changes which tokens the indexer picks and what is read of
them, in any dtype. Against a reference that rounds the same numbers, what is left is
the error of the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers import GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0


@dataclass(frozen=True)
class Emulation:
    """What to round, and what to do wrong: the latter for controls.

    Attributes:
        indexer: its queries and keys to e4m3, a scale that is a power of two for each
            128, as vLLM does for DeepGEMM.
        latent: the cached latent to e4m3, a float32 scale for each 128: `fp8_ds_mla`.
            Its rope part keeps the model's dtype.
        activations: inputs of matrix products to 8 bits, a float16 scale for each 32,
            as the kernels for GGUF do. They keep kv_b and the indexer's keys and head
            weights plain.
        topk: instead of the config's `index_topk`.
        neox: rotate the halves of the indexer's vectors instead of neighbours.
        rolled: the rope part of kv_a taken from before the latent, not after it.
    """

    indexer: bool = True
    latent: bool = False
    activations: bool = False
    topk: int | None = None
    neox: bool = False
    rolled: bool = False


def indexer_fp8(x: torch.Tensor) -> torch.Tensor:
    """Round the last dimension to e4m3 times a power of two, and back to float32."""
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True).clamp(min=1e-10)
    scale = torch.exp2(torch.ceil(torch.log2(largest / E4M3_MAX)))
    return (x / scale).to(E4M3).float() * scale


def latent_fp8(x: torch.Tensor) -> torch.Tensor:
    """Round groups of 128 to e4m3 times a float32 scale, and back to x's dtype."""
    groups = x.float().unflatten(-1, (-1, 128))
    largest = groups.abs().amax(-1, keepdim=True)
    scale = (largest / E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return ((groups / scale).to(E4M3).float() * scale).flatten(-2).to(x.dtype)


def activation_int8(x: torch.Tensor) -> torch.Tensor:
    """Round groups of 32 to 8-bit integers times a float16 scale, and back."""
    groups = x.float().unflatten(-1, (-1, 32))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    rounded = torch.where(scale > 0, torch.round(groups / scale), 0)
    return (rounded * scale.half().float()).flatten(-2).to(x.dtype)


def rotate_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of NeoX, the way that GLM-5's indexer does not use."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


class _RoundInputs(TorchFunctionMode):
    """While active, the input of `linear` is rounded to 8 bits."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear:
            args = (activation_int8(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def select(
    indexer: Any,
    emulation: Emulation,
    hidden: torch.Tensor,
    q_resid: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor,
) -> torch.Tensor:
    """The tokens that the indexer picks for each query.

    Args:
        hidden: [1, S, hidden size]; q_resid [1, S, q_lora_rank].
        mask: [1, S, S], bool (True: visible) or added to the scores.

    Returns:
        [1, S, min(topk, S)] int32.
    """
    cos, sin = position_embeddings
    tokens, rope = hidden.shape[1], indexer.qk_rope_head_dim
    q = indexer.wq_b(q_resid).view(1, tokens, indexer.n_heads, indexer.head_dim)
    k = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
    if emulation.neox:
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        rotated = [rotate_half(x[..., :rope], cos, sin) for x in (q, k)]
    else:
        rotated = glm.apply_rotary_pos_emb_interleave(
            q[..., :rope], k[..., :rope], cos, sin, unsqueeze_dim=2
        )
    q, k = (
        torch.cat([turned, x[..., rope:]], -1)
        for turned, x in zip(rotated, (q, k), strict=True)
    )
    round_ = indexer_fp8 if emulation.indexer else torch.Tensor.float
    q, keys = round_(q), round_(k).squeeze(2).mT
    # Some releases of transformers keep this one in float32 in a float16 model.
    kept = indexer.weights_proj.weight.dtype
    weights = indexer.weights_proj(hidden.to(kept)).float()
    topk = min(emulation.topk or indexer.index_topk, tokens)
    picked = []
    for start in range(0, tokens, 512):  # bounds the scores of all heads
        rows = slice(start, start + 512)
        # The scales of scores and weights are positive and change no order.
        scores = F.relu(torch.einsum("bqhd,bdk->bqhk", q[:, rows], keys))
        logits = torch.einsum("bqh,bqhk->bqk", weights[:, rows], scores)
        if mask.dtype == torch.bool:
            logits = logits.masked_fill(~mask[:, rows], -torch.inf)
        else:
            logits = logits + mask[:, rows]
        picked.append(logits.topk(topk, -1).indices)
    return torch.cat(picked, 1).int()


def load(folder: str, dtype: torch.dtype, emulation: Emulation) -> Any:
    """The model of an HF checkpoint, on the GPU if there is one."""
    model = GlmMoeDsaForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    for layer in model.model.layers:
        _emulate(layer.self_attn, emulation)
    if emulation.activations:
        for name, module in model.named_modules():
            plain = name.endswith(("kv_b_proj", "indexer.wk", "weights_proj"))
            if (isinstance(module, torch.nn.Linear) and not plain) or isinstance(
                module, glm.GlmMoeDsaExperts
            ):
                module.forward = _rounding(module.forward)
    return model


def _emulate(attention: Any, emulation: Emulation) -> None:
    indexer = attention.indexer
    if indexer is not None:

        def forward(
            hidden: Any, q_resid: Any, embeddings: Any, mask: Any, *_: Any, **__: Any
        ) -> torch.Tensor:
            return select(indexer, emulation, hidden, q_resid, embeddings, mask)

        indexer.forward = forward
    if emulation.latent:
        expand = attention.expand_kv
        attention.expand_kv = lambda latent, rope: expand(latent_fp8(latent), rope)
    if emulation.rolled:
        weight = attention.kv_a_proj_with_mqa.weight.data
        weight.copy_(weight.roll(attention.qk_rope_head_dim, 0))


def _rounding(forward: Any) -> Any:
    def rounded(*args: Any, **kwargs: Any) -> Any:
        with _RoundInputs():
            return forward(*args, **kwargs)

    return rounded


@torch.no_grad()
def log_probabilities(model: Any, tokens: list[int]) -> torch.Tensor:
    """[S, vocabulary] float32 on the CPU; row i is about token i + 1."""
    ids = torch.tensor([tokens], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0]
    return logits.float().log_softmax(-1).cpu()
