"""The device code that writes out a weight in the MMA layout as bfloat16, for torch's own product."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pt2mx.kernels.gpu.fragment import decode_fragment, lanes, load_fragments


@gluon.constexpr_function
def _layout_of_rows(C):
    return gl.BlockedLayout([1, 1, 4], [1, 8, 4], [C.warps_k // 2, 2, 1], [2, 1, 0])


@gluon.jit(do_not_specialize=["n", "k", "k_steps"])
def dequantize_kernel(codes, scale, out, n, k, k_steps, C: gl.constexpr):
    """codes, scale: as of `gemv_kernel` -> out: (n, k) bfloat16; a warp decodes a step of a tile."""
    warp_k, _, lane, word = lanes(C)
    tile = gl.program_id(1)
    at = tile.to(gl.int64) * k_steps + gl.minimum(gl.program_id(0) * C.warps_k + warp_k, k_steps - 1)
    code_words = codes.to(gl.pointer_type(gl.int32)) + ((at * (2 * C.vectors * 32) + lane) * 4 + word)
    out_words = out.to(gl.pointer_type(gl.int32))
    of_rows: gl.constexpr = _layout_of_rows(C)
    row = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, of_rows)))[:, None, None]
    place = gl.arange(0, C.warps_k * 4, gl.SliceLayout(0, gl.SliceLayout(2, of_rows)))[None, :, None]
    word_of_row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, of_rows)))[None, None, :]
    first = (gl.program_id(0) * (C.warps_k * 4) + place) * (4 * C.k8_groups) + word_of_row
    words, scales = load_fragments(((code_words,), (scale + (at * (2 * C.scales * 32) + lane),)), 0, C)
    both = decode_fragment(words, scales, 0, C, False)
    for half in gl.static_range(2):
        for i in gl.static_range(gl.constexpr(C.k8_groups // 4)):  # through shared memory, to write whole rows
            a, b = both[half * C.k8_groups + 4 * i], both[half * C.k8_groups + 4 * i + 1]
            c, d = both[half * C.k8_groups + 4 * i + 2], both[half * C.k8_groups + 4 * i + 3]
            four = gl.join(gl.join(a, c), gl.join(b, d)).reshape([C.warps_k, 8, 4, 4, 4])
            rows = gl.convert_layout(four.permute([1, 0, 2, 4, 3]).reshape([8, C.warps_k * 4, 16]), of_rows)
            n_row = tile * 16 + half * 8 + row
            inside = (n_row < n) & ((first + 16 * i) // 4 < k // 8)
            gl.store(out_words + (n_row.to(gl.int64) * (k // 8 * 4) + (first + 16 * i)), rows, inside)
