"""The device code of matmuls with a few rows of x, in Gluon: tensor cores multiply with 8 rows at a time.

Reading the packed weight determines their time. Each code is read once, into registers, and decoded there (`fragment`).
The first codes are loaded while the kernel before still computes x, and the next kernel may do the same at once.

The kernel may rotate one row of x in blocks of 32 first. The eight threads that hold a block in the layout of the
tensor cores' operand have four values each. They rotate the block together, with the sums of `pt2mx.kernels.hadamard`
in the same order. The operand has eight columns, usually one row of x each. Here each column holds the values of one
thread and zeros, so that the sum of all columns is the result for the one row (`gemv_epilogue`). No values have to be
exchanged between threads.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pt2mx.kernels.gpu.fragment import (
    decode_fragment,
    fragment_layout,
    fragment_pointers,
    lanes,
    load_fragments,
    pdl_launch_dependents,
    pdl_wait,
)
from pt2mx.kernels.gpu.gemv_epilogue import store, sums_of_squares
from pt2mx.kernels.gpu.tuning import ROTATED_BLOCK

#: acc + 16 values along K, twice. Operands: acc; four words of rows g, of rows g + 8, of x; acc
_MMA = gl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$8,$5,$9}, {$12,$13}, {$16,$17,$18,$19};"
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$6,$10,$7,$11}, {$14,$15}, {$0,$1,$2,$3};"
)
_MMA_CONSTRAINTS = gl.constexpr(",".join(["=&f"] * 4 + ["r"] * 12 + ["f"] * 4))


def _rotate_ptx() -> str:
    """Return the PTX that rotates a block.

    Operands: 16 output words, pairs of bfloat16; four equal 64-bit registers, each with four bfloat16 values.
    """
    lines = [
        ".reg .b32 lane, w0, w1, sign, minus, g;", ".reg .f32 v<4>, u<4>, s;", ".reg .pred own;",
        "mov.u32 lane, %laneid;", "mov.b64 {w0, w1}, $16;",
        # negative: the last of every four values, and all values of the fourth and eighth thread
        "shl.b32 sign, lane, 29;", "shl.b32 minus, lane, 28;", "and.b32 sign, sign, minus;",
        "and.b32 sign, sign, 0x80000000;", "xor.b32 minus, sign, 0x80000000;",
    ]  # fmt: skip
    for i, (word, take) in enumerate(
        (w, t) for w in ("w0", "w1") for t in ("shl.b32 g, {}, 16;", "and.b32 g, {}, 0xFFFF0000;")
    ):
        lines += [take.format(word), f"xor.b32 g, g, {'minus' if i == 3 else 'sign'};", f"mov.b32 v{i}, g;"]
    for pairs in (((0, 1), (2, 3)), ((0, 2), (1, 3))):
        for a, b in pairs:
            lines += [f"add.f32 u{a}, v{a}, v{b};", f"sub.f32 u{b}, v{a}, v{b};"]
        lines += [f"mov.f32 v{i}, u{i};" for i in range(4)]
    for bit in (4, 8, 16):  # bits of the thread's number
        lines += [f"and.b32 g, lane, {bit};", "setp.eq.u32 own, g, 0;", "selp.f32 s, 0f3F800000, 0fBF800000, own;"]
        for i in range(4):
            lines += [f"shfl.sync.bfly.b32 u{i}, v{i}, {bit}, 0x1f, 0xffffffff;", f"fma.rn.f32 v{i}, v{i}, s, u{i};"]
    lines += [f"mul.f32 v{i}, v{i}, 0f3E3504F3;" for i in range(4)]  # 32**-0.5
    lines += ["cvt.rn.bf16x2.f32 w0, v1, v0;", "cvt.rn.bf16x2.f32 w1, v3, v2;", "shr.u32 g, lane, 2;"]
    for i in range(8):
        lines += [f"setp.eq.u32 own, g, {i};"]
        lines += [f"selp.b32 ${2 * i + j}, w{j}, 0, own;" for j in range(2)]
    return "{\n" + "\n".join(lines) + "\n}"


_ROTATE = gl.constexpr(_rotate_ptx())
_ROTATE_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 16 + ["l"] * 4))
_ROTATE_RESULTS = gl.constexpr((gl.int32,) * 4)
_BLOCK = gl.constexpr(ROTATED_BLOCK)


@gluon.jit(do_not_specialize=["batch", "n", "k", "n_tiles", "k_steps", "loads_early"])
def gemv_kernel(
    x,
    codes,
    scale,
    tensor_scale,
    bias,
    squares,
    epilogue,
    out,
    batch,
    n,
    k,
    n_tiles,
    k_steps,
    loads_early,
    C: gl.constexpr,
):
    """x: (batch, k) bf16, codes: (n_tiles, k_steps, 2, vectors, 32, 16), scale: (n_tiles, k_steps, 2, scales, 32)
    uint8, or int16 for pairs of scales with a significand, tensor_scale: () or None, bias: (n,) -> out: (batch, n).

    `C.rotates`: x is one row, which is rotated first in blocks of 32. `C.divides`: squares is (batch, ceil(k / 16)), of
    x before its weight. epilogue: as of `store`. `loads_early`: kernels before this one did not write the weight, so
    its first loads need not wait for them."""
    layout: gl.constexpr = fragment_layout(C)
    pdl_launch_dependents(C)
    acc = ()
    for _ in gl.static_range(gl.constexpr(C.tiles_per_warp * C.m_tiles * C.chains)):
        acc = acc + (gl.full([C.warps_k, C.warps_n, 32, 4], 0.0, gl.float32, layout),)
    code_words = codes.to(gl.pointer_type(gl.int32))
    pointers = fragment_pointers(code_words, scale, gl.program_id(0), n_tiles, k_steps, C)
    x_pointers = _row_pointers(x, C) if C.rotates else _x_pointers(x, batch, k, C)
    if loads_early == 0:
        pdl_wait(C)
    words, scales = _load_weight(pointers, k_steps, 0, C)
    pdl_wait(C)
    pairs = _load_x(x_pointers, k, 0, C)
    of_squares = sums_of_squares(squares, batch, k, C)
    for start in range(C.k_unroll * C.warps_k, k_steps, C.k_unroll * C.warps_k):
        next_words, next_scales = _load_weight(pointers, k_steps, start, C)
        next_pairs = _load_x(x_pointers, k, start, C)
        acc = _multiply(acc, words, scales, pairs, C)
        words, scales, pairs = next_words, next_scales, next_pairs
    acc = _multiply(acc, words, scales, pairs, C)
    store(acc, of_squares, tensor_scale, bias, epilogue, out, batch, n, n_tiles, k, C)


@gluon.jit
def _x_pointers(x, batch, k, C: gl.constexpr):
    """Return pointers to a thread's first values in each tile of x, and their index along K. Pointers beyond the last
    row point to the last row."""
    warp_k, warp_n, lane, word = lanes(C)
    words = x.to(gl.pointer_type(gl.int32))
    pairs = ()
    for m_tile in gl.static_range(gl.constexpr(C.m_tiles)):
        m = gl.minimum(8 * m_tile + lane // 4, batch - 1).to(gl.int64)
        pairs = pairs + (words + (m * (k // 8 * 4) + (warp_k * 4 + lane % 4) * (4 * C.k8_groups) + word),)
    return pairs, (warp_k * 4 + lane % 4 + warp_n * 0) * (8 * C.k8_groups)


@gluon.jit
def _row_pointers(x, C: gl.constexpr):
    """Return pointers to a thread's four values in its first block of the one row of x, and their position along K."""
    warp_k, warp_n, lane, _ = lanes(C)
    first = (warp_k * 4 + lane % 4 + warp_n * 0) * (8 * C.k8_groups)
    return (x.to(gl.pointer_type(gl.int64)) + (first // 4 + lane // 4),), first


@gluon.jit
def _load_weight(pointers, k_steps, start, C: gl.constexpr):
    """Load the codes and scales from step `start` on."""
    warp_k, _, _, _ = lanes(C)
    words = ()
    scales = ()
    for i in gl.static_range(gl.constexpr(C.k_unroll)):
        step = start + i * C.warps_k
        if not C.whole_k:  # beyond K, the last step times zeros
            step = gl.minimum(step + warp_k, k_steps - 1) - gl.minimum(warp_k, k_steps - 1)
        of_step = load_fragments(pointers, step, C)
        words = words + of_step[0]
        scales = scales + of_step[1]
    return words, scales


@gluon.jit
def _load_x(x_pointers, k, start, C: gl.constexpr):
    """Load the values of x from step `start` on."""
    first_pairs, first_k = x_pointers
    pairs = ()
    for i in gl.static_range(gl.constexpr(C.k_unroll)):
        if C.rotates:
            at = first_pairs[0] + (start + i * C.warps_k) * (8 * C.k8_groups)
            for block in gl.static_range(gl.constexpr(8 * C.k8_groups // _BLOCK)):
                mask = first_k + (start + i * C.warps_k) * (32 * C.k8_groups) + _BLOCK * block < k
                pairs = pairs + (gl.load(at + _BLOCK // 4 * block, mask, 0),)
        for m_tile in gl.static_range(gl.constexpr(0 if C.rotates else C.m_tiles)):
            at = first_pairs[m_tile] + (start + i * C.warps_k) * (16 * C.k8_groups)
            for group in gl.static_range(gl.constexpr(C.k8_groups)):
                if C.whole_k:
                    pairs = pairs + (gl.load(at + 4 * group),)
                else:
                    mask = first_k + (start + i * C.warps_k) * (32 * C.k8_groups) + 8 * group < k
                    pairs = pairs + (gl.load(at + 4 * group, mask, 0),)
    return pairs


@gluon.jit
def _multiply(acc, words, scales, pairs, C: gl.constexpr):
    """Multiply the loaded operands, and add the products to acc: `C.chains` sums of each tile, since an MMA waits for
    the one before that adds to the same sum."""
    if C.rotates:
        pairs = _rotated(pairs, words, C)
    for step in gl.static_range(gl.constexpr(C.k_unroll)):
        new = ()
        for tile in gl.static_range(gl.constexpr(C.tiles_per_warp)):
            halves = decode_fragment(words, scales, step * C.tiles_per_warp + tile, C, False)
            for m_tile in gl.static_range(gl.constexpr(C.m_tiles)):
                for chain in gl.static_range(gl.constexpr(C.chains)):
                    total = acc[(tile * C.m_tiles + m_tile) * C.chains + chain]
                    for group in gl.static_range(chain, gl.constexpr(C.k8_groups), gl.constexpr(C.chains)):
                        b = pairs[(step * C.m_tiles + m_tile) * C.k8_groups + group]
                        operands = (halves[group], halves[C.k8_groups + group], b, total)
                        total = gl.inline_asm_elementwise(_MMA, _MMA_CONSTRAINTS, operands, gl.float32, True, 4)
                    new = new + (total,)
        acc = new
    return acc


@gluon.jit
def _rotated(values, words, C: gl.constexpr):
    """Rotate blocks, with four values of each in a thread, and return them as operands: each column has the values of
    one thread."""
    pairs = ()
    for i in gl.static_range(gl.constexpr(C.k_unroll * 8 * C.k8_groups // _BLOCK)):
        four = gl.broadcast(values[i], words[0])[0]
        pairs = pairs + gl.inline_asm_elementwise(_ROTATE, _ROTATE_CONSTRAINTS, (four,), _ROTATE_RESULTS, True, 4)
    return pairs
