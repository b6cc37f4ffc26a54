"""The device code of `gpu_linear` for more rows of x: whole groups of four warps multiply on the tensor cores of sm_90.

As in `gpu_linear_kernel` the codes go from device memory to registers and are decoded there; x comes through a ring of
stages in shared memory, its values along K in the order in which the threads hold those of the weight.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pt2mx.kernels.gpu.gemv_kernel import decoded, let_next_start, load_codes, places_of_codes, wait_for_inputs

#: values along K of a stage
STAGE_K = gl.constexpr(128)


class Wide(NamedTuple):
    """What a kernel is compiled for, besides its `Form`."""

    batch: int  # rows of x that a program multiplies
    stages: int


@gluon.constexpr_function
def _sums_layout(F, W):
    return gl.NVMMADistributedLayout([3, 0], [F.along_n, 1], [16, W.batch, 16])


@gluon.jit
def _operand(pairs, first, F: gl.constexpr, W: gl.constexpr):
    """Pairs of `decoded` from unit `first` on -> (16 * along_n, STAGE_K) bfloat16, where they are."""
    halves = ()
    for half in gl.static_range(2):
        units = ()
        for i in gl.static_range(4):
            pair = pairs[half * F.units + first + i]  # (1, along_n, 32, 4)
            low = (pair & 0xFFFF).to(gl.int16).to(gl.bfloat16, bitcast=True)
            high = (pair >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
            units = units + (gl.join(low, high),)
        halves = halves + (gl.join(gl.join(units[0], units[2]), gl.join(units[1], units[3])),)
    # warp, row of 8, place along K, product of two, half of it, value of a pair, unit, unit, rows + 8
    both = gl.join(halves[0], halves[1]).reshape([F.along_n, 8, 4, 2, 2, 2, 2, 2, 2])
    rows = both.permute([0, 8, 1, 6, 7, 3, 4, 2, 5]).reshape([F.along_n * 16, STAGE_K])
    return gl.convert_layout(rows, gl.DotOperandLayout(0, _sums_layout(F, W), 2), assert_trivial=True)


@gluon.jit
def _load(codes, step, last, F: gl.constexpr):
    """Words and scales of two stages from `step` on."""
    words = ()
    scales = ()
    for i in gl.static_range(gl.constexpr(8 // F.units)):
        of_step = load_codes(codes, gl.minimum(step + i, last), F)
        words = words + of_step[0]
        scales = scales + of_step[1]
    return words, scales


#: the line of the first of a thread's four words; the result is of no use
_PREFETCH = gl.constexpr("prefetch.global.L2 [$4]; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;")


@gluon.jit
def _prefetch(codes, step, last, F: gl.constexpr):
    """Bring the words that `_load` will read there into the L2 cache."""
    words, _ = codes
    for i in gl.static_range(gl.constexpr(8 // F.units)):
        for vector in gl.static_range(gl.constexpr(2 * F.vectors)):
            at = words[0] + gl.minimum(step + i, last) * (F.vectors * 256) + vector * 128
            gl.inline_asm_elementwise(_PREFETCH, "=r,=r,=r,=r,l,l,l,l", [at.to(gl.int64)], gl.int32, False, 4)


@gluon.jit
def _operand_of(words, scales, stage, F: gl.constexpr, W: gl.constexpr):
    """The first or second stage of what `_load` gave."""
    stages_of_step: gl.constexpr = F.units // 4
    pairs = decoded(words, scales, stage // stages_of_step, F, True)
    return _operand(pairs, stage % stages_of_step * 4, F, W)


@gluon.jit
def _request(x, values, ready, at, wanted, first_k, first_m, W: gl.constexpr):
    """Start the copy of stage number `at`."""
    barrier = ready.index(at % W.stages)
    mbarrier.expect(barrier, x.block_type.nbytes, wanted)
    tma.async_copy_global_to_shared(x, [first_m, first_k + at * STAGE_K], barrier, values.index(at % W.stages), wanted)


@gluon.jit(do_not_specialize=["batch", "n", "tiles", "steps", "split"])
def wide_kernel(x, data, scale, bias, out, batch, n, tiles, steps, split, F: gl.constexpr, W: gl.constexpr):
    """x: descriptor of (batch, K') bfloat16 in the order of the threads, data and scale as of `linear_kernel`, bias:
    (n,) -> out: (splits, batch, n). A program takes `split` steps."""
    together: gl.constexpr = 8 // F.units  # steps of two stages
    first = gl.program_id(2) * split
    count = (gl.minimum(first + split, steps) - first + together - 1) // together * 2
    first_k = first * (F.units // 4 * STAGE_K)
    first_m = gl.program_id(1) * W.batch
    values = gl.allocate_shared_memory(gl.bfloat16, [W.stages, W.batch, STAGE_K], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [W.stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(gl.constexpr(W.stages)):
        mbarrier.init(ready.index(stage), count=1)
    codes = places_of_codes(data.to(gl.pointer_type(gl.int32)), scale, tiles, steps, F)
    wait_for_inputs(F)
    for stage in gl.static_range(gl.constexpr(W.stages)):
        _request(x, values, ready, stage, stage < count, first_k, first_m, W)
    words, scales = _load(codes, first, steps - 1, F)
    acc = gl.full([F.along_n * 16, W.batch], 0.0, gl.float32, _sums_layout(F, W))
    before = gl.full([F.along_n * 16, STAGE_K], 0.0, gl.bfloat16, gl.DotOperandLayout(0, _sums_layout(F, W), 2))
    # The tensor cores read `before` until the wait: what is decoded meanwhile needs registers of its own, which it gets
    # where the wait names `before` and each operand is decoded behind the wait for the last but one (`in_place`).
    for at in range(0, count, 2):
        next_words, next_scales = _load(codes, first + (at // 2 + 1) * together, steps - 1, F)
        _prefetch(codes, first + (at // 2 + 2) * together, steps - 1, F)
        for i in gl.static_range(2):
            a = _operand_of(words, scales, i, F, W)  # while the tensor cores are at the stage before
            mbarrier.wait(ready.index((at + i) % W.stages), (at + i) // W.stages & 1)
            sums = warpgroup_mma(a, values.index((at + i) % W.stages).permute((1, 0)), acc, is_async=True)
            acc, before = warpgroup_mma_wait(1, [sums, before])
            free = at + i - 1
            wanted = (free >= 0) & (free + W.stages < count)
            _request(x, values, ready, free + W.stages, wanted, first_k, first_m, W)
            before = a
        words, scales = next_words, next_scales
    let_next_start(F)
    acc, _ = warpgroup_mma_wait(0, [acc, before])

    layout: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, F.along_n], [0, 1])
    sums = gl.convert_layout(acc, layout)
    row = gl.program_id(0) * (F.along_n * 16) + gl.arange(0, F.along_n * 16, gl.SliceLayout(1, layout))
    m = first_m + gl.arange(0, W.batch, gl.SliceLayout(0, layout))
    if F.has_bias:
        sums += gl.load(bias + row, mask=row < n, other=0).to(gl.float32)[:, None]
    at_row = out + gl.program_id(2).to(gl.int64) * batch * n + row
    inside = (row < n)[:, None] & (m < batch)[None, :]
    gl.store(at_row[:, None] + (m.to(gl.int64) * n)[None, :], sums.to(out.dtype.element_ty), inside)


@gluon.jit(do_not_specialize=["n", "size", "splits"])
def add_parts_kernel(parts, bias, out, n, size, splits, F: gl.constexpr):
    """parts: (splits, batch, n) float32, bias: (n,) -> out: (batch, n); `size` is batch * n."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [8], [0])
    at = gl.program_id(0).to(gl.int64) * 2048 + gl.arange(0, 2048, layout)
    inside = at < size
    wait_for_inputs(F)
    total = gl.load(parts + at, inside, 0.0)
    for split in range(1, splits):
        total += gl.load(parts + size.to(gl.int64) * split + at, inside, 0.0)
    if F.has_bias:
        total += gl.load(bias + at % n, inside, 0.0).to(gl.float32)
    let_next_start(F)
    gl.store(out + at, total.to(out.dtype.element_ty), inside)


@gluon.jit(do_not_specialize=["words", "words_out"])
def order_kernel(x, out, words, words_out, F: gl.constexpr):
    """x: (batch, words) int32, pairs of values -> out: (batch, words_out), the pairs of each step, those of each of its
    four threads, one of each thread in turn; zeros beyond x."""
    in_thread: gl.constexpr = 4 * F.units
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    row = gl.program_id(1).to(gl.int64)
    at = gl.program_id(0) * 1024 + gl.arange(0, 1024, layout)
    source = at // (4 * in_thread) * (4 * in_thread) + at % 4 * in_thread + at // 4 % in_thread
    wait_for_inputs(F)
    pairs = gl.load(x + row * words + source, source < words, 0)
    let_next_start(F)
    gl.store(out + row * words_out + at, pairs, at < words_out)
