// The CPU kernel of pt2mx/kernels/accumulated_matmul.py, equal to it to the bit; built and called by
// ../accumulated_matmul.py.
//
// A task is a block of rows of x, and a strip of columns of the other factor, which is converted to double once. A lane
// has one column: all lanes of a row add in the same order.

#include <cmath>
#include <vector>

#include "floats.h"

namespace {

constexpr i64 kLanes = 16;  // columns of a strip
constexpr i64 kRows = 64;   // of x, for each conversion of a strip
constexpr int kExponentBias = 1023, kFractionBits = 52, kFar = 400;

typedef double Doubles __attribute__((vector_size(4 * kWidth)));
typedef int64_t Longs __attribute__((vector_size(4 * kWidth)));
constexpr i64 kDoubles = kWidth / 2, kVectors = kLanes / kDoubles;

// The values of a strip in one row.
union Lanes {
  Doubles v[kVectors];
  double lane[kLanes];
};

inline u64 bits_of(double x) {
  u64 bits;
  std::memcpy(&bits, &x, 8);
  return bits;
}

inline double double_of(u64 bits) {
  double x;
  std::memcpy(&x, &bits, 8);
  return x;
}

inline double exponent_of(double x) { return double(int32_t(bits_of(x) >> kFractionBits & 0x7FF) - kExponentBias); }

inline double power_of_two(double exponent) {
  return double_of(u64(int64_t(exponent) + kExponentBias) << kFractionBits);
}

// Returns x rounded toward zero; |x| is less than 2**52.
inline Doubles truncated(Doubles x) {
  const Longs sign = Longs(x) & Longs(-0.0 - Doubles{});
  const Doubles magnitude = Doubles(Longs(x) ^ sign), nearest = (magnitude + 0x1p52) - 0x1p52;
  return Doubles(Longs(nearest > magnitude ? nearest - 1.0 : nearest) | sign);
}

// The rounding of a sum to the register.
struct Register {
  const int32_t kind;
  const double scale, end;  // of FIXED
  const u64 kept;           // bits, of HOPPER

  explicit Register(const AccumulatedCall& c)
      : kind(c.kind),
        scale(std::ldexp(1.0, c.fraction_bits)),
        end(std::ldexp(1.0, c.integer_bits + c.fraction_bits)),
        kept(~u64(0) << (kFractionBits - c.fraction_bits)) {}

