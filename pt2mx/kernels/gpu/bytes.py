"""PTX that converts codes of 8 bits to pairs of bfloat16, for elements of which a GPU's instructions know something.

The registers are those that `pt2mx.kernels.gpu.mma_layout.decode_ptx` declares.
"""

_TO_BF16 = ("mov.b32 {lo, hi}, r;", "cvt.f32.f16 x, lo;", "cvt.f32.f16 y, hi;", "cvt.rn.bf16x2.f32 r, y, x;")


def _from_e4m3(words: list[str]) -> list[list[str]]:
    half = "mov.b32 {{lo, hi}}, {};"
    return [[half.format(w), f"cvt.rn.f16x2.e4m3x2 r, {h};", *_TO_BF16] for w in words for h in ("lo", "hi")]


def _from_e5m2(words: list[str]) -> list[list[str]]:
    """It is the upper byte of an fp16."""
    return [[f"prmt.b32 r, {w}, 0, {bytes_};", *_TO_BF16] for w in words for bytes_ in ("0x1404", "0x3424")]


def _from_int8(words: list[str]) -> list[list[str]]:
    """2 plus the code without its sign, minus 2, or 4 where it has one; the last place of such a float is 2**-6."""
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


#: element -> from the words of a thread, four codes each, to PTX that leaves each pair of values in r
FROM_BYTES = {"fp8_e4m3": _from_e4m3, "fp8_e5m2": _from_e5m2, "int8": _from_int8, "int8_full": _from_int8}
