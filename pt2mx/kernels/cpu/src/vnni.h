// The product of many rows of bfloat16 values by AVX512_VNNI, where values of x and of the weight are codes of 8 bits
// times a power of two for each group: four products an instruction and sum, twice those of AVX512_BF16. Included by
// linear.cpp.
//
// x comes without its codes. They are looked for, and where a value has none, nothing is computed. Sums of a group are
// exact; those of a row are in fp32, in one order. A power of two is the bits of a float's exponent: those of x and of
// the weight are added as integers, and where the sum could leave the normal numbers, or the weight has a NaN, nothing
// is computed either. The caller then multiplies in another way.

#pragma once

#if defined(PT2MX_TILES)

namespace {

constexpr i64 kTall = 5;               // rows of x that go together, with kPair columns: 20 sums in registers
constexpr i64 kQuads = kGroup / 4;     // instructions for a group
constexpr int32_t kCodeMantissa = 6;   // a block's largest code is from 2**6 to 2**7
constexpr int32_t kLargestPower = 90;  // of a group's sum: 2**20 of these, in 2**17 groups, are finite

// ---- the weight ----

// The codes of a group as they are multiplied: 32 integers, plus 128. Of tables of 16, `Bits` of them a code.
template <int Bits>
struct CodesByTable {
  static constexpr bool kServed = true;
  __m256i tables[1 << (Bits - 4)];
  int32_t shift = 0;  // codes are values times 2**shift

  explicit CodesByTable(const float* table) {
    while (shift < 8 && !are_codes(table)) ++shift;
    for (int t = 0; t < 1 << (Bits - 4); ++t) {
      u8 codes[16];
      for (int i = 0; i < 16; ++i) codes[i] = u8(128 + int32_t(table[16 * t + i] * (1 << shift)));
      tables[t] = _mm256_broadcastsi128_si256(load128(codes));
    }
  }
  bool valid() const { return shift < 8; }
  __m256i decode(const u8* data) const {
    if (Bits == 4) {
      const __m128i bytes = load128(data), low = _mm_and_si128(bytes, _mm_set1_epi8(15));
      const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15));
      const __m256i first = _mm256_castsi128_si256(_mm_unpacklo_epi8(low, high));
      return _mm256_shuffle_epi8(tables[0], _mm256_inserti128_si256(first, _mm_unpackhi_epi8(low, high), 1));
    }
    __m256i even, odd;
    split_pairs<6>(data, &even, &odd);
    const __m256i codes = _mm256_or_si256(_mm256_srli_epi16(even, 10),
                                          _mm256_and_si256(_mm256_srli_epi16(odd, 2), _mm256_set1_epi16(0x3F00)));
    const __m256i places = _mm256_and_si256(codes, _mm256_set1_epi8(15));
    const __m256i top = _mm256_and_si256(codes, _mm256_set1_epi8(48));
    __m256i out = _mm256_shuffle_epi8(tables[0], places);
    for (int t = 1; t < 1 << (Bits - 4); ++t) {
      out =
          _mm256_mask_shuffle_epi8(out, _mm256_cmpeq_epi8_mask(top, _mm256_set1_epi8(char(16 * t))), tables[t], places);
    }
    return out;
  }

 private:
  bool are_codes(const float* table) const {
    return std::all_of(table, table + (1 << Bits), [&](float value) {
      const float code = value * (1 << shift);
      return code >= -128 && code <= 127 && code == float(int32_t(code));
    });
  }
};

template <class Decoder>
struct CodesOf {
  static constexpr bool kServed = false;
};
template <>
struct CodesOf<Nibbles> : CodesByTable<4> {
  using CodesByTable<4>::CodesByTable;
};
template <>
struct CodesOf<Halves<2, 3, false>> : CodesByTable<6> {
  using CodesByTable<6>::CodesByTable;
};
template <>
struct CodesOf<Int8> {
  static constexpr bool kServed = true;
  static constexpr int32_t shift = kCodeMantissa;
  explicit CodesOf(const float*) {}
  bool valid() const { return true; }
  __m256i decode(const u8* data) const { return _mm256_xor_si256(load256(data), _mm256_set1_epi8(char(128))); }
};

// Whether the processor has AVX512_VNNI, and the codes of a weight are integers.
template <class Decoder>
bool has_quads(const float* table) {
  static const bool available = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 11 & 1);
  }();
  if constexpr (CodesOf<Decoder>::kServed) return available && CodesOf<Decoder>(table).valid();
  return false;
}

