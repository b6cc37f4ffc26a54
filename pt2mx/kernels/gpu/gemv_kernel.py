"""The device code of `gpu_linear`, in Gluon: Triton with the layouts written out.

Its tensors are (KS, NS, 32, 4): warps along K, warps along N, threads of a warp, and a vector of 4 words of one thread.
The codes go from device memory to registers, where they are decoded (`gpu_fragments`) and multiplied by tensor cores
with 8 rows of x at a time.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pt2mx.formats import ElementFormat
from pt2mx.kernels.gpu.mma_layout import FRAGMENTS, decode_ptx, exponent_shift


class Form(NamedTuple):
    """What a kernel is compiled for."""

    ptx: str  # of `gpu_fragments.decode_ptx`
    vectors: int  # of 4 words that a thread decodes at a time
    scales: int
    units: int  # vectors of 8 values that it gives
    factor: int  # of a scale's byte, what is added to it to give that of the factor
    along_k: int = 1  # warps that share a tile of the output
    along_n: int = 1
    tiles: int = 1  # of 16 rows of the weight a warp
    columns: int = 0  # tiles of 8 rows of x
    steps: int = 1  # that are loaded together
    overlaps: bool = False  # it starts while the kernel before it ends, and lets the next one do so
    has_bias: bool = False
    whole: bool = True  # K is a multiple of what a program takes at a time


@functools.lru_cache(maxsize=1024)
def form_of(element: ElementFormat, **of_launch: int) -> Form:
    fragment = FRAGMENTS[element.name]
    return Form(
        ptx=decode_ptx(element),
        vectors=fragment.words // 4,
        scales=fragment.scales,
        units=fragment.values // 8,
        factor=exponent_shift(element),
        **of_launch,
    )


@gluon.constexpr_function
def _layout(F):
    return gl.BlockedLayout([1, 1, 1, 4], [1, 1, 32, 1], [F.along_k, F.along_n, 1, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def _constraints(outputs, inputs):
    return ",".join(["=&r"] * outputs + ["r"] * inputs)


@gluon.constexpr_function
def _int32s(count):
    return (gl.int32,) * count


#: acc + 16 values along K, twice. Operands: acc; four words of rows g, of rows g + 8, of x; acc
_MMA = gl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$8,$5,$9}, {$12,$13}, {$16,$17,$18,$19};"
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$6,$10,$7,$11}, {$14,$15}, {$0,$1,$2,$3};"
)
_MMA_CONSTRAINTS = gl.constexpr(",".join(["=&f"] * 4 + ["r"] * 12 + ["f"] * 4))


@gluon.jit
def _decode(words, scales, F: gl.constexpr, in_place: gl.constexpr):
    """words, scales: tuples of `vectors` and `scales` int32 -> tuple of `units` int32, pairs of bfloat16."""
    constraints: gl.constexpr = _constraints(4 * F.units, 4 * F.vectors + 4 * F.scales)
    return gl.inline_asm_elementwise(F.ptx, constraints, words + scales, _int32s(F.units), not in_place, 4)


@gluon.jit
def _lanes(F: gl.constexpr):
    """Warp along K and along N, thread of the warp and word of its vector, each of four dimensions."""
    layout: gl.constexpr = _layout(F)
    in_k: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    in_n: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    in_warp: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout)))
    in_vector: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    warp_k = gl.arange(0, F.along_k, in_k)[:, None, None, None]
    warp_n = gl.arange(0, F.along_n, in_n)[None, :, None, None]
    lane = gl.arange(0, 32, in_warp)[None, None, :, None]
    word = gl.arange(0, 4, in_vector)[None, None, None, :]
    return warp_k, warp_n, lane, word


@gluon.jit
def places_of_codes(data, scale, tiles, steps, F: gl.constexpr):
    """Where a thread's first codes and scales of each tile are; what is beyond the last tile shows the last one."""
    warp_k, warp_n, lane, word = _lanes(F)
    words = ()
    scales = ()
    for i in gl.static_range(gl.constexpr(F.tiles)):
        tile = (gl.program_id(0) * F.along_n + warp_n) * F.tiles + i
        step = gl.minimum(tile, tiles - 1).to(gl.int64) * steps + gl.minimum(warp_k, steps - 1)
        words = words + (data + ((step * (2 * F.vectors * 32) + lane) * 4 + word),)
        scales = scales + (scale + (step * (2 * F.scales * 32) + lane),)
    return words, scales


