// Rows of packed keys and values decoded to bfloat16, which is exact, two groups at a time.
//
// A decoder of rows has
//   start      begins a row
//   decode     one or two groups of the row, in the order of their values
//   failed     true if a value was subnormal, which matrix instructions take for zero, or not finite

#pragma once

#include "decode_bf16.h"
#include "look_up_bf16.h"
#include "packed_attention.h"

#if defined(PT2MX_HAVE_MATRIX_ISA)

namespace {

// What look-ups and E8M0 scales of a format do to exponents.
struct RowScales {
  i64 bias;         // as look_up_bf16.h has it
  u32 shift[256];   // what a scale takes from two values
  u8 extreme[256];  // 1 if a value could become subnormal or infinite

  explicit RowScales(const float* table) {
    i64 lowest = 254, highest = 1;  // biased exponents
    for (int i = 0; i < 256; ++i) {
      const u32 magnitude = bits_of(table[i]) & kMagnitude;
      if (!magnitude || magnitude >= u32(kInf)) continue;
      lowest = std::min<i64>(lowest, magnitude >> 23);
      highest = std::max<i64>(highest, magnitude >> 23);
    }
    bias = 254 - highest;
    for (i64 scale = 0; scale < 256; ++scale) {
      const i64 exponent = scale - kBias;
      extreme[scale] = exponent < 1 - lowest || exponent > bias;
      shift[scale] = extreme[scale] ? 0 : u32((bias - exponent) << 7) * 0x10001u;
    }
  }
};

template <class LookUp>
class RowsByLookUp {
 public:
  RowsByLookUp(const CacheRows& rows, const RowScales& scales)
      : rows_(&rows), scales_(&scales), look_up_(rows.call, scales.bias) {}

  void start(i64 row) {
    codes_ = rows_->call.data + row * rows_->call.row_bytes;
    scale_ = rows_->call.scale + row * rows_->call.row_blocks;
  }
  template <i64 kGroups>
  TARGET_AVX512_VBMI void decode(i64 group, __m512i* out) {
    look_up_.template decode<kGroups>(codes_ + group * LookUp::kBytes, out);
    for (i64 i = 0; i < kGroups; ++i) {
      const u8 scale = scale_[rows_->block_of[group + i]];
      if (scales_->extreme[scale]) failed_ |= _mm512_test_epi16_mask(out[i], out[i]);
      out[i] = _mm512_subs_epu16(out[i], _mm512_set1_epi32(int32_t(scales_->shift[scale])));
    }
  }
  bool failed() const { return failed_ || look_up_.invalid(); }

 private:
  const CacheRows* rows_;
  const RowScales* scales_;
  LookUp look_up_;
  __mmask32 failed_ = 0;
  const u8 *codes_ = nullptr, *scale_ = nullptr;
};

// Scales with a significand, by a decoder to fp32.
template <class Decoder>
class RowsByFloats {
 public:
  RowsByFloats(const CacheRows& rows, const RowScales&) : call_(&rows.call), decoder_(rows.call) {}

  void start(i64 row) {
    codes_ = call_->data + row * call_->row_bytes;
    set_half_factors(*call_, row, 0, call_->k / kGroup, 1, Decoder::kShift, halves_);
  }
  template <i64 kGroups>
  void decode(i64 group, __m512i* out) {
    for (i64 g = group; g < group + kGroups; ++g, ++out) {
      Floats values[kVectors];
      decoder_.decode(codes_ + g * Decoder::kBytes, halves_[g], values);
      for (const Floats& v : values) failed_ |= _mm512_fpclass_ps_mask(__m512(v), 0xB9);  // subnormal, Inf, NaN
      *out = __m512i(to_bf16<Decoder::kEvenOdd>(Ints(values[0]), Ints(values[1])));
    }
  }
  bool failed() const { return failed_ || decoder_.invalid(); }

 private:
  const LinearCall* call_;
  Decoder decoder_;
  __mmask16 failed_ = 0;
  HalfFactors halves_[kMaxWidth / kGroup];
  const u8* codes_ = nullptr;
};

}  // namespace

#endif
