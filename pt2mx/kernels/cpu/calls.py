"""The structures that the C++ kernels take, field by field as `src/calls.h` has them."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_float, c_int32, c_int64, c_uint64, c_void_p

from pt2mx.errors import MXError

__all__ = ["STRUCTURES", "StoreCall", "check_sizes"]

Pair = c_int64 * 2


def _fields(type: type, names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, type) for name in names.split())


class FloatScale(ctypes.Structure):
    _fields_ = (
        ("factors", ctypes.POINTER(c_float)),
        ("code_offsets", ctypes.POINTER(c_int32)),
        *_fields(c_int32, "factor_count offset_count dtype tensor reciprocal rounds_up"),
        *_fields(c_int32, "mantissa_bits bias emin max_code magnitude sign nan smallest largest"),
        *_fields(c_float, "unit most least zero_below zero max_value"),
    )


class Spec(ctypes.Structure):
    _fields_ = (
        ("exponent_offsets", ctypes.POINTER(c_int32)),
        ("float_scale", ctypes.POINTER(FloatScale)),
        *_fields(c_int32, "bits mantissa_bits emin emax max_code is_int full_range"),
        *_fields(c_int32, "rounding threshold candidates searches error_bits codes_per_group bytes_per_group"),
        *_fields(c_float, "max_normal lowest"),
    )


class QuantizeCall(ctypes.Structure):
    _fields_ = (
        ("spec", c_void_p),
        *_fields(c_int32, "operation dtype out_dtype grad_bytes"),
        *_fields(c_int64, "outer n inner block"),
        *_fields(c_void_p, "x grad out scale"),
        ("seed", c_uint64),
        ("tensor_scale", c_float),
        ("slots", c_void_p),
        *_fields(c_int64, "new_slots all_slots"),
        ("table", c_void_p),
        ("format", c_int32),
    )


class StoreCall(ctypes.Structure):
    """The calls that quantize keys and values."""

    _fields_ = (("keys", QuantizeCall), ("values", QuantizeCall))


class Epilogue(ctypes.Structure):
    _fields_ = (
        ("spec", c_void_p),
        *_fields(c_int32, "activation out_dtype"),
        ("block", c_int64),
        *_fields(c_void_p, "residual activated"),
    )


class LinearCall(ctypes.Structure):
    _fields_ = (
        ("table", c_void_p),
        *_fields(c_int32, "format bits codes_per_group bytes_per_group dtype out_dtype isa integer_isa"),
        *_fields(c_int64, "m n k block task_rows task_columns row_bytes row_blocks rotation"),
        *_fields(c_void_p, "x data scale bias epilogue out"),
        ("float_scale", ctypes.POINTER(FloatScale)),
        ("tensor_scale", c_float),
    )


class ConvolutionCall(ctypes.Structure):
    _fields_ = (
        ("linear", LinearCall),
        ("pixels", c_int64),
        *_fields(Pair, "size out_size kernel stride padding dilation"),
    )


class AttentionCall(ctypes.Structure):
    _fields_ = (
        ("table", c_void_p),
        ("float_scale", ctypes.POINTER(FloatScale)),
        *_fields(c_int32, "format dtype isa invalid"),
        *_fields(c_int64, "heads queries group slots width value_width block value_block"),
        *_fields(c_int64, "key_bytes key_blocks value_bytes value_blocks"),
        *_fields(c_int64, "mask_batch mask_head mask_query mask_slot"),
        *_fields(c_float, "factor key_tensor_scale value_tensor_scale"),
        ("pairs", c_int64),
        *_fields(c_void_p, "query key key_scale value value_scale mask out"),
    )


class MatmulCall(ctypes.Structure):
    _fields_ = (
        ("isa", c_int32),
        *_fields(c_int64, "threads first second m n k"),
        ("x_stride", c_int64 * 3),
        ("y_stride", c_int64 * 4),
        *_fields(c_void_p, "x y out"),
    )


class DenseAttentionCall(ctypes.Structure):
    _fields_ = (
        *_fields(c_int32, "isa causal dtype"),
        *_fields(c_int64, "threads batch heads group queries keys width value_width"),
        *_fields(c_int64 * 3, "query_stride key_stride value_stride mask_stride"),
        ("factor", c_float),
        *_fields(c_void_p, "query key value bool_mask additive_mask epilogue out"),
    )


class HadamardCall(ctypes.Structure):
    _fields_ = (
        ("dtype", c_int32),
        *_fields(c_int64, "outer n inner size"),
        *_fields(c_void_p, "x out"),
    )


class GptqPanelCall(ctypes.Structure):
    _fields_ = (
        ("spec", c_void_p),
        *_fields(c_int64, "groups width n"),
        *_fields(c_void_p, "columns shares scale low high rounded errors"),
    )


class ErrorSums(ctypes.Structure):
    _fields_ = (*_fields(c_int64, "nonfinite saturated flushed"), *_fields(c_double, "signal noise"))


class ErrorSumsCall(ctypes.Structure):
    _fields_ = (
        ("dtype", c_int32),
        *_fields(c_float, "low high"),
        *_fields(c_int64, "outer n inner block"),
        *_fields(c_void_p, "x y scale sums"),
    )


class ActivationCall(ctypes.Structure):
    _fields_ = (
        ("spec", c_void_p),
        *_fields(c_int32, "activation is_norm dtype out_dtype weight_dtype bias_dtype"),
        ("eps", c_float),
        *_fields(c_int64, "rows n block"),
        *_fields(c_void_p, "x residual weight bias normed out"),
    )


#: the most arguments of a recorded call
MOST_ARGUMENTS = 48


class RecordedCall(ctypes.Structure):
    _fields_ = (
        ("kernel", c_void_p),
        ("returns_error", c_int64),
        ("arguments", c_uint64 * MOST_ARGUMENTS),
    )


#: all structures; the library knows the size of each by its name
STRUCTURES = (
    *(FloatScale, Spec, QuantizeCall, Epilogue, LinearCall, ConvolutionCall, AttentionCall, MatmulCall),
    *(DenseAttentionCall, HadamardCall, GptqPanelCall, ErrorSums, ErrorSumsCall, ActivationCall, RecordedCall),
)


def check_sizes(library: ctypes.CDLL) -> None:
    """Raise MXError if a structure has another size in the library: its fields would be read at wrong offsets."""
    for structure in STRUCTURES:
        size = library.pt2mx_size_of(structure.__name__.encode())
        if size != ctypes.sizeof(structure):
            raise MXError(
                f"{structure.__name__} has {ctypes.sizeof(structure)} bytes in pt2mx/kernels/cpu/calls.py and {size} "
                "in src/calls.h: the files are of different versions. Install pt2mx again "
                "(pip install --force-reinstall pt2mx), or give both files the same fields"
            )
