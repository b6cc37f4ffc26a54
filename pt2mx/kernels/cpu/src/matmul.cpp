// Products of fp32 matrices whose values bfloat16 holds, on units for bfloat16, with sums in fp32; built and called by
// ../bfloat16_products.py.
//
// A task packs some columns of y, which stay in the second-level cache, and multiplies them with 32 rows of x at a
// time. Where a value is no bfloat16, or a product could be subnormal, which the units take for zero, nothing is
// computed.

#include <atomic>

#include "buffer.h"
#include "panels.h"

#if defined(PT2MX_TILES)

namespace {

constexpr i64 kPanelBytes = 1 << 20;  // of y that a task packs, of a second-level cache

i64 parts(i64 n, i64 size) { return (n + size - 1) / size; }

struct Matmul {
  const MatmulCall& call;
  i64 rows, columns;  // of a task, multiples of 32
  i64 down, across;   // tasks of a product
  std::atomic<bool> unserved{false};

  explicit Matmul(const MatmulCall& c) : call(c) {
    const i64 wanted = parts(c.threads, c.first * c.second);  // tasks of a product that keep all threads busy
    down = wanted;
    across = parts(c.n, std::max(kPair, std::min<i64>(1024, kPanelBytes / (2 * c.k))));
    if (c.m < 4 * c.n) {  // else to pack y for each thread takes less time than to pack all rows of x
      across = std::min(parts(across, wanted) * wanted, parts(c.n, kPair));
      down = std::max<i64>(1, std::min(parts(wanted, across), c.m / 128));
    }
    columns = parts(parts(c.n, across), kPair) * kPair;
    rows = parts(parts(c.m, down), kPair) * kPair;
    across = parts(c.n, columns);
    down = parts(c.m, rows);
  }
};

void run_matmul(i64 begin, i64 end, void* context) {
  Matmul& matmul = *static_cast<Matmul*>(context);
  const MatmulCall& c = matmul.call;
  const i64 groups = parts(c.k, kGroup), panels = matmul.columns / kPair, width = groups * kGroup;
  Buffer<u16> w, x;
  Buffer<float> sums;
  w.resize(panels * groups * 2 * kTile);
  x.resize(kPair * width);
  sums.resize((panels + 1) * kSquare);
  const u16* pixels[kPair];
  for (i64 r = 0; r < kPair; ++r) pixels[r] = x.data() + r * width;
  const bool tiles = c.units & AMX;
  if (tiles) configure();
  for (i64 task = begin; task < end && !matmul.unserved; ++task) {
    const i64 matrix = task / (matmul.across * matmul.down), i = matrix / c.second, j = matrix % c.second;
    const i64 top = task / matmul.across % matmul.down * matmul.rows, bottom = std::min(top + matmul.rows, c.m);
    const i64 first = task % matmul.across * matmul.columns, last = std::min(first + matmul.columns, c.n);
    const i64 count = parts(last - first, kPair);
    const float* from = c.x + i * c.x_stride[0] + j * c.x_stride[1];
    const Strided<float> y{c.y + i * c.y_stride[0] + j * c.y_stride[1], c.y_stride[2], c.y_stride[3]};
    Seen of_x, of_y;
    for (i64 p = 0; p < count; ++p) {
      pack_panel(y, first + p * kPair, last, c.k, w.data() + p * groups * 2 * kTile, of_y);
    }
    for (i64 m = top; m < bottom; m += kPair) {
      const i64 n = std::min(kPair, bottom - m);
      pack_rows(from + m * c.x_stride[2], c.x_stride[2], n, c.k, x.data(), of_x);
      if (tiles) squares_in_tiles(x.data(), width, w.data(), groups, count, sums.data());
      for (i64 p = 0; p < count; ++p) {
        float* square = sums.data() + p * kSquare;
        if (!tiles) square_in_vectors(pixels, n, w.data() + p * groups * 2 * kTile, 1, groups * kGroup, square, kPair);
        const i64 column = first + p * kPair, known = std::min(kPair, last - column);
        for (i64 r = 0; r < n; ++r, square += kPair) {
          std::copy(square, square + known, c.out + (matrix * c.m + m + r) * c.n + column);
        }
      }
    }
    if (!(of_x.are_bfloats() && of_y.are_bfloats() && is_served(of_x.exponent(), of_y.exponent()))) {
      matmul.unserved = true;
    }
  }
  if (tiles) release();
}

}  // namespace

extern "C" {

int32_t pt2mx_bfloat16_units() { return (has_tiles() ? AMX : 0) | (has_fast_pairs() ? AVX512_BF16 : 0); }

int32_t pt2mx_matmul(const MatmulCall* call, ParallelFor parallel_for) {
  Matmul matmul(*call);
  const i64 tasks = call->first * call->second * matmul.down * matmul.across;
  const int32_t error = parallel_for(0, tasks, 1, run_matmul, &matmul);
  return error ? error : matmul.unserved ? kUnserved : 0;
}

}  // extern "C"

#else

extern "C" {
int32_t pt2mx_bfloat16_units() { return 0; }
int32_t pt2mx_matmul(const MatmulCall*, ParallelFor) { return kUnserved; }
}  // extern "C"

#endif
