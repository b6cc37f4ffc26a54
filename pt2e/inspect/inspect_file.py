"""`inspect_file`: read what a program or package file contains.

Of a package, the machine code is not loaded and the weights are not read: AOTInductor's own records name the constants
and the operators that the code calls.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram

from pt2mx.analysis.sums import exponent_bytes
from pt2mx.errors import MXError
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import FakeQuantize, Quantize, parameter_of, value_of
from pt2mx.fx.graph.qdq import is_portable
from pt2mx.kernels.packing import unpacked_length
from pt2mx.ops.contract import OPERATORS
from pt2mx.pt2e.files.archive import check_kind, read_record, record_names
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.flow.packed_weights import PackedWeight, packed_weights
from pt2mx.pt2e.inspect.schema import (
    FileInfo,
    PackedWeightInfo,
    TensorInfo,
    counted,
    dtype_name,
    format_of,
    scale_counts,
    shape_of_ranges,
)
from pt2mx.pt2e.language.ranks import ENCODER, of_checkpoint, programs_in
from pt2mx.pt2e.packages.package import CODE, EXAMPLE, calls_in, read_signature
from pt2mx.pt2e.program.program import read_program
from pt2mx.pt2e.program.provenance import provenance_of
from pt2mx.pt2e.program.sizes import Range, input_nodes, ranges

#: a line about a constant in the C++ that AOTInductor generated
_CONSTANT = re.compile(r"constants_info_\[(\d+)\]\.(\w+) = (.*);")
_DTYPE = "cached_torch_dtype_"
#: arguments of the matmul operators
_WEIGHT = ("weight_data", "weight_scale", "tensor_scale")


def inspect_file(path: str | os.PathLike[str]) -> list[FileInfo]:
    """Read what a file contains, or what each program and package in the folder of a language model does.

    Args:
        path: the path of a program, a package or such a folder.

    Raises:
        MXError: for another file, a damaged one, or a folder without programs.
    """
    if not Path(path).is_dir():
        return [_file_info(path)]
    folder = Path(path)
    names = list(programs_in(path))
    if (folder / ENCODER).is_file():
        names.append(ENCODER)
    names += sorted(file.name for file in folder.glob("*.aoti.pt2"))
    if not names:
        raise MXError(
            f"{str(path)!r} holds no program.pt2: give a file, or the folder of a quantized language model"
            f"{of_checkpoint(path)}"
        )
    return [_file_info(folder / name) for name in names]


def _file_info(path: str | os.PathLike[str]) -> FileInfo:
    if any(name.startswith(CODE) for name in record_names(path)):
        with user_errors(f"read the package {str(path)!r}", "compile its program again"):
            return _package_info(path)
    check_kind(path, "program")
    return _program_info(path, read_program(path))


def _program_info(path: str | os.PathLike[str], program: ExportedProgram) -> FileInfo:
    portable = is_portable(program.graph_module)
    weights = [] if portable else list(packed_weights(program))
    packed: set[int] = set()
    for weight in weights:
        packed.update(tensor.data_ptr() for tensor in _tensors(weight))
    others = []
    for name, value in {**program.state_dict, **program.constants}.items():
        if isinstance(value, Tensor) and value.data_ptr() not in packed:
            others.append(TensorInfo(name, dtype_name(value.dtype), tuple(value.shape), value.nbytes))
    graphs = graph_modules(program.graph_module)
    operators: list[str] = []
    activations: list[str] = []
    for graph in graphs:
        for node in graph.graph.nodes:
            if isinstance(node.target, OpOverload):
                operators.append(_dotted(node.target._schema.name))
            elif isinstance(node.target, HigherOrderOperator):
                operators.append(str(node.target))
            call = Quantize.of(node) or FakeQuantize.of(node)
            if call is not None:
                activations.append(str(call.spec))
    inputs = [(node.name, value_of(node)) for node in input_nodes(program)]
    return FileInfo(
        file=str(path),
        kind="program",
        bytes=Path(path).stat().st_size,
        origin=provenance_of(path),
        inputs=_inputs((*pair, sizes) for pair, sizes in zip(inputs, ranges(program), strict=True)),
        weights=tuple(map(_weight_info, weights)),
        tensors=tuple(others),
        operators=counted(operators),
        activations=counted(activations),
        portable=portable,
    )


def _inputs(leaves: Iterable[tuple[str, object, list[Range] | None]]) -> tuple[TensorInfo, ...]:
    """Describe inputs by their names, values and ranges."""
    inputs = []
    for name, value, sizes in leaves:
        if isinstance(value, Tensor):
            inputs.append(TensorInfo(name, dtype_name(value.dtype), shape_of_ranges(sizes or ())))
        else:
            inputs.append(TensorInfo(name, type(value).__name__, ()))
    return tuple(inputs)


def _weight_info(weight: PackedWeight) -> PackedWeightInfo:
    scales, nan = scale_counts(exponent_bytes(weight.scales, weight.spec, weight.tensor_scale))
    nbytes = sum(tensor.nbytes for tensor in _tensors(weight))
    return PackedWeightInfo(weight.name, format_of(weight.spec), weight.spec.axis, weight.shape, nbytes, scales, nan)


def _tensors(weight: PackedWeight) -> list[Tensor]:
    return [t for t in (weight.codes, weight.scales, weight.tensor_scale) if t is not None]


def _dotted(operator: str) -> str:
    return operator.replace("::", ".")


def _package_info(path: str | os.PathLike[str]) -> FileInfo:
    """Describe a package. Its packed weights are the weights of matmul operators that the code calls; codes and scales
    of other weights are among the tensors."""
    records = {name: read_record(path, name) or b"" for name in record_names(path) if name.startswith(CODE)}
    constants = _constants(records)
    calls = calls_in(path)
    weights: dict[PackedWeightInfo, None] = {}
    packed: set[str] = set()
    for call in calls:
        weight = _called_weight(call, constants)
        if weight is not None:
            weights[weight[0]] = None
            packed.update(tensor.name for tensor in weight[1])
    return FileInfo(
        file=str(path),
        kind="package",
        bytes=Path(path).stat().st_size,
        origin=provenance_of(path),
        inputs=_inputs(read_signature(path).inputs) if EXAMPLE in record_names(path) else (),
        weights=tuple(weights),
        tensors=tuple(tensor for tensor in constants.values() if tensor.name not in packed),
        operators=counted(_dotted(call["target"]) for call in calls),
        target=_json(records, ".wrapper_metadata.json"),
    )


def _json(records: Mapping[str, bytes], ending: str) -> dict[str, Any]:
    """Merge the JSON records whose names have this ending."""
    merged: dict[str, Any] = {}
    for name, text in records.items():
        if name.endswith(ending):
            merged |= json.loads(text)
    return merged


def _constants(records: Mapping[str, bytes]) -> dict[str, TensorInfo]:
    """Describe the constants of the machine code, by the names that it uses for them."""
    facts: dict[str, dict[str, str]] = {}
    for name, source in records.items():
        if name.endswith(".wrapper.cpp"):
            for number, key, value in _CONSTANT.findall(source.decode()):
                facts.setdefault(number, {})[key] = value.strip('"{}')
    return {fact["name"]: _constant(fact) for fact in facts.values()}


def _constant(fact: Mapping[str, str]) -> TensorInfo:
    dtype = fact["dtype"].removeprefix(_DTYPE)
    shape = tuple(int(size) for size in fact["shape"].split(",") if size)
    return TensorInfo(fact["original_fqn"], dtype, shape, prod(shape) * getattr(torch, dtype).itemsize)


def _called_weight(
    call: Mapping[str, Any], constants: Mapping[str, TensorInfo]
) -> tuple[PackedWeightInfo, list[TensorInfo]] | None:
    """Describe the weight of a matmul operator that the machine code calls, with the shape of the codes that its bytes
    contain; and its codes, scales and tensor scale. Return None for another call, and for codes in the MMA layout."""
    operator: Any = OPERATORS.get(call["target"].removeprefix("pt2mx::"))
    if not hasattr(operator, "spec"):
        return None
    arguments = {argument["name"]: argument["arg"] for argument in call["inputs"]}
    tensors: list[TensorInfo] = []
    for argument in _WEIGHT:
        name = arguments.get(argument, {}).get("as_tensor", {}).get("name")
        if name in constants:
            tensors.append(constants[name])
        elif argument != "tensor_scale":  # which other formats lack
            return None
    plain = [arguments.get(argument.name, {}) for argument in operator.arguments]
    spec = operator.from_args(*(value.get("as_string", value.get("as_int")) for value in plain)).spec
    codes = tensors[0]
    *rows, size = codes.shape
    shape = (*map(int, rows), unpacked_length(int(size), spec.element.bits))
    nbytes = sum(tensor.bytes or 0 for tensor in tensors)
    return PackedWeightInfo(parameter_of(codes.name), format_of(spec), len(rows), shape, nbytes), tensors
