// The CPU kernel of pt2mx/kernels/gptq_panel.py, equal to it to the bit; built and called by ../gptq_panel.py.
//
// A column of the weight is a row of n values in memory. A thread takes a strip of these rows, and keeps the errors of
// the columns before the current one in the L1 cache: each column subtracts them in order, in registers.

#include <vector>
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "values.h"

namespace {

constexpr i64 kVectors = 4;                // of a strip: enough sums to hide the latency of a subtraction
constexpr i64 kStrip = kVectors * kWidth;  // values of a column
constexpr i64 kGrain = 1 << 15;            // values that are worth another thread

struct Strip {
  Floats v[kVectors];
};

inline Strip load_strip(const float* from, i64 n) {
  Strip strip{};
  std::memcpy(&strip, from, n == kStrip ? sizeof strip : 4 * n);
  return strip;
}

inline void store_strip(float* to, const Strip& strip, i64 n) {
  std::memcpy(to, &strip, n == kStrip ? sizeof strip : 4 * n);
}

// Returns w - share * error, rounded once if the processor has fused multiply-add, as in torch's `addcmul_`.
inline Floats without_share(Floats w, float share, Floats error) {
#if defined(__aarch64__)
  return Floats(vfmaq_n_f32(float32x4_t(w), float32x4_t(error), -share));
#else
  return fused(floats(-share), error, w);
#endif
}

struct Work {
  const GptqPanelCall& call;
  const i64 strips;  // of a group

  explicit Work(const GptqPanelCall& c) : call(c), strips((c.n + kStrip - 1) / kStrip) {}
};

// errors: (width, kStrip), memory of this thread.
template <int R>
void round_strip(const GptqPanelCall& c, i64 group, i64 first, Strip* errors) {
  const Grid grid(*c.spec);
  const i64 n = std::min(kStrip, c.n - first);
  for (i64 i = 0; i < c.width; ++i) {
    const i64 at = (group * c.width + i) * c.n + first;
    const float* shares = c.shares + (group * c.width + i) * c.width;
    Strip w = load_strip(c.columns + at, n);
    for (i64 j = 0; j < i; ++j) {
      for (i64 k = 0; k < kVectors; ++k) w.v[k] = without_share(w.v[k], shares[j], errors[j].v[k]);
    }
    Strip inside = w, value;
    const Strip scale = load_strip(c.scale + at, n);
    if (c.low) {
      const Strip low = load_strip(c.low + at, n), high = load_strip(c.high + at, n);
      for (i64 k = 0; k < kVectors; ++k) {
        inside.v[k] = inside.v[k] < low.v[k] ? low.v[k] : inside.v[k];
        inside.v[k] = inside.v[k] > high.v[k] ? high.v[k] : inside.v[k];
      }
    }
    for (i64 k = 0; k < kVectors; ++k) {
      const Floats units = inside.v[k] * (1.0f / scale.v[k]);
      const Floats nan_if_not_finite = units - units;
      const Floats p = nan_if_not_finite == 0.0f ? to_element<R>(units, grid, nullptr) : nan_if_not_finite;
      value.v[k] = p * scale.v[k];
      errors[i].v[k] = (w.v[k] - value.v[k]) / shares[i];
    }
    store_strip(c.rounded + at, value, n);
    store_strip(c.errors + at, errors[i], n);
  }
}

void run(i64 begin, i64 end, void* context) {
  const Work& work = *static_cast<const Work*>(context);
  const KeepSubnormals keep;
  std::vector<Strip> errors(work.call.width);
  for (i64 task = begin; task < end; ++task) {
    const i64 first = task % work.strips * kStrip;
    with_rounding(work.call.spec->rounding,
                  [&](auto rounding) { round_strip<rounding()>(work.call, task / work.strips, first, errors.data()); });
  }
}

}  // namespace

extern "C" int32_t pt2mx_gptq_panel(const GptqPanelCall* call, ParallelFor parallel_for) {
  Work work(*call);
  const i64 grain = std::max<i64>(1, kGrain / (call->width * kStrip));
  return parallel_for(0, call->groups * work.strips, grain, run, &work);
}
