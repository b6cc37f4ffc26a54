// The largest magnitude (amax) of each block, as bits without the sign: as integers, these order like the floats.

#pragma once

#include "values.h"

namespace {

// x: (rows) -> amax: (blocks)
template <class Bits>
NOINLINE void amax_of_runs(const Bits* x, i64 rows, i64 block, Bits mask, Bits* amax) {
  typedef Bits Vector __attribute__((vector_size(kWidth * sizeof(Bits))));
  for (i64 first = 0; first < rows; first += block) {
    const i64 last = std::min(first + block, rows);
    Vector most{};
    i64 r = first;
    for (; r + kWidth <= last; r += kWidth) most = larger(most, load<Vector>(x + r) & mask);
    Bits lanes[kWidth], largest = 0;
    store(lanes, most);
#pragma omp simd reduction(max : largest)
    for (i64 i = 0; i < kWidth; ++i) largest = std::max(largest, lanes[i]);
    for (; r < last; ++r) largest = std::max<Bits>(largest, x[r] & mask);
    *amax++ = largest;
  }
}

// x: (rows, w), with rows `stride` apart -> amax: (blocks, w)
template <class Bits>
NOINLINE void amax_of_columns(const Bits* x, i64 stride, i64 rows, i64 w, i64 block, Bits mask, Bits* amax) {
  typedef Bits Vector __attribute__((vector_size(kWidth * sizeof(Bits))));
  constexpr i64 kRows = 8;  // read together, to store the maxima less often; the prefetcher does not follow more rows
  for (i64 first = 0; first < rows; first += block, amax += w) {
    const i64 last = std::min(first + block, rows);
    std::fill(amax, amax + w, 0);
    for (i64 r = first; r < last; r += kRows) {
      const Bits* row = x + r * stride;
      const Bits* const end = row + std::min(kRows, last - r) * stride;
      i64 j = 0;
      for (; j + kWidth <= w; j += kWidth) {
        Vector most = load<Vector>(amax + j);
        for (const Bits* at = row; at < end; at += stride) most = larger(most, load<Vector>(at + j) & mask);
        store(amax + j, most);
      }
      for (; j < w; ++j) {
        for (const Bits* at = row; at < end; at += stride) amax[j] = std::max<Bits>(amax[j], at[j] & mask);
      }
    }
  }
}

}  // namespace
