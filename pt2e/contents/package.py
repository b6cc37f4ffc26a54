"""The contents of a package of AOTInductor, as far as it tells them; its machine code is not loaded."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pt2mx.kernels.packing import unpacked_length
from pt2mx.pt2e.archive import read_record, record_names
from pt2mx.pt2e.contents.held import Contents, HeldTensor, HeldWeight, counted, dtype_name, format_of, shape_of_ranges
from pt2mx.pt2e.origin import origin_of
from pt2mx.pt2e.packages.package import read_signature
from pt2mx.pt2e.packed_weights import parameter_name
from pt2mx.spec import MXSpec

#: where packages keep what AOTInductor wrote
CODE = "data/aotinductor/"
#: what the C++ that AOTInductor wrote says of a constant
_CONSTANT = re.compile(r"constants_info_\[(\d+)\]\.(\w+) = (.*);")
_DTYPE = "cached_torch_dtype_"
#: arguments of the products
_WEIGHT = ("weight_data", "weight_scale")


def of_package(path: str | os.PathLike[str]) -> Contents:
    """The contents of a package, as far as it tells them. Weights are those of the products that it calls; the others
    are among the tensors, codes and scales."""
    records = {name: read_record(path, name) or b"" for name in record_names(path) if name.startswith(CODE)}
    constants = _constants(records)
    calls = [node["node"] for node in _json(records, ".wrapper.json").get("nodes", [])]
    weights = [weight for call in calls if (weight := _Weight.of(call, constants))]
    packed = {tensor.name for weight in weights for tensor in (weight.codes, weight.scales)}
    return Contents(
        file=str(path),
        kind="package",
        bytes=Path(path).stat().st_size,
        origin=origin_of(path),
        inputs=tuple(_arguments(path)),
        weights=tuple(dict.fromkeys(weight.held() for weight in weights)),
        tensors=tuple(tensor for tensor in constants.values() if tensor.name not in packed),
        operators=counted(call["target"].replace("::", ".") for call in calls),
        target=_json(records, ".wrapper_metadata.json"),
    )


def _json(records: Mapping[str, bytes], ending: str) -> dict[str, Any]:
    """The records of that ending, in one mapping."""
    return {
        key: value for name, text in records.items() if name.endswith(ending) for key, value in json.loads(text).items()
    }


def _constants(records: Mapping[str, bytes]) -> dict[str, HeldTensor]:
    """The constants of the machine code, by the names that it has for them."""
    said: dict[str, dict[str, str]] = {}
    for name, source in records.items():
        if name.endswith(".wrapper.cpp"):
            for number, key, value in _CONSTANT.findall(source.decode()):
                said.setdefault(number, {})[key] = value.strip('"{}')
    return {facts["name"]: _constant(facts) for facts in said.values()}


def _constant(facts: Mapping[str, str]) -> HeldTensor:
    dtype = facts["dtype"].removeprefix(_DTYPE)
    shape = tuple(map(int, filter(None, facts["shape"].split(","))))
    return HeldTensor(facts["original_fqn"], dtype, shape, prod(shape) * getattr(torch, dtype).itemsize)


class _Weight(NamedTuple):
    """The weight of a product that the machine code calls."""

    codes: HeldTensor
    scales: HeldTensor
    spec: MXSpec

    @classmethod
    def of(cls, call: Mapping[str, Any], constants: Mapping[str, HeldTensor]) -> _Weight | None:
        given = {argument["name"]: argument["arg"] for argument in call["inputs"]}
        codes, scales = (constants.get(given.get(name, {}).get("as_tensor", {}).get("name")) for name in _WEIGHT)
        if codes is None or scales is None:
            return None
        return cls(codes, scales, MXSpec(given["elem_dtype_name"]["as_string"], given["block_size"]["as_int"]))

    def held(self) -> HeldWeight:
        """The weight with the shape of the codes that its bytes hold."""
        *rows, size = self.codes.shape
        shape = (*map(int, rows), unpacked_length(int(size), self.spec.element.bits))
        nbytes = (self.codes.bytes or 0) + (self.scales.bytes or 0)
        return HeldWeight(parameter_name(self.codes.name), format_of(self.spec), len(rows), shape, nbytes)


def _arguments(path: str | os.PathLike[str]) -> Iterable[HeldTensor]:
    for name, example, extents in read_signature(path).inputs:
        kind = dtype_name(example.dtype) if isinstance(example, Tensor) else type(example).__name__
        yield HeldTensor(name, kind, shape_of_ranges(extents or ()) if isinstance(example, Tensor) else ())
