// Calls kernels with the arguments of an earlier run; built and called by ../replay.py.

#include <cstddef>
#include <utility>

#include "calls.h"

namespace {

template <std::size_t>
using Number = uint64_t;

// A kernel ignores the arguments that it does not have: in the calling conventions of x86-64 and AArch64 the caller
// removes them.
template <std::size_t... I>
int32_t run(const RecordedCall& call, std::index_sequence<I...>) {
  using Kernel = int32_t (*)(Number<I>...);
  return reinterpret_cast<Kernel>(call.kernel)(call.arguments[I]...);
}

}  // namespace

extern "C" {

int64_t pt2mx_replay(const RecordedCall* calls, int64_t n) {
  int64_t i = 0;
  try {
    for (; i < n; ++i) {
      const int32_t error = run(calls[i], std::make_index_sequence<kMostArguments>{});
      if (calls[i].returns_error && error) break;
    }
  } catch (...) {  // Inductor's kernels check indices
  }
  return i;
}

}  // extern "C"