@gluon.jit
def load_codes(places, step, F: gl.constexpr):
    """Words and scales of a step of each tile."""
    first_words, first_scales = places
    words = ()
    scales = ()
    for tile in gl.static_range(gl.constexpr(F.tiles)):
        for vector in gl.static_range(gl.constexpr(2 * F.vectors)):
            at = first_words[tile] + step * (F.vectors * 256) + vector * 128
            words = words + (gl.load(at, eviction_policy="evict_first"),)
        for scale in gl.static_range(gl.constexpr(2 * F.scales)):
            scales = scales + (gl.load(first_scales[tile] + step * (F.scales * 64) + scale * 32),)
    return words, scales


@gluon.jit
def wait_for_inputs(F: gl.constexpr):
    """From here on all that the kernels before this one wrote can be read, and what they read be overwritten."""
    if F.overlaps:
        gdc_wait()


@gluon.jit
def let_next_start(F: gl.constexpr):
    """Where every program has come here, the next kernel may start and wait for this one's end. Earlier, programs of
    the next one would crowd on the few multiprocessors that have places left."""
    if F.overlaps:
        gdc_launch_dependents()


@gluon.jit
def decoded(words, scales, tile, F: gl.constexpr, in_place: gl.constexpr):
    """What `load_codes` gave of a tile -> pairs of bfloat16: `units` int32 of rows g, and as many of rows g + 8;
    `in_place`: not before what stands before it."""
    pairs = ()
    for half in gl.static_range(2):
        vectors = ()
        factors = ()
        for i in gl.static_range(gl.constexpr(F.vectors)):
            vectors = vectors + (words[(tile * 2 + half) * F.vectors + i],)
        for i in gl.static_range(gl.constexpr(F.scales)):
            factor = (scales[(tile * 2 + half) * F.scales + i].to(gl.int32) + F.factor) * 0x00800080  # two bfloat16
            factors = factors + (gl.broadcast(factor, vectors[0])[0],)
        pairs = pairs + _decode(vectors, factors, F, in_place)
    return pairs


@gluon.jit
def _places_of_x(x, batch, k, F: gl.constexpr):
    """Where a thread's first values of each column are, and their place along K; beyond the last row, the last one."""
    warp_k, warp_n, lane, word = _lanes(F)
    pairs = ()
    for column in gl.static_range(gl.constexpr(F.columns)):
        m = gl.minimum(8 * column + lane // 4, batch - 1).to(gl.int64)
        pairs = pairs + (x + (m * (k // 8 * 4) + (warp_k * 4 + lane % 4) * (4 * F.units) + word),)
    return pairs, (warp_k * 4 + lane % 4 + warp_n * 0) * (8 * F.units)


@gluon.jit
def _load(codes, xs, k, steps, start, F: gl.constexpr):
    """Codes and scales from step `start` on, and the values of x that belong to them."""
    first_pairs, first_k = xs
    warp_k, _, _, _ = _lanes(F)
    words = ()
    scales = ()
    pairs = ()
    for i in gl.static_range(gl.constexpr(F.steps)):
        step = start + i * F.along_k
        if not F.whole:  # beyond K, the last step times zeros
            step = gl.minimum(step + warp_k, steps - 1) - gl.minimum(warp_k, steps - 1)
        of_step = load_codes(codes, step, F)
        words = words + of_step[0]
        scales = scales + of_step[1]
        for column in gl.static_range(gl.constexpr(F.columns)):
            at = first_pairs[column] + (start + i * F.along_k) * (16 * F.units)
            for unit in gl.static_range(gl.constexpr(F.units)):
                if F.whole:
                    pairs = pairs + (gl.load(at + 4 * unit),)
                else:
                    mask = first_k + (start + i * F.along_k) * (32 * F.units) + 8 * unit < k
                    pairs = pairs + (gl.load(at + 4 * unit, mask, 0),)
    return words, scales, pairs


@gluon.jit
def _multiply(acc, words, scales, pairs, F: gl.constexpr):
    """acc + the products of what `_load` gave."""
    for step in gl.static_range(gl.constexpr(F.steps)):
        new = ()
        for tile in gl.static_range(gl.constexpr(F.tiles)):
            halves = decoded(words, scales, step * F.tiles + tile, F, False)
            for column in gl.static_range(gl.constexpr(F.columns)):
                total = acc[tile * F.columns + column]
                for unit in gl.static_range(gl.constexpr(F.units)):
                    b = pairs[(step * F.columns + column) * F.units + unit]
                    operands = (halves[unit], halves[F.units + unit], b, total)
                    total = gl.inline_asm_elementwise(_MMA, _MMA_CONSTRAINTS, operands, gl.float32, True, 4)
                new = new + (total,)
        acc = new
    return acc


@gluon.jit(do_not_specialize=["batch", "n", "k", "tiles", "steps"])
def linear_kernel(x, data, scale, bias, out, batch, n, k, tiles, steps, F: gl.constexpr):
    """x: (batch, k) bf16, data: (tiles, steps, 2, vectors, 32, 16), scale: (tiles, steps, 2, scales, 32) uint8,
    bias: (n,) -> out: (batch, n)."""
    layout: gl.constexpr = _layout(F)
    acc = ()
    for _ in gl.static_range(gl.constexpr(F.tiles * F.columns)):
        acc = acc + (gl.full([F.along_k, F.along_n, 32, 4], 0.0, gl.float32, layout),)
    x_words = x.to(gl.pointer_type(gl.int32))
    data_words = data.to(gl.pointer_type(gl.int32))
    codes = places_of_codes(data_words, scale, tiles, steps, F)
    xs = _places_of_x(x_words, batch, k, F)
    wait_for_inputs(F)
    words, scales, pairs = _load(codes, xs, k, steps, 0, F)
    for start in range(F.steps * F.along_k, steps, F.steps * F.along_k):
        next_words, next_scales, next_pairs = _load(codes, xs, k, steps, start, F)
        acc = _multiply(acc, words, scales, pairs, F)
        words, scales, pairs = next_words, next_scales, next_pairs
    let_next_start(F)
    acc = _multiply(acc, words, scales, pairs, F)

    of_rows: gl.constexpr = gl.SliceLayout(0, layout)
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, of_rows)))[None, :, None]
    warp_n = gl.arange(0, F.along_n, gl.SliceLayout(1, gl.SliceLayout(2, of_rows)))[:, None, None]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, of_rows)))[None, None, :]
    for tile in gl.static_range(gl.constexpr(F.tiles)):
        row = ((gl.program_id(0) * F.along_n + warp_n) * F.tiles + tile) * 16 + lane // 4 + word // 2 * 8
        added = gl.load(bias + row, mask=row < n, other=0).to(gl.float32) if F.has_bias else 0.0
        for column in gl.static_range(gl.constexpr(F.columns)):
            total = gl.sum(acc[tile * F.columns + column], 0) + added  # (NS, 32, 4)
            m = 8 * column + lane % 4 * 2 + word % 2
            at = m.to(gl.int64) * n + row
            gl.store(out + at, total.to(out.dtype.element_ty), mask=(row < n) & (m < batch))


