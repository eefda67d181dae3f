# SPDX-License-Identifier: Apache-2.0
"""The tensor types of GGML: their sizes, and who can compute with them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GgmlType:
    """One tensor type.

    Attributes:
        name: as GGML spells it.
        block: how many elements share one block; rows hold whole blocks.
        size: bytes of one block.
    """

    name: str
    block: int
    size: int


TYPES = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    24: GgmlType("I8", 1, 1),
    25: GgmlType("I16", 1, 2),
    26: GgmlType("I32", 1, 4),
    27: GgmlType("I64", 1, 8),
    28: GgmlType("F64", 1, 8),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
    41: GgmlType("Q1_0", 128, 18),
}

PLAIN = frozenset({"F32", "F16", "BF16"})

# The types that vLLM's GGUF kernels multiply with. The set is the same in every
# release that has them in its tree (up to 0.23) and in vllm-gguf-plugin 0.0.5.
PACKED = frozenset(
    {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
    | {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
    | {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"}
    | {"IQ4_NL", "IQ4_XS"}
)

# The types that a gguf package turns into floats, enough for the few tensors that
# vLLM keeps unquantised anyway. The last two need gguf 0.18.
DEQUANTISABLE = PLAIN | PACKED | {"TQ1_0", "TQ2_0", "MXFP4", "NVFP4"}


def type_name(type_id: int) -> str:
    """The type's name, or its number for types of forks such as ik_llama.cpp."""
    known = TYPES.get(type_id)
    return known.name if known else f"type {type_id}"
