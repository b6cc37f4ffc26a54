"""`Accumulator`: the register in which hardware adds the products of a matmul, and its spellings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from pt2mx.errors import MXError, check_integer, nearest
from pt2mx.spec import ROW

#: values of a group where none is named: the block of an MX format
_GROUP = 32
#: most bits of a fixed-point register apart from its sign: float64 holds its values
_MOST_FIXED_BITS = 52


class Kind(NamedTuple):
    """A kind of register.

    Args:
        numbers: names of the numbers that its spelling has in parentheses.
        most: the largest of each.
        default: the numbers of a spelling without; None: it needs them.
        promotion: products after which it is added to a float32 sum, where a spelling names none.
    """

    numbers: tuple[str, ...] = ()
    most: int = 0
    default: tuple[int, ...] | None = ()
    promotion: int = ROW


KINDS = {
    "float32": Kind(),
    "bfloat16": Kind(),
    "float16": Kind(),
    "fixed": Kind(("integer bits", "fraction bits"), _MOST_FIXED_BITS, None),
    "hopper": Kind(("fraction bits",), 23, (13,), 128),
}

_FORMS = (
    *("float32", "float32{32}", "bfloat16", "float16", "fixed(integer bits,fraction bits)"),
    *("hopper", "hopper(fraction bits)"),
)
_ORDER = (
    "each with an order of sums in braces, {products of a group} or {products of a group,products until the register "
    "is added to a float32 sum}: bfloat16{32}, hopper{32,128}, float16{32,row} (row: all)"
)
_SPELLING = re.compile(
    r"(?P<kind>\w+)(?:\((?P<numbers>\d{1,3}(?:,\d{1,3})*)\))?"
    r"(?:\{(?P<group>\d{1,18}|row)(?:,(?P<promotion>\d{1,18}|row))?\})?",
    re.ASCII,
)


@dataclass(frozen=True)
class Accumulator:
    """The register in which the products of a matmul are added, and the order of its sums.

    `group` products at a time are added to the register exactly, and the result is rounded to it. After `promotion`
    products it is added to a float32 sum, and starts again at zero. `pt2mx.kernels.accumulated_matmul` is the
    definition.

    Args:
        kind: "float32", "bfloat16", "float16" (rounded to nearest, ties to even), "fixed" or "hopper".
        numbers: of "fixed" the integer bits and the fraction bits beside the sign: multiples of 2**-fraction, rounded
            to nearest, ties to even, that saturate at 2**integer. Of "hopper" the fraction bits that the FP8 tensor
            cores of that GPU keep: 13, or 14.
        group: products that are added at once, at least 1.
        promotion: products between two sums in float32, a multiple of `group`; `2**63 - 1`: all products.

    Raises:
        MXError: for any other value.

    Example:
        >>> import pt2mx
        >>> print(pt2mx.parse_accumulator("hopper"), pt2mx.Accumulator("fixed", (8, 16)))
        hopper(13){32,128} fixed(8,16){32,row}
    """

    kind: str
    numbers: tuple[int, ...] = ()
    group: int = _GROUP
    promotion: int = ROW

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise MXError(f"unknown accumulator {self.kind!r}: {nearest(self.kind, KINDS)}")
        kind = KINDS[self.kind]
        if not isinstance(self.numbers, tuple) or len(self.numbers) != len(kind.numbers):
            words = f"({', '.join(kind.numbers)})" if kind.numbers else "no numbers"
            raise MXError(f"accumulator {self.kind!r} with numbers {self.numbers!r}: it takes {words}")
        for name, number in zip(kind.numbers, self.numbers, strict=True):
            check_integer(f"{name} of accumulator {self.kind!r}", number, 0, kind.most)
        if self.numbers and not 1 <= sum(self.numbers) <= kind.most:
            words = " + ".join(kind.numbers)
            raise MXError(
                f"accumulator {self.kind!r}: {words} = {sum(self.numbers)}, and must be from 1 to {kind.most}"
            )
        check_integer("the group of an accumulator", self.group, 1)
        check_integer("the promotion of an accumulator", self.promotion, 1)
        if self.promotion != ROW and self.promotion % self.group:
            raise MXError(
                f"accumulator {self.kind!r}: {self.promotion} products until the sum is added in float32 must be a "
                f"multiple of the group, {self.group}, or 'row'"
            )

    def __str__(self) -> str:
        numbers = f"({','.join(map(str, self.numbers))})" if self.numbers else ""
        group, promotion = ("row" if n == ROW else n for n in (self.group, self.promotion))
        return f"{self.kind}{numbers}{{{group},{promotion}}}"


def parse_accumulator(value: object) -> Accumulator | None:
    """Return the accumulator that a text spells; None for "float32", torch's own sums.

    Args:
        value: an `Accumulator`, None, or a text: a kind, its numbers in parentheses, its order of sums in braces.

    Returns:
        The accumulator. Without numbers "hopper" keeps 13 fraction bits. Without an order of sums groups have 32
        products, and "hopper" adds to a float32 sum after 128; the others never do.

    Raises:
        MXError: for another text.

    Example:
        >>> import pt2mx
        >>> print(pt2mx.parse_accumulator("float16{16,64}"), pt2mx.parse_accumulator("float32"))
        float16{16,64} None
    """
    if value is None or value == "float32" or isinstance(value, Accumulator):
        return value if isinstance(value, Accumulator) else None
    match = _SPELLING.fullmatch(value.replace(" ", "").lower()) if isinstance(value, str) else None
    if match is None or match["kind"] not in KINDS:
        raise MXError(f"unknown accumulator {value!r}: {nearest(value, _FORMS)}; {_ORDER}")
    kind = KINDS[match["kind"]]
    numbers = tuple(map(int, match["numbers"].split(","))) if match["numbers"] else kind.default or ()
    group = _products(match["group"], _GROUP)
    promotion = kind.promotion if group and kind.promotion % group == 0 else ROW
    return Accumulator(match["kind"], numbers, group, _products(match["promotion"], promotion))


def _products(text: str | None, default: int) -> int:
    return default if text is None else ROW if text == "row" else int(text)
