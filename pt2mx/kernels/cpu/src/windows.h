// The rows of x in a product. In a convolution a row is what lies under the kernel at one place of the result: the
// pixels at its taps, one after the other. In another product it is a row of x. Included by linear.cpp.
//
// Rows of a convolution have an order of their own: those follow each other of which the same taps lie inside of the
// image, so that a kernel can leave out a tap that lies outside for all of its rows.

#pragma once

#include "floats.h"

namespace {

class Windows {
 public:
  const i64 taps, pixels;  // in a row; rows of x in memory

  Windows(const LinearCall& c, const ConvolutionCall* convolution)
      : taps(convolution ? convolution->kernel[0] * convolution->kernel[1] : 1),
        pixels(convolution ? convolution->pixels : c.m),
        c_(convolution) {
    if (!c_) return;
    places_ = c_->out_size[0] * c_->out_size[1];
    images_ = c.m / places_;
    for (const Range& down : ranges(0)) {
      for (const Range& right : ranges(1)) parts_.push_back({down, right});
    }
  }

  bool are_rows() const { return !c_; }

  // Of the `n` rows from `m` on, one after the other: where each goes, as a row of the result, to `places`; and
  // each(r, count, tap, pixel, step), for `count` rows from `r` on: their pixels at a tap are `step` apart from `pixel`
  // on. Outside of the image that is -1.
  template <class Each>
  void each_tap(i64 m, i64 n, i64* places, Each each) const {
    if (!c_) {
      for (i64 r = 0; r < n; ++r) places[r] = m + r;
      return each(0, n, 0, m, 1);
    }
    const i64 high = c_->size[0], wide = c_->size[1];
    Place at = find(m);
    for (i64 r = 0, count; r < n; r += count) {
      count = std::min(n - r, parts_[at.part].right.end - at.right);
      const i64 place = at.image * places_ + at.down * c_->out_size[1] + at.right, first = at.image * high * wide;
      for (i64 i = 0; i < count; ++i) places[r + i] = place + i;
      i64 tap = 0, y = at.down * c_->stride[0] - c_->padding[0];
      for (i64 i = 0; i < c_->kernel[0]; ++i, y += c_->dilation[0]) {
        i64 x = at.right * c_->stride[1] - c_->padding[1];
        for (i64 j = 0; j < c_->kernel[1]; ++j, ++tap, x += c_->dilation[1]) {
          const bool inside = u64(y) < u64(high) && u64(x) < u64(wide);
          each(r, count, tap, inside ? first + y * wide + x : -1, c_->stride[1]);
        }
      }
      advance(at, count);
    }
  }

 private:
  struct Range {
    i64 begin, end;
  };
  struct Part {  // of an image of the result: everywhere in it the same taps lie inside
    Range down, right;
  };
  struct Place {
    i64 image, part, down, right;
  };

  // Along a dimension of the result, the places at which the same taps lie inside.
  std::vector<Range> ranges(int d) const {
    std::vector<Range> found;
    Range before{-1, -1};
    for (i64 place = 0; place < c_->out_size[d]; ++place) {
      Range inside{0, 0};
      for (i64 tap = 0; tap < c_->kernel[d]; ++tap) {
        const i64 at = place * c_->stride[d] - c_->padding[d] + tap * c_->dilation[d];
        inside.begin += at < 0;
        inside.end += at < c_->size[d];
      }
      if (inside.begin != before.begin || inside.end != before.end) found.push_back({place, place});
      found.back().end = place + 1;
      before = inside;
    }
    return found;
  }

  Place find(i64 m) const {
    for (i64 part = 0;; ++part) {
      const Part& p = parts_[part];
      const i64 wide = p.right.end - p.right.begin, area = (p.down.end - p.down.begin) * wide;
      if (m < images_ * area) {
        const i64 of_image = m % area;
        return {m / area, part, p.down.begin + of_image / wide, p.right.begin + of_image % wide};
      }
      m -= images_ * area;
    }
  }

  // To the place `count` further, in the same line or at the begin of the next.
  void advance(Place& at, i64 count) const {
    const Part& p = parts_[at.part];
    if ((at.right += count) < p.right.end) return;
    at.right = p.right.begin;
    if (++at.down < p.down.end) return;
    at.down = p.down.begin;
    if (++at.image < images_) return;
    if (++at.part == i64(parts_.size())) return;  // behind the last place
    at = {0, at.part, parts_[at.part].down.begin, parts_[at.part].right.begin};
  }

  const ConvolutionCall* c_;     // null of another product
  i64 places_ = 0, images_ = 0;  // places of an image of the result
  std::vector<Part> parts_;
};

}  // namespace
