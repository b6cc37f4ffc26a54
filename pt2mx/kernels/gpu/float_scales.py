"""The functions of `pt2mx.kernels.float_scales` on tiles of blocks (`pt2mx.kernels.gpu.tiles`), in Triton: scales with
a significand.

A block's scale is a tuple here: its code, and the tensor scale, fp32. Each step is one operation of fp32. A division is
`div.rn` and a product whose rounding matters is `mul.rn`: no compiler fuses those with an addition.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from pt2mx.scale_formats import TENSOR_SCALE_RANGE

_INFINITY = tl.constexpr(float("inf"))
_LEAST, _MOST = map(tl.constexpr, TENSOR_SCALE_RANGE)


@dataclass(frozen=True)
class ScaleConstants:
    """The compile-time values of a scale format and its mode for an element (`constants.float_scale_constants`).

    `bits`, `mantissa_bits`, `bias`, `emin`, `max_normal`: of the grid, as of an element. `stored`: the dtype of stored
    scales. `tensor`: "" also if the tensor scale is None, which counts as 1.
    """

    bits: int
    mantissa_bits: int
    bias: int
    emin: int
    max_normal: float
    nan: int
    stored: str
    tensor: str
    smallest: int
    largest: int
    unit: float
    most: float
    least: float
    zero_below: float
    zero: float
    factors: tuple[float, ...]
    code_offsets: tuple[int, ...]
    reciprocal: bool
    rounds_up: bool

    @property
    def searches(self) -> bool:
        return self.candidates > 1

    @property
    def candidates(self) -> int:
        return len(self.factors) * len(self.code_offsets)

    @property
    def offsets_of_factor(self) -> int:
        return len(self.code_offsets)


@triton.jit
def product(a, b):
    """a * b, which no compiler fuses with an addition."""
    a, b = tl.broadcast(a, b)
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=r,r,r", [a, b], tl.float32, True, 1)


@triton.jit
def quotient_of(amax, t, C: tl.constexpr):
    """amax: (lines) fp32 -> the scales of blocks before they are rounded to the format."""
    if C.scale.tensor == "":
        q = tl.div_rn(amax, C.scale.most)
    elif C.scale.tensor == "divisor":
        q = product(tl.div_rn(amax, C.scale.most), t)
    elif C.scale.reciprocal:
        q = tl.div_rn(tl.div_rn(amax, C.scale.most), t)
    else:
        q = tl.div_rn(amax, product(t, tl.full([], C.scale.most, tl.float32)))
    return q


@triton.jit
def code_of_quotient(q, C: tl.constexpr):
    """q: fp32 -> the code of the scale that it becomes, int32."""
    q = tl.where(q <= C.scale.zero_below, C.scale.zero, q)
    # a NaN, of a block that is not finite, becomes any code
    q = tl.minimum(tl.maximum(q, C.scale.least), C.scale.max_normal)
    if C.scale.stored == "float32":
        code = q.to(tl.int32, bitcast=True)
    elif C.scale.stored == "bfloat16":
        bits = q.to(tl.int32, bitcast=True)
        code = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
    elif C.scale.stored == "float16":
        code = q.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    else:
        binade = (q.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        # adding 2**23 quanta rounds to a whole number of them, ties to even
        many = tl.maximum(binade, 2.0**C.scale.emin) * 2.0 ** (23 - C.scale.mantissa_bits)
        rounded = (q + many) - many
        # times 2**(bias - 127), a value has the exponent field of the format, and is subnormal if it is one there
        code = (rounded * 2.0 ** (C.scale.bias - 127)).to(tl.int32, bitcast=True) >> (23 - C.scale.mantissa_bits)
    if C.scale.rounds_up:
        code += (value_of(code, C) < q).to(tl.int32)
    return code


@triton.jit
def value_of(code, C: tl.constexpr):
    """code: int32 -> the scale in fp32."""
    if C.scale.stored == "float32":
        value = code.to(tl.float32, bitcast=True)
    elif C.scale.stored == "bfloat16":
        value = (code << 16).to(tl.float32, bitcast=True)
    elif C.scale.stored == "float16":
        value = code.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        # the sign of a byte that has one, exponent field and mantissa, in the bits of fp32; times 2**(127 - bias)
        sign = code << (32 - C.scale.bits) & -0x80000000
        magnitude = (code & ((1 << (C.scale.bits - 1)) - 1)) << (23 - C.scale.mantissa_bits)
        value = (sign | magnitude).to(tl.float32, bitcast=True) * 2.0 ** (127 - C.scale.bias)
        value = tl.where(tl.abs(value) > C.scale.max_normal, float("nan"), value)
    return value


@triton.jit
def multiplier(scale, C: tl.constexpr):
    """Return the factor of the codes of a block; (lines) fp32."""
    code, t = scale
    value = value_of(code, C)
    if C.scale.tensor == "factor":
        value = product(value, t)
    elif C.scale.tensor == "divisor":
        value = tl.div_rn(value, t)
    return value


@triton.jit
def divided(blocks, scale, finite, C: tl.constexpr):
    """Return `blocks` in units of their scales, NaN where the block is not finite."""
    if C.scale.reciprocal:
        code, t = scale
        value = value_of(code, C)
        if C.scale.tensor == "divisor":
            reciprocal = tl.div_rn(t, value)
        elif C.scale.tensor == "factor":
            reciprocal = tl.div_rn(tl.div_rn(1.0, t), value)
        else:
            reciprocal = tl.div_rn(1.0, value)
        v = product(blocks, tl.expand_dims(tl.where(finite, reciprocal, float("nan")), 1))
    else:
        by = tl.expand_dims(tl.where(finite, multiplier(scale, C), float("nan")), 1)
        v = tl.div_rn(blocks, by)
    if C.scale.unit != 1:
        v *= C.scale.unit
    return v


@triton.jit
def code_of_candidate(q, INDEX: tl.constexpr, C: tl.constexpr):
    """Return candidate number INDEX of a search as a code."""
    FACTOR: tl.constexpr = C.scale.factors[INDEX // C.scale.offsets_of_factor]
    OFFSET: tl.constexpr = C.scale.code_offsets[INDEX % C.scale.offsets_of_factor]
    if FACTOR != 1:
        q = product(q, tl.full([], FACTOR, tl.float32))
    code = code_of_quotient(q, C)
    if OFFSET != 0:
        code = tl.minimum(tl.maximum(code + OFFSET, C.scale.smallest), C.scale.largest)
    return code


@triton.jit
def ratio_of(candidate, first, C: tl.constexpr):
    """Return the scale of a candidate over the scale of the first one, (lines) fp32."""
    return tl.div_rn(value_of(candidate, C), value_of(first, C))


@triton.jit
def finite_scale(amax, t):
    """Return whether each block is finite, and the scale of the tensor in its range."""
    t = t + tl.zeros_like(amax)
    return (amax < _INFINITY) & (t >= _LEAST) & (t <= _MOST)


@triton.jit
def load_tensor_scale(tensor_scale, C: tl.constexpr):
    """Load the tensor scale, () fp32; 1 for a format without one."""
    t = None
    if C.has_significand:
        if C.scale.tensor != "":
            t = tl.load(tensor_scale)
        else:
            t = tl.full([], 1.0, tl.float32)
    return t
