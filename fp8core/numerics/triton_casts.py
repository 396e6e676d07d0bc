"""Casts of FP32 values that round to nearest even on a GPU and in Triton's interpreter alike.

The interpreter, in which the kernels are tested on a CPU, cuts bits off where a GPU rounds; for it the rounding is
written out. Which of the two is compiled is known when the module is imported.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def to_bf16(x: tl.tensor) -> tl.tensor:
    """BF16 of FP32."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x.to(tl.bfloat16)


@triton.jit
def to_e4m3(x: tl.tensor) -> tl.tensor:
    """E4M3 of FP32; magnitudes above 448 saturate."""
    if INTERPRETED:
        # As `e4m3.round_to_e4m3`, which says why.
        clamped = tl.minimum(tl.maximum(x, -448.0), 448.0)
        exponent = tl.maximum(clamped.to(tl.int32, bitcast=True) & 0x7F800000, (127 - 6) << 23)
        magic = (exponent + (20 << 23) + 0x00400000).to(tl.float32, bitcast=True)
        sign = x.to(tl.int32, bitcast=True) & -0x80000000
        x = (((clamped + magic) - magic).to(tl.int32, bitcast=True) & 0x7FFFFFFF | sign).to(tl.float32, bitcast=True)
    return x.to(tl.float8e4nv)
