// Rotates blocks of values: negates some, and multiplies by the Hadamard matrix over the square root of the block's
// size. The sums and their order are those of pt2mx/kernels/hadamard.py.

#pragma once

#include <cmath>
#include <utility>
#include <vector>

#include "floats.h"

namespace {

// ---- butterflies: sums and differences at a distance, within a vector and between vectors ----

// Adds to each lane the lane at distance `D`; the upper lane of a pair gets the difference.
template <i64 D, std::size_t... Lane>
inline Floats butterfly(Floats v, std::index_sequence<Lane...>) {
#if defined(__clang__)
  const Floats partner = __builtin_shufflevector(v, v, (Lane ^ D)...);
#else
  const Floats partner = __builtin_shuffle(v, Ints{int32_t(Lane ^ D)...});
#endif
  const Ints negated = {(Lane & D ? kSign : 0)...};
  return partner + Floats(Ints(v) ^ negated);
}

// Runs the stages of all distances below `S`, a power of two.
template <i64 S, i64 D = 1>
inline Floats within(Floats v) {
  if constexpr (D < S) return within<S, 2 * D>(butterfly<D>(v, std::make_index_sequence<kWidth>()));
  else return v;
}

template <i64 R>
inline void between(Floats (&v)[R]) {
  for (i64 d = 1; d < R; d *= 2) {
    for (i64 i = 0; i < R; ++i) {
      if (i & d) continue;
      const Floats first = v[i], second = v[i + d];
      v[i] = first + second;
      v[i + d] = first - second;
    }
  }
}

// x: n values, in whole runs of S values (less than a vector) or of R vectors -> out; signs: (period).
template <i64 S, i64 R>
NOINLINE void transform(const float* x, i64 n, const int32_t* signs, i64 period, float scale, float* out) {
  for (i64 i = 0; i < n; i += R * kWidth) {
    Floats v[R];
    for (i64 r = 0; r < R; ++r) {
      const i64 at = i + r * kWidth;
      v[r] = within<S>(Floats(load<Ints>(x + at) ^ load<Ints>(signs + (at & (period - 1)))));
    }
    between(v);
    for (i64 r = 0; r < R; ++r) store(out + i + r * kWidth, v[r] * scale);
  }
}

// Runs one stage of n values at distance `d`, in place.
NOINLINE void stage(float* y, i64 n, i64 d) {
  for (float *first = y, *end = y + n; first < end; first += 2 * d) {
    float* second = first + d;
#pragma omp simd
    for (i64 i = 0; i < d; ++i) {
      const float a = first[i], b = second[i];
      first[i] = a + b;
      second[i] = a - b;
    }
  }
}

// ---- blocks of one size ----

class Rotation {
 public:
  explicit Rotation(i64 size)
      : size_(size), scale_(float(1 / std::sqrt(double(size)))), signs_(std::max(size, kWidth)) {
    for (std::size_t i = 0; i < signs_.size(); ++i) signs_[i] = is_negated(i & (size - 1)) ? kSign : 0;
  }

  i64 size() const { return size_; }

  // x: n values in whole blocks -> out, which may be x; both have room for whole vectors.
  void blocks(const float* x, i64 n, float* out) const {
    const i64 period = i64(signs_.size());
    const auto apply = [&](auto* function, float scale) { function(x, n, signs_.data(), period, scale, out); };
    if (size_ < kWidth) return apply(kShort[log2(size_)], scale_);
    const i64 vectors = size_ / kWidth;
    if (vectors <= kMost) return apply(kLong[log2(vectors)], scale_);
    apply(kLong[log2(kMost)], 1.0f);
    for (i64 d = kMost * kWidth; d < size_; d *= 2) stage(out, n, d);
    scale_all(out, n);
  }

  // Rotates the columns of y: (size, w) in place.
  void columns(float* y, i64 w) const {
    for (i64 i = 0; i < size_; ++i) {
      if (signs_[i]) {
        for (i64 j = 0; j < w; ++j) y[i * w + j] = -y[i * w + j];
      }
    }
    for (i64 d = 1; d < size_; d *= 2) stage(y, size_ * w, d * w);
    scale_all(y, size_ * w);
  }

 private:
  static constexpr i64 kMost = 4;  // vectors of a block that stay in registers
  static constexpr decltype(&transform<1, 1>) kShort[] = {transform<1, 1>, transform<2, 1>, transform<4, 1>,
                                                          transform<8, 1>};
  static constexpr decltype(&transform<1, 1>) kLong[] = {transform<kWidth, 1>, transform<kWidth, 2>,
                                                         transform<kWidth, 4>};

  static int log2(i64 n) { return n > 1 ? 1 + log2(n / 2) : 0; }

  static bool is_negated(u32 index) {
    u32 odd = index & index >> 1 & 0x5555;
    for (int shift = 8; shift > 1; shift /= 2) odd ^= odd >> shift;
    return odd & 1;
  }

  void scale_all(float* y, i64 n) const {
#pragma omp simd
    for (i64 i = 0; i < n; ++i) y[i] *= scale_;
  }

  const i64 size_;
  const float scale_;
  std::vector<int32_t> signs_;
};

// ---- values in memory ----

constexpr i64 kRotated = 2048;  // values of a chunk, unless a block is longer

// Rotates values [begin, end) of x, adjacent whole blocks, to out; y: scratch of a chunk and a vector.
void rotate_run(const Rotation& rotation, int32_t dtype, const void* x, i64 begin, i64 end, void* out, float* y) {
  const i64 chunk = std::max(rotation.size(), kRotated);
  for (i64 at = begin; at < end; at += chunk) {
    const i64 n = std::min(chunk, end - at);
    if (dtype == FP32 && n % kWidth == 0) {
      rotation.blocks(static_cast<const float*>(x) + at, n, static_cast<float*>(out) + at);
      continue;
    }
    get_floats(x, at, n, dtype, y);
    rotation.blocks(y, n, y);
    put_floats(y, n, dtype, out, at);
  }
}

// Returns n values of x rotated, in their dtype, in `memory`.
UNUSED const void* rotate_copy(i64 size, int32_t dtype, const void* x, i64 n, std::vector<float>& memory) {
  const KeepSubnormals keep;
  std::vector<float> y(std::max(size, kRotated) + kWidth);
  memory.resize(n);
  rotate_run(Rotation(size), dtype, x, 0, n, memory.data(), y.data());
  return memory.data();
}

}  // namespace
