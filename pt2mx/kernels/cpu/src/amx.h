// The product of up to 32 rows of bfloat16 values in the matrix registers of AMX: 32 rows of the weight are decoded to
// bfloat16 at a time, which is exact, and multiplied with x, with sums in fp32. Included by linear.cpp.
//
// The registers take subnormal numbers for zero, as they do in torch's own products of bfloat16 values. Rows with
// weights that small, and rows with codes that have to be looked up, go the way of other rows.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, "Programming with Intel AMX".

#pragma once

#if defined(PT2MX_TILES)

#include <mutex>

namespace {

constexpr i64 kDepth = 8;  // groups that are decoded at a time: of both operands they fit the first-level cache

struct Tiled {
  Linear& linear;
  Buffer<u16> x;                // (groups, 2, kSide pairs of values, kSide rows, 2)
  mutable std::once_flag once;  // linear is prepared for rows that go the other way

  explicit Tiled(Linear& linear) : linear(linear) {
    x.resize(linear.groups * 2 * kTile);
    const LinearCall& c = linear.call;
    for (i64 m = 0; m < c.m; ++m) {
      const u16* values = static_cast<const u16*>(c.x) + m * c.k;
      u16* row = x.data() + m / kSide * kTile + m % kSide * 2;
      for (i64 first = 0; first < c.k; first += kGroup, row += 2 * kTile) {
        for (i64 i = 0; i < std::min(kGroup, c.k - first); ++i) row[i / 2 * kSide * 2 + i % 2] = values[first + i];
      }
    }
  }
};

// The values of a group in their order, which are those at even and at odd places, or else the two halves.
template <bool Pairs>
inline Ints to_bfloats(Ints first, Ints second) {
  if (Pairs) return (second & int32_t(0xFFFF0000)) | ((first >> 16) & 0xFFFF);
  const __m256i low = _mm512_cvtepi32_epi16(__m512i(first >> 16)), high = _mm512_cvtepi32_epi16(__m512i(second >> 16));
  return Ints(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}

// One chunk of the weight's rows from `row` on, decoded: w (depth, 2, kSide, kGroup). Returns whether a weight is
// subnormal.
template <class Decoder>
bool decode_chunk(const LinearCall& c, Decoder& decoder, i64 row, i64 begin, i64 end, u16* w) {
  __mmask16 subnormal = 0;
  for (i64 q = 0; q < kPair; ++q) {
    const i64 at = std::min(row + q, c.n - 1);
    const u8* codes = c.data + at * c.row_bytes + begin * Decoder::kBytes;
    u8 rest[Decoder::kBytes];
    Scales scales;
    scales.set(c.scale + at * c.row_blocks, c.block / kGroup, begin, end, Decoder::kShift);
    if (!scales.ordinary) scales.split(c.scale + at * c.row_blocks, c.block / kGroup, begin, end, Decoder::kShift);
    u16* out = w + q * kGroup;
    for (i64 i = 0; i < end - begin; ++i, codes += Decoder::kBytes, out += 2 * kTile) {
      Floats values[kVectors];
      if ((begin + i + 1) * kGroup > c.k) codes = last_group<Decoder>(c, at, rest);
      if (scales.ordinary) {
        decoder.decode(codes, scales.one[i], values);
      } else {
        decoder.decode(codes, scales.two[i], values);
        for (int v = 0; v < kVectors; ++v) subnormal |= _mm512_fpclass_ps_mask(__m512(values[v]), 0x20);
      }
      __builtin_prefetch(codes + kPair * c.row_bytes);
      store(out, to_bfloats<Decoder::kPairs>(Ints(values[0]), Ints(values[1])));
    }
  }
  return subnormal;
}

// sums: (2, 2, kSide, kSide) += w: (depth, 2, kSide, kGroup) times x: (depth, 2, kSide, kSide, 2), of which only the
// first half where the second one is empty.
__attribute__((target("amx-tile,amx-bf16"))) NOINLINE void multiply_tiles(const u16* w, const u16* x, i64 depth,
                                                                          bool full, float* sums) {
  constexpr i64 kSums = kSide * kSide;
  _tile_loadd(0, sums, 64);
  _tile_loadd(2, sums + 2 * kSums, 64);
  if (!full) {
    for (i64 g = 0; g < depth; ++g, w += 2 * kTile, x += 2 * kTile) {
      _tile_loadd(6, x, 64);
      _tile_loadd(4, w, 64);
      _tile_loadd(5, w + kTile, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(2, sums + 2 * kSums, 64);
    return;
  }
  _tile_loadd(1, sums + kSums, 64);
  _tile_loadd(3, sums + 3 * kSums, 64);
  for (i64 g = 0; g < depth; ++g, w += 2 * kTile, x += 2 * kTile) {
    _tile_loadd(4, w, 64);
    _tile_loadd(6, x, 64);
    _tile_loadd(5, w + kTile, 64);
    _tile_loadd(7, x + kTile, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + kSums, 64);
  _tile_stored(2, sums + 2 * kSums, 64);
  _tile_stored(3, sums + 3 * kSums, 64);
}

template <class Decoder>
void run_tiles(i64 begin, i64 end, void* context) {
  const Tiled& tiled = *static_cast<const Tiled*>(context);
  const LinearCall& c = tiled.linear.call;
  const i64 groups = tiled.linear.groups;
  const KeepSubnormals keep;
  Buffer<u16> w;
  Buffer<float> sums;  // (2, kSide, 2, kSide), the weight's rows first
  w.resize(kDepth * 2 * kTile);
  sums.resize(kPair * kPair);
  configure();
  for (i64 row = begin * kPair; row < std::min(end * kPair, c.n); row += kPair) {
    Decoder decoder(c);
    bool subnormal = false;
    sums.zero();
    for (i64 g = 0; g < groups; g += kDepth) {
      const i64 depth = std::min(kDepth, groups - g);
      subnormal |= decode_chunk(c, decoder, row, g, g + depth, w.data());
      multiply_tiles(w.data(), tiled.x.data() + g * 2 * kTile, depth, kSide < c.m, sums.data());
    }
    if (subnormal || decoder.invalid()) {
      std::call_once(tiled.once, [&] { prepare(tiled.linear, Decoder::kPairs); });
      run<Decoder, 4>(row / kRows, (std::min(row + kPair, c.n) + kRows - 1) / kRows, &tiled.linear);
      continue;
    }
    for (i64 m = 0; m < c.m; ++m) {
      const float* from = sums.data() + m / kSide * kSide * kSide + m % kSide;
      float y[kPair];
      for (i64 q = 0; q < kPair; ++q) y[q] = from[(q / kSide * 2 * kSide + q % kSide) * kSide];
      finish(tiled.linear, m, row, std::min(kPair, c.n - row), y);
    }
  }
  release();
}

template <class Decoder>
int32_t multiply_in_tiles(Linear& linear, ParallelFor parallel_for) {
  Tiled tiled(linear);
  return parallel_for(0, (linear.call.n + kPair - 1) / kPair, 1, run_tiles<Decoder>, &tiled);
}

}  // namespace

#else

namespace {
template <class Decoder>
int32_t multiply_in_tiles(Linear&, ParallelFor) {
  return 1;
}
}  // namespace

#endif
