# SPDX-License-Identifier: Apache-2.0
"""What each rank of vLLM should hold after loading, worked out from the HF weights.

Shares nothing with the loader: it knows vLLM's parameters and GGML's blocks, and
encodes the checkpoint again, piece by piece.
"""

from dataclasses import dataclass

import gguf
import numpy as np
import torch
from tiny_glm import _LAYER_NAMES, Arrays, Tiny, Types, encode

PLAIN = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Case:
    """One file, one release and one rank.

    Attributes:
        fused_index: the release holds wk and weights_proj in one plain matrix.
        dense: what the weights are worth: all are numbers, nothing is packed.
    """

    tiny: Tiny
    checkpoint: Arrays
    types: Types
    fused_index: bool
    tp: int
    rank: int
    dtype: torch.dtype
    dense: bool = False

    def packed(self, source: str, values: np.ndarray) -> torch.Tensor:
        """The file's own blocks: uint8 [..., bytes of a row]."""
        return torch.from_numpy(encode(source, values, self.types(source)))

    def plain(self, source: str, values: np.ndarray) -> torch.Tensor:
        """What the file says the values are, in the model's type."""
        kind = self.types(source)
        if kind == "F32":
            return torch.from_numpy(values).to(self.dtype)
        stored = encode(source, values, kind)
        if kind == "BF16":
            return torch.from_numpy(stored).view(torch.bfloat16).to(self.dtype)
        if kind == "F16":
            return torch.from_numpy(stored).to(self.dtype)
        kind_id = gguf.GGMLQuantizationType[kind]
        return torch.from_numpy(gguf.quants.dequantize(stored, kind_id)).to(self.dtype)

    def keeps_blocks(self, source: str) -> bool:
        return not self.dense and self.types(source) not in PLAIN

    def slice(self, whole: torch.Tensor, axis: int) -> torch.Tensor:
        size = whole.shape[axis] // self.tp
        return whole.narrow(axis, self.rank * size, size)

    def parameters(self) -> dict[str, torch.Tensor]:
        tiny = self.tiny
        result = {
            **self.vocabulary("model.embed_tokens", "token_embd.weight"),
            **self.vocabulary("lm_head", "output.weight"),
            "model.norm.weight": self.plain(
                "output_norm.weight", self.checkpoint["model.norm.weight"]
            ),
        }
        for layer in range(tiny.layers):
            parts = self.layer(layer)
            result |= {f"model.layers.{layer}.{n}": v for n, v in parts.items()}
        return result

    def vocabulary(self, module: str, source: str) -> dict[str, torch.Tensor]:
        values = self.checkpoint[f"{module}.weight"]
        quantised = self.keeps_blocks(source)
        rows = (self.packed if quantised else self.plain)(source, values)
        padded = -(-len(rows) // 64) * 64
        rows = torch.cat([rows, torch.zeros(padded - len(rows), *rows.shape[1:])])
        rows = rows.to(torch.uint8 if quantised else self.dtype)
        name = "qweight" if quantised else "weight"
        return {f"{module}.{name}": self.slice(rows, 0)}

    def layer(self, layer: int) -> dict[str, torch.Tensor]:
        tiny = self.tiny
        at, block = f"model.layers.{layer}.", f"blk.{layer}."
        result: dict[str, torch.Tensor] = {}

        def source(target: str) -> str:
            return block + _LAYER_NAMES[target + ".weight"]

        def quantised(target: str) -> bool:
            return self.keeps_blocks(source(target))

        def values(target: str, packed: bool) -> torch.Tensor:
            weight = self.checkpoint[f"{at}{target}.weight"]
            return (self.packed if packed else self.plain)(source(target), weight)

        def linear(target: str, axis: int | None) -> None:
            packed = quantised(target)
            whole = values(target, packed)
            part = whole if axis is None else self.slice(whole, axis)
            result[f"{target}.{'qweight' if packed else 'weight'}"] = part

        def merged(target: str, parts: tuple[str, str], split: bool) -> None:
            packed = all(map(quantised, parts))
            both = [values(part, packed) for part in parts]
            if split:
                both = [self.slice(part, 0) for part in both]
            width = max(part.shape[1] for part in both)
            padded = [
                torch.nn.functional.pad(part, (0, width - part.shape[1]))
                for part in both
            ]
            result[f"{target}.{'qweight' if packed else 'weight'}"] = torch.cat(padded)

        def plain(target: str) -> None:
            result[f"{target}.weight"] = values(target, False)

        for target in (
            "input_layernorm",
            "post_attention_layernorm",
            "self_attn.q_a_layernorm",
            "self_attn.kv_a_layernorm",
        ):
            plain(target)
        merged(
            "self_attn.fused_qkv_a_proj",
            ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
            split=False,
        )
        linear("self_attn.q_b_proj", 0)
        linear("self_attn.o_proj", 1)
        result["self_attn.kv_b_proj.weight"] = self.kv_b(layer)
        if tiny.full_layers is None or tiny.full_layers[layer]:
            linear("self_attn.indexer.wq_b", None)
            # vLLM keeps this norm in float32.
            for name in ("weight", "bias"):
                norm = f"self_attn.indexer.k_norm.{name}"
                result[norm] = torch.from_numpy(self.checkpoint[at + norm])
            projection = "self_attn.indexer.weights_proj"
            if self.fused_index:
                wk = values("self_attn.indexer.wk", False)
                both = torch.cat([wk, values(projection, False)])
                result["self_attn.indexer.wk_weights_proj.weight"] = both
            else:
                linear("self_attn.indexer.wk", None)
                plain(projection)
        if layer < tiny.dense_layers:
            merged("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"), split=True)
            linear("mlp.down_proj", 1)
            return result
        plain("mlp.gate")
        bias = "mlp.gate.e_score_correction_bias"
        result[bias] = torch.from_numpy(self.checkpoint[at + bias])
        shared = "mlp.shared_experts"
        merged(
            f"{shared}.gate_up_proj",
            (f"{shared}.gate_proj", f"{shared}.up_proj"),
            split=True,
        )
        linear(f"{shared}.down_proj", 1)
        return result | self.experts(at, block)

    def experts(self, at: str, block: str) -> dict[str, torch.Tensor]:
        def stack(part: str, axis: int) -> torch.Tensor:
            source = f"{block}ffn_{part}_exps.weight"
            weights = [
                self.checkpoint[f"{at}mlp.experts.{expert}.{part}_proj.weight"]
                for expert in range(self.tiny.experts)
            ]
            whole = (self.packed if packed else self.plain)(source, np.stack(weights))
            return self.slice(whole, axis)

        packed = self.keeps_blocks(f"{block}ffn_gate_exps.weight")
        name = "qweight" if packed else "weight"
        gate_up = torch.cat([stack("gate", 1), stack("up", 1)], dim=1)
        return {
            f"mlp.experts.w13_{name}": gate_up,
            f"mlp.experts.w2_{name}": stack("down", 2),
        }

    def kv_b(self, layer: int) -> torch.Tensor:
        """Head by head: nope rows of k_b, transposed back, then rows of v_b."""
        tiny = self.tiny
        name = f"model.layers.{layer}.self_attn.kv_b_proj.weight"
        heads = self.checkpoint[name].reshape(
            tiny.heads, tiny.nope + tiny.value, tiny.kv_rank
        )
        k_b = np.ascontiguousarray(heads[:, : tiny.nope].transpose(0, 2, 1))
        v_b = np.ascontiguousarray(heads[:, tiny.nope :])
        k = self.plain(f"blk.{layer}.attn_k_b.weight", k_b)
        v = self.plain(f"blk.{layer}.attn_v_b.weight", v_b)
        rows = []
        for head in range(tiny.heads):
            rows += [k[head].T, v[head]]
        return self.slice(torch.cat(rows), 0)
