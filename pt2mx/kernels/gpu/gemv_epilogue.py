"""The epilogue of `gemv_kernel`: it turns sums into the result, with the norm, gate and residual sum of a decoder.

A thread has rows g and g + 8 of a tile of the weight, for two rows of x: four words, `lane // 4` is g. A tile with a
gate has the gate in its first eight rows and the values in the others, so one thread has both.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pt2mx.kernels.gpu.fragment import fragment_layout, lanes, scaled

_FOUR_FLOATS = gl.constexpr(",".join(["=&f"] * 4 + ["f"] * 4))


def _sum_over_lanes(bits: list[int], pairs: tuple[tuple[int, int], tuple[int, int]]) -> str:
    """Return PTX that adds two words, then the sums of the lanes that differ in `bits`, for each of two pairs."""
    lines = [".reg .f32 a, b, c, d;", *(f"add.f32 {r}, ${i}, ${j};" for r, (i, j) in zip("ab", pairs, strict=True))]
    for bit in bits:
        lines += [f"shfl.sync.bfly.b32 {o}, {r}, {bit}, 0x1f, 0xffffffff;" for o, r in ("ca", "db")]
        lines += ["add.f32 a, a, c;", "add.f32 b, b, d;"]
    of_word = {i - 4: r for r, pair in zip("ab", pairs, strict=True) for i in pair}
    lines += [f"mov.f32 ${word}, {of_word[word]};" for word in range(4)]
    return "{\n" + "\n".join(lines) + "\n}"


#: adds a thread's two rows over all columns, each sum in both of its registers
_SUM_COLUMNS = gl.constexpr(_sum_over_lanes([1, 2], ((4, 5), (6, 7))))
#: adds a thread's two columns over all rows of a tile
_SUM_ROWS = gl.constexpr(_sum_over_lanes([4, 8, 16], ((4, 6), (5, 7))))


def _gate_ptx(argument: str) -> str:
    """Return PTX for `g * sigmoid(v) * u`, where `argument` computes v of g. g: words 4 and 5, u: words 6 and 7; the
    results are words 0 and 1, and again 2 and 3."""
    lines = [".reg .f32 g, v, e;"]
    for i in range(2):
        lines += [f"mov.f32 g, ${4 + i};", argument, "mul.f32 v, v, 0fBFB8AA3B;", "ex2.approx.f32 e, v;"]  # -log2(e)
        lines += ["add.f32 e, e, 0f3F800000;", "rcp.approx.f32 e, e;", "mul.f32 g, g, e;"]
        lines += [f"mul.f32 ${i}, g, ${6 + i};", f"mov.f32 ${2 + i}, ${i};"]
    return "{\n" + "\n".join(lines) + "\n}"


#: gate -> its PTX. GELU by tanh is g * sigmoid(2 (2 / pi) ** 0.5 (g + 0.044715 g ** 3))
_GATES = {
    "silu": _gate_ptx("mov.f32 v, g;"),
    "gelu_tanh": _gate_ptx("mul.f32 v, g, g; fma.rn.f32 v, v, 0f3D922279, 0f3FCC422A; mul.f32 v, v, g;"),
}


@gluon.constexpr_function
def _gate_of(C):
    return _GATES[C.gate]


@gluon.jit
def sums_of_squares(squares, batch, k, C: gl.constexpr):
    """squares: (batch, ceil(k / 16)) -> for each tile of x, a thread's part of the squares of its two rows."""
    warp_k, warp_n, lane, word = lanes(C)
    parts = (k + 15) // 16
    totals = ()
    for m_tile in gl.static_range(gl.constexpr(C.m_tiles if C.divides else 0)):
        m = gl.minimum(8 * m_tile + lane % 4 * 2 + word % 2 + warp_n * 0, batch - 1)
        total = gl.full([C.warps_k, C.warps_n, 32, 4], 0.0, gl.float32, fragment_layout(C))
        first = warp_k * 16 + lane // 4 * 2 + word // 2
        for start in range(0, parts, 16 * C.warps_k):
            total += gl.load(squares + (m * parts + first + start), mask=first + start < parts, other=0)
        totals = totals + (total,)
    return totals


@gluon.jit
def _sum_of_lanes(asm: gl.constexpr, x):
    return gl.inline_asm_elementwise(asm, _FOUR_FLOATS, (x,), gl.float32, True, 4)


@gluon.jit
def store(acc, of_squares, tensor_scale, bias, epilogue, out, batch, n, n_tiles, k, C: gl.constexpr):
    """Add the sums of the warps along K, scale them, add the bias, apply norm, gate and residual sum, and store the
    result of each tile. epilogue: eps, the residual, the weight of the next norm, the weighted total, its squares."""
    of_rows: gl.constexpr = gl.SliceLayout(0, fragment_layout(C))
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, of_rows)))[None, :, None]
    warp_n = gl.arange(0, C.warps_n, gl.SliceLayout(1, gl.SliceLayout(2, of_rows)))[:, None, None]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, of_rows)))[None, None, :]
    eps, residual, norm_weight, weighted, squares = epilogue
    factors = ()
    for m_tile in gl.static_range(gl.constexpr(C.m_tiles if C.divides else 0)):
        factors = factors + (gl.rsqrt(_sum_of_lanes(_SUM_ROWS, gl.sum(of_squares[m_tile], 0)) / k + eps),)
    for tile in gl.static_range(gl.constexpr(C.tiles_per_warp)):
        n_tile = (gl.program_id(0) * C.warps_n + warp_n) * C.tiles_per_warp + tile
        row = n_tile * 16 + lane // 4 + word // 2 * 8
        added = gl.load(bias + row, mask=row < n, other=0).to(gl.float32) if C.has_bias else 0.0
        for m_tile in gl.static_range(gl.constexpr(C.m_tiles)):
            sums = acc[(tile * C.m_tiles + m_tile) * C.chains]
            for chain in gl.static_range(1, gl.constexpr(C.chains)):
                sums += acc[(tile * C.m_tiles + m_tile) * C.chains + chain]
            if C.rotates:
                sums = _sum_of_lanes(_SUM_COLUMNS, sums)
            total = scaled(gl.sum(sums, 0), tensor_scale, C)  # (warps_n, 32, 4)
            if C.divides:
                total = total * factors[m_tile]
            result = (total + added).to(out.dtype.element_ty)
            m = 8 * m_tile + lane % 4 * 2 + word % 2
            at, inside = m.to(gl.int64) * n + row, (row < n) & (m < batch)
            if C.gate is not None:
                result = _sum_of_lanes(_gate_of(C), result.to(gl.float32)).to(out.dtype.element_ty)
                at = m.to(gl.int64) * (n // 2) + (n_tile * 8 + lane // 4)
                inside = inside & (word < 2)
            if C.adds_residual:
                old = gl.load(residual + at, mask=inside, other=0).to(gl.float32)
                result = (result.to(gl.float32) + old).to(out.dtype.element_ty)
                of_row = result.to(gl.float32) * gl.load(norm_weight + row, mask=row < n, other=0).to(gl.float32)
                gl.store(weighted + at, of_row.to(out.dtype.element_ty), inside)
                square = gl.where(inside, result.to(gl.float32), 0.0)
                square = _sum_of_lanes(_SUM_ROWS, square * square)
                one_of_tile = (lane < 4) & (word < 2) & (m < batch) & (n_tile < n_tiles)
                gl.store(squares + (m * n_tiles + n_tile), square, one_of_tile)
            gl.store(out + at, result, inside)
