"""The contents of a file as a table, and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from math import prod
from typing import Any

from pt2mx.analysis.tables import text_table
from pt2mx.pt2e.contents.held import Contents, HeldTensor, HeldWeight
from pt2mx.pt2e.report.finite import listed

#: from the fewest blocks to the most
_BARS = "▁▂▃▄▅▆▇█"
#: columns of a histogram, at most
_COLUMNS = 24


def table(contents: Contents) -> str:
    """Return what is known, in tables."""
    origin = contents.origin
    written = f", written by pt2mx {origin.pt2mx} and torch {origin.torch}" if origin else ""
    parts = [f"{contents.file}: a {contents.kind} of {contents.bytes:,} bytes{written}"]
    if contents.target:
        parts.append("for: " + ", ".join(value for value in contents.target.values() if value))
    if origin and origin.recipe:
        parts.append("recipe:\n" + textwrap.indent(origin.recipe.rstrip(), "  "))
    if contents.inputs:
        parts.append("inputs: " + ", ".join(map(_input, contents.inputs)))
    if contents.portable:
        parts.append("portable: operators are written out, and packed weights are not told from other tensors")
    parts += [text_table(rows, left) for rows, left in _tables(contents)]
    return "\n\n".join([*parts, *_storage(contents), _summary(contents)])


def as_json(contents: Contents) -> dict[str, Any]:
    """Return what is known, as `json.dumps` takes it: the fields of `Contents`; of each weight also the bits a value,
    and why they are more than the format's."""
    found = asdict(contents)
    for weight, held in zip(found["weights"], contents.weights, strict=True):
        weight |= {"bits": held.bits, "storage": held.storage}
    return found


def _tables(contents: Contents) -> Iterable[tuple[list[tuple[str, ...]], int]]:
    """Rows, the header first, and how many of the columns are aligned on the left."""
    if contents.weights:
        header = ("weight", "format", "scales, powers of two", "shape", "axis", "bytes", "bits")
        yield [header, *map(_weight_row, contents.weights)], 3
    if contents.tensors:
        rows = [(t.name, t.dtype, _shape(t.shape), f"{t.bytes:,}") for t in contents.tensors]
        yield [("other tensor", "dtype", "shape", "bytes"), *rows], 2
    for title, counts in (("quantized as it runs", contents.activations), ("operator", contents.operators)):
        if counts:
            yield [(title, "calls"), *((name, str(count)) for name, count in counts.items())], 1


def _weight_row(weight: HeldWeight) -> tuple[str, ...]:
    scales = "" if weight.scales is None else _histogram(weight.scales)
    scales += f", {weight.nan_blocks} NaN" if weight.nan_blocks else ""
    numbers = _shape(weight.shape), str(weight.axis), f"{weight.bytes:,}", f"{weight.bits:.2f}"
    return weight.name, weight.format, scales, *numbers


def _histogram(scales: Mapping[int, int]) -> str:
    """Bars from the least exponent to the greatest, between the two; a bar stands for more where there are many."""
    if not scales:
        return ""
    least, most = min(scales), max(scales)
    width = -(-(most - least + 1) // _COLUMNS)
    counts = [sum(scales.get(e, 0) for e in range(start, start + width)) for start in range(least, most + 1, width)]
    bars = "".join(" " if not n else _BARS[(len(_BARS) - 1) * n // max(counts)] for n in counts)
    return f"{least} {bars} {most}"


def _storage(contents: Contents) -> Iterable[str]:
    """Why weights take more bits a value than their formats, each reason with their names."""
    names: dict[str, list[str]] = {}
    for weight in contents.weights:
        if weight.storage is not None:
            names.setdefault(weight.storage, []).append(weight.name)
    if names:
        yield "\n".join(f"{reason}: {listed(found)}" for reason, found in names.items())


def _summary(contents: Contents) -> str:
    packed, values = sum(w.bytes for w in contents.weights), sum(prod(w.shape) for w in contents.weights)
    rest = sum(t.bytes or 0 for t in contents.tensors)
    bits = f", {8 * packed / values:.2f} bits a value" if values else ""
    return (
        f"{len(contents.weights)} packed weights: {values:,} values, {packed:,} bytes{bits}; "
        f"{len(contents.tensors)} other tensors: {rest:,} bytes"
    )


def _input(tensor: HeldTensor) -> str:
    return f"{tensor.name} {tensor.dtype} ({', '.join(map(str, tensor.shape))})"


def _shape(shape: Iterable[int | str]) -> str:
    return "x".join(map(str, shape)) or "()"
