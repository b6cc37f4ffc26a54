// The CPU kernel of error_sums in pt2mx/kernels/reference.py; called by ../quantize.py. Its counts are equal; it adds
// the squares in another order.
//
// A tensor is (outer, n, inner) with blocks along n. A run is a block if inner is 1, otherwise a row of inner values,
// each with a scale of its own. A part has whole runs, which are adjacent in memory. The sums of the parts are added in
// their order, so that they do not depend on the number of threads.

#include <vector>

#include "floats.h"

namespace {

constexpr i64 kPart = 1 << 14;  // values of a part, about

// Adds the sums of a run. Step: 0 if all values have one scale, 1 if each has its own.
template <i64 Step>
void add(const float* x, const float* y, const float* scale, i64 n, float low, float high, ErrorSums* sums) {
  int32_t nonfinite = 0, saturated = 0, nonzero = 0, kept = 0;
  double signal = 0, noise = 0;
#pragma omp simd reduction(+ : nonfinite, saturated, nonzero, kept, signal, noise)
  for (i64 i = 0; i < n; ++i) {
    const float s = scale[Step * i], a = x[i];
    const bool has_scale = s > 0;
    const float value = has_scale ? a : 0.0f, result = has_scale ? y[i] : 0.0f, error = value - result;
    nonfinite += a - a != 0;
    saturated += (value > high * s) | (value < low * s);
    nonzero += value != 0;
    kept += result != 0;
    signal += double(value) * value;
    noise += double(error) * error;
  }
  sums->nonfinite += nonfinite;
  sums->saturated += saturated;
  sums->flushed += nonzero - kept;
  sums->signal += signal;
  sums->noise += noise;
}

struct Work {
  const ErrorSumsCall& call;
  const i64 blocks, runs, runs_of_part;
  std::vector<ErrorSums> parts;

  explicit Work(const ErrorSumsCall& c)
      : call(c),
        blocks((c.n + c.block - 1) / c.block),
        runs(c.outer * (c.inner == 1 ? blocks : c.n)),
        runs_of_part(std::max<i64>(1, kPart / (c.inner == 1 ? c.block : c.inner))),
        parts((runs + runs_of_part - 1) / runs_of_part) {}

  // The offset of the first value of a run.
  i64 offset(i64 run) const {
    if (call.inner > 1) return run * call.inner;
    return run / blocks * call.n + std::min(run % blocks * call.block, call.n);
  }
};

void add_parts(i64 begin, i64 end, void* context) {
  Work& work = *static_cast<Work*>(context);
  const ErrorSumsCall& c = work.call;
  const KeepSubnormals keep;
  std::vector<float> x, y;
  for (i64 part = begin; part < end; ++part) {
    const i64 first = part * work.runs_of_part, last = std::min(first + work.runs_of_part, work.runs);
    const i64 at = work.offset(first), count = work.offset(last) - at;
    const float *values = static_cast<const float*>(c.x) + at, *results = static_cast<const float*>(c.y) + at;
    if (c.dtype != FP32) {
      x.resize(count);
      y.resize(count);
      widen(static_cast<const u16*>(c.x) + at, count, c.dtype, x.data());
      widen(static_cast<const u16*>(c.y) + at, count, c.dtype, y.data());
      values = x.data();
      results = y.data();
    }
    for (i64 run = first; run < last; ++run) {
      const i64 start = work.offset(run) - at, n = work.offset(run + 1) - at - start;
      const float *a = values + start, *b = results + start;
      if (c.inner == 1) {
        add<0>(a, b, c.scale + run, n, c.low, c.high, &work.parts[part]);
      } else {
        const i64 block = run / c.n * work.blocks + run % c.n / c.block;
        add<1>(a, b, c.scale + block * c.inner, n, c.low, c.high, &work.parts[part]);
      }
    }
  }
}

}  // namespace

extern "C" int32_t pt2mx_error_sums(const ErrorSumsCall* call, ParallelFor parallel_for) {
  Work work(*call);
  const int32_t error = parallel_for(0, i64(work.parts.size()), 2, add_parts, &work);
  for (const ErrorSums& part : work.parts) {
    call->sums->nonfinite += part.nonfinite;
    call->sums->saturated += part.saturated;
    call->sums->flushed += part.flushed;
    call->sums->signal += part.signal;
    call->sums->noise += part.noise;
  }
  return error;
}
