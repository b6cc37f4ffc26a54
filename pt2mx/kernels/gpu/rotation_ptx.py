"""The rotation of one row of x in the GEMV kernel: PTX of a warp, whose threads each hold a part of a block.

Of a block of 32, which a thread of each four has as an operand of the tensor cores, the eight threads of that place
hold four values each: they rotate it together, with the sums of `pt2mx.kernels.hadamard` in their order. The operand's
eight columns, one row of x each, are then parts of the one row: each thread puts its own values among zeros, and the
sums of the columns, added, are the row's (`SUM_COLUMNS`). Nothing has to be gathered.
"""

from __future__ import annotations

#: values of a block
BLOCK = 32


def rotate_ptx() -> str:
    """Return the PTX that rotates a block.

    Operands: 16 words that come out, pairs of bfloat16; four equal registers of 64 bits, with four values of bfloat16.
    """
    lines = [
        ".reg .b32 lane, w0, w1, sign, minus, g;", ".reg .f32 v<4>, u<4>, s;", ".reg .pred own;",
        "mov.u32 lane, %laneid;", "mov.b64 {w0, w1}, $16;",
        # negated: the last of every four values, and all of the fourth and eighth thread
        "shl.b32 sign, lane, 29;", "shl.b32 minus, lane, 28;", "and.b32 sign, sign, minus;",
        "and.b32 sign, sign, 0x80000000;", "xor.b32 minus, sign, 0x80000000;",
    ]  # fmt: skip
    for i, (word, take) in enumerate((w, t) for w in ("w0", "w1") for t in ("shl.b32 g, {}, 16;", _HIGH)):
        lines += [take.format(word), f"xor.b32 g, g, {'minus' if i == 3 else 'sign'};", f"mov.b32 v{i}, g;"]
    for pairs in (((0, 1), (2, 3)), ((0, 2), (1, 3))):
        for a, b in pairs:
            lines += [f"add.f32 u{a}, v{a}, v{b};", f"sub.f32 u{b}, v{a}, v{b};"]
        lines += [f"mov.f32 v{i}, u{i};" for i in range(4)]
    for bit in (4, 8, 16):  # of the number of a thread
        lines += [f"and.b32 g, lane, {bit};", "setp.eq.u32 own, g, 0;", "selp.f32 s, 0f3F800000, 0fBF800000, own;"]
        for i in range(4):
            lines += [f"shfl.sync.bfly.b32 u{i}, v{i}, {bit}, 0x1f, 0xffffffff;", f"fma.rn.f32 v{i}, v{i}, s, u{i};"]
    lines += [f"mul.f32 v{i}, v{i}, 0f3E3504F3;" for i in range(4)]  # 32**-0.5
    lines += ["cvt.rn.bf16x2.f32 w0, v1, v0;", "cvt.rn.bf16x2.f32 w1, v3, v2;", "shr.u32 g, lane, 2;"]
    for i in range(8):
        lines += [f"setp.eq.u32 own, g, {i};"]
        lines += [f"selp.b32 ${2 * i + j}, w{j}, 0, own;" for j in range(2)]
    return "{\n" + "\n".join(lines) + "\n}"


_HIGH = "and.b32 g, {}, 0xFFFF0000;"

#: the sums of a thread's two rows over all columns, each in both of its places
SUM_COLUMNS = """{
.reg .f32 a, b, c, d;
add.f32 a, $4, $5;
add.f32 b, $6, $7;
shfl.sync.bfly.b32 c, a, 1, 0x1f, 0xffffffff;
shfl.sync.bfly.b32 d, b, 1, 0x1f, 0xffffffff;
add.f32 a, a, c;
add.f32 b, b, d;
shfl.sync.bfly.b32 c, a, 2, 0x1f, 0xffffffff;
shfl.sync.bfly.b32 d, b, 2, 0x1f, 0xffffffff;
add.f32 a, a, c;
add.f32 b, b, d;
mov.f32 $0, a;
mov.f32 $1, a;
mov.f32 $2, b;
mov.f32 $3, b;
}"""