// The exponents of powers of two that are multiplied; that of groups of zeros is 0.
struct Powers {
  int32_t least = INT16_MAX, most = INT16_MIN;
  void add(int32_t power) {
    least = std::min(least, power);
    most = std::max(most, power);
  }
  void add(Powers other) {
    add(other.least);
    add(other.most);
  }
};

// A group of 16 rows of the weight as it is multiplied.
struct Panel {
  u8 codes[kTile];        // (kQuads, kSide rows, 4)
  int32_t powers[kSide];  // the exponents of floats, as their bits
};

// A group of a pixel of x.
struct Record {
  u8 codes[kGroup];
  int32_t power;  // as those of the weight
  int32_t first;  // what a sum begins with, for what the weight's codes are too large by
};

// Rows [row, last) of the weight, from a multiple of 32 on and up to one: (16 rows each, groups) panels. Returns
// whether products with them are served.
template <class Decoder>
bool decode_codes(const Linear& linear, i64 row, i64 last, Powers x, Panel* panels) {
  const CodesOf<Decoder> decoder(linear.call.table);
  const i64 groups = linear.tap_groups, taps = linear.windows.taps;
  Powers all;
  bool finite = true;
  const i64 end_of_pair = (last + kPair - 1) / kPair * (kPair / kSide);
  for (i64 part = row / kSide * taps; part < end_of_pair * taps; ++part, panels += groups) {
    const LinearCall c = linear.call_of(part % taps);
    for (i64 begin = 0; begin < groups; begin += 2) {  // the codes of two groups are a square
      alignas(64) u8 square[2 * kTile];
      const i64 end = std::min(begin + 2, groups);
      for (i64 q = 0; q < kSide; ++q) {
        const i64 at = std::min(part / taps * kSide + q, c.n - 1);
        u8 rest[Decoder::kBytes];
        for (i64 g = begin; g < end; ++g) {
          const u8* data = c.data + at * c.row_bytes + g * Decoder::kBytes;
          __builtin_prefetch(data + kSide * c.row_bytes);
          if ((g + 1) * kGroup > c.k) data = last_group<Decoder>(c, at, rest);
          const u8 scale = c.scale[at * c.row_blocks + g / (c.block / kGroup)];
          const __m256i values = decoder.decode(data);
          store(square + (2 * q + g - begin) * kGroup, values);
          const bool zeros = !_mm256_cmpneq_epi8_mask(values, _mm256_set1_epi8(char(128)));
          const int32_t power = zeros ? 0 : scale - kBias - decoder.shift;
          all.add(power);
          finite &= scale != 255;
          panels[g].powers[q] = (power + kBias) * (1 << 23);
        }
      }
      transpose(reinterpret_cast<u16*>(square));
      for (i64 g = begin; g < end; ++g) std::memcpy(panels[g].codes, square + (g - begin) * kTile, kTile);
    }
  }
  return finite && all.most < kBias - kCodeMantissa && x.least + all.least > -kBias &&
         x.most + all.most <= kLargestPower;
}

// ---- x ----

// A group of x as codes times 2**power. Returns whether it is.
inline bool to_codes(const u16* x, Record* out, int32_t* power) {
  const __m512i values = _mm512_loadu_si512(x), magnitudes = _mm512_and_si512(values, _mm512_set1_epi16(0x7FFF));
  // -2**n counts as the number below it: there is a code of -128, and none of 128
  const __m512i keys = _mm512_subs_epu16(magnitudes, _mm512_srli_epi16(values, 15));
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(keys), _mm512_extracti64x4_epi64(keys, 1));
  const __m128i most = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  const __m128i largest = _mm_minpos_epu16(_mm_xor_si128(most, _mm_set1_epi16(-1)));
  const int32_t exponent = (~_mm_cvtsi128_si32(largest) & 0xFFFF) >> 7;
  if (exponent <= kCodeMantissa) {  // the power of two would be subnormal
    *power = 0;
    *out = {};
    return !_mm512_test_epi16_mask(magnitudes, magnitudes);
  }
  if (exponent >= 2 * kBias) return false;  // -Inf counts as 2**127
  *power = exponent - kBias - kCodeMantissa;
  const __m512 factor = _mm512_set1_ps(from_bits((exponent - kCodeMantissa) << 23));
  const __m512 inverse = _mm512_set1_ps(from_bits((2 * kBias + kCodeMantissa - exponent) << 23));
  __m512i total = _mm512_setzero_si512();
  __mmask16 exact = 0xFFFF;
  for (int h = 0; h < 2; ++h) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + h * kSide));
    const __m512 part = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(part, inverse));
    exact &= _mm512_cmp_ps_mask(_mm512_mul_ps(_mm512_cvtepi32_ps(whole), factor), part, _CMP_EQ_OQ);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out->codes + h * kSide), _mm512_cvtepi32_epi8(whole));
    total = _mm512_add_epi32(total, whole);
  }
  out->power = *power * (1 << 23);
  out->first = -128 * _mm512_reduce_add_epi32(total);
  return exact == 0xFFFF;
}

