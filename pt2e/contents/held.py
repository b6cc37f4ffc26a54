"""The contents of a file as plain data: what a program or a package holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

import torch

from pt2mx.pt2e.origin import Origin
from pt2mx.pt2e.packages.extents import Range
from pt2mx.pt2e.stored_bits import storage_note
from pt2mx.spec import MXSpec, parse


@dataclass(frozen=True)
class HeldTensor:
    """A tensor that is not packed, or an input, whose shape has ranges of dynamic sizes."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    bytes: int | None = None


@dataclass(frozen=True)
class HeldWeight:
    """A packed weight.

    Args:
        format: element and block size.
        axis: along which blocks run, from the front.
        bytes: of codes and scales.
        scales: exponent of a scale -> blocks that have it; None where that is not known.
        nan_blocks: blocks whose values are NaN.
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
        """Bits a value, scales among them."""
        return 8 * self.bytes / max(prod(self.shape), 1)

    @property
    def storage(self) -> str | None:
        """Why these are more than the format's; None where they are not."""
        return storage_note(self.shape, parse(self.format).replace(axis=self.axis))


@dataclass(frozen=True)
class Contents:
    """The contents of a file.

    Args:
        kind: "program" or "package".
        bytes: of the file.
        origin: the versions that wrote it, and the recipe; None where it names none.
        inputs: what it is called with.
        weights: those that are packed.
        tensors: the other parameters, buffers and constants.
        activations: format -> how many tensors are quantized to it as the program runs.
        operators: name -> how many calls there are; of a package those that its machine code does not contain.
        portable: True of a program whose operators are written out, which has no packed weights.
        target: of a package: the device and the processor that it was compiled for.
    """

    file: str
    kind: str
    bytes: int
    origin: Origin | None
    inputs: tuple[HeldTensor, ...]
    weights: tuple[HeldWeight, ...]
    tensors: tuple[HeldTensor, ...]
    operators: dict[str, int]
    activations: dict[str, int] = field(default_factory=dict)
    portable: bool = False
    target: dict[str, str] = field(default_factory=dict)


def format_of(spec: MXSpec) -> str:
    """Element and block size, as in `fp4_e2m1{32}`."""
    return f"{spec.element}{{{spec.block_size}}}"


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without that of torch."""
    return str(dtype).removeprefix("torch.")


def counted(names: Iterable[str]) -> dict[str, int]:
    """Name -> how often it is there, the most frequent first."""
    return dict(sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])))


def shape_of_ranges(ranges: Iterable[Range]) -> tuple[int | str, ...]:
    """A shape with the range of each dynamic dimension, as in `("1..64", 128)`."""
    return tuple(low if low == high else f"{low}..{'' if high is None else high}" for low, high in ranges)
