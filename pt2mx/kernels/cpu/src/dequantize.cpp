// Dequantizes rows of whole groups with E8M0 scales in registers, 2.5x faster than the tiles of quantize.cpp, which
// calls this.

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

// Stores the values of row `row` of the codes. Returns false for a row with a NaN, whose bits a decoder does not keep.
template <class Decoder>
bool dequantize_row(const QuantizeCall& c, i64 row) {
  LinearCall call{};
  call.table = c.table;
  Decoder decoder(call);
  const i64 groups = c.n / kGroup, per_block = c.block / kGroup, blocks = (c.n + c.block - 1) / c.block;
  const u8* codes = static_cast<const u8*>(c.x) + row * groups * Decoder::kBytes;
  const u8* scale = static_cast<const u8*>(c.scale) + row * blocks;
  Ints nan{};
  for (i64 block = 0; block < blocks; ++block) {
    const TwoFactors f = factors_of(scale[block], Decoder::kShift);
    for (i64 g = block * per_block; g < std::min(groups, (block + 1) * per_block); ++g, codes += Decoder::kBytes) {
      Floats values[kVectors];
      decoder.decode(codes, f, values);
      const i64 at = row * c.n + g * kGroup;
      if (Decoder::kEvenOdd) interleave(values);
      for (int v = 0; v < kVectors; ++v) nan |= values[v] != values[v];
      for (int v = 0; v < kVectors; v += 2) {
        store_two(c.out, c.out_dtype, at + v * kWidth, rounded(values[v], c.out_dtype),
                  rounded(values[v + 1], c.out_dtype));
      }
    }
  }
  i64 any = 0;
  for (i64 i = 0; i < kWidth; ++i) any |= nan[i];
  return !any && !decoder.invalid();
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
