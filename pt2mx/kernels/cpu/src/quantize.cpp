// The CPU kernel of pt2mx/kernels/reference.py, equal to it to the bit; built and called by ../quantize.py and
// ../cache.py.
//
// A tensor is (outer, n, inner) with blocks along n. The kernel splits it into tiles of whole blocks that fit the
// first-level cache. It computes the amax, scale and factors of each block, then processes the values in chunks: widens
// them to fp32, quantizes them (values.h), and narrows or packs them. Formats and modes are data, a `Spec`.

#include "block_amax.h"
#include "float_scale.h"
#include "quantize_vec.h"
#include "packing.h"
#include "random.h"
#include "rotate.h"
#include "values.h"

namespace {

constexpr i64 kColumns = 512;                     // of a tile
constexpr i64 kTile = 2048;                       // values of a tile of short blocks
constexpr i64 kChunk = 2048;                      // values that go through a step at a time
constexpr i64 kMinRowLen = 64;                    // shorter rows are not worth a loop each
constexpr i64 kGrain = 1 << 15;                   // values that are worth another thread
constexpr i64 kLanes = 16;                        // values that share a factor: a multiple of every kWidth
constexpr i64 kBlocks = std::max(kTile, kChunk);  // of a tile, at most: the codes of a packed group may share it

// ---- a tile: whole blocks of some columns ----

// How a tensor is cut into tiles.
struct Cut {
  i64 group, rows, segments, columns, strips, chunk_rows, data_rows, blocks, ahead;
  bool flat;

  explicit Cut(const QuantizeCall& c) {
    const bool packed = c.operation == QUANTIZE || c.operation == DEQUANTIZE;
    group = packed ? c.spec->codes_per_group : 1;
    columns = std::min({c.inner, kColumns, kChunk / group});
    strips = (c.inner + columns - 1) / columns;
    flat = c.inner < kMinRowLen;
    i64 whole = c.block;  // rows after which a block and a packed group both end
    while (whole % group) whole += c.block;
    rows = std::max<i64>(1, kTile / (columns * whole)) * whole;
    segments = (c.n + rows - 1) / rows;
    chunk_rows = flat ? std::max<i64>(1, kChunk / (columns * kLanes)) * kLanes : group;
    data_rows = packed ? (c.n + group - 1) / group * c.spec->bytes_per_group : c.n;
    blocks = (c.n + c.block - 1) / c.block;
    ahead = strips == 1 ? std::min(rows, c.n) * c.inner : columns;
  }
};

class Tile {
 public:
  Tile(const QuantizeCall& call, const Cut& cut) : call_(call), cut_(cut), spec_(*call.spec) {}
  void run(i64 index);

 private:
  void find_amax();
  void find_scales(int32_t candidate, int32_t* exponent);
  void find_least_squares();
  void set_factors(const int32_t* exponent);
  void set_ratios(const int32_t* exponent);
  void move_scales(bool out);
  template <class Step>
  void each_chunk(bool values, Step step);
  template <class Bits>
  void find_amax(Bits mask, Bits* amax);

  i64 offset(i64 row) const { return (outer_ * call_.n + row0_ + row) * call_.inner + column0_; }
  u8* data(void* base, i64 row) const {
    const i64 data_row = (row0_ + row) / cut_.group * spec_.bytes_per_group;
    return static_cast<u8*>(base) + (packed_outer_ * cut_.data_rows + data_row) * call_.inner + column0_;
  }

