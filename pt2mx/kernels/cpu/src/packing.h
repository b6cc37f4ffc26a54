// Packs codes into bytes, and unpacks them, in the groups of pt2mx/kernels/packing.py.

#pragma once

#include "floats.h"

namespace {

constexpr i64 kMaxGroup = 8;  // codes of a group, at most

// `codes` codes of `bits` bits take `bytes` bytes, as one little-endian number; 1 and 1 if codes share no bytes.
struct Packing {
  int32_t bits, codes, bytes;
};

// Packs one group: codes `w` apart to bytes `stride` apart.
template <int Bits>
inline void pack_group(const u8* codes, i64 w, u8* data, i64 stride) {
  if (Bits == 4) {
    data[0] = u8(codes[0] | codes[w] << 4);
  } else {
    const int c0 = codes[0], c1 = codes[w], c2 = codes[2 * w], c3 = codes[3 * w];
    data[0] = u8(c0 | c1 << 6);
    data[stride] = u8(c1 >> 2 | c2 << 4);
    data[2 * stride] = u8(c2 >> 4 | c3 << 2);
  }
}

template <int Bits>
inline void unpack_group(const u8* data, i64 stride, u8* codes, i64 w) {
  if (Bits == 4) {
    codes[0] = data[0] & 15;
    codes[w] = data[0] >> 4;
  } else {
    const int word = data[0] | data[stride] << 8 | data[2 * stride] << 16;
    for (int i = 0; i < 4; ++i) codes[i * w] = word >> 6 * i & 63;
  }
}

// The same for codes of any width.
inline void pack_group(const u8* codes, i64 w, Packing p, u8* data, i64 stride) {
  u64 word = 0;
  for (i64 i = 0; i < p.codes; ++i) word |= u64(codes[i * w]) << p.bits * i;
  for (i64 i = 0; i < p.bytes; ++i) data[i * stride] = u8(word >> 8 * i);
}

inline void unpack_group(const u8* data, i64 stride, Packing p, u8* codes, i64 w) {
  u64 word = 0;
  for (i64 i = 0; i < p.bytes; ++i) word |= u64(data[i * stride]) << 8 * i;
  for (i64 i = 0; i < p.codes; ++i) codes[i * w] = u8(word >> p.bits * i & ((1 << p.bits) - 1));
}

// Calls body(code, gap, byte, step) for each group: its codes are at code, code + gap, .., and its bytes at byte, byte
// + step, .. codes: (rows, w) in groups of `group` rows; data: (rows / group * size, w), with rows `stride` apart.
template <class Body>
inline __attribute__((always_inline)) void each_group(i64 group, i64 size, i64 rows, i64 w, i64 stride, Body body) {
  if (w == 1 && stride == 1) {
#pragma omp simd
    for (i64 i = 0; i < rows / group; ++i) body(i * group, 1, i * size, 1);
    return;
  }
  for (i64 i = 0; i < rows / group; ++i) {
#pragma omp simd
    for (i64 j = 0; j < w; ++j) body(i * group * w + j, w, i * size * stride + j, stride);
  }
}

#define GROUP (i64 code, UNUSED i64 gap, i64 byte, UNUSED i64 step) __attribute__((always_inline))

// codes: (rows, w), whole groups of rows -> data: (rows / codes * bytes, w), with rows `stride` apart
NOINLINE void pack(const u8* codes, i64 rows, i64 w, Packing p, u8* data, i64 stride) {
  if (p.codes == 1) {
    each_group(1, 1, rows, w, stride, [=] GROUP { data[byte] = codes[code]; });
  } else if (p.bits == 4) {
    each_group(2, 1, rows, w, stride, [=] GROUP { pack_group<4>(codes + code, gap, data + byte, step); });
  } else if (p.bits == 6) {
    each_group(4, 3, rows, w, stride, [=] GROUP { pack_group<6>(codes + code, gap, data + byte, step); });
  } else {
    each_group(p.codes, p.bytes, rows, w, stride, [=] GROUP { pack_group(codes + code, gap, p, data + byte, step); });
  }
}

// Reads words of 4 bytes, because the compiler does not vectorize groups of three bytes.
inline void unpack_contiguous_6(const u8* data, i64 groups, u8* codes) {
  for (i64 i = 0; i < groups; ++i) {
    u32 word = data[3 * i] | data[3 * i + 1] << 8 | data[3 * i + 2] << 16;
    word = (word & 0x00000FFF) | (word & 0x00FFF000) << 4;
    word = (word & 0x003F003F) | (word & 0x0FC00FC0) << 2;
    std::memcpy(codes + 4 * i, &word, 4);  // little-endian, as all machines that torch runs on
  }
}

NOINLINE void unpack(const u8* data, i64 stride, i64 rows, i64 w, Packing p, u8* codes) {
  const u8 mask = u8((1 << p.bits) - 1);
  if (p.codes == 1) {
    each_group(1, 1, rows, w, stride, [=] GROUP { codes[code] = data[byte] & mask; });
  } else if (p.bits == 4) {
    each_group(2, 1, rows, w, stride, [=] GROUP { unpack_group<4>(data + byte, step, codes + code, gap); });
  } else if (p.bits == 6 && w == 1 && stride == 1) {
    unpack_contiguous_6(data, rows / 4, codes);
  } else if (p.bits == 6) {
    each_group(4, 3, rows, w, stride, [=] GROUP { unpack_group<6>(data + byte, step, codes + code, gap); });
  } else {
    each_group(p.codes, p.bytes, rows, w, stride, [=] GROUP { unpack_group(data + byte, step, p, codes + code, gap); });
  }
}

}  // namespace
