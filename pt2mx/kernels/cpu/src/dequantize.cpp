// Dequantizes rows of whole groups with E8M0 scales in registers, faster than the tiles of quantize.cpp,
// which calls this.

#include <type_traits>

#include "decode.h"

namespace {

constexpr i64 kGrain = 1 << 15;  // values that are worth another thread

// The values of a group in their order, of those at even and at odd positions.
inline void interleave(Floats* v) {
#if defined(__AVX512BW__)
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512 even = __m512(v[0]), odd = __m512(v[1]);
  v[0] = Floats(_mm512_permutex2var_ps(even, low, odd));
  v[1] = Floats(_mm512_permutex2var_ps(even, _mm512_add_epi32(low, _mm512_set1_epi32(8)), odd));
#elif defined(__AVX2__)
  const Floats values[4] = {v[0], v[2], v[1], v[3]};
  for (int i = 0; i < 4; i += 2) {
    const __m256 low = _mm256_unpacklo_ps(__m256(values[i]), __m256(values[i + 1]));
    const __m256 high = _mm256_unpackhi_ps(__m256(values[i]), __m256(values[i + 1]));
    v[i] = Floats(_mm256_permute2f128_ps(low, high, 0x20));
    v[i + 1] = Floats(_mm256_permute2f128_ps(low, high, 0x31));
  }
#else
  (void)v;
#endif
}

// Stores a group of values times a factor. Returns true if one is a NaN.
template <class Decoder, class F>
inline bool dequantize_group(const QuantizeCall& c, Decoder& decoder, const u8* codes, F factor, bool rounds, i64 at) {
  Floats values[kVectors];
  decoder.decode(codes, factor, values);
  if (Decoder::kEvenOdd) interleave(values);
  Ints nan{};
  for (Floats& v : values) {
    nan |= v != v;
    if (rounds) v = rounded(v, c.out_dtype);
  }
  for (int v = 0; v < kVectors; v += 2) store_two(c.out, c.out_dtype, at + v * kWidth, values[v], values[v + 1]);
  return any_bit(nan);
}

// Stores the values of row `row` of the codes. Returns false for a row with a NaN, whose bits a decoder does not keep.
// Values of an ordinary scale are normal numbers and need one factor; bfloat16 represents them.
template <class Decoder>
bool dequantize_row(const QuantizeCall& c, i64 row) {
  LinearCall call{};
  call.table = c.table;
  Decoder decoder(call);
  constexpr int32_t kShift = Decoder::kShift;
  const i64 groups = c.n / kGroup, per_block = c.block / kGroup, blocks = (c.n + c.block - 1) / c.block;
  const u8* codes = static_cast<const u8*>(c.x) + row * groups * Decoder::kBytes;
  const u8* scale = static_cast<const u8*>(c.scale) + row * blocks;
  bool nan = false;
  for (i64 block = 0, at = row * c.n; block < blocks; ++block) {
    const int32_t exponent = scale[block] + kShift;
    const bool ordinary = exponent > 24 && std::max<int32_t>(exponent, scale[block]) < 255;
    const i64 last = std::min(groups, (block + 1) * per_block);
    for (i64 g = block * per_block; g < last; ++g, codes += Decoder::kBytes, at += kGroup) {
      if (ordinary) nan |= dequantize_group(c, decoder, codes, from_bits(exponent << 23), c.out_dtype == FP16, at);
      else nan |= dequantize_group(c, decoder, codes, factors_of(scale[block], kShift), true, at);
    }
  }
  return !nan && !decoder.invalid();
}

int32_t run_here(i64 begin, i64 end, i64, void (*work)(i64, i64, void*), void* context) {
  work(begin, end, context);
  return 0;
}

template <class Decoder>
void run(i64 begin, i64 end, void* context) {
  const QuantizeCall& c = *static_cast<const QuantizeCall*>(context);
  const KeepSubnormals keep;
  for (i64 row = begin; row < end; ++row) {
    if (dequantize_row<Decoder>(c, row)) continue;
    QuantizeCall tiles = c;
    tiles.format = 0;
    tiles.outer = 1;
    tiles.x = static_cast<const u8*>(c.x) + row * (c.n / kGroup) * Decoder::kBytes;
    tiles.scale = static_cast<u8*>(c.scale) + row * ((c.n + c.block - 1) / c.block);
    tiles.out = static_cast<u8*>(c.out) + row * c.n * (c.out_dtype == FP32 ? 4 : 2);
    pt2mx_run(&tiles, run_here);
  }
}

}  // namespace

extern "C" int32_t pt2mx_dequantize_rows(const QuantizeCall* call, ParallelFor parallel_for) {
  const QuantizeCall& c = *call;
  if (c.inner != 1 || c.n % kGroup || c.block % kGroup || c.spec->float_scale) return kUnsupported;
  int32_t error = kUnsupported;
  with_decoder(c.format, [&](auto* decoder) {
    using Decoder = std::remove_pointer_t<decltype(decoder)>;
    if constexpr (!std::is_same_v<Decoder, Decoded>)
      error = parallel_for(0, c.outer, std::max<i64>(1, kGrain / c.n), run<Decoder>, const_cast<QuantizeCall*>(call));
  });
  return error;
}