  const QuantizeCall& call_;
  const Cut& cut_;
  const Spec& spec_;
  const bool divides_ = spec_.float_scale && !spec_.float_scale->reciprocal;
  const Packing packing_{spec_.bits, spec_.codes_per_group, spec_.bytes_per_group};
  i64 outer_, packed_outer_, row0_, rows_, column0_, w_, blocks_;  // packed: of codes and scales
  alignas(64) u32 amax_[kBlocks];
  alignas(64) int32_t exponent_[kBlocks];  // of E8M0 scales; codes of others
  alignas(64) float factors_[4][kBlocks + kWidth];
  alignas(64) float expanded_[4][kChunk + kWidth];
  alignas(64) float x_[kChunk + kWidth];
  alignas(64) float y_[kChunk + kWidth];
  alignas(64) int32_t scratch_[kChunk + kWidth];
  alignas(64) u32 random_[kChunk + kWidth + 8];
  alignas(64) u8 codes_[kChunk + kMaxGroup * kMinRowLen + kWidth];
};

template <class Bits>
void Tile::find_amax(Bits mask, Bits* amax) {
  const Bits* x = static_cast<const Bits*>(call_.x) + offset(0);
  if (call_.inner == 1 && call_.block > 1) amax_of_runs(x, rows_, call_.block, mask, amax);
  else if (call_.inner == 1) amax_of_columns(x, rows_, 1, rows_, 1, mask, amax);
  else amax_of_columns(x, call_.inner, rows_, w_, call_.block, mask, amax);
}

void Tile::find_amax() {
  if (call_.dtype == FP32) return find_amax<u32>(kMagnitude, amax_);
  u16 half[kBlocks];
  find_amax<u16>(0x7FFF, half);
  widen(half, blocks_ * w_, call_.dtype, reinterpret_cast<float*>(amax_));
}

// Writes the scales of a candidate to `exponent`; to `exponent_`, the scales from which a search starts.
void Tile::find_scales(int32_t candidate, int32_t* exponent) {
  const i64 count = blocks_ * w_;
  const Spec spec = spec_;
  if (spec.float_scale) {
    candidate_codes(amax_, count, *spec.float_scale, call_.tensor_scale, candidate, exponent);
  } else if (exponent == exponent_) {
#pragma omp simd
    for (i64 i = 0; i < count; ++i) exponent[i] = exponent_of(int32_t(amax_[i]), spec);
  } else {
    for (i64 i = 0; i < count; ++i) {
      const int32_t changed = clamp_exponent(exponent_[i] + spec.exponent_offsets[candidate]);
      exponent[i] = exponent_[i] == kNotFinite ? kNotFinite : changed;
    }
  }
}

void Tile::set_factors(const int32_t* exponent) {
  const i64 count = blocks_ * w_;
  if (const FloatScale* s = spec_.float_scale) {
    for (i64 i = 0; i < count; ++i) {
      const float scale = value_of(exponent[i], *s);
      factors_[0][i] = divisor_or_reciprocal(scale, *s, call_.tensor_scale);
      factors_[1][i] = s->unit;
      factors_[2][i] = 1 / s->unit;
      factors_[3][i] = applied(scale, *s, call_.tensor_scale);
    }
    return;
  }
#pragma omp simd
  for (i64 i = 0; i < count; ++i) {
    const int32_t e = exponent[i], half = e >> 1;
    const int32_t out0 = (half + kBias) << 23, out1 = (e - half + kBias) << 23;
    factors_[0][i] = from_bits((2 * kBias << 23) - out0);
    factors_[1][i] = from_bits((2 * kBias << 23) - out1);
    factors_[2][i] = from_bits(out0);
    factors_[3][i] = from_bits(e == kNotFinite ? 0x7FC00000 : out1);
  }
}

// Sets the factors of errors: scales in units of the first ones.
void Tile::set_ratios(const int32_t* exponent) {
  const FloatScale* s = spec_.float_scale;
  for (i64 i = 0; i < blocks_ * w_; ++i) {
    factors_[2][i] = s ? value_of(exponent[i], *s) / value_of(exponent_[i], *s)
                       : from_bits((exponent[i] - exponent_[i] + kBias) << 23);
  }
}

// Calls step(chunk, row, rows, at) for `rows` rows from `row` on; `at` is the offset of their values in a buffer of
// whole packed groups. values: whether the step reads x, which is then widened.
template <class Step>
void Tile::each_chunk(bool values, Step step) {
  const i64 block = call_.block, inner = call_.inner;
  const bool runs = inner == 1 && block % kLanes == 0;
  i64 rows;
  for (i64 row = 0; row < rows_; row += rows) {
    rows = cut_.flat ? std::min(cut_.chunk_rows, rows_ - row) : 1;
    Chunk c{};
    c.random = random_;  // every rounding computes its address, one reads it
    c.n = rows * w_;
    c.run = 0;
    i64 b = row / block;
    if (runs && (row % block || block > cut_.chunk_rows)) {  // a slice of one block
      rows = std::min(rows, (b + 1) * block - row);
      c.n = c.run = rows;
      c.run = (rows + kLanes - 1) / kLanes * kLanes;
    } else if (runs) {
      if (row + rows < rows_) rows = c.n = rows / block * block;
      c.run = block;
    }
    if (c.run || !cut_.flat || block == 1) {
      c.f = {factors_[0] + b * w_, factors_[1] + b * w_, factors_[2] + b * w_, factors_[3] + b * w_};
    } else {
      for (i64 r = row; r < row + rows; b = r / block) {
        const i64 last = std::min((b + 1) * block, row + rows);
        for (int k = 0; k < 4; ++k) {
          float* out = expanded_[k] + (r - row) * w_;
          const float* in = factors_[k] + b * w_;
          if (w_ == 1) std::fill(out, out + (last - r), *in);
          else
            for (i64 i = r; i < last; ++i, out += w_) std::copy(in, in + w_, out);
        }
        r = last;
      }
      c.f = {expanded_[0], expanded_[1], expanded_[2], expanded_[3]};
    }
    c.scratch = scratch_;
    c.next_bytes = call_.dtype == FP32 ? 4 : 2;
    c.next = static_cast<const u8*>(call_.x) + (offset(row) + cut_.ahead) * c.next_bytes;
    if (values && call_.dtype == FP32) {
      c.x = static_cast<const float*>(call_.x) + offset(row);
      if (c.n % kWidth) c.x = static_cast<const float*>(std::memcpy(x_, c.x, 4 * c.n));
    } else if (values) {
      widen(static_cast<const u16*>(call_.x) + offset(row), c.n, call_.dtype, x_);
      c.x = x_;
    }
    if (values && spec_.rounding == STOCHASTIC) c.random = random_bits(call_.seed, offset(row), c.n, random_);
    step(c, row, rows, cut_.flat ? 0 : row % cut_.group * w_);
  }
}

// Keeps of the candidates the one with the smallest sum of squared errors; of equal ones the first.
void Tile::find_least_squares() {
  const i64 count = blocks_ * w_;
  int32_t candidate[kBlocks], best[kBlocks] = {};
  i64 total[kBlocks], least[kBlocks];
  for (int32_t k = 0; k < spec_.candidates; ++k) {
    find_scales(k, candidate);
    std::fill(total, total + count, 0);
    set_factors(candidate);
    set_ratios(candidate);
    each_chunk(true, [&](const Chunk& c, i64 row, i64 rows, i64) {
      // a scale does not depend on the seed of stochastic rounding
      with_rounding(spec_.rounding == STOCHASTIC ? EVEN : spec_.rounding, [&](auto rounding) {
        (divides_ ? to_errors<rounding(), true> : to_errors<rounding(), false>)(c, spec_, c.scratch);
      });
      for (i64 r = row, last; r < row + rows; r = last) {
        const i64 b = r / call_.block;
        const int32_t* e = c.scratch + (r - row) * w_;
        i64* sums = total + b * w_;
        last = std::min((b + 1) * call_.block, row + rows);
        if (w_ == 1) {
          i64 sum = 0;
#pragma omp simd reduction(+ : sum)
          for (i64 i = 0; i < last - r; ++i) sum += i64(e[i]) * e[i];
          *sums += sum;
        } else {
          for (i64 i = r; i < last; ++i, e += w_) {
#pragma omp simd
            for (i64 j = 0; j < w_; ++j) sums[j] += i64(e[j]) * e[j];
          }
        }
      }
    });
    for (i64 i = 0; i < count; ++i) {
      if (k > 0 && total[i] >= least[i]) continue;
      best[i] = candidate[i];
      least[i] = total[i];
    }
  }
  std::copy(best, best + count, exponent_);
}

void Tile::move_scales(bool out) {
  const bool whole = w_ == call_.inner;  // rows of scales are adjacent
  const i64 rows = whole ? 1 : blocks_, w = whole ? blocks_ * w_ : w_;
  for (i64 r = 0; r < rows; ++r) {
    const i64 at = (packed_outer_ * cut_.blocks + row0_ / call_.block + r) * call_.inner + column0_;
    u8* scale = static_cast<u8*>(call_.scale) + at;  // of E8M0
    int32_t* exponent = exponent_ + r * w;
    if (const FloatScale* s = spec_.float_scale) {
      if (out) store_codes(exponent, w, s->dtype, call_.scale, at);
      else load_codes(call_.scale, at, w, s->dtype, exponent);
    } else if (out) {
#pragma omp simd
      for (i64 j = 0; j < w; ++j) scale[j] = u8(exponent[j] + kBias);
    } else {
#pragma omp simd
      for (i64 j = 0; j < w; ++j) exponent[j] = scale[j] - kBias;
    }
  }
}

void Tile::run(i64 index) {
  const i64 segment = index / cut_.strips % cut_.segments;
  outer_ = packed_outer_ = index / cut_.strips / cut_.segments;
  const i64 count = call_.new_slots;
  if (count) packed_outer_ = outer_ / count * call_.all_slots + call_.slots[outer_ % count];
  row0_ = segment * cut_.rows;
  rows_ = std::min(cut_.rows, call_.n - row0_);
  column0_ = index % cut_.strips * cut_.columns;
  w_ = std::min(cut_.columns, call_.inner - column0_);
  blocks_ = (rows_ + call_.block - 1) / call_.block;

  if (call_.operation == DEQUANTIZE) {
    move_scales(false);
  } else {
    find_amax();
    find_scales(0, exponent_);
    if (spec_.searches) find_least_squares();
    if (call_.operation == QUANTIZE) move_scales(true);
  }
  set_factors(exponent_);

  // Stores the values of a chunk in the output's dtype; to_floats(out) writes them in fp32.
  const auto put = [&](const Chunk& c, i64 row, auto to_floats) {
    if (call_.out_dtype != FP32) {
      to_floats(y_);
      return narrow(y_, c.n, call_.out_dtype, static_cast<u16*>(call_.out) + offset(row));
    }
    float* out = static_cast<float*>(call_.out) + offset(row);
    if (c.n % kWidth == 0) return to_floats(out);
    to_floats(y_);
    std::memcpy(out, y_, 4 * c.n);
  };
  switch (call_.operation) {
    case FAKE_QUANTIZE:
      each_chunk(true, [&](const Chunk& c, i64 row, i64, i64) {
        put(c, row, [&](float* out) {
          with_rounding(spec_.rounding, [&](auto rounding) {
            (divides_ ? to_values<rounding(), true> : to_values<rounding(), false>)(c, spec_, out);
          });
        });
      });
      break;
    case CLIP_GRADIENT:
      each_chunk(true, [&](const Chunk& c, i64 row, i64, i64) {
        (divides_ ? to_saturated<true> : to_saturated<false>)(c, spec_, c.scratch);
        if (call_.grad_bytes == 4) clip<u32>(c.scratch, call_.grad, call_.out, offset(row), c.n);
        else clip<u16>(c.scratch, call_.grad, call_.out, offset(row), c.n);
      });
      break;
    case QUANTIZE:
      each_chunk(true, [&](const Chunk& c, i64 row, i64 rows, i64 at) {
        with_rounding(spec_.rounding, [&](auto rounding) {
          (divides_ ? to_codes<rounding(), true> : to_codes<rounding(), false>)(c, spec_, codes_ + at);
        });
        const i64 end = row + rows, filled = at / w_ + rows, missing = (cut_.group - filled % cut_.group) % cut_.group;
        if (missing && end < rows_) return;
        std::memset(codes_ + filled * w_, 0, missing * w_);
        pack(codes_, filled + missing, w_, packing_, data(call_.out, end - filled), call_.inner);
      });
      break;
    case DEQUANTIZE:
      each_chunk(false, [&](const Chunk& c, i64 row, i64 rows, i64 at) {
        if (at == 0) {
          const i64 whole = (rows + cut_.group - 1) / cut_.group * cut_.group;
          unpack(data(const_cast<void*>(call_.x), row), call_.inner, whole, w_, packing_, codes_);
        }
        put(c, row, [&](float* out) { from_codes(c, spec_, codes_ + at, out); });
      });
      break;
  }
}

struct Work {
  const QuantizeCall& call;
  const Cut cut;
};

void run_tiles(i64 begin, i64 end, void* context) {
  const Work& work = *static_cast<const Work*>(context);
  const KeepSubnormals keep;
  Tile tile(work.call, work.cut);
  for (i64 i = begin; i < end; ++i) tile.run(i);
}

// FAKE_QUANTIZE of rotated x, if inner is 1: rotates a few rows at a time into the output, and quantizes them there.
struct RotatedWork {
  const QuantizeCall& call;  // its x is its output
  const Cut cut;
  const Rotation rotation;
  const void* x;
};

void run_rotated(i64 begin, i64 end, void* context) {
  const RotatedWork& work = *static_cast<const RotatedWork*>(context);
  const QuantizeCall& c = work.call;
  const KeepSubnormals keep;
  const i64 rows = std::max<i64>(1, kRotated / c.n);
  std::vector<float> y(std::max(work.rotation.size(), kRotated) + kWidth);
  Tile tile(c, work.cut);
  for (i64 row = begin; row < end; row += rows) {
    const i64 last = std::min(row + rows, end);
    rotate_run(work.rotation, c.dtype, work.x, row * c.n, last * c.n, c.out, y.data());
    for (i64 i = row * work.cut.segments; i < last * work.cut.segments; ++i) tile.run(i);
  }
}

// True if activations.cpp supports the call: it is faster.
bool uses_vec_quantizer(const QuantizeCall& c) {
  const bool threads = c.n % c.block == 0 || c.n < kGrain;
  return c.operation == FAKE_QUANTIZE && c.inner == 1 && threads && VecQuantizer::supports(*c.spec, c.block, c.n);
}

int32_t run_vec_quantizer(const QuantizeCall& c, ParallelFor parallel_for) {
  ActivationCall rows{c.spec, 0, 0, c.dtype, c.out_dtype, 0, 0, 0, c.outer, c.n, c.block, c.x};
  rows.out = c.out;
  return pt2mx_quantize_activation(&rows, parallel_for);
}

}  // namespace

