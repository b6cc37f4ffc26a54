"""Show what a file contains, as tables and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from math import prod
from typing import Any

from pt2mx.analysis.tables import text_table
from pt2mx.pt2e.inspect.schema import FileInfo, PackedWeightInfo, TensorInfo
from pt2mx.pt2e.report.weights import listed

#: bars of a histogram, from the fewest blocks to the most
_BARS = "▁▂▃▄▅▆▇█"
#: the most columns of a histogram
_COLUMNS = 24


def table(info: FileInfo) -> str:
    """Return the description of a file as tables."""
    origin = info.origin
    written = f", written by pt2mx {origin.pt2mx} and torch {origin.torch}" if origin else ""
    parts = [f"{info.file}: a {info.kind} of {info.bytes:,} bytes{written}"]
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
        rows = [(t.name, t.dtype, _shape(t.shape), f"{t.bytes:,}") for t in info.tensors]
        yield [("other tensor", "dtype", "shape", "bytes"), *rows], 2
    for title, counts in (("quantized as it runs", info.activations), ("operator", info.operators)):
        if counts:
            yield [(title, "calls"), *((name, str(count)) for name, count in counts.items())], 1


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
    counts = [sum(scales.get(e, 0) for e in range(start, start + width)) for start in starts]
    bars = "".join(" " if not n else _BARS[(len(_BARS) - 1) * n // max(counts)] for n in counts)
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
    packed, values = sum(w.bytes for w in info.weights), sum(prod(w.shape) for w in info.weights)
    others = sum(t.bytes or 0 for t in info.tensors)
    bits = f", {8 * packed / values:.2f} bits a value" if values else ""
    return (
        f"{len(info.weights)} packed weights: {values:,} values, {packed:,} bytes{bits}; "
        f"{len(info.tensors)} other tensors: {others:,} bytes"
    )


def _input(tensor: TensorInfo) -> str:
    return f"{tensor.name} {tensor.dtype} ({', '.join(map(str, tensor.shape))})"


def _shape(shape: Iterable[int | str]) -> str:
    return "x".join(map(str, shape)) or "()"
