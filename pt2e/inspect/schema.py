"""Describe what a program or package file contains: dataclasses, shown as tables and as JSON."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from pt2mx.analysis.tables import text_table
from pt2mx.errors import listed
from pt2mx.kernels.elements import NAN_SCALE
from pt2mx.pt2e.flow.packed_weights import storage_note
from pt2mx.pt2e.program.provenance import Provenance
from pt2mx.pt2e.program.sizes import Range
from pt2mx.spec import MXSpec, parse

_SCALE_BIAS = 127
#: bars of a histogram, from the fewest blocks to the most
_BARS = "▁▂▃▄▅▆▇█"
#: the most columns of a histogram
_COLUMNS = 24


@dataclass(frozen=True)
class TensorInfo:
    """Describe a tensor that is not packed, or an input. The shape of an input has the ranges of dynamic sizes."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    bytes: int | None = None


@dataclass(frozen=True)
class PackedWeightInfo:
    """Describe a packed weight.

    Args:
        format: the element, the block size and, other than E8M0, the scale format.
        axis: the dimension along which blocks run, counted from the front.
        bytes: the size of codes and scales.
        scales: exponent of a scale, rounded down to a power of two -> number of blocks that have it; None where it is
            unknown.
        nan_blocks: the number of blocks whose values are NaN.
    """

    name: str
    format: str
    axis: int
    shape: tuple[int, ...]
    bytes: int
    scales: dict[int, int] | None = None
    nan_blocks: int = 0

    @property
    def bits(self) -> float:
        """Return the bits per value, including scales."""
        return 8 * self.bytes / max(prod(self.shape), 1)

    @property
    def storage(self) -> str | None:
        """Return why a value takes more bits than the format has; None where it does not."""
        return storage_note(self.shape, parse(self.format).replace(axis=self.axis))


@dataclass(frozen=True)
class FileInfo:
    """Describe a file.

    Args:
        kind: "program", "package" or "ONNX model".
        bytes: the size of the file.
        origin: the versions that wrote the file, and the recipe; None where the file names none.
        inputs: the inputs of a call.
        weights: the packed weights.
        tensors: the other parameters, buffers and constants.
        activations: format -> number of tensors that are quantized to it at run time.
        operators: name -> number of calls; of a package, only the calls that leave its machine code.
        portable: True for a program in plain aten operators, which has no packed weights.
        target: the device and the processor that a package was compiled for.
    """

    file: str
    kind: str
    bytes: int
    origin: Provenance | None
    inputs: tuple[TensorInfo, ...]
    weights: tuple[PackedWeightInfo, ...]
    tensors: tuple[TensorInfo, ...]
    operators: dict[str, int]
    activations: dict[str, int] = field(default_factory=dict)
    portable: bool = False
    target: dict[str, str] = field(default_factory=dict)


def format_of(spec: MXSpec) -> str:
    """Return the element and the block size, as in `fp4_e2m1{32}`, and other scales than E8M0 bytes of one row."""
    if spec.has_plain_scale:
        return f"{spec.element}{{{spec.block_size}}}"
    return str(spec.replace(scale_mode=None, rounding="even"))


def scale_counts(exponents: Tensor) -> tuple[dict[int, int], int]:
    """Return exponent -> number of blocks, and the number of NaN blocks, of E8M0 bytes, int64."""
    *counts, nan = torch.bincount(exponents.flatten(), minlength=NAN_SCALE + 1).tolist()
    return {byte - _SCALE_BIAS: count for byte, count in enumerate(counts) if count}, nan


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


def counted(names: Iterable[str]) -> dict[str, int]:
    """Count the names, the most frequent first."""
    return dict(sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])))


def shape_of_ranges(ranges: Iterable[Range]) -> tuple[int | str, ...]:
    """Return a shape with the range of each dynamic dimension: `("1..64", 128)`."""
    return tuple(low if low == high else f"{low}..{'' if high is None else high}" for low, high in ranges)


