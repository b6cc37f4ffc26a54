"""The structures and functions of the C++ kernels, as `src/calls.h` declares them."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from torch import Tensor

__all__ = ["FUNCTIONS", "STRUCTURES", "RepeatedCalls"]

#: the most structures that are kept of an operator
_MOST_CALLS = 1024
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
ErrorSums = STRUCTURES["ErrorSums"]
ErrorSumsCall = STRUCTURES["ErrorSumsCall"]
ActivationCall = STRUCTURES["ActivationCall"]
RecordedCall = STRUCTURES["RecordedCall"]


class StoreCall(ctypes.Structure):
    """The calls that quantize keys and values."""

    _fields_ = (("keys", QuantizeCall), ("values", QuantizeCall))


class RepeatedCalls:
    """Structures of earlier calls by their arguments: shapes, strides and dtypes of tensors, and all else. A call with
    the same ones needs no checks, which take longer than a small kernel."""

    def __init__(self, structure: type[ctypes.Structure]) -> None:
        self._structure = structure
        self._calls: dict[tuple[Hashable, ...], tuple[ctypes.Structure, object]] = {}

    def add(self, args: tuple[object, ...], call: ctypes.Structure, kept: object = None) -> None:
        """Keep a copy of a call, and an object to which it has pointers. `get` leaves those of tensors to the
        caller."""
        key = _signature(args)
        if key is None:
            return
        if len(self._calls) >= _MOST_CALLS:
            self._calls.clear()
        self._calls[key] = self._structure.from_buffer_copy(call), kept

    def get(self, args: tuple[object, ...]) -> ctypes.Structure | None:
        """Return a copy of the call with such arguments, which keeps the object of `add`; None without one."""
        key = _signature(args)
        entry = None if key is None else self._calls.get(key)
        if entry is None:
            return None
        call = self._structure.from_buffer_copy(entry[0])
        call.kept = entry[1]  # another thread may drop the entry while the call runs
        return call


def _signature(args: tuple[object, ...]) -> tuple[Hashable, ...] | None:
    """Return what two calls have in common that need the same checks; None for tensors other than plain ones of the
    CPU."""
    signature: list[Hashable] = []
    for arg in args:
        if type(arg) is Tensor:
            if not arg.is_cpu:
                return None
            signature += (arg.shape, arg.stride(), arg.dtype)
        elif isinstance(arg, Tensor):
            return None
        else:
            signature.append(arg)
    return tuple(signature)
