// Aligned memory, and memory that a thread keeps.

#pragma once

#include <cstdlib>
#include <vector>

#include "floats.h"

namespace {

// Memory aligned to cache lines: a vector that crosses two takes twice as long.
template <class T>
class Buffer {
 public:
  void resize(i64 n) { lines_.resize((n * sizeof(T) + sizeof(Line) - 1) / sizeof(Line)); }
  i64 size() const { return i64(lines_.size() * sizeof(Line) / sizeof(T)); }
  void zero() { std::memset(static_cast<void*>(lines_.data()), 0, lines_.size() * sizeof(Line)); }
  T* data() { return reinterpret_cast<T*>(lines_.data()); }
  const T* data() const { return reinterpret_cast<const T*>(lines_.data()); }

 private:
  struct alignas(64) Line {
    u8 bytes[64];
  };
  std::vector<Line> lines_;
};

enum Use { OF_X, OF_WEIGHT, OF_SUMS };
constexpr i64 kKept = 1 << 25;  // the most bytes that a thread keeps

// Memory that a thread keeps for its next call, because page faults on fresh memory take longer than filling it.
template <Use>
class Scratch {
 public:
  explicit Scratch(i64 bytes) {
    static thread_local Buffer<u8> kept;
    Buffer<u8>& buffer = bytes <= kKept ? kept : large_;
    if (buffer.size() < bytes) {
      buffer = Buffer<u8>();  // so that resize copies nothing
      buffer.resize(bytes);
    }
    data_ = buffer.data();
  }
  u8* data() const { return data_; }

 private:
  Buffer<u8> large_;
  u8* data_;
};

}  // namespace
