"""Shared code of the kernels for weights in the MMA layout, in Gluon: a thread loads its fragments of the weight and
decodes them; programmatic dependent launch. `dequantize_kernel` does only this, for torch's matmul.

Their tensors are (warps_k, warps_n, 32, 4): warps along K, warps along N, threads of a warp, and a vector of 4 words of
one thread. The codes go from device memory to registers and are decoded there (`mma_decode`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pt2mx.kernels.gpu.mma_layout import RESULT_SHIFT

#: what scales with a significand lack
_LACKING = gl.constexpr(2.0**RESULT_SHIFT)


@gluon.constexpr_function
def fragment_layout(C):
    return gl.BlockedLayout([1, 1, 1, 4], [1, 1, 32, 1], [C.warps_k, C.warps_n, 1, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def _constraints(outputs, inputs):
    return ",".join(["=&r"] * outputs + ["r"] * inputs)


@gluon.constexpr_function
def _int32s(count):
    return (gl.int32,) * count


@gluon.jit
def lanes(C: gl.constexpr):
    """Return the indices of the warp along K, the warp along N, the thread and the word of its vector, each a
    four-dimensional tensor."""
    layout: gl.constexpr = fragment_layout(C)
    in_k: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    in_n: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    in_warp: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout)))
    in_vector: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    warp_k = gl.arange(0, C.warps_k, in_k)[:, None, None, None]
    warp_n = gl.arange(0, C.warps_n, in_n)[None, :, None, None]
    lane = gl.arange(0, 32, in_warp)[None, None, :, None]
    word = gl.arange(0, 4, in_vector)[None, None, None, :]
    return warp_k, warp_n, lane, word


@gluon.jit
def fragment_pointers(codes, scale, part, n_tiles, k_steps, C: gl.constexpr):
    """Return pointers to a thread's first codes and scales in each tile of the program's part of the weight. Pointers
    beyond the last tile point to the last one."""
    warp_k, warp_n, lane, word = lanes(C)
    words = ()
    scales = ()
    for i in gl.static_range(gl.constexpr(C.tiles_per_warp)):
        tile = (part * C.warps_n + warp_n) * C.tiles_per_warp + i
        step = gl.minimum(tile, n_tiles - 1).to(gl.int64) * k_steps + gl.minimum(warp_k, k_steps - 1)
        words = words + (codes + ((step * (2 * C.vectors * 32) + lane) * 4 + word),)
        scales = scales + (scale + (step * (2 * C.scales * 32) + lane),)
    return words, scales


@gluon.jit
def load_fragments(pointers, step, C: gl.constexpr):
    """Load the words and scales of one step of each tile."""
    first_words, first_scales = pointers
    words = ()
    scales = ()
    for tile in gl.static_range(gl.constexpr(C.tiles_per_warp)):
        for vector in gl.static_range(gl.constexpr(2 * C.vectors)):
            at = first_words[tile] + step * (C.vectors * 256) + vector * 128
            words = words + (gl.load(at, eviction_policy="evict_first"),)
        for scale in gl.static_range(gl.constexpr(2 * C.scales)):
            scales = scales + (gl.load(first_scales[tile] + step * (C.scales * 64) + scale * 32),)
    return words, scales


@gluon.jit
def decode_fragment(words, scales, tile, C: gl.constexpr, in_place: gl.constexpr):
    """The result of `load_fragments` of a tile -> pairs of bfloat16: `k8_groups` int32 of rows g, and as many of rows g
    + 8. `in_place`: the compiler must not move the decoding up."""
    pairs = ()
    for half in gl.static_range(2):
        vectors = ()
        factors = ()
        for i in gl.static_range(gl.constexpr(C.vectors)):
            vectors = vectors + (words[(tile * 2 + half) * C.vectors + i],)
        for i in gl.static_range(gl.constexpr(C.scales)):
            scale = scales[(tile * 2 + half) * C.scales + i].to(gl.int32)
            if C.has_significand:
                for shift in gl.static_range(0, 16, 8):
                    scale_of_block = (scale >> shift & 0xFF) * 0x00100010 + C.scale_offset * 0x00010001
                    factors = factors + (gl.broadcast(scale_of_block, vectors[0])[0],)
            else:
                exponent = scale + C.exponent_shift
                factors = factors + (gl.broadcast(exponent * 0x00800080, vectors[0])[0],)  # two bfloat16
        pairs = pairs + _decode(vectors, factors, C, in_place)
    return pairs


@gluon.jit
def _decode(words, scales, C: gl.constexpr, in_place: gl.constexpr):
    """words, scales: tuples of int32 -> tuple of `k8_groups` int32, pairs of bfloat16."""
    constraints: gl.constexpr = _constraints(4 * C.k8_groups, 4 * C.vectors + 4 * C.scales * C.scales_of_word)
    return gl.inline_asm_elementwise(C.ptx, constraints, words + scales, _int32s(C.k8_groups), not in_place, 4)


@gluon.jit
def scaled(sums, tensor_scale, C: gl.constexpr):
    """Return fp32 values times what the scales of the weight lack, and times the tensor scale."""
    if C.scales_result:
        sums = sums * _LACKING
        if C.has_tensor_scale:
            sums = sums * gl.load(tensor_scale)
    return sums


@gluon.jit
def _scaled_pair(pair, tensor_scale, C: gl.constexpr):
    """Return `scaled` of a pair of bfloat16."""
    if C.scales_result:
        low = scaled((pair << 16).to(gl.float32, bitcast=True), tensor_scale, C).to(gl.bfloat16)
        high = scaled((pair & -0x10000).to(gl.float32, bitcast=True), tensor_scale, C).to(gl.bfloat16)
        pair = low.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF | high.to(gl.int16, bitcast=True).to(gl.int32) << 16
    return pair


@gluon.constexpr_function
def _layout_of_rows(C):
    return gl.BlockedLayout([1, 1, 4], [1, 8, 4], [C.warps_k // 2, 2, 1], [2, 1, 0])


@gluon.jit(do_not_specialize=["n", "k", "k_steps"])
def dequantize_kernel(codes, scale, tensor_scale, out, n, k, k_steps, C: gl.constexpr):
    """codes, scale: as of `gemv_kernel` -> out: (n, k) bfloat16; a warp decodes a step of a tile."""
    warp_k, _, lane, word = lanes(C)
    tile = gl.program_id(1)
    at = tile.to(gl.int64) * k_steps + gl.minimum(gl.program_id(0) * C.warps_k + warp_k, k_steps - 1)
    code_words = codes.to(gl.pointer_type(gl.int32)) + ((at * (2 * C.vectors * 32) + lane) * 4 + word)
    out_words = out.to(gl.pointer_type(gl.int32))
    of_rows: gl.constexpr = _layout_of_rows(C)
    row = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, of_rows)))[:, None, None]
    position = gl.arange(0, C.warps_k * 4, gl.SliceLayout(0, gl.SliceLayout(2, of_rows)))[None, :, None]
    word_of_row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, of_rows)))[None, None, :]
    first = (gl.program_id(0) * (C.warps_k * 4) + position) * (4 * C.k8_groups) + word_of_row
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
            rows = _scaled_pair(rows, tensor_scale, C)
            gl.store(out_words + (n_row.to(gl.int64) * (k // 8 * 4) + (first + 16 * i)), rows, inside)


# --- programmatic dependent launch (CUDA Programming Guide, section of that name): a kernel starts while the one before
# it ends, and lets the next one do so ---


@gluon.jit
def pdl_wait(C: gl.constexpr):
    """Wait for the kernels before this one: from here on, it may read what they wrote, and overwrite what they read."""
    if C.use_pdl:
        gdc_wait()


@gluon.jit
def pdl_launch_dependents(C: gl.constexpr):
    """Allow the next kernel to start once every program gets here; it then waits for the end of this kernel. Kernels
    whose programs fill the multiprocessors call this late: the next programs would crowd onto the few that have room
    left. Kernels with room for the next programs call it first, so that these can load their weight meanwhile."""
    if C.use_pdl:
        gdc_launch_dependents()
