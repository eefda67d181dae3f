# SPDX-License-Identifier: Apache-2.0
"""Tiny random GLM-5 models: as HF weights, and as the GGUF files made from them.

Heads, latents and indexer have GLM-5's own dimensions, the rest is small. Written
with the gguf package, so nothing here shares code with what it tests.
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

Arrays = dict[str, np.ndarray]
Types = Callable[[str], str]
Encoder = Callable[[str, np.ndarray, str], np.ndarray]


@dataclass(frozen=True)
class Tiny:
    """Dimensions of one model; see `config` for what they mean."""

    layers: int = 4
    draft_layers: int = 1
    dense_layers: int = 1
    hidden: int = 256
    dense_intermediate: int = 512
    expert_intermediate: int = 256
    experts: int = 8
    experts_used: int = 2
    heads: int = 8
    q_rank: int = 128
    kv_rank: int = 512
    nope: int = 192
    rope: int = 64
    value: int = 256
    index_heads: int = 32
    index_dim: int = 128
    index_topk: int = 16
    vocabulary: int = 500
    context: int = 202752
    # None: the file has no such key and every layer is full.
    full_layers: tuple[bool, ...] | None = None

    def config(self) -> dict:
        """The `config.json` that would have come with the HF checkpoint."""
        config = {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
            "num_hidden_layers": self.layers,
            "num_nextn_predict_layers": self.draft_layers,
            "first_k_dense_replace": self.dense_layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.dense_intermediate,
            "moe_intermediate_size": self.expert_intermediate,
            "n_routed_experts": self.experts,
            "num_experts_per_tok": self.experts_used,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": self.q_rank,
            "kv_lora_rank": self.kv_rank,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rope,
            "v_head_dim": self.value,
            "index_n_heads": self.index_heads,
            "index_head_dim": self.index_dim,
            "index_topk": self.index_topk,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.context,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "rms_norm_eps": 1e-5,
            "rope_interleave": True,
            "indexer_rope_interleave": True,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "hidden_act": "silu",
            "moe_layer_freq": 1,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": 2,
            "eos_token_id": [0, 3, 4],
            "pad_token_id": 1,
            "dtype": "bfloat16",
        }
        if self.full_layers:
            config["index_topk_pattern"] = "".join("SF"[f] for f in self.full_layers)
        return config


def weights(tiny: Tiny, seed: int = 0) -> Arrays:
    """A random HF checkpoint, float32, under the checkpoint's own names.

    Attention is mild and routing is not saturated, or the noise of quantisation would
    flip selected tokens and experts and hide what tests look for.
    """
    rng = np.random.default_rng(seed)
    result: Arrays = {}

    def matrix(name: str, *shape: int, gain: float = 1.0) -> None:
        values = rng.standard_normal(shape, dtype=np.float32)
        result[name] = values * np.float32(gain / np.sqrt(shape[-1]))

    def norm(name: str, size: int) -> None:
        values = 1 + 0.1 * rng.standard_normal(size, dtype=np.float32)
        result[name] = values.astype(np.float32)

    def mlp(prefix: str, width: int) -> None:
        matrix(f"{prefix}.gate_proj.weight", width, tiny.hidden)
        matrix(f"{prefix}.up_proj.weight", width, tiny.hidden)
        matrix(f"{prefix}.down_proj.weight", tiny.hidden, width)

    matrix("model.embed_tokens.weight", tiny.vocabulary, tiny.hidden, gain=16)
    matrix("lm_head.weight", tiny.vocabulary, tiny.hidden, gain=2)
    norm("model.norm.weight", tiny.hidden)
    for layer in range(tiny.layers + tiny.draft_layers):
        at = f"model.layers.{layer}"
        attention = f"{at}.self_attn"
        norm(f"{at}.input_layernorm.weight", tiny.hidden)
        norm(f"{at}.post_attention_layernorm.weight", tiny.hidden)
        matrix(f"{attention}.q_a_proj.weight", tiny.q_rank, tiny.hidden)
        norm(f"{attention}.q_a_layernorm.weight", tiny.q_rank)
        matrix(
            f"{attention}.q_b_proj.weight",
            tiny.heads * (tiny.nope + tiny.rope),
            tiny.q_rank,
        )
        matrix(
            f"{attention}.kv_a_proj_with_mqa.weight",
            tiny.kv_rank + tiny.rope,
            tiny.hidden,
            gain=2,
        )
        norm(f"{attention}.kv_a_layernorm.weight", tiny.kv_rank)
        matrix(
            f"{attention}.kv_b_proj.weight",
            tiny.heads * (tiny.nope + tiny.value),
            tiny.kv_rank,
        )
        matrix(f"{attention}.o_proj.weight", tiny.hidden, tiny.heads * tiny.value)
        indexer = f"{attention}.indexer"
        matrix(f"{indexer}.wq_b.weight", tiny.index_heads * tiny.index_dim, tiny.q_rank)
        matrix(f"{indexer}.wk.weight", tiny.index_dim, tiny.hidden)
        matrix(f"{indexer}.weights_proj.weight", tiny.index_heads, tiny.hidden)
        norm(f"{indexer}.k_norm.weight", tiny.index_dim)
        matrix(f"{indexer}.k_norm.bias", tiny.index_dim)
        if layer < tiny.dense_layers:
            mlp(f"{at}.mlp", tiny.dense_intermediate)
        else:
            matrix(f"{at}.mlp.gate.weight", tiny.experts, tiny.hidden, gain=2)
            matrix(f"{at}.mlp.gate.e_score_correction_bias", tiny.experts)
            mlp(f"{at}.mlp.shared_experts", tiny.expert_intermediate)
            for expert in range(tiny.experts):
                mlp(f"{at}.mlp.experts.{expert}", tiny.expert_intermediate)
        if layer >= tiny.layers:
            matrix(f"{at}.eh_proj.weight", tiny.hidden, 2 * tiny.hidden)
            for name in ("enorm", "hnorm", "shared_head.norm"):
                norm(f"{at}.{name}.weight", tiny.hidden)
    return result


_PLAIN_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "self_attn.indexer.wk.weight": "indexer.attn_k.weight",
    "self_attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "self_attn.indexer.k_norm.weight": "indexer.k_norm.weight",
    "self_attn.indexer.k_norm.bias": "indexer.k_norm.bias",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    "eh_proj.weight": "nextn.eh_proj.weight",
    "enorm.weight": "nextn.enorm.weight",
    "hnorm.weight": "nextn.hnorm.weight",
    "shared_head.norm.weight": "nextn.shared_head_norm.weight",
}


def to_gguf(tiny: Tiny, checkpoint: Arrays) -> Arrays:
    """The tensors that llama.cpp's converter makes of a checkpoint, in file order:
    alphabetical within a layer, so that kv_a comes before q_a."""
    result = {_PLAIN_NAMES[name]: checkpoint[name] for name in _PLAIN_NAMES}
    for layer in range(tiny.layers + tiny.draft_layers):
        at = f"model.layers.{layer}."
        found = {
            name.removeprefix(at): values
            for name, values in checkpoint.items()
            if name.startswith(at)
        }
        block = {_LAYER_NAMES[n]: v for n, v in found.items() if n in _LAYER_NAMES}
        heads = found["self_attn.kv_b_proj.weight"].reshape(
            tiny.heads, tiny.nope + tiny.value, tiny.kv_rank
        )
        k_b = heads[:, : tiny.nope].transpose(0, 2, 1)
        block["attn_k_b.weight"] = np.ascontiguousarray(k_b)
        block["attn_v_b.weight"] = np.ascontiguousarray(heads[:, tiny.nope :])
        if layer >= tiny.dense_layers:
            for part in ("gate", "up", "down"):
                block[f"ffn_{part}_exps.weight"] = np.stack(
                    [
                        found[f"mlp.experts.{expert}.{part}_proj.weight"]
                        for expert in range(tiny.experts)
                    ]
                )
        result |= {f"blk.{layer}.{name}": block[name] for name in sorted(block)}
    return result


# Where a block of these types keeps its half-precision scales, and how large each is
# relative to the first: the second scales minima, and centres the block on zero.
_SCALES = {
    "Q2_K": {80: 1, 82: 1.5},
    "Q3_K": {108: 1},
    "Q4_K": {0: 1, 2: 7.5},
    "Q5_K": {0: 1, 2: 15.5},
    "Q6_K": {208: 1},
    "IQ4_XS": {0: 1},
}


def encode(name: str, values: np.ndarray, kind: str) -> np.ndarray:
    """`values` in the given type; for types that the gguf package cannot encode,
    random blocks as large as `values` (much larger ones would overflow float16)."""
    qtype = gguf.GGMLQuantizationType[kind]
    if kind not in _SCALES:
        return gguf.quants.quantize(values, qtype)
    block, size = gguf.GGML_QUANT_SIZES[qtype]
    rng = np.random.default_rng(list(name.encode()))
    blocks = rng.integers(0, 256, (values.size // block, size), dtype=np.uint8)

    def scale(by: float) -> None:
        for offset, relative in _SCALES[kind].items():
            stored = np.float16(by * relative).tobytes()
            blocks[:, offset : offset + 2] = np.frombuffer(stored, np.uint8)

    scale(1)
    scale(values.std() / gguf.quants.dequantize(blocks[:256], qtype).std())
    return blocks.reshape(*values.shape[:-1], values.shape[-1] // block * size)


def uniform(kind: str) -> Types:
    """As the converter does with one output type: small tensors stay float32."""

    small = (
        *("norm.weight", "norm.bias", "ffn_gate_inp.weight", "indexer.proj.weight"),
        *("exp_probs_b.bias", "exp_probs_b"),
    )
    return lambda name: "F32" if name.endswith(small) else kind


def mixed(default: str, **exceptions: str) -> Types:
    """`uniform`, but for names that hold a key of `exceptions` (dots as `__`)."""

    def types(name: str) -> str:
        for part, kind in exceptions.items():
            if part.replace("__", ".") in name:
                return kind
        return uniform(default)(name)

    return types


def metadata(tiny: Tiny) -> dict[str, object]:
    """The keys below `glm-dsa.` as the converter writes them."""
    keys: dict[str, object] = {
        "block_count": tiny.layers + tiny.draft_layers,
        "context_length": tiny.context,
        "embedding_length": tiny.hidden,
        "feed_forward_length": tiny.dense_intermediate,
        "attention.head_count": tiny.heads,
        "attention.head_count_kv": 1,
        "rope.freq_base": 1000000.0,
        "rope.dimension_count": tiny.rope,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.q_lora_rank": tiny.q_rank,
        "attention.kv_lora_rank": tiny.kv_rank,
        "attention.key_length": tiny.kv_rank + tiny.rope,
        "attention.value_length": tiny.kv_rank,
        "attention.key_length_mla": tiny.nope + tiny.rope,
        "attention.value_length_mla": tiny.value,
        "leading_dense_block_count": tiny.dense_layers,
        "expert_count": tiny.experts,
        "expert_used_count": tiny.experts_used,
        "expert_shared_count": 1,
        "expert_feed_forward_length": tiny.expert_intermediate,
        "expert_gating_func": 2,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
        "attention.indexer.head_count": tiny.index_heads,
        "attention.indexer.key_length": tiny.index_dim,
        "attention.indexer.top_k": tiny.index_topk,
        "vocab_size": tiny.vocabulary,
    }
    if tiny.draft_layers:
        keys["nextn_predict_layers"] = tiny.draft_layers
    return keys


def write(
    path: Path,
    tiny: Tiny,
    tensors: Arrays,
    types: Types,
    *,
    shard_tensors: int = 0,
    indexer_types: bool = False,
    encoder: Encoder = encode,
) -> Path:
    """Write one file, or several of `shard_tensors` tensors each after a first one
    without any. Returns the path of the file to open.

    Args:
        tensors: as `to_gguf` makes them; what is left out is left out of the file.
        indexer_types: whether to write which layers run an indexer of their own.
        encoder: in place of `encode`.
    """
    writer = gguf.GGUFWriter(
        path,
        "glm-dsa",
        split_max_tensors=shard_tensors,
        small_first_shard=bool(shard_tensors),
    )
    writer.add_name("Tiny GLM")
    for key, value in metadata(tiny).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](f"glm-dsa.{key}", value)
    if indexer_types:
        writer.add_array(
            "glm-dsa.attention.indexer.types", list(tiny.full_layers or ())
        )
    writer.add_token_list([f"token{i}" for i in range(tiny.vocabulary)])
    for kind, token in {"eos": 0, "padding": 1, "bos": 2, "eot": 3, "eom": 4}.items():
        writer.add_uint32(f"tokenizer.ggml.{kind}_token_id", token)
    for name, values in tensors.items():
        kind = types(name)
        data = values if kind == "F32" else encoder(name, values, kind)
        raw = None if kind in ("F32", "F16") else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(iter(sorted(path.parent.glob(f"{path.stem}*.gguf"))))


def write_config(folder: Path, tiny: Tiny, **changes: object) -> Path:
    """Write the `config.json` of the HF checkpoint; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(tiny.config() | changes)
    (folder / "config.json").write_text(text)
    return folder


SHARING = dataclasses.replace(
    Tiny(), context=1 << 20, full_layers=(True, True, True, False)
)
