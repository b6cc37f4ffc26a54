"""Compare the formats of the OCP specification: as a table, and on data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import EllipsisType
from typing import TextIO

from pt2mx.analysis.measure import MXStatistics, mx_statistics
from pt2mx.analysis.tables import text_table
from pt2mx.errors import MXError
from pt2mx.formats import FORMATS
from pt2mx.kernels.packing import group_of
from pt2mx.spec import MXSpec

#: The six formats of the OCP specification, with blocks of 32, by pychop's names.
MX_FORMATS: dict[str, MXSpec] = {f"mx{name}": MXSpec(element) for name, element in FORMATS.items()}


@dataclass(frozen=True)
class MXComparison:
    """The errors of several formats on the same data. `str` is the table.

    Args:
        rows: one row per format, in the order of the request.

    Example:
        >>> import io, torch, pt2mx
        >>> comparison = pt2mx.compare_mx_formats(torch.ones(32), ["mxfp8", "mxfp4"], file=io.StringIO())
        >>> comparison
        <MXComparison of 2 formats: mxfp8_e4m3{32}, mxfp4_e2m1{32}>
        >>> comparison.to_dict()["mxfp4_e2m1{32}"]["bits_per_element"]
        4.25
    """

    rows: tuple[MXStatistics, ...]

    def to_dict(self) -> dict[str, dict[str, object]]:
        """Return the statistics by format, as `str(MXSpec)` spells it."""
        return {row.format: row.to_dict() for row in self.rows}

    def __str__(self) -> str:
        header = ("format", "bits", "SQNR dB", "max abs error", "mean abs error", "saturated %", "flushed %", "ratio")
        table = text_table([header, *map(_comparison_row, self.rows)], left=1)
        return "\n".join([table, *_byte_notes(self.rows)])

    def __repr__(self) -> str:  # short, because a notebook shows it below the printed table
        return f"<MXComparison of {len(self.rows)} formats: {', '.join(row.format for row in self.rows)}>"


def compare_mx_formats(
    data: object,
    formats: Iterable[object] | None = None,
    block_size: int | None = None,
    axis: int | EllipsisType | None = ...,
    file: TextIO | None = None,
) -> MXComparison:
    """Print and return the errors of each format on `data`.

    The columns: bits a value with its share of the scale, signal to noise ratio, largest and mean absolute error, the
    shares of the values that saturated and that became zero, and the compression ratio over data's dtype.

    Args:
        data: (...) as `mx_quantize` takes it.
        formats: in any spelling that `pt2mx.parse` takes; by default `MX_FORMATS`.
        block_size: values that share a scale, in all formats; by default each format's own block size, or 32.
        axis: the dimension along which blocks run, in all formats; as in `mx_quantize`.
        file: where the table is printed; by default the standard output.

    Returns:
        An `MXComparison`: `rows` are the `MXStatistics` of the formats, and `str` is the table.

    Raises:
        MXError: as `mx_statistics`.

    Example:
        >>> import torch, pt2mx
        >>> comparison = pt2mx.compare_mx_formats(torch.tensor([0.25, 1.0, 3.0, -7.0]), ["mxfp8", "mxfp4"])
        format           bits  SQNR dB  max abs error  mean abs error  saturated %  flushed %  ratio
        mxfp8_e4m3{32}  10.00      inf              0               0         0.00       0.00  3.20x
        mxfp4_e2m1{32}   6.00    17.45              1          0.3125        25.00      25.00  5.33x
    """
    if formats is None:
        formats = MX_FORMATS
    elif isinstance(formats, str | MXSpec):
        formats = [formats]
    elif not isinstance(formats, Iterable):
        raise MXError(f"formats={formats!r} must be a format or several, for example ['mxfp4', 'mxfp8']")
    comparison = MXComparison(tuple(mx_statistics(data, format, block_size, axis) for format in formats))
    print(comparison, file=file)
    return comparison


def print_mx_format_table(file: TextIO | None = None) -> None:
    """Print the table of the formats in `MX_FORMATS`.

    The columns: the bits of an element and their split, its bias, largest exponent, largest value, smallest normal and
    subnormal, and special values; block size, scale, bits a value with its share of the scale, and the compression
    ratios over fp16 and fp32.

    Args:
        file: where it is printed; by default the standard output.

    Example:
        >>> import pt2mx
        >>> pt2mx.print_mx_format_table()  # doctest: +ELLIPSIS
        format      bits  exponent  mantissa ...
        mxfp8_e4m3  8     4         3 ...
        ...
    """
    print(format_table(), file=file)


def format_table() -> str:
    """Return the table of `print_mx_format_table`."""
    header = "format,bits,exponent,mantissa,bias,emax,max,min normal,min subnormal,special,block,scale,bits/value"
    return text_table([(*header.split(","), "x fp16", "x fp32"), *map(_format_row, MX_FORMATS)])


def _comparison_row(row: MXStatistics) -> tuple[str, ...]:
    return (
        row.format,
        f"{row.bits_per_element:.2f}",
        f"{row.sqnr:.2f}",
        f"{row.max_abs_error:.4g}",
        f"{row.mean_abs_error:.4g}",
        f"{100 * row.saturated:.2f}",
        f"{100 * row.flushed:.2f}",
        f"{row.compression_ratio:.2f}x",
    )


def _byte_notes(rows: Iterable[MXStatistics]) -> list[str]:
    """Return a line for each format whose codes a model stores in more bits than they have."""
    notes = []
    for row in rows:
        bits = 1 + row.exp_bits + row.sig_bits
        codes, size = group_of(bits)
        width = 8 * size // codes
        if width != bits:
            stored = row.bits_per_element + width - bits
            notes.append(f"{row.format}: a model stores {stored:.2f} bits a value: codes of {bits} bits take {width}")
    return notes


def _format_row(name: str) -> tuple[str, ...]:
    spec = MX_FORMATS[name]
    element, bits = spec.element, spec.effective_bits
    special = ["Inf"] * element.has_inf + ["NaN"] * element.has_nan
    split = [str(element.exponent_bits), str(element.mantissa_bits), str(element.bias)]
    if element.is_int:
        split = ["-", str(element.bits - 2), "-"]
    return (
        name,
        str(element.bits),
        *split,
        str(element.emax),
        f"{element.max_normal:g}",
        "-" if element.is_int else f"2^{element.emin}",
        f"2^{element.emin - element.mantissa_bits}",
        ", ".join(special) or "-",
        str(spec.block_size),
        f"E{spec.scale_exp_bits}M{spec.scale_sig_bits}",
        f"{bits:g}",
        f"{16 / bits:.2f}",
        f"{32 / bits:.2f}",
    )
