// The random numbers of stochastic rounding: pt2mx/kernels/reference.py.

#pragma once

#include "floats.h"

namespace {

// Draws the numbers of values [first, first + n) into `out`, which has room for whole counters of four. Returns a
// pointer to the first one.
const u32* random_bits(u64 seed, i64 first, i64 n, u32* out) {
  const i64 counter = first / 4, counters = (first + n + 3) / 4 - counter;
#pragma omp simd
  for (i64 i = 0; i < counters; ++i) {
    u32 c0 = u32(counter + i), c1 = u32(u64(counter + i) >> 32), c2 = 0, c3 = 0;
    u32 key0 = u32(seed), key1 = u32(seed >> 32);
    for (int round = 0; round < 10; ++round) {
      const u64 product0 = u64(c0) * 0xD2511F53u, product1 = u64(c2) * 0xCD9E8D57u;
      c0 = u32(product1 >> 32) ^ c1 ^ key0;
      c1 = u32(product1);
      c2 = u32(product0 >> 32) ^ c3 ^ key1;
      c3 = u32(product0);
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    out[4 * i] = c0 >> 1;
    out[4 * i + 1] = c1 >> 1;
    out[4 * i + 2] = c2 >> 1;
    out[4 * i + 3] = c3 >> 1;
  }
  return out + (first & 3);
}

}  // namespace
