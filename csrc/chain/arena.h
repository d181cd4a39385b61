// A thread's memory for a program.
#pragma once
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "../cpu/scratch.h"
#include "../cpu/simd.h"

namespace pflcore::cpu::chain {

constexpr int64_t kSlack = 64;  // elements behind an array that vectors may reach into

// One block of memory, every array at a cache line. Arrays are taken twice, in the same order:
// after `begin` to count them, when there are none yet, and after `grow` to have them.
class Arena {
 public:
  void begin() {
    used_ = 0;
    counting_ = true;
  }
  void grow() {
    apart_.clear();
    if (kKeepScratch && used_ > held_) {
      held_ = used_;
      memory_.reset();
      memory_ = std::make_unique<Scratch<std::byte>>(held_);
      // Nothing that vectors may reach into is ever undefined.
      std::memset(memory_->data, 0, held_);
    }
    used_ = 0;
    counting_ = false;
  }

  template <class U>
  U* take(int64_t n) {
    if (!kKeepScratch && !counting_) {
      apart_.push_back(std::make_unique<Scratch<std::byte>>(n * sizeof(U)));
      std::memset(apart_.back()->data, 0, n * sizeof(U));
      return reinterpret_cast<U*>(apart_.back()->data);
    }
    U* const p = counting_ ? nullptr : reinterpret_cast<U*>(memory_->data + used_);
    used_ += up(n * sizeof(U), 64) + 64;  // neighbours do not begin in one set of the cache
    return p;
  }
  template <class U>
  U* take_zeros(int64_t n) {
    U* const p = take<U>(n);
    if (!counting_) std::fill_n(p, n, U(0));
    return p;
  }

  int64_t used() const { return used_; }  // bytes
  int64_t held() const { return held_; }

 private:
  std::unique_ptr<Scratch<std::byte>> memory_;
  // Where a sanitizer watches, every array is by itself.
  std::vector<std::unique_ptr<Scratch<std::byte>>> apart_;
  int64_t used_ = 0, held_ = 0;
  bool counting_ = true;
};

// Memory that begins at a cache line.
template <class T>
struct Aligned {
  using value_type = T;
  Aligned() = default;
  template <class U>
  Aligned(const Aligned<U>&) {}
  T* allocate(size_t n) {
    return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(64)));
  }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
  bool operator==(const Aligned&) const { return true; }
};
template <class T>
using Numbers = std::vector<T, Aligned<T>>;

}  // namespace pflcore::cpu::chain
