# SPDX-License-Identifier: Apache-2.0
"""GGUF headers byte by byte: what no proper writer would write, and at full size."""

import math
import struct
from collections.abc import Iterable
from pathlib import Path

from tiny_glm import Tiny, metadata

# GLM-5.2's own dimensions.
FULL = Tiny(
    layers=78,
    draft_layers=1,
    dense_layers=3,
    hidden=6144,
    dense_intermediate=12288,
    expert_intermediate=2048,
    experts=256,
    heads=64,
    q_rank=2048,
    index_topk=2048,
    vocabulary=154880,
    context=1 << 20,
)
# Number, elements and bytes of a block.
KINDS = {
    "F32": (0, 1, 4),
    "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "TQ1_0": (34, 256, 54),
    "ik": (144, 256, 136),
}


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def key(name: str, value: object) -> bytes:
    """One key and its value; lists are arrays of strings or of booleans."""
    if isinstance(value, bool):
        return string(name) + struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return string(name) + struct.pack("<II", 4, value)
    if isinstance(value, float):
        return string(name) + struct.pack("<If", 6, value)
    if isinstance(value, str):
        return string(name) + struct.pack("<I", 8) + string(value)
    assert isinstance(value, list)
    kind = 8 if value and isinstance(value[0], str) else 7
    head = string(name) + struct.pack("<IIQ", 9, kind, len(value))
    if kind == 8:
        return head + b"".join(map(string, value))
    return head + bytes(value)


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
    return string(name) + dimensions + struct.pack("<IQ", kind, offset)


def header(
    keys: Iterable[bytes],
    tensors: Iterable[bytes] = (),
    *,
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
) -> bytes:
    """The file up to its first tensor; counts can be made to lie."""
    keys, tensors = list(keys), list(tensors)
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    return b"".join([b"GGUF", struct.pack("<IQQ", version, *counts), *keys, *tensors])


def glm_keys(tiny: Tiny) -> list[bytes]:
    return [
        key("general.architecture", "glm-dsa"),
        key("general.name", "GLM-5.2"),
        *(key(f"glm-dsa.{name}", value) for name, value in metadata(tiny).items()),
    ]


def write_sparse(path: Path, head: bytes, size: int) -> None:
    """A file that begins with `head` and is `size` bytes long, of which the disk
    holds the beginning only."""
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)


def names_and_shapes(model: Tiny) -> list[tuple[str, tuple[int, ...]]]:
    """Every tensor of a converted model, in file order, as unsloth's GLM-5.2 has it:
    indexers in all layers."""
    m = model
    found = [
        ("output.weight", (m.vocabulary, m.hidden)),
        ("output_norm.weight", (m.hidden,)),
        ("token_embd.weight", (m.vocabulary, m.hidden)),
    ]
    for layer in range(m.layers + m.draft_layers):
        parts: dict[str, tuple[int, ...]] = {
            "attn_k_b.weight": (m.heads, m.kv_rank, m.nope),
            "attn_kv_a_mqa.weight": (m.kv_rank + m.rope, m.hidden),
            "attn_kv_a_norm.weight": (m.kv_rank,),
            "attn_norm.weight": (m.hidden,),
            "attn_output.weight": (m.hidden, m.heads * m.value),
            "attn_q_a.weight": (m.q_rank, m.hidden),
            "attn_q_a_norm.weight": (m.q_rank,),
            "attn_q_b.weight": (m.heads * (m.nope + m.rope), m.q_rank),
            "attn_v_b.weight": (m.heads, m.value, m.kv_rank),
            "ffn_norm.weight": (m.hidden,),
            "indexer.attn_k.weight": (m.index_dim, m.hidden),
            "indexer.attn_q_b.weight": (m.index_heads * m.index_dim, m.q_rank),
            "indexer.k_norm.bias": (m.index_dim,),
            "indexer.k_norm.weight": (m.index_dim,),
            "indexer.proj.weight": (m.index_heads, m.hidden),
        }
        if layer < m.dense_layers:
            parts["ffn_down.weight"] = (m.hidden, m.dense_intermediate)
            parts["ffn_gate.weight"] = (m.dense_intermediate, m.hidden)
            parts["ffn_up.weight"] = (m.dense_intermediate, m.hidden)
        else:
            wide, narrow = m.hidden, m.expert_intermediate
            parts["exp_probs_b.bias"] = (m.experts,)
            parts["ffn_gate_inp.weight"] = (m.experts, wide)
            parts["ffn_down_exps.weight"] = (m.experts, wide, narrow)
            parts["ffn_gate_exps.weight"] = (m.experts, narrow, wide)
            parts["ffn_up_exps.weight"] = (m.experts, narrow, wide)
            parts["ffn_down_shexp.weight"] = (wide, narrow)
            parts["ffn_gate_shexp.weight"] = (narrow, wide)
            parts["ffn_up_shexp.weight"] = (narrow, wide)
        if layer >= m.layers:
            parts["nextn.eh_proj.weight"] = (m.hidden, 2 * m.hidden)
            for name in ("enorm", "hnorm", "shared_head_norm"):
                parts[f"nextn.{name}.weight"] = (m.hidden,)
        found += [(f"blk.{layer}.{name}", parts[name]) for name in sorted(parts)]
    return found


def kind_of(name: str, shape: tuple[int, ...], experts: str) -> str:
    """The type a tensor has in files such as unsloth's UD-Q4_K_XL."""
    small = ("ffn_gate_inp.weight", "indexer.proj.weight")
    if len(shape) == 1 or name.endswith(small):
        return "F32"
    return experts if "_exps" in name else "Q8_0"


def padded_size(shape: tuple[int, ...], kind: str) -> int:
    """Bytes of a tensor, up to where the next one can begin."""
    _, block, size = KINDS[kind]
    return -(-(math.prod(shape) // block * size) // 32) * 32


def write_full_size(folder: Path, model: Tiny = FULL, experts: str = "Q4_K") -> Path:
    """A set of files with the headers, names and sizes of a real one, and no data:
    a first shard of metadata alone, with a full vocabulary, and ten of tensors."""
    tensors = names_and_shapes(model)
    shards = 10
    share = -(-len(tensors) // shards)

    def split(number: int) -> list[bytes]:
        return [
            key("split.no", number),
            key("split.count", shards + 1),
            key("split.tensors.count", len(tensors)),
        ]

    def path(number: int) -> Path:
        name = f"GLM-5.2-UD-Q4_K_XL-{number + 1:05}-of-{shards + 1:05}.gguf"
        return folder / name

    vocabulary = [f"token {i}" for i in range(model.vocabulary)]
    merges = [f"left{i} right{i}" for i in range(320_000)]
    tokenizer = [
        key("tokenizer.ggml.tokens", vocabulary),
        key("tokenizer.ggml.merges", merges),
        key("tokenizer.ggml.eos_token_id", 154820),
    ]
    path(0).write_bytes(header([*glm_keys(model), *tokenizer, *split(0)]))
    for number in range(shards):
        infos, offset = [], 0
        for name, shape in tensors[number * share : (number + 1) * share]:
            kind = kind_of(name, shape, experts)
            infos.append(tensor(name, shape, KINDS[kind][0], offset))
            offset += padded_size(shape, kind)
        head = header(split(number + 1), infos)
        write_sparse(path(number + 1), head, -(-len(head) // 32) * 32 + offset)
    return path(0)
