// Units of the processor for products of bfloat16 values: which there are, and the matrix registers of AMX.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, "Programming with Intel AMX".

#pragma once

#include "decode.h"

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define PT2MX_PAIRS
#include <cpuid.h>
#endif

#if defined(PT2MX_PAIRS) && defined(__linux__)
#define PT2MX_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if defined(PT2MX_PAIRS)
bool has_pairs() {
  static const bool available = [] {  // to ask the processor takes microseconds in a virtual machine
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(c >> 1 & 1)) return false;  // AVX512_VBMI
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);               // AVX512_BF16
  }();
  return available;
}

// Whether these products take less time than float32's: Intel's take two cycles each (Xeon with AMX, measured:
// tests/benchmarks/products.py).
bool has_fast_pairs() {
  static const bool fast = [] {
    unsigned a = 0, vendor[3] = {};
    return has_pairs() && __get_cpuid(0, &a, &vendor[0], &vendor[2], &vendor[1]) &&
           !std::memcmp(vendor, "AuthenticAMD", sizeof vendor);
  }();
  return fast;
}
#else
UNUSED bool has_pairs() { return false; }
UNUSED bool has_fast_pairs() { return false; }
#endif

#if defined(PT2MX_TILES)
constexpr i64 kSide = 16;         // rows of a register; 32 values of 16 bits, or 16 sums, a row
constexpr i64 kPair = 2 * kSide;  // rows of the weight, and of x, that go together
constexpr i64 kTile = kSide * kGroup;

bool has_tiles() {
  static const bool available = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    const bool present = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1);
    return present && syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
  }();
  return available;
}

// Eight registers of 16 rows of 64 bytes. In static memory: GCC takes _tile_loadconfig to read its first bytes only.
struct TileConfig {
  u8 palette = 1, start = 0, reserved[14] = {};
  u16 row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  u8 rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
const TileConfig kTileConfig;

__attribute__((target("amx-tile"))) NOINLINE void configure() { _tile_loadconfig(&kTileConfig); }
__attribute__((target("amx-tile"))) NOINLINE void release() { _tile_release(); }
#else
UNUSED bool has_tiles() { return false; }
#endif

}  // namespace
