// The tasks of a GEMM: blocks of its result. A thread that finishes a task takes the next one, so that no thread waits
// for another. Tasks of the same columns are consecutive, so that a thread often has these columns decoded already.

#pragma once

#include <algorithm>
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

  // Returns false when all tasks are taken.
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
