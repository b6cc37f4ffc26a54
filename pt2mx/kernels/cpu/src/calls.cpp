// The sizes of the structures that Python mirrors; called by ../build.py when it loads the library.

#include "calls.h"

#include <cstring>

namespace {

struct Size {
  const char* name;
  int64_t bytes;
};

#define SIZE(type) {#type, sizeof(type)}
constexpr Size kSizes[] = {
    SIZE(FloatScale),      SIZE(Spec),          SIZE(QuantizeCall),  SIZE(Epilogue),           SIZE(LinearCall),
    SIZE(ConvolutionCall), SIZE(AttentionCall), SIZE(MatmulCall),    SIZE(DenseAttentionCall), SIZE(HadamardCall),
    SIZE(GptqPanelCall),   SIZE(ErrorSums),     SIZE(ErrorSumsCall), SIZE(ActivationCall),     SIZE(RecordedCall)};

}  // namespace

extern "C" int64_t pt2mx_size_of(const char* structure) {
  for (const Size& size : kSizes) {
    if (!std::strcmp(size.name, structure)) return size.bytes;
  }
  return -1;
}
