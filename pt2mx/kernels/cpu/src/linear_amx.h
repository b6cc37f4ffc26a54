// linear_mx of up to 32 rows of x in bfloat16 by AMX: 32 rows of the weight are decoded to bfloat16 a chunk at a time
// and multiplied with all of x, with sums in fp32.
//
// AMX treats subnormal numbers as zero, as torch's own bfloat16 matmul does. linear_fp32.h multiplies rows of the
// weight with such values, and rows with codes that have to be looked up.

#pragma once

#include <mutex>

#include "decode_bf16.h"
#include "linear_fp32.h"

#if defined(PT2MX_HAVE_MATRIX_ISA)

namespace {

struct LinearAmx {
  Linear& linear;
  Buffer<u16> x;                // (groups, 2, kTileRows pairs of values, kTileRows rows, 2)
  mutable std::once_flag once;  // of preparing `linear` for linear_fp32.h

  explicit LinearAmx(Linear& linear) : linear(linear) {
    x.resize(linear.groups * 2 * kTileElems);
    const LinearCall& c = linear.call;
    for (i64 m = 0; m < c.m; ++m) {
      const u16* values = static_cast<const u16*>(c.x) + m * c.k;
      u16* row = x.data() + m / kTileRows * kTileElems + m % kTileRows * 2;
      for (i64 first = 0; first < c.k; first += kGroup, row += 2 * kTileElems) {
        for (i64 i = 0; i < std::min(kGroup, c.k - first); ++i) row[i / 2 * kTileRows * 2 + i % 2] = values[first + i];
      }
    }
  }
};

// sums: (2, 2, kTileRows, kTileRows) += w: (groups, 2, kTileRows, kGroup) times x: (groups, 2, kTileRows, kTileRows,
// 2). The tiles lie as in the drawing of gemm_microkernel.h, with the weight as the left operand. Without `full` x has
// up to 16 rows, and its second tile is skipped.
__attribute__((target("amx-tile,amx-bf16"))) NOINLINE void accumulate_amx(const u16* w, const u16* x, i64 groups,
                                                                          bool full, float* sums) {
  constexpr i64 kSums = kTileRows * kTileRows;
  _tile_loadd(0, sums, 64);
  _tile_loadd(2, sums + 2 * kSums, 64);
  if (!full) {
    for (i64 g = 0; g < groups; ++g, w += 2 * kTileElems, x += 2 * kTileElems) {
      _tile_loadd(6, x, 64);
      _tile_loadd(4, w, 64);
      _tile_loadd(5, w + kTileElems, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(2, sums + 2 * kSums, 64);
    return;
  }
  _tile_loadd(1, sums + kSums, 64);
  _tile_loadd(3, sums + 3 * kSums, 64);
  for (i64 g = 0; g < groups; ++g, w += 2 * kTileElems, x += 2 * kTileElems) {
    _tile_loadd(4, w, 64);
    _tile_loadd(6, x, 64);
    _tile_loadd(5, w + kTileElems, 64);
    _tile_loadd(7, x + kTileElems, 64);
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
void run_linear_amx(i64 begin, i64 end, void* context) {
  const LinearAmx& amx = *static_cast<const LinearAmx*>(context);
  const LinearCall& c = amx.linear.call;
  const i64 groups = amx.linear.groups;
  const KeepSubnormals keep;
  Buffer<u16> w;
  Buffer<float> sums;  // (2, kTileRows rows of the weight, 2, kTileRows rows of x)
  w.resize(kChunkGroups * 2 * kTileElems);
  sums.resize(kNR * kMR);
  configure_amx();
  for (i64 row = begin * kNR; row < std::min(end * kNR, c.n); row += kNR) {
    Decoder decoder(c);
    bool subnormal = false;
    sums.zero();
    for (i64 g = 0; g < groups; g += kChunkGroups) {
      const i64 count = std::min(kChunkGroups, groups - g);
      subnormal |= decode_chunk(c, decoder, row, g, g + count, w.data());
      accumulate_amx(w.data(), amx.x.data() + g * 2 * kTileElems, count, kTileRows < c.m, sums.data());
    }
    if (subnormal || decoder.invalid()) {
      std::call_once(amx.once, [&] { prepare(amx.linear, Decoder::kEvenOdd); });
      run<Decoder, 4>(row / kRows, (std::min(row + kNR, c.n) + kRows - 1) / kRows, &amx.linear);
      continue;
    }
    for (i64 m = 0; m < c.m; ++m) {
      const float* from = sums.data() + m / kTileRows * kTileRows * kTileRows + m % kTileRows;
      float y[kNR];
      for (i64 q = 0; q < kNR; ++q)
        y[q] = from[(q / kTileRows * 2 * kTileRows + q % kTileRows) * kTileRows] * amx.linear.result_factor;
      finish(amx.linear, m, row, std::min(kNR, c.n - row), y);
    }
  }
  release_amx();
}

template <class Decoder>
int32_t linear_amx(Linear& linear, ParallelFor parallel_for) {
  LinearAmx amx(linear);
  return parallel_for(0, (linear.call.n + kNR - 1) / kNR, 1, run_linear_amx<Decoder>, &amx);
}

}  // namespace

#endif
