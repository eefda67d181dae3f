# SPDX-License-Identifier: Apache-2.0
"""The one table of names: which tensor of a file fills which parameter of vLLM."""

import enum
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .config import Model

Shape = tuple[int, ...]


class Split(enum.Enum):
    """How tensor parallelism divides a parameter."""

    WHOLE = "every rank holds all of it"
    ROWS = "outputs: the next to last dimension"
    COLUMNS = "inputs: the last dimension"
    VOCABULARY = "outputs, padded to a multiple"


@dataclass(frozen=True)
class Entry:
    """One line of the table.

    Attributes:
        target: the parameter, in the spelling of the HF checkpoint.
        sources: the tensors it is made from; two only for kv_b_proj.
        shapes: what each source must look like.
        plain: vLLM holds this parameter unquantised whatever the file does.
        partner: the target that vLLM fuses this one with, in one matrix.
    """

    target: str
    sources: tuple[str, ...]
    shapes: Callable[[Model], tuple[Shape, ...]]
    split: Split = Split.WHOLE
    plain: bool = False
    partner: str | None = None


def _entry(
    target: str,
    source: str,
    shape: Callable[[Model], Shape],
    split: Split = Split.WHOLE,
    *,
    plain: bool = False,
    partner: str | None = None,
) -> Entry:
    return Entry(target, (source,), lambda m: (shape(m),), split, plain, partner)


# Within a layer the order is the order of loading. It matters where vLLM fuses two
# tensors: releases up to 0.23 concatenate fused GGUF parts in the order in which
# they arrive, and files hold kv_a before q_a.
_TOP: tuple[Entry, ...] = (
    _entry(
        "model.embed_tokens.weight",
        "token_embd.weight",
        lambda m: (m.vocabulary, m.hidden),
        Split.VOCABULARY,
    ),
)
_BOTTOM: tuple[Entry, ...] = (
    _entry(
        "model.norm.weight",
        "output_norm.weight",
        lambda m: (m.hidden,),
        plain=True,
    ),
    _entry(
        "lm_head.weight",
        "output.weight",
        lambda m: (m.vocabulary, m.hidden),
        Split.VOCABULARY,
    ),
)
_ATTENTION: tuple[Entry, ...] = (
    _entry(
        "input_layernorm.weight", "attn_norm.weight", lambda m: (m.hidden,), plain=True
    ),
    _entry(
        "self_attn.q_a_proj.weight",
        "attn_q_a.weight",
        lambda m: (m.q_rank, m.hidden),
        partner="self_attn.kv_a_proj_with_mqa.weight",
    ),
    _entry(
        "self_attn.kv_a_proj_with_mqa.weight",
        "attn_kv_a_mqa.weight",
        lambda m: (m.kv_rank + m.rope, m.hidden),
        partner="self_attn.q_a_proj.weight",
    ),
    _entry(
        "self_attn.q_a_layernorm.weight",
        "attn_q_a_norm.weight",
        lambda m: (m.q_rank,),
        plain=True,
    ),
    _entry(
        "self_attn.q_b_proj.weight",
        "attn_q_b.weight",
        lambda m: (m.heads * (m.nope + m.rope), m.q_rank),
        Split.ROWS,
    ),
    _entry(
        "self_attn.kv_a_layernorm.weight",
        "attn_kv_a_norm.weight",
        lambda m: (m.kv_rank,),
        plain=True,
    ),
    Entry(
        "self_attn.kv_b_proj.weight",
        ("attn_k_b.weight", "attn_v_b.weight"),
        lambda m: ((m.heads, m.kv_rank, m.nope), (m.heads, m.value, m.kv_rank)),
        Split.ROWS,
        # k_b's blocks run along nope, but kv_b_proj's rows along kv_rank.
        plain=True,
    ),
    _entry(
        "self_attn.o_proj.weight",
        "attn_output.weight",
        lambda m: (m.hidden, m.heads * m.value),
        Split.COLUMNS,
    ),
)
_INDEXER: tuple[Entry, ...] = (
    _entry(
        "self_attn.indexer.wq_b.weight",
        "indexer.attn_q_b.weight",
        lambda m: (m.index_heads * m.index_dim, m.q_rank),
    ),
    _entry(
        "self_attn.indexer.wk.weight",
        "indexer.attn_k.weight",
        lambda m: (m.index_dim, m.hidden),
    ),
    _entry(
        "self_attn.indexer.weights_proj.weight",
        "indexer.proj.weight",
        lambda m: (m.index_heads, m.hidden),
        plain=True,
    ),
    _entry(
        "self_attn.indexer.k_norm.weight",
        "indexer.k_norm.weight",
        lambda m: (m.index_dim,),
        plain=True,
    ),
    _entry(
        "self_attn.indexer.k_norm.bias",
        "indexer.k_norm.bias",
        lambda m: (m.index_dim,),
        plain=True,
    ),
)
_FFN_NORM: tuple[Entry, ...] = (
    _entry(
        "post_attention_layernorm.weight",
        "ffn_norm.weight",
        lambda m: (m.hidden,),
        plain=True,
    ),
)


