// Im2col without the copy: finds where the values of each row of a matmul are in x. In a convolution, a row has the
// pixels under the kernel at one position of the result, one tap after the other. In a matmul it is a row of x.
//
// The rows of a convolution are ordered so that neighbours share the same valid taps; a kernel can then skip taps that
// fall in the padding for all its rows.

#pragma once

#include <vector>

#include "floats.h"

namespace {

class Im2col {
 public:
  const i64 taps, pixels;  // of a row; rows of x in memory

  Im2col(const LinearCall& c, const ConvolutionCall* convolution)
      : taps(convolution ? convolution->kernel[0] * convolution->kernel[1] : 1),
        pixels(convolution ? convolution->pixels : c.m),
        c_(convolution) {
    if (!c_) return;
    positions_ = c_->out_size[0] * c_->out_size[1];
    images_ = c.m / positions_;
    for (const Range& y : ranges(0)) {
      for (const Range& x : ranges(1)) parts_.push_back({y, x});
    }
  }

  bool is_matrix() const { return !c_; }

  // For `n` rows from row `m` on: writes the position of each in the result to `positions`, and calls each(r, count,
  // tap, pixel, step) for `count` rows from the r-th on. Their pixels at `tap` are pixel, pixel + step, ..; -1 is
  // padding.
  template <class Each>
  void each_tap(i64 m, i64 n, i64* positions, Each each) const {
    if (!c_) {
      for (i64 r = 0; r < n; ++r) positions[r] = m + r;
      return each(0, n, 0, m, 1);
    }
    const i64 height = c_->size[0], width = c_->size[1];
    Position at = find(m);
    for (i64 r = 0, count; r < n; r += count) {
      count = std::min(n - r, parts_[at.part].x.end - at.x);
      const i64 position = at.image * positions_ + at.y * c_->out_size[1] + at.x, first = at.image * height * width;
      for (i64 i = 0; i < count; ++i) positions[r + i] = position + i;
      i64 tap = 0, y = at.y * c_->stride[0] - c_->padding[0];
      for (i64 i = 0; i < c_->kernel[0]; ++i, y += c_->dilation[0]) {
        i64 x = at.x * c_->stride[1] - c_->padding[1];
        for (i64 j = 0; j < c_->kernel[1]; ++j, ++tap, x += c_->dilation[1]) {
          const bool inside = u64(y) < u64(height) && u64(x) < u64(width);
          each(r, count, tap, inside ? first + y * width + x : -1, c_->stride[1]);
        }
      }
      advance(at, count);
    }
  }

 private:
  struct Range {
    i64 begin, end;
  };
  struct Part {  // a rectangle of the result in which every position has the same valid taps
    Range y, x;
  };
  struct Position {
    i64 image, part, y, x;
  };

  // Splits a dimension of the result into ranges of positions with the same valid taps.
  std::vector<Range> ranges(int d) const {
    std::vector<Range> ranges;
    Range before{-1, -1};
    for (i64 position = 0; position < c_->out_size[d]; ++position) {
      Range inside{0, 0};
      for (i64 tap = 0; tap < c_->kernel[d]; ++tap) {
        const i64 at = position * c_->stride[d] - c_->padding[d] + tap * c_->dilation[d];
        inside.begin += at < 0;
        inside.end += at < c_->size[d];
      }
      if (inside.begin != before.begin || inside.end != before.end) ranges.push_back({position, position});
      ranges.back().end = position + 1;
      before = inside;
    }
    return ranges;
  }

  // Rows are ordered by part, then by image, then by y and x.
  Position find(i64 m) const {
    for (i64 part = 0;; ++part) {
      const Part& p = parts_[part];
      const i64 width = p.x.end - p.x.begin, area = (p.y.end - p.y.begin) * width;
      if (m < images_ * area) {
        const i64 in_image = m % area;
        return {m / area, part, p.y.begin + in_image / width, p.x.begin + in_image % width};
      }
      m -= images_ * area;
    }
  }

  // Moves `count` positions further, within a row of the part or to the begin of the next.
  void advance(Position& at, i64 count) const {
    const Part& p = parts_[at.part];
    if ((at.x += count) < p.x.end) return;
    at.x = p.x.begin;
    if (++at.y < p.y.end) return;
    at.y = p.y.begin;
    if (++at.image < images_) return;
    if (++at.part == i64(parts_.size())) return;  // past the last position
    at = {0, at.part, parts_[at.part].y.begin, parts_[at.part].x.begin};
  }

  const ConvolutionCall* c_;        // null for a matmul
  i64 positions_ = 0, images_ = 0;  // positions of an image of the result
  std::vector<Part> parts_;
};

}  // namespace
