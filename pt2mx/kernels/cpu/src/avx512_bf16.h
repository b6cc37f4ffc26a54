// The product of a row of bfloat16 values by AVX512_BF16: codes of 4 and 6 bits become bfloat16, which is exact, by a
// table in a register, and pairs of products are added in fp32. Included by linear.cpp.
//
// These instructions take subnormal numbers for zero, and a scale is applied to the sum of its block: values of x so
// small, and rows of the weight with scales so extreme, that this could lose something, go the way of other rows.

#pragma once

#if defined(PT2MX_PAIRS)

#include <cmath>
#include <mutex>

#define PAIRS __attribute__((target("avx512vbmi,avx512bf16")))

namespace {

constexpr i64 kSpan = 4 * kGroup;  // values that are decoded together, to four vectors of 32
constexpr i64 kAhead = 6144;       // bytes, of the codes that are fetched: the processor alone does it too late

// The first `n` values of the table of codes as bfloat16, twice where they are 16: look-ups take five bits.
inline __m512i table_of(const LinearCall& call, int n) {
  u16 values[32];
  for (int i = 0; i < 32; ++i) values[i] = u16(bits_of(call.table[i % n]) >> 16);
  return _mm512_loadu_si512(values);
}

// A decoder has: kBytes of a span; kLanes, the sums next to each other that belong to a block; decode; and place, of
// value `i` of vector `v` in the span.

struct NibblePairs {
  static constexpr i64 kBytes = 64;
  static constexpr int kLanes = 4;
  __m512i table;

  explicit NibblePairs(const LinearCall& call) : table(table_of(call, 16)) {}
  static i64 place(i64 v, i64 i) { return 4 * i + v; }
  PAIRS void decode(const u8* data, __m512i* out) const {
    const __m512i codes = _mm512_loadu_si512(data);  // what is above the four bits does not matter
    out[0] = _mm512_permutexvar_epi16(codes, table);
    out[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table);
    out[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table);
    out[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), table);
  }
};

struct SixPairs {
  static constexpr i64 kBytes = 96;
  static constexpr int kLanes = 16;
  __m512i table, spread, shifts;

  explicit SixPairs(const LinearCall& call) : table(table_of(call, 32)) {
    u16 counts[32];
    u8 bytes[64];
    for (int i = 0; i < 32; ++i) {  // of each three bytes the first two, with codes 0 and 1, and the last two
      const int first = i / 4 * 3 + i % 4 / 2;
      bytes[2 * i] = u8(first);
      bytes[2 * i + 1] = u8(first + 1);
      counts[i] = u16(i % 4 / 2 * 4 + i % 2 * 6);
    }
    spread = _mm512_loadu_si512(bytes);
    shifts = _mm512_loadu_si512(counts);
  }
  static i64 place(i64 v, i64 i) { return kGroup * v + i; }
  PAIRS void decode(const u8* data, __m512i* out) const {
    for (int v = 0; v < 4; ++v) {
      const __m512i bytes = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(0xFFFFFF, data + 24 * v));
      const __m512i codes = _mm512_srlv_epi16(_mm512_permutexvar_epi8(spread, bytes), shifts);
      const __m512i values = _mm512_permutexvar_epi16(codes, table);  // of five bits
      out[v] = _mm512_ternarylogic_epi32(values, _mm512_slli_epi16(codes, 10), _mm512_set1_epi16(short(0x8000)), 0xF8);
    }
  }
};

// Whether x has values below 2**-100 other than zero: sums of their products could be subnormal.
inline bool has_tiny_values(const LinearCall& c) {
  u32 tiny = 0;
  for (i64 i = 0; i < c.k; ++i) {
    const u32 magnitude = static_cast<const u16*>(c.x)[i] & 0x7FFF;
    tiny |= magnitude && magnitude < (kBias - 100) << 7;
  }
  return tiny;
}

struct Paired {
  Linear& linear;
  const i64 spans;              // of a row, the last one perhaps not whole
  Buffer<u16> x;                // (spans * kSpan) in the order of the decoder
  mutable std::once_flag once;  // linear is prepared for rows that go the other way

  explicit Paired(Linear& linear) : linear(linear), spans((linear.call.k + kSpan - 1) / kSpan) {}
};

template <class Pairs>
void arrange_pairs(Paired& paired) {
  const LinearCall& c = paired.linear.call;
  paired.x.resize(paired.spans * kSpan);
  paired.x.zero();
  u16* out = paired.x.data();
  for (i64 first = 0; first < c.k; first += kSpan, out += kSpan) {
    for (i64 i = 0; i < kSpan; ++i) {
      const i64 at = first + Pairs::place(i / 32, i % 32);
      if (at < c.k) out[i] = static_cast<const u16*>(c.x)[at];
    }
  }
}

PAIRS inline __m512 add_products(__m512 sum, __m512i w, const u16* x) {
  return _mm512_dpbf16_ps(sum, __m512bh(w), __m512bh(_mm512_loadu_si512(x)));
}