@gluon.constexpr_function
def _layout_of_rows(F):
    return gl.BlockedLayout([1, 1, 4], [1, 8, 4], [F.along_k // 2, 2, 1], [2, 1, 0])


@gluon.jit(do_not_specialize=["n", "k", "steps"])
def dequantize_kernel(data, scale, out, n, k, steps, F: gl.constexpr):
    """data, scale as above -> out: (n, k) bfloat16; a warp a step of a tile."""
    warp_k, _, lane, word = _lanes(F)
    tile = gl.program_id(1)
    at = tile.to(gl.int64) * steps + gl.minimum(gl.program_id(0) * F.along_k + warp_k, steps - 1)
    data_words = data.to(gl.pointer_type(gl.int32)) + ((at * (2 * F.vectors * 32) + lane) * 4 + word)
    out_words = out.to(gl.pointer_type(gl.int32))
    of_rows: gl.constexpr = _layout_of_rows(F)
    row = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, of_rows)))[:, None, None]
    place = gl.arange(0, F.along_k * 4, gl.SliceLayout(0, gl.SliceLayout(2, of_rows)))[None, :, None]
    word_of_row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, of_rows)))[None, None, :]
    first = (gl.program_id(0) * (F.along_k * 4) + place) * (4 * F.units) + word_of_row
    words, scales = load_codes(((data_words,), (scale + (at * (2 * F.scales * 32) + lane),)), 0, F)
    both = decoded(words, scales, 0, F, False)
    for half in gl.static_range(2):
        for i in gl.static_range(gl.constexpr(F.units // 4)):  # through shared memory, to write whole rows
            a, b = both[half * F.units + 4 * i], both[half * F.units + 4 * i + 1]
            c, d = both[half * F.units + 4 * i + 2], both[half * F.units + 4 * i + 3]
            four = gl.join(gl.join(a, c), gl.join(b, d)).reshape([F.along_k, 8, 4, 4, 4])
            rows = gl.convert_layout(four.permute([1, 0, 2, 4, 3]).reshape([8, F.along_k * 4, 16]), of_rows)
            n_row = tile * 16 + half * 8 + row
            inside = (n_row < n) & ((first + 16 * i) // 4 < k // 8)
            gl.store(out_words + (n_row.to(gl.int64) * (k // 8 * 4) + (first + 16 * i)), rows, inside)
