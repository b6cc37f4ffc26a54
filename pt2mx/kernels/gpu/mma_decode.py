"""The PTX that decodes a thread's fragment of a weight (`mma_layout`) to pairs of bfloat16, the operands of tensor
cores.

FP4, FP6 and the 8-bit elements that no instruction converts: a mask and shifts for each pair, then one multiplication
by the scale. Marlin (Frantar et al., 2024) does the like for INT4, after "Who Says Elephants Can't Run" (Kim et al.,
2022).
"""

from __future__ import annotations

from pt2mx.formats import ElementFormat
from pt2mx.kernels.gpu.mma_layout import CONVERTED, FRAGMENTS, Fragment

_FP16_TO_BF16 = ("mov.b32 {lo, hi}, r;", "cvt.f32.f16 x, lo;", "cvt.f32.f16 y, hi;", "cvt.rn.bf16x2.f32 r, y, x;")


def decode_ptx(element: ElementFormat, scales_of_word: int = 1) -> str:
    """Return the PTX that decodes a thread's part of a row.

    Operands: an output register for each pair of values; the words of the fragment; each scale times two to the
    `exponent_shift`, as a pair of bfloat16, in four equal registers. `scales_of_word`: scales of 32 values.
    """
    fragment = FRAGMENTS[element.name]
    scales = fragment.scales * scales_of_word
    outputs = fragment.values // 2
    words = [f"${outputs + i}" for i in range(fragment.words)]
    pairs = _from_pieces(fragment, words) if fragment.pairs else _FROM_BYTES[element.name](words)
    lines = [".reg .b32 h, a, u, r, none, minus;", ".reg .b16 lo, hi;", ".reg .f32 x, y;"]
    lines += ["mov.b32 none, 0x80008000;", "mov.b32 minus, 0xBF80BF80;"]
    for i, pair in enumerate(pairs):  # leaves it in r
        scale = f"${outputs + fragment.words + 4 * (i * scales // outputs)}"
        lines += [*pair, f"fma.rn.bf16x2 ${i}, r, {scale}, none;"]  # a product alone needs sm_90
    return "{\n" + "\n".join(lines) + "\n}"


def decode_eight_ptx(element: ElementFormat) -> str:
    """Return the PTX that decodes eight codes to four pairs of bfloat16.

    Operands: four output registers; two words with the codes in their bytes, or, with the codes of the pairs 0, 1, ...
    from the lowest bits of both halves on, one word of FP4, or two of FP6.
    """
    words = ["$4"] if element.bits == 4 else ["$4", "$5"]
    pairs = _FROM_BYTES[element.name](words) if element.name in CONVERTED else _from_halves(element, words)
    factor = f"0x{(254 - element.bias) << 7:04X}"
    lines = [".reg .b32 h, a, u, r, none, minus, factor;", ".reg .b16 lo, hi;", ".reg .f32 x, y;"]
    lines += ["mov.b32 none, 0x80008000;", "mov.b32 minus, 0xBF80BF80;", f"mov.b32 factor, {factor}{factor[2:]};"]
    for i, pair in enumerate(pairs):  # leaves it in r
        lines += [*pair, f"mov.b32 ${i}, r;"]
    return "{\n" + "\n".join(lines) + "\n}"


def _from_halves(element: ElementFormat, words: list[str]) -> list[list[str]]:
    """Shift the sign and the magnitude of a code to their bits in bfloat16, and multiply by 2**(127 - bias)."""
    lowest = 7 - element.mantissa_bits
    magnitude = ((1 << element.bits - 1) - 1) << lowest
    pairs = []
    for word in words:
        for first in range(0, 17 - element.bits, element.bits):
            pairs.append(
                [
                    _shifted("u", word, 16 - first - element.bits),
                    "and.b32 r, u, 0x80008000;",
                    _shifted("u", word, lowest - first),
                    f"lop3.b32 r, u, 0x{magnitude << 16 | magnitude:08X}, r, 0xEA;",
                    "fma.rn.bf16x2 r, r, factor, none;",
                ]
            )
    return pairs


def _shifted(target: str, source: str, left: int) -> str:
    return f"shl.b32 {target}, {source}, {left};" if left >= 0 else f"shr.u32 {target}, {source}, {-left};"


def _from_pieces(fragment: Fragment, words: list[str]) -> list[list[str]]:
    pairs = []
    for first in range(0, len(words), fragment.group_words):
        for pieces in fragment.pairs:
            lines: list[str] = []
            for i, (word, left, mask) in enumerate(pieces):
                source = words[first + word]
                if left:
                    shift = f"shl.b32 u, {source}, {left};" if left > 0 else f"shr.u32 u, {source}, {-left};"
                    lines, source = [*lines, shift], "u"
                twice = f"0x{mask << 16 | mask:08X}"
                lines.append(f"lop3.b32 r, {source}, {twice}, r, 0xEA;" if i else f"and.b32 r, {source}, {twice};")
            pairs.append(lines)
    return pairs


def _from_e4m3(words: list[str]) -> list[list[str]]:
    half = "mov.b32 {{lo, hi}}, {};"
    return [[half.format(w), f"cvt.rn.f16x2.e4m3x2 r, {h};", *_FP16_TO_BF16] for w in words for h in ("lo", "hi")]


def _from_e5m2(words: list[str]) -> list[list[str]]:
    """E5M2 is the upper byte of an fp16."""
    return [[f"prmt.b32 r, {w}, 0, {bytes_};", *_FP16_TO_BF16] for w in words for bytes_ in ("0x1404", "0x3424")]


def _from_int8(words: list[str]) -> list[list[str]]:
    """Build the float 2 plus the code without its sign bit, whose last bit is 2**-6, then subtract 2, or 4 if the sign
    bit is set."""
    return [
        [
            f"prmt.b32 h, {w}, 0, {bytes_};",
            "lop3.b32 a, h, 0x007F007F, 0x40004000, 0xEA;",
            "lop3.b32 u, h, 0x00800080, 0x40004000, 0xEA;",
            "fma.rn.bf16x2 r, u, minus, a;",
        ]
        for w in words
        for bytes_ in ("0x4140", "0x4342")
    ]


#: the elements of `mma_layout.CONVERTED` -> function from a thread's words, four codes each, to PTX that leaves each
#: pair of values in r
_FROM_BYTES = {"fp8_e4m3": _from_e4m3, "fp8_e5m2": _from_e5m2, "int8": _from_int8, "int8_full": _from_int8}