// total + spans of a row of the weight times x.
template <class Pairs>
PAIRS NOINLINE __m512 multiply_pairs(const Pairs& own, const u8* codes, const float* factors, const u16* x, i64 spans,
                                     __m512 total) {
  const Pairs decoder = own;  // in registers
  const __m512i block_of_lane = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  for (i64 s = 0; s < spans; ++s, codes += Pairs::kBytes, factors += 4, x += kSpan) {
    for (i64 at = 0; at < Pairs::kBytes; at += 64)
      __builtin_prefetch(codes + kAhead + at, 0, 1);  // to L2: more at a time
    __m512i w[4];
    decoder.decode(codes, w);
    __m512 sum = _mm512_setzero_ps();
    for (int v = 0; v < 4; ++v) {
      sum = add_products(sum, w[v], x + v * 32);
      if (Pairs::kLanes == 16) {  // a vector is a block
        total = _mm512_fmadd_ps(sum, _mm512_set1_ps(factors[v]), total);
        sum = _mm512_setzero_ps();
      }
    }
    if (Pairs::kLanes == 4) {
      const __m512 of_blocks = _mm512_broadcast_f32x4(_mm_loadu_ps(factors));
      total = _mm512_fmadd_ps(sum, _mm512_permutexvar_ps(block_of_lane, of_blocks), total);
    }
  }
  return total;
}

// The factors of the groups [begin, end) of a row, `per_block` of them a block of `scale`, and zeros up to a whole
// span. Returns whether all are from 2**-64 to 2**64, or the least one, which blocks of zeros have.
inline bool set_factors(const u8* scale, i64 per_block, i64 begin, i64 end, float* out) {
  u8 expanded[kChunk];
  const u8* bytes = scales_of_groups(scale, per_block, begin, end, expanded);
  u32 extreme = 0;
#pragma omp simd reduction(| : extreme)
  for (i64 i = 0; i < end - begin; ++i) {
    const u32 byte = bytes[i];
    extreme |= byte && byte - (kBias - 64) > 128;
    out[i] = from_bits(byte ? byte << 23 : 1 << 22);
  }
  for (i64 i = end - begin; i % 4; ++i) out[i] = 0;
  return !extreme;
}

// One row of the weight. Returns NaN where it has to go the other way.
template <class Pairs>
float times_pairs(const Paired& paired, const Pairs& decoder, i64 row) {
  const LinearCall& c = paired.linear.call;
  const i64 groups = paired.linear.groups, whole = c.k / kSpan;
  __m512 sums = _mm512_setzero_ps();
  for (i64 g = 0; g < groups; g += kChunk) {
    float factors[kChunk];
    const i64 end = std::min(g + kChunk, groups), first = g / 4;
    if (!set_factors(c.scale + row * c.row_blocks, c.block / kGroup, g, end, factors)) return NAN;
    const i64 full = std::min((end - g + 3) / 4, whole - first);
    const u16* x = paired.x.data() + g * kGroup;
    const u8* codes = c.data + row * c.row_bytes + first * Pairs::kBytes;
    sums = multiply_pairs(decoder, codes, factors, x, full, sums);
    if (end < groups || first + full == paired.spans) continue;
    u8 rest[Pairs::kBytes];
    codes = last_group<Pairs, kSpan>(c, row, rest);
    sums = multiply_pairs(decoder, codes, factors + 4 * full, x + full * kSpan, 1, sums);
  }
  return sum_of(Floats(sums));
}

template <class Pairs, class Decoder>
void run_pairs(i64 begin, i64 end, void* context) {
  const Paired& paired = *static_cast<const Paired*>(context);
  const Pairs decoder(paired.linear.call);
  const KeepSubnormals keep;
  for (i64 tile = begin; tile < end; ++tile) {
    const i64 row = tile * kRows, rows = std::min<i64>(kRows, paired.linear.call.n - row);
    float y[kRows];
    bool finite = true;
    for (i64 q = 0; q < rows; ++q) {
      y[q] = times_pairs(paired, decoder, row + q);
      finite &= std::abs(y[q]) < INFINITY;  // else perhaps of a sum without its scale
    }
    if (finite) {
      finish(paired.linear, 0, row, rows, y);
    } else {
      std::call_once(paired.once, [&] { prepare(paired.linear, Decoder::kPairs); });
      run<Decoder, 1>(tile, tile + 1, &paired.linear);
    }
  }
}

// What reads the codes that `Decoder` reads, if they are of 4 or 6 bits.
template <class Decoder>
struct PairsOf {
  using type = void;
};
template <>
struct PairsOf<Nibbles> {
  using type = NibblePairs;
};
template <int E, int M, bool Nan>
struct PairsOf<Halves<E, M, Nan>> {
  using type = std::conditional_t<E + M == 5, SixPairs, void>;
};

template <class Pairs, class Decoder>
int32_t multiply_in_pairs(Linear& linear, i64 tiles, i64 grain, ParallelFor parallel_for) {
  Paired paired(linear);
  arrange_pairs<Pairs>(paired);
  return parallel_for(0, tiles, grain, run_pairs<Pairs, Decoder>, &paired);
}

}  // namespace

#else

namespace {
bool has_tiny_values(const LinearCall&) { return false; }
template <class Decoder>
struct PairsOf {
  using type = void;
};
template <class Pairs, class Decoder>
int32_t multiply_in_pairs(Linear&, i64, i64, ParallelFor) {
  return 1;
}
}  // namespace

#endif
