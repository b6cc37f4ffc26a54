"""The structures and functions of the C++ kernels, as `src/calls.h` declares them."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

#: type in C++ -> in Python; pointers are `c_void_p`
_NUMBERS: dict[str, Any] = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "ParallelFor": ctypes.c_void_p,
    "void": None,
}


def _type_of(types: dict[str, Any], declaration: str) -> Any:
    """Return the type of one number, pointer or structure, "const float* x"."""
    return ctypes.c_void_p if "*" in declaration else types[declaration.removeprefix("const ").split()[0]]


def _structures(header: str, constants: dict[str, int]) -> dict[str, type[ctypes.Structure]]:
    """Return the structures of a header by name, each after those that it contains."""
    structures: dict[str, type[ctypes.Structure]] = {}
    for name, body in re.findall(r"^struct (\w+) \{(.*?)^\};", header, re.DOTALL | re.MULTILINE):
        fields = []
        for type_and_first, *others in (line.split(",") for line in body.split(";")[:-1]):
            of_first, _, first = type_and_first.strip().rpartition(" ")
            for field in (first, *others):
                type_of_field = _type_of(_NUMBERS | structures, f"{of_first} {field}")
                field_name, _, length = field.strip(" *]").partition("[")
                if length:
                    type_of_field *= constants.get(length) or int(length)
                fields.append((field_name, type_of_field))
        structures[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return structures


def _functions(header: str) -> dict[str, tuple[Any, list[Any]]]:
    """Return the types of the result and of the arguments of the functions of a header, by name."""
    functions = {}
    for result, name, arguments in re.findall(r"^(\w+) (pt2mx_\w+)\(([^)]*)\);", header, re.MULTILINE):
        types = [_type_of(_NUMBERS, argument.strip()) for argument in arguments.split(",") if argument]
        functions[name] = _NUMBERS[result], types
    return functions


_header = re.sub(r" *//.*", "", (Path(__file__).parent / "src" / "calls.h").read_text(encoding="utf-8"))
_constants = {name: int(value) for name, value in re.findall(r"constexpr \w+ (\w+) = (-?\d+);", _header)}
#: name -> structure, whose fields have the names of the header
STRUCTURES = _structures(_header, _constants)
#: name of a function of the library -> the types of its result and of its arguments
FUNCTIONS = _functions(_header)
#: the most arguments of a recorded call
MOST_ARGUMENTS = _constants["kMostArguments"]

FloatScale = STRUCTURES["FloatScale"]
Spec = STRUCTURES["Spec"]
QuantizeCall = STRUCTURES["QuantizeCall"]
Epilogue = STRUCTURES["Epilogue"]
LinearCall = STRUCTURES["LinearCall"]
ConvolutionCall = STRUCTURES["ConvolutionCall"]
AttentionCall = STRUCTURES["AttentionCall"]
MatmulCall = STRUCTURES["MatmulCall"]
DenseAttentionCall = STRUCTURES["DenseAttentionCall"]
HadamardCall = STRUCTURES["HadamardCall"]
GptqPanelCall = STRUCTURES["GptqPanelCall"]
AccumulatedCall = STRUCTURES["AccumulatedCall"]
ErrorSums = STRUCTURES["ErrorSums"]
ErrorSumsCall = STRUCTURES["ErrorSumsCall"]
ActivationCall = STRUCTURES["ActivationCall"]
RecordedCall = STRUCTURES["RecordedCall"]


class StoreCall(ctypes.Structure):
    """The calls that quantize keys and values."""

    _fields_ = (("keys", QuantizeCall), ("values", QuantizeCall))
