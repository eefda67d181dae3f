# SPDX-License-Identifier: Apache-2.0
"""How sparse MLA is launched: the shape of a program, and the split of the keys.

One table, pure, so that tests can compile and check every answer of it without a
GPU. docs/kernels.md has the measurement behind each line (SM90), and the argument
for those that could not be measured.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton

# A cache row: a latent, which is key and value at once, and a rotary part of the key.
LATENT_DIM = 512
ROPE_DIM = 64
ROW_DIM = LATENT_DIM + ROPE_DIM
MAX_HEADS = 128

# What TRITON_INTERPRET=1 on the CPU pretends to be: the chips with the least
# shared memory, whose configuration most users of this kernel run.
INTERPRETED_CAPABILITY = (8, 6)
INTERPRETED_SMS = 8

# Chips that give a program 160 KB of shared memory or more. All others, unknown
# ones included, are held to the 99 KB of SM86, SM89, SM120 and SM121.
LARGE_SHARED_MEMORY = frozenset({(8, 0), (9, 0), (10, 0), (10, 3)})


# Pieces in which a latent is loaded, multiplied and accumulated; even.
CHUNKS = 4

# Up to so many splits are merged by the last of them to end: beyond, one program has
# too much to read, and a kernel of many programs is faster.
MERGED_BY_THE_LAST = 4


class LaunchConfig(NamedTuple):
    """How one program of the kernel is shaped."""

    block_h: int  # heads of one program; the tensor cores want at least 16
    block_n: int  # cache rows of one step, a power of two, at least 16
    num_warps: int
    num_stages: int  # of loads in flight. The chain is slot, then row, and slots run
    # ahead: in `mma.sync` shapes 5 gives the rows two buffers, 2 gives them one
    programs_per_sm: int  # that share a multiprocessor; decides the number of splits


def launch_config(
    capability: tuple[int, int], num_heads: int, num_tokens: int
) -> LaunchConfig:
    """Pick the launch shape for a compute capability, heads and tokens.

    Two limits decide. The float32 accumulator of `block_h` x 512 lives in registers.
    The buffers of `block_n` rows of 1152 bytes and the query live in shared memory.
    Every warp reads the whole query from there once a step, so few warps with many
    rows each are better than many with few.
    """
    if capability == (9, 0):
        if num_heads <= 16:
            if num_tokens <= 8:
                return LaunchConfig(16, 32, 4, 5, 1)
            if num_tokens <= 128:
                return LaunchConfig(16, 64, 4, 5, 1)
            return LaunchConfig(16, 32, 2, 2, 4)
        if num_heads <= 32:
            if num_tokens <= 32:
                return LaunchConfig(32, 32, 4, 5, 1)
            return LaunchConfig(32, 64, 4, 2, 2)
        return LaunchConfig(64, 64, 8, 2, 1)
    if num_heads <= 16:
        return LaunchConfig(16, 32, 4, 5, 1)
    return LaunchConfig(32, 16, 4, 5, 1)


def launch_config_fp8(
    capability: tuple[int, int], num_heads: int, num_tokens: int
) -> LaunchConfig:
    """Pick the launch shape of the kernel for `fp8_ds_mla` rows; pure, too.

    A row is 656 bytes, and all of it goes through `mma.sync`, whose operands are
    decoded in registers.
    """
    if capability == (9, 0):
        if num_heads > 16:
            return LaunchConfig(32, 64, 8, 5, 1)
        return LaunchConfig(16, 32 if num_tokens <= 128 else 64, 4, 5, 2)
    if num_heads > 16:
        return LaunchConfig(32, 32, 8, 3, 1)
    if capability in LARGE_SHARED_MEMORY:
        return LaunchConfig(16, 32, 4, 5, 2)
    return LaunchConfig(16, 32, 4, 3, 2)


def converts_e4m3(capability: tuple[int, int]) -> bool:
    """Whether the chip has an instruction from e4m3 to float16."""
    return capability >= (8, 9)


def num_splits(
    config: LaunchConfig, num_heads: int, num_tokens: int, topk: int, num_sms: int
) -> int:
    """Over how many programs to split the keys of a token; a power of two.

    As many as the chip runs at a time, and no more than there are steps. Powers
    of two, because each number of splits is a binary of its own, which the warm-up
    compiles.
    """
    head_blocks = triton.cdiv(num_heads, config.block_h)
    room = config.programs_per_sm * num_sms // (num_tokens * head_blocks)
    steps = triton.cdiv(topk, config.block_n)
    return 1 << (max(1, min(room, steps)).bit_length() - 1)


@cache
def chip(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability and multiprocessors; asked once, it costs microseconds."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return (properties.major, properties.minor), properties.multi_processor_count
    return INTERPRETED_CAPABILITY, INTERPRETED_SMS
