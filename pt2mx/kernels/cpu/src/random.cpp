// random_bits: the numbers that stochastic rounding draws; built and called by ../quantize.py.

#include "random.h"

namespace {

constexpr i64 kChunk = 2048;     // numbers that are drawn at a time
constexpr i64 kGrain = 1 << 15;  // numbers that are worth another thread

struct Random {
  u64 seed;
  int32_t* out;
};

void run_random(i64 begin, i64 end, void* context) {
  const Random& random = *static_cast<const Random*>(context);
  u32 buffer[kChunk + 8];
  for (i64 i = begin; i < end; i += kChunk) {
    const i64 n = std::min(kChunk, end - i);
    std::memcpy(random.out + i, random_bits(random.seed, i, n, buffer), 4 * n);
  }
}

}  // namespace

extern "C" {

// out: (n) int32, the random numbers of the first n values of a tensor.
int32_t pt2mx_random_bits(u64 seed, int32_t* out, i64 n, ParallelFor parallel_for) {
  Random random{seed, out};
  return parallel_for(0, n, kGrain, run_random, &random);
}

}  // extern "C"
