// Memory for kernels: scratch that a thread keeps between calls, and huge pages for large fresh
// results.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace pflcore::cpu {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kKeepScratch =
    false;  // blocks of exactly the size asked for, so that the sanitizer sees their ends
#else
constexpr bool kKeepScratch = true;
#endif

// The blocks a thread has given back. Some 100 KB from the system cost more in page faults than the
// work that is done in them.
class Shelf {
 public:
  static Shelf& mine() {
    thread_local Shelf shelf;
    return shelf;
  }
  // A block of at least `bytes`, 64-byte aligned; `bytes` becomes its size.
  void* take(size_t& bytes) {
    Block* best = nullptr;
    for (Block& b : blocks_)
      if (b.data && b.bytes >= bytes && (!best || b.bytes < best->bytes)) best = &b;
    if (!best) return ::operator new(bytes, std::align_val_t(64));
    bytes = best->bytes;
    void* data = best->data;
    *best = {};
    return data;
  }
  void give(void* data, size_t bytes) {
    Block* smallest = &blocks_[0];
    for (Block& b : blocks_)
      if (b.bytes < smallest->bytes) smallest = &b;  // an empty place has size 0
    if (kKeepScratch && bytes <= kLargest && smallest->bytes < bytes) {
      std::swap(data, smallest->data);
      smallest->bytes = bytes;
    }
    ::operator delete(data, std::align_val_t(64));
  }
  ~Shelf() {
    for (Block& b : blocks_) ::operator delete(b.data, std::align_val_t(64));
  }

 private:
  struct Block {
    void* data = nullptr;
    size_t bytes = 0;
  };
  static constexpr size_t kLargest = size_t{2} << 20;
  Block blocks_[8];
};

// 64-byte aligned scratch for n elements, not initialised.
template <class T>
struct Scratch {
  explicit Scratch(int64_t n)
      : bytes_(sizeof(T) * static_cast<size_t>(std::max<int64_t>(n, 1))),
        data(static_cast<T*>(Shelf::mine().take(bytes_))) {}
  ~Scratch() { Shelf::mine().give(data, bytes_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  T& operator[](int64_t i) const { return data[i]; }

 private:
  size_t bytes_;

 public:
  T* data;
};

// For memory fresh from the system: huge pages where it grants them, and all pages touched, in
// parallel. Left to the first write, the pages of a result of 80 MB cost more time than computing
// it does.
template <class Parallel>
void touch_fresh(void* memory, size_t bytes, const Parallel& parallel) {
#if defined(__linux__)
  constexpr uintptr_t huge = uintptr_t{2} << 20, small = 4096;
  const uintptr_t from = reinterpret_cast<uintptr_t>(memory),
                  begin = (from + huge - 1) / huge * huge, end = (from + bytes) / huge * huge;
  if (end < begin + 2 * huge) return;
#if defined(MADV_HUGEPAGE)
  madvise(reinterpret_cast<void*>(begin), end - begin,
          MADV_HUGEPAGE);  // a hint: nothing is lost where it is refused
#endif
  parallel(static_cast<int64_t>((end - begin) / huge), [begin](int64_t first, int64_t last) {
    for (uintptr_t at = begin + first * huge; at < begin + last * huge; at += small)
      *reinterpret_cast<volatile char*>(at) = 0;
  });
#else
  (void)memory, (void)bytes, (void)parallel;
#endif
}

}  // namespace pflcore::cpu
