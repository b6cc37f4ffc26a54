// Sums of a strip of groups of integers by AMX, for linear_int8.h. A tile register of sums has up to 16 rows of x times
// 16 rows of the weight for one group. So each sum is exact, and vectors add sums as in int8_microkernel.h:
//
//                                     tmm1: a group of the weight, as in int8_columns.h
//                                     row 0             row 1             ...    row 15
//                                   +---------------------------------------------------+
//     tmm2: 32 codes of each row    | tmm0 = tmm2 * tmm1                                |
//                                   +---------------------------------------------------+

#pragma once

#include <algorithm>

#include "buffer.h"
#include "int8_columns.h"

#if defined(PT2MX_HAVE_INT8)

namespace {

constexpr i64 kRowsOfAmx = 8;  // the fewest rows of x for which AMX is faster, as measured

#if defined(PT2MX_HAVE_MATRIX_ISA)

// Codes of x as tiles.
class CodeTiles {
 public:
  void resize(i64 m, i64 groups) {
    m_ = m;
    groups_ = groups;
    config_.rows[0] = config_.rows[2] = u8(std::min(m, kTileRows));
    config_.rows[1] = kSteps;
    config_.row_bytes[2] = kGroup;
    codes_.resize(groups * group_bytes());
    powers_.resize(m * groups);
  }
  // Sets a group of a row of x.
  void put(i64 m, i64 group, const CodeGroup& from) {
    std::memcpy(codes_.data() + group * group_bytes() + m * kGroup, from.codes, kGroup);
    powers_.data()[m * groups_ + group] = from.power;
  }
  void configure() const { configure_amx(config_); }
  static void release() { release_amx(); }

  // totals: (m, kWidth) += x, `count` groups from `first` on, times w: (count).
  void multiply(const GroupColumns* w, i64 first, i64 count, float* totals) const {
    alignas(64) int32_t sums[kStripGroups][kTileRows][kWidth];
    for (i64 top = 0; top < m_; top += kTileRows) {
      multiply_tiles(w, codes_.data() + first * group_bytes() + top * kGroup, group_bytes(), count, sums[0][0]);
      for (i64 m = top; m < std::min(top + kTileRows, m_); ++m, totals += kWidth) {
        const int32_t* power = powers_.data() + m * groups_ + first;
        Floats strip{};
        for (i64 g = 0; g < count; ++g) {
          const Floats sum = Floats(_mm512_cvtepi32_ps(_mm512_load_si512(sums[g][m - top])));
          strip = fused(sum, Floats(load<Ints>(w[g].powers) + power[g]), strip);
        }
        store(totals, load<Floats>(totals) + strip);
      }
    }
  }

 private:
  // Writes sums: (groups, kTileRows, kWidth). It uses three tile registers: with all eight it took twice as long, as
  // measured.
  __attribute__((target("amx-tile,amx-int8"))) NOINLINE static void multiply_tiles(const GroupColumns* w, const u8* x,
                                                                                   i64 group_bytes, i64 groups,
                                                                                   int32_t* sums) {
    for (i64 g = 0; g < groups; ++g, x += group_bytes, sums += kTileRows * kWidth) {
      _tile_loadd(1, w[g].codes, kStepBytes);
      _tile_loadd(2, x, kGroup);
      _tile_zero(0);
      _tile_dpbssd(0, 2, 1);
      _tile_stored(0, sums, 4 * kWidth);
    }
  }

  i64 group_bytes() const { return (m_ > kTileRows ? 2 * kTileRows : m_) * kGroup; }

  i64 m_ = 0, groups_ = 0;
  TileConfig config_;
  Buffer<u8> codes_;        // (groups, m or whole tiles, kGroup)
  Buffer<int32_t> powers_;  // (m, groups), as in CodeGroup
};

#else

class CodeTiles {
 public:
  void resize(i64, i64) {}
  void put(i64, i64, const CodeGroup&) {}
  void configure() const {}
  static void release() {}
  void multiply(const GroupColumns*, i64, i64, float*) const {}
};

#endif

}  // namespace

#endif
