// Sums of groups of integers for the GEMM of many rows: kInt8Rows rows of x times kNR columns.
//
// vpmaddubsw multiplies unsigned by signed bytes, and adds two products in 16 bits. The weight's codes are unsigned,
// because `offset` is added to them. A sum starts at minus `offset` times the codes of x that it multiplies, so it ends
// at the sum of the signed products. Only that one has to fit 16 bits: sums before it may wrap around. The sums of a
// group take fewer additions the smaller the codes are:
//
//     codes of x         of w    products in a sum of 16 bits
//     up to 128          FP4     16, of all steps: 16 * 12 * 128 < 2**15
//     up to 15 (FP4)     E2M3    16: 16 * 60 * 15
//     up to 15 (FP4)     INT8    16: 16 * 128 * 15
//     up to 63 (E2M3)    E2M3    8: 8 * 60 * 63
//     up to 128          E2M3    4: 4 * 60 * 128
//
// vpmaddwd multiplies other codes, as integers of 16 bits. vpdpbusd adds four products in 32 bits, for all codes.

#pragma once

#include "int8_microkernel.h"

#if defined(PT2MX_HAVE_INT8)

namespace {

constexpr i64 kInt8Rows = kWidth == 16 ? 5 : 3;  // rows of x of a micro-tile
constexpr i64 kPanels = kNR / kWidth;            // vectors of columns of a micro-tile
constexpr int kVecs = 2;                         // vectors that are multiplied together, in registers

// A kernel, and the groups that it reads.
struct Int8Kernel {
  int32_t isa, mantissa, largest;  // mantissa, largest magnitude: of codes of x
  int32_t products;                // that a sum of 16 bits adds; 0: sums have 32 bits
  i64 x_bytes, w_bytes;            // of a group
  // Write a group. offset: of the weight's codes.
  void (*pack_x)(const CodeGroup& codes, int32_t offset, u8* out);
  void (*pack_w)(const GroupColumns& codes, int32_t offset, u8* out);
  // strip: (kInt8Rows, kNR) += x: kInt8Rows rows of n groups, times w: (kPanels, n), `panels` groups apart.
  void (*multiply)(const u8* const* x, const u8* w, i64 panels, i64 n, float* strip);

  // Returns true if no sum with the integers [-offset, most] of a weight overflows.
  bool fits(int32_t offset, int32_t most) const {
    return !products ||
           (2 * (offset + most) * largest <= INT16_MAX && products * std::max(offset, most) * largest <= INT16_MAX);
  }
};

// ---- the sums of a group, Bytes: (kInt8Rows, kVecs) of 32 bits each ----

using Sums = Bytes[kInt8Rows][kVecs];

// Keeps the order of additions: GCC would compute all products first, which do not fit the registers.
inline __attribute__((always_inline)) void keep_order(Bytes& sum) { asm("" : "+v"(sum)); }

template <int kChunks>
struct Vpmaddubsw {
  struct X {
    u8 codes[kGroup];
    int32_t power;             // as in CodeGroup
    int32_t offsets[kChunks];  // initial values of the sums, two of 16 bits each
  };
  using W = GroupColumns;

  static void pack_x(const CodeGroup& group, int32_t offset, u8* to) {
    X* const out = reinterpret_cast<X*>(to);
    const __m256i codes = load256(group.codes);
    store(out->codes, codes);
    out->power = group.power;
    // sums of each two adjacent codes, then of every second of these in a chunk
    __m256i sums = _mm256_maddubs_epi16(_mm256_set1_epi8(1), codes);
    sums = _mm256_mullo_epi16(sums, _mm256_set1_epi16(short(-offset)));
    if (kChunks <= 4) sums = _mm256_add_epi16(sums, _mm256_shuffle_epi32(sums, 0xB1));
    if (kChunks <= 2) sums = _mm256_add_epi16(sums, _mm256_shuffle_epi32(sums, 0x4E));
    if (kChunks <= 1) sums = _mm256_add_epi16(sums, _mm256_permute2x128_si256(sums, sums, 1));
    int32_t lanes[8];
    store(lanes, sums);
    for (int i = 0; i < kChunks; ++i) out->offsets[i] = lanes[i * 8 / kChunks];
  }
  static void pack_w(const GroupColumns& group, int32_t, u8* to) { std::memcpy(to, &group, sizeof group); }