  template <int K>
  double round(double sum) const {
    if (K == FIXED) return std::min(std::max(std::rint(sum * scale), -end), end - 1) / scale;
    const float y = float(K == HOPPER ? double_of(bits_of(sum) & kept) : sum);
    if (K == BF16_REGISTER) return from_bits(u32(narrow_bfloat(y)) << 16);
    return K == FP16_REGISTER ? widen_half(narrow_half(y)) : y;
  }
};

// x, exponents: (k), a row and its exponents; other, its exponents: (k, kLanes); out: kLanes sums.
template <int K>
void add_row(const AccumulatedCall& c, const Register& to, const double* x, const double* x_exponents,
             const Lanes* other, const Lanes* other_exponents, float* out) {
  float total[kLanes] = {};
  for (i64 start = 0; start < c.k; start += std::min(c.promotion, c.k - start)) {
    const i64 stop = start + std::min(c.promotion, c.k - start);
    Lanes reg = {};
    for (i64 first = start; first < stop; first += std::min(c.group, stop - first)) {
      const i64 last = first + std::min(c.group, stop - first);
      Lanes exact = reg;
      for (i64 i = first; i < last; ++i) {
        for (i64 v = 0; v < kVectors; ++v) exact.v[v] += x[i] * other[i].v[v];
      }
      Lanes sum = exact;
      if (K == HOPPER) {
        Lanes largest, per_unit;
        for (i64 lane = 0; lane < kLanes; ++lane) largest.lane[lane] = exponent_of(reg.lane[lane]);
        for (i64 i = first; i < last; ++i) {
          for (i64 v = 0; v < kVectors; ++v) {
            const Doubles exponent = x_exponents[i] + other_exponents[i].v[v];
            largest.v[v] = largest.v[v] > exponent ? largest.v[v] : exponent;
          }
        }
        for (i64 lane = 0; lane < kLanes; ++lane) {
          const double exponent = std::min(std::max(largest.lane[lane], double(-kFar)), double(kFar));
          per_unit.lane[lane] = power_of_two(c.fraction_bits - exponent);
        }
        for (i64 v = 0; v < kVectors; ++v) sum.v[v] = truncated(reg.v[v] * per_unit.v[v]);
        for (i64 i = first; i < last; ++i) {
          for (i64 v = 0; v < kVectors; ++v) sum.v[v] += truncated(x[i] * other[i].v[v] * per_unit.v[v]);
        }
        for (i64 v = 0; v < kVectors; ++v) sum.v[v] /= per_unit.v[v];
      }
      for (i64 lane = 0; lane < kLanes; ++lane) {
        const double rounded = to.template round<K>(sum.lane[lane]);
        reg.lane[lane] = exact.lane[lane] - exact.lane[lane] == 0.0 ? rounded : exact.lane[lane];
      }
    }
#pragma omp simd
    for (i64 lane = 0; lane < kLanes; ++lane) total[lane] += float(reg.lane[lane]);
  }
  std::memcpy(out, total, sizeof total);
}

struct Work {
  const AccumulatedCall& call;
  const i64 strips, blocks;

  explicit Work(const AccumulatedCall& c)
      : call(c), strips((c.n + kLanes - 1) / kLanes), blocks((c.m + kRows - 1) / kRows) {}
};

template <int K>
void run(i64 begin, i64 end, void* context) {
  const Work& work = *static_cast<const Work*>(context);
  const AccumulatedCall& c = work.call;
  const KeepSubnormals keep;
  const Register to(c);
  std::vector<Lanes> strip(2 * c.k);
  std::vector<double> row(2 * c.k);
  Lanes *const other = strip.data(), *const exponents = other + c.k;
  for (i64 task = begin; task < end; ++task) {
    const i64 column = task % work.strips * kLanes, batch = task / work.strips / work.blocks;
    const i64 first = task / work.strips % work.blocks * kRows, width = std::min(kLanes, c.n - column);
    for (i64 i = 0; i < c.k; ++i) {
      for (i64 lane = 0; lane < kLanes; ++lane) {
        other[i].lane[lane] = lane < width ? c.other[(batch * c.k + i) * c.n + column + lane] : 0.0;
        if (K == HOPPER) exponents[i].lane[lane] = exponent_of(other[i].lane[lane]);
      }
    }
    for (i64 m = first; m < std::min(first + kRows, c.m); ++m) {
      const float* x = c.x + (batch * c.m + m) * c.k;
      for (i64 i = 0; i < c.k; ++i) row[i] = x[i];
      if (K == HOPPER) {
        for (i64 i = 0; i < c.k; ++i) row[c.k + i] = exponent_of(row[i]);
      }
      float out[kLanes];
      add_row<K>(c, to, row.data(), row.data() + c.k, other, exponents, out);
      std::memcpy(c.out + (batch * c.m + m) * c.n + column, out, 4 * width);
    }
  }
}

constexpr decltype(&run<HOPPER>) kRuns[] = {run<FP32_REGISTER>, run<BF16_REGISTER>, run<FP16_REGISTER>, run<FIXED>,
                                            run<HOPPER>};

}  // namespace

extern "C" int32_t pt2mx_accumulated_matmul(const AccumulatedCall* call, ParallelFor parallel_for) {
  Work work(*call);
  return parallel_for(0, call->batch * work.blocks * work.strips, 1, kRuns[call->kind], &work);
}
