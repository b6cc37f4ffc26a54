// The GEMM of many rows of x in bfloat16: a task decodes some rows of the weight to bfloat16, which is exact, and
// multiplies them with 32 rows of x at a time, by AMX or AVX512_BF16, with sums in fp32.
//
// Both treat subnormal numbers as zero. If a product could be subnormal, the kernel computes nothing, and the caller
// uses another kernel.

#pragma once

#include <atomic>
#include <optional>

#include "decode_panels_bf16.h"
#include "epilogue.h"
#include "gemm_microkernel.h"

#if defined(PT2MX_HAVE_MATRIX_ISA)

namespace {

struct GemmBf16;

// Copies the first `n` of 32 values, and zeros after them.
inline void copy_group(const u16* values, i64 n, u16* out) {
  const __mmask32 known = n < kGroup ? (u32(1) << n) - 1 : ~u32(0);
  _mm512_storeu_si512(out, _mm512_maskz_loadu_epi16(known, values));
}

// Decodes groups [begin, end) of rows [row, last) of the weight to panels w: (panels, end - begin, 2, kTileRows pairs
// of values, kTileRows columns, 2). Returns false if products with them could be subnormal, or a code is invalid.
typedef bool (*DecodeRows)(const GemmBf16& gemm, i64 row, i64 last, i64 begin, i64 end, u16* w);

constexpr i64 kDecodedBytes = 1 << 20;  // of the weight that are decoded at a time, for a second-level cache

// Returns how many groups of `panels` panels are decoded at a time: whole strips, so that the order of sums stays.
inline i64 decoded_groups(i64 groups, i64 panels) {
  const i64 strips = kDecodedBytes / (panels * kStripGroups * kMicroGroup * i64(sizeof(u16)));
  return std::min(groups, std::max<i64>(1, strips) * kStripGroups);
}

struct GemmBf16 {
  const Linear& linear;
  const DecodeRows decode;
  Tasks tasks;
  const i64 width;                         // values of a tap, padded to whole groups
  i64 pixel_stride;                        // values between pixels in memory
  const u16* x;                            // pixels
  const ConvolutionCall* image = nullptr;  // for conv_small_channels.h: the convolution before taps were merged
  Buffer<u16> padded, zeros;
  std::optional<Scratch<OF_X>> packed;       // a matrix x for AMX: (m / kMR, groups, kMR, kGroup)
  std::atomic<i64> min_exponent{2 * kBias};  // of x
  std::atomic<bool> unsupported{false};

  GemmBf16(const Linear& linear, DecodeRows decode)
      : linear(linear),
        decode(decode),
        tasks(linear.call),
        width(linear.tap_groups * kGroup),
        pixel_stride(width),
        x(static_cast<const u16*>(linear.call.x)) {
    zeros.resize(width);
  }

  // Where the group of rows of `packed` starts that has this row.
  u16* packed_rows(i64 row) const { return reinterpret_cast<u16*>(packed->data()) + row / kMR * kMR * width; }

  void update_min_exponent(i64 exponent) {
    for (i64 before = min_exponent; exponent < before && !min_exponent.compare_exchange_weak(before, exponent);) {}
  }

  // Points `out`: (taps, kMR) to the pixels of `n` rows from `row` on, and writes the rows' positions in the result.
  // Leaves the pointers of missing rows unchanged.
  void find_pixels(i64 row, i64 n, const u16** out, i64* positions) const {
    linear.im2col.each_tap(row, n, positions, [&](i64 r, i64 count, i64 tap, i64 pixel, i64 apart) {
      const u16* at = pixel < 0 ? zeros.data() : x + pixel * pixel_stride;
      apart *= pixel < 0 ? 0 : pixel_stride;
      for (i64 i = 0; i < count; ++i, at += apart) out[tap * kMR + r + i] = at;
    });
  }

