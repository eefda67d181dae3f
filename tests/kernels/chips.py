# SPDX-License-Identifier: Apache-2.0
"""The chips that the kernels are held against, by ten times the compute capability."""

# Shared memory that one program may have, in bytes (CUDA programming guide).
SHARED_LIMIT = {
    80: 166_912,
    86: 101_376,
    89: 101_376,
    90: 232_448,
    120: 101_376,
    121: 101_376,
}
# Multiprocessors of A100, RTX 3090, RTX 4090, H200, RTX PRO 6000 and GB10.
PROCESSORS = {80: 108, 86: 82, 89: 128, 90: 132, 120: 188, 121: 48}