struct Coded {
  const Linear& linear;
  Tasks tasks;
  const i64 pixels, groups;  // of a pixel
  const Scratch<OF_X> scratch;
  Record* const records;  // (pixels, groups), and those of a pixel of zeros
  Powers powers;          // of x
  std::mutex mutex;       // of them
  std::atomic<bool> unserved{false};

  explicit Coded(const Linear& linear)
      : linear(linear),
        tasks(linear.call),
        pixels(linear.windows.pixels),
        groups(linear.tap_groups),
        scratch((pixels + 1) * groups * i64(sizeof(Record))),
        records(reinterpret_cast<Record*>(scratch.data())) {
    std::fill(records + pixels * groups, records + (pixels + 1) * groups, Record{});
    if (!linear.windows.are_rows()) powers.add(0);  // of these
  }

  // Returns whether all values of a pixel have codes.
  bool set_pixel(i64 pixel, Powers& powers) {
    const i64 k = linear.call.k;
    const u16* x = static_cast<const u16*>(linear.call.x) + pixel * k;
    Record* out = records + pixel * groups;
    for (i64 first = 0; first < k; first += kGroup, ++out) {
      const u16* values = x + first;
      u16 rest[kGroup] = {};
      if (k - first < kGroup) values = static_cast<const u16*>(std::memcpy(rest, values, 2 * (k - first)));
      int32_t power;
      if (!to_codes(values, out, &power)) return false;
      powers.add(power);
    }
    return true;
  }

  // The pixels of `n` rows from `row` on, up to kTall: (taps, kTall), and their places in the result. Those of missing
  // rows stay as they are.
  void find(i64 row, i64 n, const Record** out, i64* places) const {
    linear.windows.each_tap(row, n, places, [&](i64 r, i64 count, i64 tap, i64 pixel, i64 step) {
      const Record* at = pixel < 0 ? zeros() : records + pixel * groups;
      step *= pixel < 0 ? 0 : groups;
      for (i64 i = 0; i < count; ++i, at += step) out[tap * kTall + r + i] = at;
    });
  }

  const Record* zeros() const { return records + pixels * groups; }
};

void run_codes_of_x(i64 begin, i64 end, void* context) {
  Coded& coded = *static_cast<Coded*>(context);
  const KeepSubnormals keep;
  Powers powers;
  for (i64 pixel = begin; pixel < end && !coded.unserved; ++pixel) {
    if (!coded.set_pixel(pixel, powers)) coded.unserved = true;
  }
  const std::lock_guard<std::mutex> lock(coded.mutex);
  coded.powers.add(powers);
}

// ---- the product ----

