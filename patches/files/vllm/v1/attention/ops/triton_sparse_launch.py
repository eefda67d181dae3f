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


class LaunchConfig(NamedTuple):
    """How one program of the kernel is shaped."""

    block_h: int  # heads of one program; the tensor cores want at least 16
    block_n: int  # cache rows of one step, a power of two, at least 16
    num_warps: int
    num_stages: int  # of loads in flight. The chain is slot, then row, and slots run
    # ahead: in `mma.sync` shapes 5 gives the rows two buffers, 3 gives them one
    latent_down: bool  # accumulate [LATENT, heads]: see the kernel
    programs_per_sm: int  # that fit at a time; decides the number of splits
    max_registers: int | None = None  # of a thread, where more programs must fit


def launch_config(
    capability: tuple[int, int], num_heads: int, num_tokens: int
) -> LaunchConfig:
    """Pick the launch shape for a compute capability, heads and tokens.

    Pure, so that tests can compile every answer without a GPU. Two limits
    decide. The float32 accumulator of `block_h` x 512 lives in registers, and
    so does, for 16 heads, the query. The buffers of `block_n` rows of 1152 bytes
    and the query live in shared memory. docs/kernels.md has the measurements
    (SM90) and the arguments (all others).
    """
    if capability == (9, 0):
        if num_heads <= 16:
            if num_tokens <= 8:
                return LaunchConfig(16, 32, 4, 3, False, 2)
            return LaunchConfig(16, 64, 8, 2, True, 2)
        if num_heads <= 32:
            return LaunchConfig(32, 32, 8, 3, False, 1)
        return LaunchConfig(64, 64, 8, 2, False, 1)
    if num_heads <= 16:
        return LaunchConfig(16, 32, 8, 5, False, 1)
    if capability in LARGE_SHARED_MEMORY:
        return LaunchConfig(32, 32, 8, 5, False, 1)
    return LaunchConfig(32, 16, 8, 5, False, 1)


def num_splits(
    config: LaunchConfig, num_heads: int, num_tokens: int, topk: int, num_sms: int
) -> int:
    """Over how many programs to split the keys of a token; a power of two.

    As many as the chip runs at a time, and no more than there are steps. Powers
    of two, so that a class of batch sizes that shares a binary contains a power
    of two itself: vLLM captures its graphs for those, and nothing is left to
    compile later.
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


def workspace_size(num_heads: int, topk: int, device: torch.device) -> int:
    """Float32 elements that the splits of any number of tokens may need."""
    capability, num_sms = chip(device)
    rows = 0
    tokens = 1
    # Tokens times splits is largest where a class of tokens ends.
    while True:
        config = launch_config(capability, num_heads, tokens)
        splits = num_splits(config, num_heads, tokens, topk, num_sms)
        if splits == 1:
            return rows * num_heads * (LATENT_DIM + 1)
        rows = max(rows, tokens * splits)
        tokens += 1
