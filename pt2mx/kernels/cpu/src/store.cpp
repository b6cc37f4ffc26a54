// store_mx: quantizes new keys and values into slots of a cache; built and called by ../cache.py.

#include "floats.h"

extern "C" int32_t pt2mx_store(const QuantizeCall* calls, i64 count, ParallelFor parallel_for) {
  for (i64 i = 0; i < count; ++i) {
    for (i64 s = 0; s < calls[i].new_slots; ++s) {
      if (calls[i].slots[s] < 0 || calls[i].slots[s] >= calls[i].all_slots) return kUnsupported;
    }
  }
  int32_t error = 0;
  for (i64 i = 0; i < count && !error; ++i) error = pt2mx_run(calls + i, parallel_for);
  return error;
}