def table(info: FileInfo) -> str:
    """Return the description of a file as tables."""
    origin = info.origin
    written = f", written by pt2mx {origin.pt2mx} and torch {origin.torch}" if origin else ""
    article = "an" if info.kind.startswith("O") else "a"
    parts = [f"{info.file}: {article} {info.kind} of {info.bytes:,} bytes{written}"]
    if info.target:
        parts.append("for: " + ", ".join(value for value in info.target.values() if value))
    if origin and origin.recipe:
        parts.append("recipe:\n" + textwrap.indent(origin.recipe.rstrip(), "  "))
    if info.inputs:
        parts.append("inputs: " + ", ".join(map(_input, info.inputs)))
    if info.portable:
        parts.append("portable: operators are written out, and packed weights are not told from other tensors")
    parts += [text_table(rows, left) for rows, left in _tables(info)]
    return "\n\n".join([*parts, *_storage(info), _summary(info)])


def as_json(info: FileInfo) -> dict[str, Any]:
    """Return the fields of `FileInfo` for `json.dumps`. Each weight also has its bits per value, and the reason why
    they are more than the format's."""
    fields = asdict(info)
    for fields_of_weight, weight in zip(fields["weights"], info.weights, strict=True):
        fields_of_weight |= {"bits": weight.bits, "storage": weight.storage}
    return fields


def _tables(info: FileInfo) -> Iterable[tuple[list[tuple[str, ...]], int]]:
    """Yield the rows of each table, the header first, and the number of left-aligned columns."""
    if info.weights:
        header = ("weight", "format", "scales, powers of two", "shape", "axis", "bytes", "bits")
        yield [header, *map(_weight_row, info.weights)], 3
    if info.tensors:
        rows: list[tuple[str, ...]] = [("other tensor", "dtype", "shape", "bytes")]
        for tensor in info.tensors:
            rows.append((tensor.name, tensor.dtype, _shape(tensor.shape), f"{tensor.bytes:,}"))
        yield rows, 2
    for title, counts in (("quantized as it runs", info.activations), ("operator", info.operators)):
        if counts:
            yield [(title, "calls"), *zip(counts, map(str, counts.values()), strict=True)], 1


def _weight_row(weight: PackedWeightInfo) -> tuple[str, ...]:
    scales = "" if weight.scales is None else _histogram(weight.scales)
    scales += f", {weight.nan_blocks} NaN" if weight.nan_blocks else ""
    numbers = _shape(weight.shape), str(weight.axis), f"{weight.bytes:,}", f"{weight.bits:.2f}"
    return weight.name, weight.format, scales, *numbers


def _histogram(scales: Mapping[int, int]) -> str:
    """Draw bars from the smallest exponent to the largest. A bar covers several exponents where there are many."""
    if not scales:
        return ""
    smallest, largest = min(scales), max(scales)
    width = -(-(largest - smallest + 1) // _COLUMNS)
    starts = range(smallest, largest + 1, width)
    counts = [0] * len(starts)
    for exponent, blocks in scales.items():
        counts[(exponent - smallest) // width] += blocks
    bars = ""
    for blocks in counts:
        bars += _BARS[(len(_BARS) - 1) * blocks // max(counts)] if blocks else " "
    return f"{smallest} {bars} {largest}"


def _storage(info: FileInfo) -> Iterable[str]:
    """Yield why values take more bits than their formats have, each reason with the names of the weights."""
    names: dict[str, list[str]] = {}
    for weight in info.weights:
        if weight.storage is not None:
            names.setdefault(weight.storage, []).append(weight.name)
    if names:
        yield "\n".join(f"{reason}: {listed(weights)}" for reason, weights in names.items())


def _summary(info: FileInfo) -> str:
    packed = sum(weight.bytes for weight in info.weights)
    values = sum(prod(weight.shape) for weight in info.weights)
    others = sum(tensor.bytes or 0 for tensor in info.tensors)
    bits = f", {8 * packed / values:.2f} bits a value" if values else ""
    return (
        f"{len(info.weights)} packed weights: {values:,} values, {packed:,} bytes{bits}; "
        f"{len(info.tensors)} other tensors: {others:,} bytes"
    )


def _input(tensor: TensorInfo) -> str:
    return f"{tensor.name} {tensor.dtype} ({', '.join(map(str, tensor.shape))})"


def _shape(shape: Iterable[int | str]) -> str:
    return "x".join(map(str, shape)) or "()"
