"""`nki.isa.quantize_mx` of AWS Neuron in NumPy, by its documentation (Neuron 2.32.0).

It gives MXFP8 with a block scale twice that of the sample conversion in section 6.3 of OCP MX v1.0, so that the largest
values round without saturation."""

import numpy as np
from numpy.typing import NDArray

#: element -> its mantissa bits, the exponents of its least and largest normal number, its largest value
ELEMENTS = {"fp8_e4m3": (3, -6, 8, 448.0), "fp8_e5m2": (2, -14, 15, 57344.0)}


def quantize_mx(x: NDArray[np.float32], element: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """x: (rows, n) float32 -> E8M0 bytes (rows, n / 32) and codes (rows, n). The documentation leaves open what becomes
    of Inf and NaN, here a NaN scale, and of scales below 2**-127, here that one."""
    mantissa_bits, emin, emax, largest = ELEMENTS[element]
    blocks = x.reshape(len(x), -1, 32)
    exponent = (np.abs(blocks).max(-1).view(np.uint32) >> 23).astype(int)
    scale = np.where(exponent == 255, 255, np.maximum(exponent - emax + 1, 0))
    v = np.clip(np.nan_to_num(blocks) / 2.0 ** (scale - 127)[..., None], -largest, largest)
    binade = np.frexp(np.maximum(np.abs(v), 2.0**emin))[1] - 1
    quanta = np.rint(np.ldexp(np.abs(v), mantissa_bits - binade)).astype(int)  # ties to even
    codes = (binade - emin << mantissa_bits) + quanta + (np.signbit(v) << 7)
    return scale.astype(np.uint8), codes.astype(np.uint8).reshape(x.shape)
