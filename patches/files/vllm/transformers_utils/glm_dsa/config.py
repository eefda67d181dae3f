# SPDX-License-Identifier: Apache-2.0
"""From the metadata of a ``glm-dsa`` file to the fields of a ``glm_moe_dsa`` config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from .header import GgufError, Value
from .shards import Checkpoint

ARCHITECTURE = "glm-dsa"
MODEL_TYPE = "glm_moe_dsa"

# From this context length on, files without `attention.indexer.types` share
# indexers between layers, as GLM-5.2 does; llama.cpp draws the line here too.
_SHARING_CONTEXT = 1 << 20
_SHARING_PERIOD, _SHARING_OFFSET = 4, 3

Number = TypeVar("Number", int, float, bool, str)


@dataclass(frozen=True)
class Model:
    """What the metadata says about one model.

    Attributes:
        name: `general.name`, for people.
        layers: without the draft layers of multi-token prediction.
        draft_layers: layers that predict further tokens; they follow the others.
        full_layers: for each layer, whether it runs an indexer of its own; the
            others reuse the selection of the last layer that does.
    """

    name: str
    layers: int
    draft_layers: int
    dense_layers: int
    hidden: int
    dense_intermediate: int
    expert_intermediate: int
    experts: int
    experts_used: int
    shared_experts: int
    groups: int
    groups_used: int
    expert_scale: float
    expert_norm: bool
    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    index_heads: int
    index_dim: int
    index_topk: int
    full_layers: tuple[bool, ...]
    vocabulary: int
    context: int
    rope_base: float
    norm_eps: float
    bos: int | None
    eos: tuple[int, ...]
    pad: int | None

    @property
    def shares_indexers(self) -> bool:
        return not all(self.full_layers)

    def config(self) -> dict[str, Any]:
        """The fields of a `config.json`, with the constants no GGUF file carries."""
        fields: dict[str, Any] = {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": MODEL_TYPE,
            "num_hidden_layers": self.layers,
            "num_nextn_predict_layers": self.draft_layers,
            "first_k_dense_replace": self.dense_layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.dense_intermediate,
            "moe_intermediate_size": self.expert_intermediate,
            "n_routed_experts": self.experts,
            "num_experts_per_tok": self.experts_used,
            "n_shared_experts": self.shared_experts,
            "n_group": self.groups,
            "topk_group": self.groups_used,
            "routed_scaling_factor": self.expert_scale,
            "norm_topk_prob": self.expert_norm,
            "num_attention_heads": self.heads,
            # The file describes the latent view, which has one head.
            "num_key_value_heads": self.heads,
            "q_lora_rank": self.q_rank,
            "kv_lora_rank": self.kv_rank,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rope,
            "qk_head_dim": self.nope + self.rope,
            "v_head_dim": self.value,
            "index_n_heads": self.index_heads,
            "index_head_dim": self.index_dim,
            "index_topk": self.index_topk,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.context,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_base},
            "rms_norm_eps": self.norm_eps,
            "bos_token_id": self.bos,
            "eos_token_id": list(self.eos),
            "pad_token_id": self.pad,
            # Not in any file; the same for every GLM-5. Without the first two, the
            # rotation is wrong, silently; without the next, routing is.
            "rope_interleave": True,
            "indexer_rope_interleave": True,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "hidden_act": "silu",
            "moe_layer_freq": 1,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }
        if self.shares_indexers:
            # The first is what vLLM reads, the second what transformers does.
            fields["index_topk_pattern"] = "".join(
                "F" if full else "S" for full in self.full_layers
            )
            fields["indexer_types"] = [
                "full" if full else "shared" for full in self.full_layers
            ]
        return fields


def is_glm_dsa(metadata: Mapping[str, Value]) -> bool:
    return metadata.get("general.architecture") == ARCHITECTURE


def read_model(checkpoint: Checkpoint) -> Model:
    """The model that the checkpoint's metadata describe.

    Raises:
        GgufError: another architecture, a key is missing or has an impossible value.
    """
    metadata = checkpoint.metadata
    if not is_glm_dsa(metadata):
        architecture = metadata.get("general.architecture")
        raise GgufError(
            f"the architecture is {architecture!r}, not {ARCHITECTURE!r}: "
            "these files hold no GLM-5"
        )
    if metadata.get(f"{ARCHITECTURE}.expert_gating_func", 2) != 2:
        raise GgufError("expert_gating_func is not 2 (sigmoid), as every GLM-5 has it")
    get = _Reader(metadata)
    blocks = get.size("block_count")
    draft = get.value("nextn_predict_layers", int, 0)
    rope = get.size("rope.dimension_count")
    kv_rank = get.size("attention.kv_lora_rank")
    head = get.size("attention.key_length_mla")
    context = get.size("context_length")
    if not 0 <= draft < blocks <= 1000:
        raise GgufError(f"block_count is {blocks} with {draft} nextn_predict_layers")
    if head <= rope or get.size("attention.key_length") != kv_rank + rope:
        raise GgufError(
            f"attention.key_length_mla {head}, rope.dimension_count {rope} and "
            f"attention.kv_lora_rank {kv_rank} do not fit attention.key_length"
        )
    layers = blocks - draft
    embedding = checkpoint.tensors.get("token_embd.weight")
    return Model(
        name=_shown(metadata.get("general.name")),
        layers=layers,
        draft_layers=draft,
        dense_layers=get.value("leading_dense_block_count", int, 0),
        hidden=get.size("embedding_length"),
        dense_intermediate=get.size("feed_forward_length"),
        expert_intermediate=get.size("expert_feed_forward_length"),
        experts=get.size("expert_count"),
        experts_used=get.size("expert_used_count"),
        shared_experts=get.size("expert_shared_count"),
        groups=get.value("expert_group_count", int, 1),
        groups_used=get.value("expert_group_used_count", int, 1),
        expert_scale=get.value("expert_weights_scale", float, 1.0),
        expert_norm=get.value("expert_weights_norm", bool, False),
        heads=get.size("attention.head_count"),
        q_rank=get.size("attention.q_lora_rank"),
        kv_rank=kv_rank,
        nope=head - rope,
        rope=rope,
        value=get.size("attention.value_length_mla"),
        index_heads=get.size("attention.indexer.head_count"),
        index_dim=get.size("attention.indexer.key_length"),
        index_topk=get.size("attention.indexer.top_k"),
        full_layers=_full_layers(metadata, layers, context),
        # Older conversions lack the key.
        vocabulary=embedding.shape[0] if embedding else get.size("vocab_size"),
        context=context,
        rope_base=get.value("rope.freq_base", float, None),
        norm_eps=get.value("attention.layer_norm_rms_epsilon", float, None),
        bos=get.token("bos"),
        eos=tuple(
            token
            for token in map(get.token, ("eos", "eot", "eom"))
            if token is not None
        ),
        pad=get.token("padding"),
    )


class _Reader:
    """Typed look-ups below the architecture's prefix."""

    def __init__(self, metadata: Mapping[str, Value]) -> None:
        self.metadata = metadata

    def value(self, key: str, kind: type[Number], default: Number | None) -> Number:
        key = f"{ARCHITECTURE}.{key}"
        value = self.metadata.get(key, default)
        if value is None:
            raise GgufError(f"the metadata lack {key}")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise GgufError(f"{key} is {value!r}, not of type {kind.__name__}")
        return value

    def size(self, key: str) -> int:
        value = self.value(key, int, None)
        if not 0 < value < 1 << 31:
            raise GgufError(f"{ARCHITECTURE}.{key} is {value}, an impossible size")
        return value

    def token(self, kind: str) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        return value if type(value) is int else None


def _shown(name: Value) -> str:
    """A name that does no harm on a terminal."""
    text = name if isinstance(name, str) else ""
    return "".join(filter(str.isprintable, text))[:80] or "GLM-5"


def _full_layers(
    metadata: Mapping[str, Value], layers: int, context: int
) -> tuple[bool, ...]:
    key = f"{ARCHITECTURE}.attention.indexer.types"
    if key not in metadata:
        if context < _SHARING_CONTEXT:
            return (True,) * layers
        return tuple(
            max(layer - _SHARING_OFFSET + 1, 0) % _SHARING_PERIOD == 0
            for layer in range(layers)
        )
    types = metadata[key]
    if not isinstance(types, tuple) or len(types) < layers:
        raise GgufError(f"{key} does not list each of the {layers} layers")
    full = tuple(map(bool, types[:layers]))
    if not full[0]:
        raise GgufError(f"{key} lets the first layer share an indexer with none")
    return full
