// Looks up elements and modes in the tables that pt2mx has in Python.

#include "elements.h"

#include <algorithm>
#include <array>
#include <map>

#include "tensors.h"

namespace pt2mx {
namespace {

struct ScaleMode {
  const char* name;
  int32_t candidates;
  int32_t exponent_offsets[kCandidates];
};

#include "elements.inc"

template <class Row>
const char* name_of(const Row& row) {
  return row.name;
}
const char* name_of(const char* row) { return row; }

template <class Row, size_t N>
int32_t index_of(const Row (&rows)[N], const std::string& name, const char* kind) {
  for (size_t i = 0; i < N; ++i) {
    if (name == name_of(rows[i])) return int32_t(i);
  }
  STD_TORCH_CHECK(false, "unknown ", kind, " of pt2mx's C++ operators: ", name);
  return -1;
}

// Returns the bits of an error with which the sum of a block's squares fits int64: reference.squared_error_bits.
int32_t squared_error_bits(int64_t block_size) {
  int32_t bits = 0;
  while ((block_size - 1) >> bits) ++bits;
  return std::min(28, (62 - bits) / 2);
}

}  // namespace

const Element& element_of(const std::string& name) { return kElements[index_of(kElements, name, "element")]; }

Spec spec_of(const Element& e, int64_t block_size, const std::string& scale_mode, const std::string& rounding) {
  const int32_t mode = index_of(kScaleModes, scale_mode, "scale mode");
  const ScaleMode& scale = kScaleModes[mode];
  Spec spec{};
  spec.exponent_offsets = scale.exponent_offsets;
  spec.bits = e.bits;
  spec.mantissa_bits = e.mantissa_bits;
  spec.emin = e.emin;
  spec.emax = e.emax;
  spec.max_code = e.max_code;
  spec.is_int = e.is_int;
  spec.full_range = e.full_range;
  spec.rounding = index_of(kRoundings, rounding, "rounding");
  STD_TORCH_CHECK(e.thresholds[mode] != kUndefined, "scale mode ", scale_mode, " is not defined for ", e.name);
  spec.threshold = e.thresholds[mode];
  spec.candidates = scale.candidates;
  spec.searches = scale.candidates > 1;
  spec.error_bits = squared_error_bits(block_size);
  spec.codes_per_group = e.codes_per_group;
  spec.bytes_per_group = e.bytes_per_group;
  spec.max_normal = e.max_normal;
  spec.lowest = e.lowest;
  return spec;
}

const float* table_of(const Element& element) {
  using Table = std::array<float, 256>;
  static const std::map<const Element*, Table> tables = [] {
    std::map<const Element*, Table> tables;
    uint8_t codes[256], one = 127;
    for (const Element& e : kElements) {
      for (int i = 0; i < 256; ++i) codes[i] = uint8_t(i & ((1 << e.bits) - 1));
      Spec spec = spec_of(e, 256);
      spec.codes_per_group = spec.bytes_per_group = 1;
      QuantizeCall call{&spec, DEQUANTIZE, FP32, FP32, 0, 1, 256, 1, 256, codes, nullptr, tables[&e].data(), &one, 0};
      check_error(pt2mx_run(&call, torch_parallel_for));
    }
    return tables;
  }();
  return tables.at(&element).data();
}

Blocks blocks_of(const Element& element, int64_t block_size, int64_t k) {
  constexpr int64_t kGroup = 32;  // codes that are decoded together
  const int64_t size = block_size < k ? block_size : (k + kGroup - 1) / kGroup * kGroup;
  return {size % kGroup ? 0 : element.decoder, size};
}

}  // namespace pt2mx