// sums: (kTall, kPair) = x: (taps, kTall) pixels of `groups` groups, times w: (2, taps, groups). Some groups are summed
// by themselves: sums of sums are more exact. A tap of which all pixels are `outside` is left out.
__attribute__((target("avx512vnni"))) NOINLINE void multiply_codes(const Record* const* x, const Panel* w, i64 taps,
                                                                   i64 groups, const Record* outside, float* sums) {
  constexpr int kHalves = kPair / kSide;
  const i64 panels = taps * groups;
  std::memset(sums, 0, kTall * kPair * sizeof(float));
  for (i64 tap = 0, g = 0; tap < taps;) {
    __m512 strip[kTall][kHalves] = {};
    for (i64 left = kStripSums; left && tap < taps;) {
      const Record* row[kTall];
      bool inside = false;
      for (int r = 0; r < kTall; ++r) {
        inside |= x[tap * kTall + r] != outside;
        row[r] = x[tap * kTall + r] + g;
      }
      const i64 n = std::min(groups - g, left);
      const Panel* panel = w;
      w += n;
      for (i64 i = 0; i < n && inside; ++i, ++panel) {
        __m512i sum[kTall][kHalves];
        for (int r = 0; r < kTall; ++r) {
          for (int h = 0; h < kHalves; ++h) sum[r][h] = _mm512_set1_epi32(row[r][i].first);
        }
        for (int q = 0; q < kQuads; ++q) {
          __m512i quads[kHalves];
          for (int h = 0; h < kHalves; ++h) quads[h] = _mm512_loadu_si512(panel[h * panels].codes + q * 4 * kSide);
          for (int r = 0; r < kTall; ++r) {
            const __m512i values = _mm512_set1_epi32(load<int32_t>(row[r][i].codes + 4 * q));
            for (int h = 0; h < kHalves; ++h) sum[r][h] = _mm512_dpbusd_epi32(sum[r][h], quads[h], values);
          }
        }
        for (int h = 0; h < kHalves; ++h) {
          const __m512i powers = _mm512_loadu_si512(panel[h * panels].powers);
          for (int r = 0; r < kTall; ++r) {
            const __m512i power = _mm512_add_epi32(powers, _mm512_set1_epi32(row[r][i].power));
            strip[r][h] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][h]), _mm512_castsi512_ps(power), strip[r][h]);
          }
        }
      }
      left -= n;
      g += n;
      if (g == groups) ++tap, g = 0;
    }
    for (int r = 0; r < kTall; ++r) {
      for (int h = 0; h < kHalves; ++h) {
        float* total = sums + r * kPair + h * kSide;
        _mm512_storeu_ps(total, _mm512_add_ps(_mm512_loadu_ps(total), strip[r][h]));
      }
    }
  }
}

template <class Decoder>
void run_codes(i64, i64, void* context) {
  Coded& coded = *static_cast<Coded*>(context);
  const Linear& linear = coded.linear;
  const LinearCall& c = linear.call;
  const i64 panels = (c.task_columns + kPair - 1) / kPair * (kPair / kSide);
  const KeepSubnormals keep;
  const Scratch<OF_WEIGHT> scratch(panels * linear.groups * i64(sizeof(Panel)));
  Panel* const w = reinterpret_cast<Panel*>(scratch.data());
  std::vector<const Record*> x(linear.windows.taps * kTall, coded.records);
  alignas(64) float sums[kTall * kPair];
  i64 places[kTall];
  i64 decoded = -1;
  for (Task task; !coded.unserved && coded.tasks.take(task); decoded = task.first) {
    const auto [top, bottom, first, last] = task;
    if (decoded != first && !decode_codes<Decoder>(linear, first, last, coded.powers, w)) {
      coded.unserved = true;
      return;
    }
    for (i64 m = top; m < bottom; m += kTall) {
      const i64 rows = std::min(kTall, bottom - m);
      coded.find(m, rows, x.data(), places);
      for (i64 n = first; n < last; n += kPair) {
        const Panel* panel = w + (n - first) / kSide * linear.groups;
        multiply_codes(x.data(), panel, linear.windows.taps, coded.groups, coded.zeros(), sums);
        finish_square(linear, places, rows, n, std::min(kPair, last - n), sums);
      }
    }
  }
}

template <class Decoder>
int32_t multiply_in_codes(const Linear& linear, ParallelFor parallel_for) {
  if constexpr (CodesOf<Decoder>::kServed) {
    const LinearCall& c = linear.call;
    Coded coded(linear);
    const i64 first = std::min(kTall, coded.pixels), grain = std::max<i64>(1, (1 << 16) / c.k);
    run_codes_of_x(0, first, &coded);  // where these have no codes, no thread looks further
    if (!coded.unserved && coded.pixels > first) {
      if (const int32_t error = parallel_for(first, coded.pixels, grain, run_codes_of_x, &coded)) return error;
    }
    if (coded.unserved) return kUnserved;
    const int32_t error = parallel_for(0, coded.tasks.count(), 1, run_codes<Decoder>, &coded);
    return error ? error : coded.unserved ? kUnserved : 0;
  }
  return kUnserved;
}

}  // namespace

#else

namespace {
template <class Decoder>
bool has_quads(const float*) {
  return false;
}
template <class Decoder>
int32_t multiply_in_codes(const Linear&, ParallelFor) {
  return kUnserved;
}
}  // namespace

#endif
