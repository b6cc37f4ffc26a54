// Element formats and modes by name, as the kernels take them; the tables are in elements.inc.

#pragma once

#include <string>

#include "calls.h"

namespace pt2mx {

constexpr int kModes = 7;       // scale modes
constexpr int kCandidates = 3;  // of the mode that searches
constexpr int kUndefined = -2;  // no threshold: -1 is below every mantissa

// A row of elements.inc.
struct Element {
  const char* name;
  int32_t decoder;  // of decode.h for blocks of whole groups; 0: the table of codes
  int32_t bits, mantissa_bits, emin, emax, max_code, is_int, full_range;
  int32_t codes_per_group, bytes_per_group;
  float max_normal, lowest;
  int32_t thresholds[kModes];  // kUndefined where the mode is not defined for the element
};

const Element& element_of(const std::string& name);

// Returns the bytes of n packed codes.
inline int64_t packed_length(const Element& e, int64_t n) {
  return (n + e.codes_per_group - 1) / e.codes_per_group * e.bytes_per_group;
}

Spec spec_of(const Element& element, int64_t block_size, const std::string& scale_mode = "floor",
             const std::string& rounding = "even");

// Returns the values of the 256 bytes that a code may have.
const float* table_of(const Element& element);

// How rows of k values are decoded, and the size of their blocks; a single block is rounded up to whole groups.
struct Blocks {
  int32_t decoder;
  int64_t size;
};
Blocks blocks_of(const Element& element, int64_t block_size, int64_t k);

}  // namespace pt2mx
