// The matmul of fp32 matrices whose values bfloat16 represents, on AMX or AVX512_BF16, with sums in fp32; built and
// called by ../bf16_matmul.py.
//
// A task packs some columns of y, which stay in the second-level cache, and multiplies them with 32 rows of x at a
// time. The kernel computes nothing if bfloat16 does not represent a value, or if a product could be subnormal, which
// the instructions treat as zero.

#include <atomic>

#include "buffer.h"
#include "pack_b.h"

#if defined(PT2MX_HAVE_MATRIX_ISA)

namespace {

constexpr i64 kPanelBytes = 1 << 20;  // bytes of y that a task packs, to fit the second-level cache

i64 parts(i64 n, i64 size) { return (n + size - 1) / size; }

struct Matmul {
  const MatmulCall& call;
  i64 rows, columns;  // of a task, multiples of 32
  i64 down, across;   // tasks of a matrix of the batch
  std::atomic<bool> unsupported{false};

  explicit Matmul(const MatmulCall& c) : call(c) {
    const i64 tasks = parts(c.threads, c.first * c.second);  // of a matrix, which keep all threads busy
    down = tasks;
    across = parts(c.n, std::max(kNR, std::min<i64>(1024, kPanelBytes / (2 * c.k))));
    if (c.m < 4 * c.n) {  // otherwise packing y in each thread is faster than packing all rows of x in each
      across = std::min(parts(across, tasks) * tasks, parts(c.n, kNR));
      down = std::max<i64>(1, std::min(parts(tasks, across), c.m / 128));
    }
    columns = parts(parts(c.n, across), kNR) * kNR;
    rows = parts(parts(c.m, down), kMR) * kMR;
    across = parts(c.n, columns);
    down = parts(c.m, rows);
  }
};

void run_matmul(i64 begin, i64 end, void* context) {
  Matmul& matmul = *static_cast<Matmul*>(context);
  const MatmulCall& c = matmul.call;
  const i64 groups = parts(c.k, kGroup), panels = matmul.columns / kNR, width = groups * kGroup;
  Buffer<u16> w, x;
  Buffer<float> sums;
  w.resize(panels * groups * 2 * kTileElems);
  x.resize(kMR * width);
  sums.resize(panels * kMicroTile);
  const u16* x_rows[kMR];
  for (i64 r = 0; r < kMR; ++r) x_rows[r] = x.data() + r * width;
  const bool amx = c.isa & AMX;
  const StridesOfA strides(amx, groups);
  if (amx) configure_amx();
  for (i64 task = begin; task < end && !matmul.unsupported; ++task) {
    const i64 matrix = task / (matmul.across * matmul.down), i = matrix / c.second, j = matrix % c.second;
    const i64 top = task / matmul.across % matmul.down * matmul.rows, bottom = std::min(top + matmul.rows, c.m);
    const i64 first = task % matmul.across * matmul.columns, last = std::min(first + matmul.columns, c.n);
    const i64 count = parts(last - first, kNR);
    const float* from = c.x + i * c.x_stride[0] + j * c.x_stride[1];
    const Strided<float> y{c.y + i * c.y_stride[0] + j * c.y_stride[1], c.y_stride[2], c.y_stride[3]};
    ValueStats x_stats, y_stats;
    for (i64 p = 0; p < count; ++p) {
      pack_panel(y, first + p * kNR, last, c.k, w.data() + p * groups * 2 * kTileElems, y_stats);
    }
    for (i64 m = top; m < bottom; m += kMR) {
      const i64 n = std::min(kMR, bottom - m);
      pack_rows(from + m * c.x_stride[2], c.x_stride[2], n, c.k, strides, x.data(), x_stats);
      if (amx) gemm_panels_amx(x.data(), w.data(), groups, count, sums.data());
      for (i64 p = 0; p < count; ++p) {
        float* micro_tile = sums.data() + p * kMicroTile;
        if (!amx)
          microkernel_32x32_avx512(x_rows, n, w.data() + p * groups * 2 * kTileElems, 1, groups * kGroup, micro_tile,
                                   kNR);
        const i64 column = first + p * kNR, known = std::min(kNR, last - column);
        for (i64 r = 0; r < n; ++r, micro_tile += kNR) {
          std::copy(micro_tile, micro_tile + known, c.out + (matrix * c.m + m + r) * c.n + column);
        }
      }
    }
    if (!(x_stats.are_bf16() && y_stats.are_bf16() && products_are_normal(x_stats.exponent(), y_stats.exponent()))) {
      matmul.unsupported = true;
    }
  }
  if (amx) release_amx();
}

}  // namespace

extern "C" {

int32_t pt2mx_bf16_isa() { return (has_amx() ? AMX : 0) | (has_fast_avx512_bf16() ? AVX512_BF16 : 0); }

int32_t pt2mx_matmul(const MatmulCall* call, ParallelFor parallel_for) {
  Matmul matmul(*call);
  const i64 tasks = call->first * call->second * matmul.down * matmul.across;
  const int32_t error = parallel_for(0, tasks, 1, run_matmul, &matmul);
  return error ? error : matmul.unsupported ? kUnsupported : 0;
}

}  // extern "C"

#else

extern "C" {
int32_t pt2mx_bf16_isa() { return 0; }
int32_t pt2mx_matmul(const MatmulCall*, ParallelFor) { return kUnsupported; }
}  // extern "C"

#endif