def _mlp(target: str, suffix: str, width: Callable[[Model], int]) -> tuple[Entry, ...]:
    gate, up = f"{target}.gate_proj.weight", f"{target}.up_proj.weight"

    def outwards(m: Model) -> Shape:
        return (width(m), m.hidden)

    return (
        _entry(gate, f"ffn_gate{suffix}.weight", outwards, Split.ROWS, partner=up),
        _entry(up, f"ffn_up{suffix}.weight", outwards, Split.ROWS, partner=gate),
        _entry(
            f"{target}.down_proj.weight",
            f"ffn_down{suffix}.weight",
            lambda m: (m.hidden, width(m)),
            Split.COLUMNS,
        ),
    )


_DENSE = _mlp("mlp", "", lambda m: m.dense_intermediate)
# vLLM's expert loader takes the stack of all experts under the first one's name.
EXPERTS = "mlp.experts.0."
_SPARSE: tuple[Entry, ...] = (
    _entry(
        "mlp.gate.weight",
        "ffn_gate_inp.weight",
        lambda m: (m.experts, m.hidden),
        plain=True,
    ),
    _entry(
        "mlp.gate.e_score_correction_bias",
        "exp_probs_b.bias",
        lambda m: (m.experts,),
        plain=True,
    ),
    *_mlp(
        "mlp.shared_experts",
        "_shexp",
        lambda m: m.expert_intermediate * m.shared_experts,
    ),
    _entry(
        EXPERTS + "gate_proj.weight",
        "ffn_gate_exps.weight",
        lambda m: (m.experts, m.expert_intermediate, m.hidden),
        Split.ROWS,
    ),
    _entry(
        EXPERTS + "up_proj.weight",
        "ffn_up_exps.weight",
        lambda m: (m.experts, m.expert_intermediate, m.hidden),
        Split.ROWS,
    ),
    _entry(
        EXPERTS + "down_proj.weight",
        "ffn_down_exps.weight",
        lambda m: (m.experts, m.hidden, m.expert_intermediate),
        Split.COLUMNS,
    ),
)
# Converters have spelt this one both ways.
ALIASES = {"exp_probs_b.bias": "exp_probs_b"}
_INDEXER_SOURCES = {source for entry in _INDEXER for source in entry.sources}
_BLOCK_NAME = re.compile(r"blk\.(\d{1,4})\.(.+)")


def groups(model: Model) -> Iterator[tuple[str, str, tuple[Entry, ...]]]:
    """For each part of the model in turn, the prefixes of its parameters and of its
    tensors, and its lines of the table."""
    yield "", "", _TOP
    for layer in range(model.layers):
        entries = _ATTENTION
        if model.full_layers[layer]:
            entries += _INDEXER
        entries += _FFN_NORM
        entries += _DENSE if layer < model.dense_layers else _SPARSE
        yield f"model.layers.{layer}.", f"blk.{layer}.", entries
    yield "", "", _BOTTOM


def skip_reason(model: Model, name: str) -> str | None:
    """Why a tensor that is in none of the groups can be left out; None if it cannot."""
    match = _BLOCK_NAME.fullmatch(name)
    if match is None:
        return None
    layer, source = int(match[1]), match[2]
    if model.layers <= layer < model.layers + model.draft_layers:
        return "a draft layer: vLLM does not draft from GGUF files"
    if (
        layer < model.layers
        and source in _INDEXER_SOURCES
        and not model.full_layers[layer]
    ):
        return "an indexer that is never run: the layer shares another's selection"
    return None