  inline __attribute__((always_inline)) static void multiply(const X* const* x, const W* w, i64 panels, Sums& sums) {
    constexpr int kLength = kSteps / kChunks;
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      Sums wide;
      for (int r = 0; r < kInt8Rows; ++r) {
        for (int h = 0; h < kVecs; ++h) wide[r][h] = VECTOR(set1_epi32)(x[r]->offsets[chunk]);
      }
      for (int s = chunk * kLength; s < (chunk + 1) * kLength; ++s) {
        Bytes codes[kVecs];
        for (int h = 0; h < kVecs; ++h) codes[h] = load<Bytes>(w[h * panels].codes + s * kStepBytes);
        for (int r = 0; r < kInt8Rows; ++r) {
          const Bytes values = VECTOR(set1_epi32)(load<int32_t>(x[r]->codes + 4 * s));
          for (int h = 0; h < kVecs; ++h) {
            wide[r][h] = VECTOR(add_epi16)(wide[r][h], VECTOR(maddubs_epi16)(codes[h], values));
            keep_order(wide[r][h]);
          }
        }
      }
      for (int r = 0; r < kInt8Rows; ++r) {
        for (int h = 0; h < kVecs; ++h) {
          const Bytes sum = VECTOR(madd_epi16)(wide[r][h], VECTOR(set1_epi16)(1));
          sums[r][h] = chunk ? VECTOR(add_epi32)(sums[r][h], sum) : sum;
        }
      }
    }
  }
};

struct Vpmaddwd {
  struct X {
    int16_t codes[kGroup];  // of each step: k, k + 2, k + 1, k + 3
    int32_t power;
  };
  struct W {
    alignas(64) int16_t codes[2 * kSteps][2 * kWidth];  // of half a step: two of each column
    int32_t powers[kWidth];
  };

  static void pack_x(const CodeGroup& group, int32_t, u8* to) {
    X* const out = reinterpret_cast<X*>(to);
    out->power = group.power;
    const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    for (i64 i = 0; i < kGroup; i += 16) {
      store(out->codes + i, _mm256_cvtepi8_epi16(_mm_shuffle_epi8(load128(group.codes + i), order)));
    }
  }
  static void pack_w(const GroupColumns& group, int32_t offset, u8* to) {
    W* const out = reinterpret_cast<W*>(to);
    const Bytes subtracted = VECTOR(set1_epi16)(short(offset));
    for (int s = 0; s < kSteps; ++s) {
      const Bytes codes = load<Bytes>(group.codes + s * kStepBytes);
      store(out->codes[2 * s], VECTOR(sub_epi16)(codes & VECTOR(set1_epi16)(255), subtracted));
      store(out->codes[2 * s + 1], VECTOR(sub_epi16)(VECTOR(srli_epi16)(codes, 8), subtracted));
    }
    std::memcpy(out->powers, group.powers, sizeof group.powers);
  }

  inline __attribute__((always_inline)) static void multiply(const X* const* x, const W* w, i64 panels, Sums& sums) {
    for (int s = 0; s < 2 * kSteps; ++s) {
      Bytes codes[kVecs];
      for (int h = 0; h < kVecs; ++h) codes[h] = load<Bytes>(w[h * panels].codes[s]);
      for (int r = 0; r < kInt8Rows; ++r) {
        const Bytes values = VECTOR(set1_epi32)(load<int32_t>(x[r]->codes + 2 * s));
        for (int h = 0; h < kVecs; ++h) {
          const Bytes sum = VECTOR(madd_epi16)(codes[h], values);
          sums[r][h] = s ? VECTOR(add_epi32)(sums[r][h], sum) : sum;
          keep_order(sums[r][h]);
        }
      }
    }
  }
};

#if defined(PT2MX_HAVE_VNNI)

struct Vpdpbusd {
  using X = CodeGroup;
  using W = GroupColumns;

