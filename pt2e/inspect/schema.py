"""Dataclasses that describe what a program or package file contains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

import torch

from pt2mx.pt2e.packages.sizes import Range
from pt2mx.pt2e.packed_weights import storage_note
from pt2mx.pt2e.provenance import Provenance
from pt2mx.spec import MXSpec, parse


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
        format: the element and the block size.
        axis: the dimension along which blocks run, counted from the front.
        bytes: the size of codes and scales.
        scales: exponent of a scale -> number of blocks that have it; None where it is unknown.
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
        kind: "program" or "package".
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
    """Return the element and the block size, as in `fp4_e2m1{32}`."""
    return f"{spec.element}{{{spec.block_size}}}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


def counted(names: Iterable[str]) -> dict[str, int]:
    """Count the names, the most frequent first."""
    return dict(sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])))


def shape_of_ranges(ranges: Iterable[Range]) -> tuple[int | str, ...]:
    """Return a shape with the range of each dynamic dimension, as in `("1..64", 128)`."""
    return tuple(low if low == high else f"{low}..{'' if high is None else high}" for low, high in ranges)
