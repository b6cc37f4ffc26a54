// The CPU kernel of pt2mx/kernels/hadamard.py, equal to it to the bit; built and called by ../hadamard.py.
//
// A tensor is (outer, n, inner) with blocks along n. If inner is 1, blocks are adjacent, and the kernel rotates them in
// chunks. Otherwise a tile is some columns of a block.

#include "rotate.h"

namespace {

constexpr i64 kColumns = 64;     // of a tile
constexpr i64 kGrain = 1 << 15;  // values that are worth another thread

struct Work {
  const HadamardCall& call;
  const Rotation rotation;
  const i64 columns, strips, rows, tiles;  // columns of a tile, tiles across inner, rows of a tile, all tiles

  explicit Work(const HadamardCall& c)
      : call(c),
        rotation(c.size),
        columns(std::min(c.inner, kColumns)),
        strips((c.inner + columns - 1) / columns),
        rows(c.inner == 1 ? std::max(c.size, kRotated) : c.size),
        tiles(strips * ((c.outer * c.n + rows - 1) / rows)) {}
};

void run(i64 begin, i64 end, void* context) {
  const Work& work = *static_cast<const Work*>(context);
  const HadamardCall& c = work.call;
  const KeepSubnormals keep;
  std::vector<float> y(work.rows * work.columns + kWidth);
  if (c.inner == 1) {
    const i64 last = std::min(end * work.rows, c.outer * c.n);
    return rotate_run(work.rotation, c.dtype, c.x, begin * work.rows, last, c.out, y.data());
  }
  for (i64 tile = begin; tile < end; ++tile) {
    const i64 column = tile % work.strips * work.columns, w = std::min(work.columns, c.inner - column);
    const i64 at = tile / work.strips * work.rows * c.inner + column;
    const i64 runs = w == c.inner ? 1 : work.rows, n = work.rows * w / runs;  // contiguous runs of n values
    for (i64 r = 0; r < runs; ++r) get_floats(c.x, at + r * c.inner, n, c.dtype, y.data() + r * w);
    work.rotation.columns(y.data(), w);
    for (i64 r = 0; r < runs; ++r) put_floats(y.data() + r * w, n, c.dtype, c.out, at + r * c.inner);
  }
}

}  // namespace

extern "C" {

int32_t pt2mx_hadamard(const HadamardCall* call, ParallelFor parallel_for) {
  Work work(*call);
  return parallel_for(0, work.tiles, std::max<i64>(1, kGrain / (work.rows * work.columns)), run, &work);
}

}  // extern "C"
