// The rows of x in a product. In a convolution a row is what lies under the kernel at one place of the result: the
// pixels at its taps, one after the other. In another product it is a row of x. Included by linear.cpp.

#pragma once

#include "floats.h"

namespace {

class Windows {
 public:
  const i64 taps, pixels;  // in a row; rows of x in memory

  Windows(const LinearCall& c, const ConvolutionCall* convolution)
      : taps(convolution ? convolution->kernel[0] * convolution->kernel[1] : 1),
        pixels(convolution ? convolution->pixels : c.m),
        c_(convolution) {}

  bool are_rows() const { return !c_; }

  // each(r, tap, pixel): for the taps of `n` rows from `m` on; the pixel is -1 outside of the image.
  template <class Each>
  void each_tap(i64 m, i64 n, Each each) const {
    if (!c_) {
      for (i64 r = 0; r < n; ++r) each(r, 0, m + r);
      return;
    }
    const i64 high = c_->size[0], wide = c_->size[1];
    i64 right = m % c_->out_size[1], down = m / c_->out_size[1] % c_->out_size[0];
    i64 first = m / c_->out_size[1] / c_->out_size[0] * high * wide;  // pixel of the image
    for (i64 r = 0; r < n; ++r) {
      i64 tap = 0, y = down * c_->stride[0] - c_->padding[0];
      for (i64 i = 0; i < c_->kernel[0]; ++i, y += c_->dilation[0]) {
        i64 x = right * c_->stride[1] - c_->padding[1];
        for (i64 j = 0; j < c_->kernel[1]; ++j, ++tap, x += c_->dilation[1]) {
          each(r, tap, u64(y) < u64(high) && u64(x) < u64(wide) ? first + y * wide + x : -1);
        }
      }
      if (++right < c_->out_size[1]) continue;
      right = 0;
      if (++down < c_->out_size[0]) continue;
      down = 0;
      first += high * wide;
    }
  }

 private:
  const ConvolutionCall* c_;  // null of another product
};

}  // namespace