  static void pack_x(const CodeGroup& group, int32_t offset, u8* to) {
    X* const out = reinterpret_cast<X*>(to);
    *out = group;
    out->offset *= -offset;
  }
  static void pack_w(const GroupColumns& group, int32_t, u8* to) { std::memcpy(to, &group, sizeof group); }

  inline __attribute__((always_inline)) static void multiply(const X* const* x, const W* w, i64 panels, Sums& sums) {
    for (int r = 0; r < kInt8Rows; ++r) {
      for (int h = 0; h < kVecs; ++h) sums[r][h] = VECTOR(set1_epi32)(x[r]->offset);
    }
    for (int s = 0; s < kSteps; ++s) {
      Bytes codes[kVecs];
      for (int h = 0; h < kVecs; ++h) codes[h] = load<Bytes>(w[h * panels].codes + s * kStepBytes);
      for (int r = 0; r < kInt8Rows; ++r) {
        const Bytes values = VECTOR(set1_epi32)(load<int32_t>(x[r]->codes + 4 * s));
        for (int h = 0; h < kVecs; ++h) dpbusd(sums[r][h], codes[h], values);
      }
    }
  }
};

#endif

// ---- the sums of groups times their powers of two ----

template <class Kernel>
NOINLINE void multiply_groups(const u8* const* rows, const u8* panel, i64 panels, i64 n, float* strips) {
  using X = typename Kernel::X;
  using W = typename Kernel::W;
  const X* x[kInt8Rows];
  const W* w = reinterpret_cast<const W*>(panel);
  for (i64 p = 0; p < kPanels; p += kVecs, w += kVecs * panels, strips += kVecs * kWidth) {
    Floats strip[kInt8Rows][kVecs];
    for (int r = 0; r < kInt8Rows; ++r) {
      x[r] = reinterpret_cast<const X*>(rows[r]);
      for (int h = 0; h < kVecs; ++h) strip[r][h] = load<Floats>(strips + r * kNR + h * kWidth);
    }
    for (i64 g = 0; g < n; ++g) {
      Sums sums;
      Kernel::multiply(x, w + g, panels, sums);
      for (int h = 0; h < kVecs; ++h) {
        const Ints powers = load<Ints>(w[g + h * panels].powers);
        for (int r = 0; r < kInt8Rows; ++r) {
          strip[r][h] = fused(Floats(VECTOR(cvtepi32_ps)(sums[r][h])), Floats(powers + x[r]->power), strip[r][h]);
        }
      }
      for (int r = 0; r < kInt8Rows; ++r) ++x[r];
    }
    for (int r = 0; r < kInt8Rows; ++r) {
      for (int h = 0; h < kVecs; ++h) store(strips + r * kNR + h * kWidth, strip[r][h]);
    }
  }
}

template <class Kernel>
constexpr Int8Kernel int8_kernel(int32_t isa, int32_t mantissa, int32_t largest, int32_t products) {
  return {isa,
          mantissa,
          largest,
          products,
          sizeof(typename Kernel::X),
          sizeof(typename Kernel::W),
          Kernel::pack_x,
          Kernel::pack_w,
          multiply_groups<Kernel>};
}

// In the order of preference: the first one that fits the weight, and has the values of x as codes, multiplies.
constexpr Int8Kernel kInt8Kernels[] = {
#if defined(PT2MX_HAVE_VNNI)
    int8_kernel<Vpdpbusd>(VPDPBUSD, kCodeMantissa, kMaxCode, 0),
#endif
    int8_kernel<Vpmaddubsw<1>>(VPMADDUBSW, kCodeMantissa, kMaxCode, 16),
    int8_kernel<Vpmaddubsw<1>>(VPMADDUBSW, 3, 15, 16),
    int8_kernel<Vpmaddubsw<2>>(VPMADDUBSW, 5, 63, 8),
    int8_kernel<Vpmaddubsw<4>>(VPMADDUBSW, kCodeMantissa, kMaxCode, 4),
    int8_kernel<Vpmaddwd>(VPMADDUBSW, kCodeMantissa, kMaxCode, 0),
};

}  // namespace

#endif