extern "C" {

int32_t pt2mx_run(const QuantizeCall* call, ParallelFor parallel_for) {
  int32_t error = kUnsupported;
  if (uses_vec_quantizer(*call)) error = run_vec_quantizer(*call, parallel_for);
  else if (call->operation == DEQUANTIZE && call->format) error = pt2mx_dequantize_rows(call, parallel_for);
  if (error != kUnsupported) return error;
  Work work{*call, Cut(*call)};
  const i64 tiles = call->outer * work.cut.segments * work.cut.strips;
  const i64 values = std::min(work.cut.rows, call->n) * work.cut.columns;
  return parallel_for(0, tiles, std::max<i64>(1, kGrain / values), run_tiles, &work);
}

int32_t pt2mx_rotate_fake_quantize(const QuantizeCall* call, i64 size, ParallelFor parallel_for) {
  QuantizeCall in_place = *call;
  in_place.x = call->out;
  RotatedWork work{in_place, Cut(in_place), Rotation(size), call->x};
  return parallel_for(0, call->outer, std::max<i64>(1, kGrain / call->n), run_rotated, &work);
}

int32_t pt2mx_store(const QuantizeCall* calls, i64 count, ParallelFor parallel_for) {
  for (i64 i = 0; i < count; ++i) {
    for (i64 s = 0; s < calls[i].new_slots; ++s) {
      if (calls[i].slots[s] < 0 || calls[i].slots[s] >= calls[i].all_slots) return kUnsupported;
    }
  }
  int32_t error = 0;
  for (i64 i = 0; i < count && !error; ++i) error = pt2mx_run(calls + i, parallel_for);
  return error;
}

}  // extern "C"
