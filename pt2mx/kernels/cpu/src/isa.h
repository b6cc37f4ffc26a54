// The matrix instructions for bfloat16 values and 8-bit codes: checks whether the compiler and the processor have them,
// and AMX's tile registers.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, "Programming with Intel AMX".

#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "decode.h"

namespace {

constexpr i64 kNR = kGroup;  // columns of a micro-tile of the result, which are rows of the weight

#if defined(__x86_64__)
// The registers of the CPUID instruction for leaf 7, "Structured Extended Feature Flags"; 0 where it does not exist.
struct Cpuid {
  unsigned a = 0, b = 0, c = 0, d = 0;
  explicit Cpuid(unsigned subleaf) { __get_cpuid_count(7, subleaf, &a, &b, &c, &d); }
};
#endif

}  // namespace

// Defined if the compiler targets AVX512 and supports AMX, AVX512_VNNI and AVX512_BF16, which functions enable by
// attributes. The functions below check the processor at run time.
#if defined(__AVX512BW__) && defined(__AVX512DQ__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define PT2MX_HAVE_MATRIX_ISA

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// The results are cached, because the CPUID instruction takes microseconds in a virtual machine.
inline bool has_avx512_vbmi() {
  static const bool available = Cpuid(0).c >> 1 & 1;
  return available;
}

inline bool has_avx512_bf16() {
  static const bool available = has_avx512_vbmi() && Cpuid(1).a >> 5 & 1;
  return available;
}

// True where AVX512_BF16 is faster than float32: on Intel's processors an instruction takes two cycles (Xeon with AMX,
// measured: tests/benchmarks/bf16_matmul.py).
inline bool has_fast_avx512_bf16() {
  static const bool fast = [] {
    unsigned a = 0, vendor[3] = {};
    return has_avx512_bf16() && __get_cpuid(0, &a, &vendor[0], &vendor[2], &vendor[1]) &&
           !std::memcmp(vendor, "AuthenticAMD", sizeof vendor);
  }();
  return fast;
}

inline bool has_avx512_vnni() {
  static const bool available = Cpuid(0).c >> 11 & 1;
  return available;
}

// Also requests the tile registers from the operating system: without that, a process may not use them.
inline bool has_amx() {
#if defined(__linux__)
  static const bool available = [] {
    const unsigned d = Cpuid(0).d;
    const bool present = (d >> 22 & 1) && (d >> 24 & 1);
    return present && syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
  }();
  return available;
#else
  return false;
#endif
}

// The same of AMX's instructions for 8-bit integers.
inline bool has_amx_int8() {
  static const bool available = has_amx() && Cpuid(0).d >> 25 & 1;
  return available;
}

constexpr i64 kTileRows = 16;                   // rows of a tile register: each has 32 bfloat16 values, or 16 sums
constexpr i64 kTileElems = kTileRows * kGroup;  // bfloat16 values of a tile register
constexpr i64 kMR = 2 * kTileRows;              // rows of x of a micro-tile of the result
static_assert(kNR == 2 * kTileRows, "a micro-tile has two tile registers of columns");

// Eight tile registers of 16 rows of 64 bytes. It is in memory that other functions know: GCC assumes that
// _tile_loadconfig reads only its first bytes.
struct TileConfig {
  u8 palette = 1, start = 0, reserved[14] = {};
  u16 row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  u8 rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
const TileConfig kTileConfig;

// A kernel configures the registers again for each few rows of the weight: now and then AMX's instructions take up to
// twice as long until the next configuration, as measured.
__attribute__((target("amx-tile"))) NOINLINE void configure_amx(const TileConfig& config = kTileConfig) {
  _tile_loadconfig(&config);
}
__attribute__((target("amx-tile"))) NOINLINE void release_amx() { _tile_release(); }

}  // namespace

#else

namespace {
inline bool has_avx512_vbmi() { return false; }
inline bool has_amx_int8() { return false; }
}  // namespace

#endif