  // Copies groups [begin, end) of n rows to out: (end - begin, kMR, kGroup), padded with zeros.
  void gather(const u16* const* pixels, i64 n, i64 begin, i64 end, u16* out) const {
    for (i64 at = begin; at < end; ++at, out += kMicroGroup) {
      const i64 tap = at / linear.tap_groups, i = at % linear.tap_groups * kGroup;
      for (i64 r = 0; r < n; ++r) copy_group(pixels[tap * kMR + r] + i, linear.call.k - i, out + r * kGroup);
    }
  }
};

// Finds the smallest exponent of pixels. Packs the rows of a matrix for AMX, and pads other pixels with zeros to whole
// groups.
void scan_and_pack(i64 begin, i64 end, void* context) {
  GemmBf16& gemm = *static_cast<GemmBf16*>(context);
  const i64 k = gemm.linear.call.k, width = gemm.width;
  const u16* x = static_cast<const u16*>(gemm.linear.call.x) + begin * k;
  i64 min_exponent = 2 * kBias;
  for (i64 row = begin; row < end; ++row, x += k) {
    min_exponent = std::min(min_exponent, min_exponent_of(x, k));
    if (gemm.packed) {
      u16* out = gemm.packed_rows(row) + row % kMR * kGroup;
      for (i64 i = 0; i < width; i += kGroup, out += kMicroGroup) copy_group(x + i, k - i, out);
    } else if (width != k) {
      for (i64 i = 0; i < width; i += kGroup) copy_group(x + i, k - i, gemm.padded.data() + row * width + i);
    }
  }
  gemm.update_min_exponent(min_exponent);
}

template <class Decoder>
bool decode_rows(const GemmBf16& gemm, i64 row, i64 last, i64 begin, i64 end, u16* w) {
  const Linear& linear = gemm.linear;
  Decoder decoder(linear.call);
  PanelDecoder<Decoder> panels(linear.call);
  i64 min_exponent = 2 * kBias;
  bool subnormal = false;
  for (; row < last; row += kNR) {
    for (i64 at = begin, count; at < end; at += count) {
      const i64 tap = at / linear.tap_groups, g = at % linear.tap_groups;
      count = std::min({kChunkGroups, linear.tap_groups - g, end - at});
      const LinearCall c = linear.call_of(tap);
      const i64 size = count * kMicroGroup;
      if (!panels.decode(c, row, g, count, w)) {
        subnormal |= decode_chunk(c, decoder, row, g, g + count, w);
        min_exponent = std::min(min_exponent, min_exponent_of(w, size));
        for (i64 i = 0; i < size; i += kTileElems) transpose(w + i);
      }
      w += size;
    }
  }
  min_exponent = std::min(min_exponent, panels.min_exponent());
  return products_are_normal(gemm.min_exponent, min_exponent) && !subnormal && !decoder.invalid();
}

void run_gemm_bf16(i64, i64, void* context) {
  GemmBf16& gemm = *static_cast<GemmBf16*>(context);
  const LinearCall& c = gemm.linear.call;
  const KeepSubnormals keep;
  const bool amx = c.isa & AMX;
  const i64 groups = gemm.linear.groups, panels = (c.task_columns + kNR - 1) / kNR;
  const i64 depth = amx && !gemm.image ? decoded_groups(groups, panels) : groups;
  const i64 kept_rows = depth < groups ? c.task_rows : kMR;  // whose sums wait for the next groups
  const Scratch<OF_WEIGHT> w_scratch(sizeof(u16) * panels * depth * kMicroGroup);
  const Scratch<OF_SUMS> sums_scratch(sizeof(float) * panels * kept_rows * kNR);
  u16* const w = reinterpret_cast<u16*>(w_scratch.data());
  float* const sums = reinterpret_cast<float*>(sums_scratch.data());
  std::vector<const u16*> pixels(gemm.linear.im2col.taps * kMR, gemm.x);
  i64 positions[kMR];
  Buffer<u16> gathered;
  if (amx && !gemm.packed) gathered.resize(depth * kMicroGroup);
  if (amx) configure_amx();
  i64 decoded = -1;
  for (Task task; !gemm.unsupported && gemm.tasks.take(task); decoded = depth < groups ? -1 : task.first) {
    const auto [top, bottom, first, last] = task;
    for (i64 begin = 0; begin < groups && !gemm.unsupported; begin += depth) {
      const i64 end = std::min(begin + depth, groups);
      if (decoded != first && !gemm.decode(gemm, first, last, begin, end, w)) gemm.unsupported = true;
      for (i64 m = top; m < bottom; m += kMR) {
        const i64 rows = std::min(kMR, bottom - m);
        float* const of_rows = depth < groups ? sums + (m - top) * panels * kNR : sums;
        gemm.find_pixels(m, rows, pixels.data(), positions);
        if (amx) {
          const u16* x = gemm.packed ? gemm.packed_rows(m) + begin * kMicroGroup : gathered.data();
          if (!gemm.packed) gemm.gather(pixels.data(), rows, begin, end, gathered.data());
          gemm_panels_amx(x, w, end - begin, (last - first + kNR - 1) / kNR, of_rows, begin > 0);
        }
        for (i64 p = 0; end == groups && p * kNR < last - first; ++p) {
          float* micro_tile = of_rows + p * kMicroTile;
          if (!amx) {
            microkernel_32x32_avx512(pixels.data(), rows, w + p * groups * kMicroGroup, gemm.linear.im2col.taps, c.k,
                                     micro_tile, kNR, gemm.zeros.data());
          }
          const i64 column = first + p * kNR;
          finish_micro_tile(gemm.linear, positions, rows, column, std::min(kNR, last - column), micro_tile);
        }
      }
    }
  }
  if (amx) release_amx();
}

int32_t multiply(GemmBf16& gemm, ParallelFor parallel_for) {
  const int32_t error = parallel_for(0, gemm.tasks.count(), 1, run_gemm_bf16, &gemm);
  return error ? error : gemm.unsupported ? kUnsupported : 0;
}

template <class Decoder>
int32_t gemm_bf16(Linear& linear, ParallelFor parallel_for) {
  const i64 k = linear.call.k, pixels = linear.im2col.pixels, grain = std::max<i64>(1, (1 << 16) / k);
  GemmBf16 gemm(linear, decode_rows<Decoder>);
  if (linear.call.isa & AMX && linear.im2col.is_matrix()) {
    gemm.packed.emplace((pixels + kMR - 1) / kMR * kMR * gemm.width * sizeof(u16));
  } else if (gemm.width != k) {
    gemm.padded.resize(pixels * gemm.width);
    gemm.x = gemm.padded.data();
  }
  if (const int32_t error = parallel_for(0, pixels, grain, scan_and_pack, &gemm)) return error;
  return multiply(gemm, parallel_for);
}

}  // namespace

#endif
