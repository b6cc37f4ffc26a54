// The tasks of a product of many rows: some rows and some columns of its result. A thread that has ended one takes the
// next, so that none waits for another, and finds the columns that it has decoded last. Included by linear.cpp.

#pragma once

#include <atomic>

#include "calls.h"

namespace {

struct Task {
  int64_t top, bottom, first, last;  // rows, columns
};

class Tasks {
 public:
  explicit Tasks(const LinearCall& c)
      : call_(c), down_((c.m + c.task_rows - 1) / c.task_rows), across_((c.n + c.task_columns - 1) / c.task_columns) {}

  int64_t count() const { return down_ * across_; }

  // Returns whether there was another; those of the same columns follow each other.
  bool take(Task& task) {
    const int64_t at = taken_++, row = at % down_ * call_.task_rows, column = at / down_ * call_.task_columns;
    task = {row, std::min(row + call_.task_rows, call_.m), column, std::min(column + call_.task_columns, call_.n)};
    return at < count();
  }

 private:
  const LinearCall& call_;
  const int64_t down_, across_;
  std::atomic<int64_t> taken_{0};
};

}  // namespace
