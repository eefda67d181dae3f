# SPDX-License-Identifier: Apache-2.0
"""Numbers as e4m3, the float8 format of both caches, on chips without float8 types."""

import triton
import triton.language as tl


@triton.jit
def encode_e4m3(b_x):
    """Float32 numbers as e4m3, rounded to nearest even, 448 at most; NaN is 0x7f."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_sign = (b_bits >> 24) & 0x80
    b_size = tl.minimum(tl.abs(b_x), 448.0)
    # Normal: round to 3 bits of mantissa, and exchange the biases, 127 for 7.
    b_bits = b_size.to(tl.int32, bitcast=True)
    b_normal = ((b_bits + 0x7FFFF + ((b_bits >> 20) & 1)) >> 20) - (120 << 3)
    # Subnormal: a multiple of 2**-9. Added to 2**23, a number is rounded to an integer.
    b_subnormal = (b_size * 2.0**9 + 2.0**23).to(tl.int32, bitcast=True) & 0xFF
    b_code = tl.where(b_size < 2.0**-6, b_subnormal, b_normal)
    b_code = tl.where(b_x == b_x, b_code, 0x7F)
    return (b_sign | b_code).to(tl.uint8)
