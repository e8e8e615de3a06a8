"""The dropout masks of fusions/random.py, bit for bit, inside a Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from fusions import random

_A, _M1, _M2 = tl.constexpr(random._A), tl.constexpr(random._M1), tl.constexpr(random._M2)


@triton.jit
def keep(columns, first, second, threshold):
    """Whether elements are kept: int32 columns, row keys and threshold, of shapes that broadcast."""
    v = (columns * _A) ^ first
    v = (v ^ ((v >> 16) & 0xFFFF)) * _M1
    v = v ^ second
    v = (v ^ ((v >> 15) & 0x1FFFF)) * _M2
    return v >= threshold
