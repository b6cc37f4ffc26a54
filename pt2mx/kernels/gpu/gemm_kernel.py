"""The device code of matmuls with more rows of x: whole groups of four warps multiply on the tensor cores of sm_90.

As in `gemv_kernel` the codes go from device memory to registers and are decoded there; x comes through a ring of stages
in shared memory. Its values along K have the order in which the threads hold the values of the weight. With a ring of
four:

    stage    0       1       2       3       4       5
    copy     start   start   start   start                    before the loop: TMA copies fill the ring
    loop 0   wait 0, mma 0
    loop 1   wait 1, mma 1; mma 0 is done: its slot is free, copy 4 starts there
    loop 2   wait 2, mma 2; mma 1 is done: copy 5 starts
    ...

Each iteration decodes the operand of its stage while the tensor cores work on the previous stage, and loads the codes
of the next stages.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pt2mx.kernels.gpu.fragment import (
    decode_fragment,
    fragment_pointers,
    load_fragments,
    pdl_launch_dependents,
    pdl_wait,
    scaled,
)

#: values along K of a stage
STAGE_K = gl.constexpr(128)


@gluon.jit(do_not_specialize=["batch", "n", "n_tiles", "k_steps", "split_steps", "loads_early"])
def gemm_kernel(
    x, codes, scale, tensor_scale, bias, out, batch, n, n_tiles, k_steps, split_steps, loads_early, C: gl.constexpr
):
    """x: descriptor of (batch, K') bfloat16 in the order of the threads, codes, scale and loads_early: as of
    `gemv_kernel`, bias: (n,) -> out: (split_k, batch, n). A program takes `split_steps` steps along K."""
    pair_steps: gl.constexpr = 8 // C.k8_groups  # steps of two stages
    load_stages: gl.constexpr = C.load_steps * C.k8_groups // 4
    first = gl.program_id(2) * split_steps
    count = (gl.minimum(first + split_steps, k_steps) - first + pair_steps - 1) // pair_steps * 2
    first_k = first * (C.k8_groups // 4 * STAGE_K)
    if C.m_first:
        pid_m, pid_n = gl.program_id(0), gl.program_id(1)
    else:
        pid_n, pid_m = gl.program_id(0), gl.program_id(1)
    first_m = pid_m * C.m_rows
    ring = gl.allocate_shared_memory(gl.bfloat16, [C.slots, C.m_rows, STAGE_K], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [C.stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(gl.constexpr(C.stages)):
        mbarrier.init(ready.index(stage), count=1)
    pointers = fragment_pointers(codes.to(gl.pointer_type(gl.int32)), scale, pid_n, n_tiles, k_steps, C)
    if loads_early == 0:
        pdl_wait(C)
    words, scales = _load(pointers, first, k_steps - 1, C)
    for ahead in gl.static_range(gl.constexpr(C.load_steps), 16 // C.k8_groups, gl.constexpr(C.load_steps)):
        _prefetch(pointers, first + ahead, k_steps - 1, C)
    pdl_wait(C)
    for stage in gl.static_range(gl.constexpr(C.stages)):
        _copy_stage(x, ring, ready, stage, stage < count, first_k, first_m, C)
    acc = gl.full([C.warps_n * 16, C.m_rows], 0.0, gl.float32, _sums_layout(C))
    prev_a = gl.full([C.warps_n * 16, STAGE_K], 0.0, gl.bfloat16, gl.DotOperandLayout(0, _sums_layout(C), 2))
    # The tensor cores read `prev_a` until the wait, so the operand that is decoded meanwhile needs other registers. It
    # gets them because the wait names `prev_a`, and because each operand is decoded after the wait for the second-last
    # one (`in_place`).
    for at in range(0, count, 2):
        for i in gl.static_range(2):
            if i % load_stages == 0:
                step = first + (at + i) * 4 // C.k8_groups
                next_words, next_scales = _load(pointers, step + C.load_steps, k_steps - 1, C)
                _prefetch(pointers, step + 16 // C.k8_groups, k_steps - 1, C)  # four stages ahead
            a = _operand_of_stage(words, scales, i % load_stages, C)  # the tensor cores work on the last stage
            mbarrier.wait(ready.index((at + i) % C.stages), (at + i) // C.stages & 1)
            sums = warpgroup_mma(a, ring.index((at + i) % C.stages).permute((1, 0)), acc, is_async=True)
            acc, prev_a = warpgroup_mma_wait(1, [sums, prev_a])
            prev_stage = at + i - 1
            do_load = (prev_stage >= 0) & (prev_stage + C.stages < count)
            _copy_stage(x, ring, ready, prev_stage + C.stages, do_load, first_k, first_m, C)
            prev_a = a
            if (i + 1) % load_stages == 0:
                words, scales = next_words, next_scales
    pdl_launch_dependents(C)
    acc, _ = warpgroup_mma_wait(0, [acc, prev_a])
    _store(acc, tensor_scale, bias, out, pid_n * (C.warps_n * 16), batch, n, first_m, C)


@gluon.constexpr_function
def _sums_layout(C):
    return gl.NVMMADistributedLayout([3, 0], [C.warps_n, 1], [16, C.m_rows, 16])


@gluon.jit
def _copy_stage(x, ring, ready, at, do_load, first_k, first_m, C: gl.constexpr):
    """Start the copy of stage number `at`, if `do_load`."""
    barrier = ready.index(at % C.stages)
    mbarrier.expect(barrier, x.block_type.nbytes, do_load)
    tma.async_copy_global_to_shared(x, [first_m, first_k + at * STAGE_K], barrier, ring.index(at % C.stages), do_load)


@gluon.jit
def _load(pointers, step, last, C: gl.constexpr):
    """Load the words and scales of `load_steps` steps from `step` on."""
    words = ()
    scales = ()
    for i in gl.static_range(gl.constexpr(C.load_steps)):
        of_step = load_fragments(pointers, gl.minimum(step + i, last), C)
        words = words + of_step[0]
        scales = scales + of_step[1]
    return words, scales


#: prefetches the cache line of the first of a thread's four words; the results are dummies
_PREFETCH = gl.constexpr("prefetch.global.L2 [$4]; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;")


@gluon.jit
def _prefetch(pointers, step, last, C: gl.constexpr):
    """Prefetch into the L2 cache the words that `_load` will read there."""
    words, _ = pointers
    for i in gl.static_range(gl.constexpr(C.load_steps)):
        for vector in gl.static_range(gl.constexpr(2 * C.vectors)):
            at = words[0] + gl.minimum(step + i, last) * (C.vectors * 256) + vector * 128
            gl.inline_asm_elementwise(_PREFETCH, "=r,=r,=r,=r,l,l,l,l", [at.to(gl.int64)], gl.int32, False, 4)


@gluon.jit
def _operand_of_stage(words, scales, stage, C: gl.constexpr):
    """Decode one stage of the result of `_load`."""
    stages_of_step: gl.constexpr = C.k8_groups // 4
    pairs = decode_fragment(words, scales, stage // stages_of_step, C, True)
    return _operand(pairs, stage % stages_of_step * 4, C)


@gluon.jit
def _operand(pairs, first, C: gl.constexpr):
    """Pairs of `decode_fragment` from group `first` on -> (16 * warps_n, STAGE_K) bfloat16, in the same registers."""
    halves = ()
    for half in gl.static_range(2):
        groups = ()
        for i in gl.static_range(4):
            pair = pairs[half * C.k8_groups + first + i]  # (1, warps_n, 32, 4)
            low = (pair & 0xFFFF).to(gl.int16).to(gl.bfloat16, bitcast=True)
            high = (pair >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
            groups = groups + (gl.join(low, high),)
        halves = halves + (gl.join(gl.join(groups[0], groups[2]), gl.join(groups[1], groups[3])),)
    # warp, row of 8, position along K, MMA of two, half of it, value of a pair, group, group, rows + 8
    both = gl.join(halves[0], halves[1]).reshape([C.warps_n, 8, 4, 2, 2, 2, 2, 2, 2])
    rows = both.permute([0, 8, 1, 6, 7, 3, 4, 2, 5]).reshape([C.warps_n * 16, STAGE_K])
    return gl.convert_layout(rows, gl.DotOperandLayout(0, _sums_layout(C), 2), assert_trivial=True)


@gluon.jit
def _store(acc, tensor_scale, bias, out, first_n, batch, n, first_m, C: gl.constexpr):
    """Scale the sums of a program, add the bias and store them."""
    layout: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, C.warps_n], [0, 1])
    sums = scaled(gl.convert_layout(acc, layout), tensor_scale, C)
    row = first_n + gl.arange(0, C.warps_n * 16, gl.SliceLayout(1, layout))
    m = first_m + gl.arange(0, C.m_rows, gl.SliceLayout(0, layout))
    if C.has_bias:
        sums += gl.load(bias + row, mask=row < n, other=0).to(gl.float32)[:, None]
    at_row = out + gl.program_id(2).to(gl.int64) * batch * n + row
    inside = (row < n)[:, None] & (m < batch)[None, :]
    gl.store(at_row[:, None] + (m.to(gl.int64) * n)[None, :], sums.to(out.dtype.element_ty), inside)


@gluon.jit(do_not_specialize=["n", "size", "split_k"])
def reduce_split_k_kernel(parts, tensor_scale, bias, out, n, size, split_k, C: gl.constexpr):
    """parts: (split_k, batch, n) float32, bias: (n,) -> out: (batch, n); `size` is batch * n."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [8], [0])
    at = gl.program_id(0).to(gl.int64) * 2048 + gl.arange(0, 2048, layout)
    inside = at < size
    pdl_wait(C)
    total = gl.load(parts + at, inside, 0.0)
    for split in range(1, split_k):
        total += gl.load(parts + size.to(gl.int64) * split + at, inside, 0.0)
    total = scaled(total, tensor_scale, C)
    if C.has_bias:
        total += gl.load(bias + at % n, inside, 0.0).to(gl.float32)
    pdl_launch_dependents(C)
    gl.store(out + at, total.to(out.dtype.element_ty), inside)


@gluon.jit(do_not_specialize=["batch", "words", "words_out"])
def shuffle_x_kernel(x, out, batch, words, words_out, C: gl.constexpr):
    """x: (batch, words) int32, pairs of values -> out: (rows, words_out), the pairs of each step, interleaved: one pair
    of each of the four threads in turn; zeros beyond x."""
    in_thread: gl.constexpr = 4 * C.k8_groups
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    at = gl.program_id(0) * 1024 + gl.arange(0, 1024, layout)
    source = at // (4 * in_thread) * (4 * in_thread) + at % 4 * in_thread + at // 4 % in_thread
    pdl_launch_dependents(C)
    pdl_wait(C)
    for row in range(gl.program_id(1), batch, gl.num_programs(1)):
        pairs = gl.load(x + row.to(gl.int64) * words + source, source < words, 0)
        gl.store(out + row.to(gl.int64) * words_out + at, pairs, at < words_out)
