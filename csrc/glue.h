// What the glue of every op shares: dtypes, rows, and torch's own threads as the kernels' `parallel`.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <optional>

#include "check.h"
#include "cpu/isa.h"

namespace pflcore {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline Dtype dtype_of(const Tensor& t, const char* op) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return Dtype::f32;
    case ScalarType::Double: return Dtype::f64;
    case ScalarType::Half: return Dtype::f16;
    case ScalarType::BFloat16: return Dtype::bf16;
    default: break;
  }
  PFL_CHECK(false, op, ": expected a float16, bfloat16, float32 or float64 tensor");
  return Dtype::f32;
}

// torch's C interface says no more than that a call failed. Where all it has to do is to find memory, we know why, and say so.
template <class Allocate>
Tensor allocated(int64_t elements, const Allocate& allocate) {
  try {
    return allocate();
  } catch (const std::exception&) {
    throw std::runtime_error(text("out of memory (or an earlier error of the device): there is no room for ", elements, " more elements"));
  }
}

template <class Sizes = std::initializer_list<int64_t>>
Tensor make(const Tensor& like, const Sizes& sizes, std::optional<ScalarType> dtype = std::nullopt) {
  int64_t elements = 1;
  for (const int64_t size : sizes) elements *= size;
  return allocated(elements, [&] { return torch::stable::new_empty(like, sizes, dtype); });
}

inline Tensor dense(const Tensor& t) {
  return t.is_contiguous() ? t : allocated(t.numel(), [&] { return torch::stable::contiguous(t); });
}

inline Tensor converted(const Tensor& t, ScalarType dtype) {
  return t.scalar_type() == dtype ? t : allocated(t.numel(), [&] { return torch::stable::to(t, dtype); });
}

// A tensor whose last dimension is contiguous: itself, or a copy.
inline Tensor rows(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  return last < 0 || t.size(last) <= 1 || t.stride(last) == 1 ? t : dense(t);
}

inline Tensor dense_as(const Tensor& t, ScalarType dtype) { return dense(converted(t, dtype)); }

inline int64_t row_stride(const Tensor& t) { return t.size(0) > 1 ? t.stride(0) : t.size(1); }

// Runs `body(begin, end)` over pieces 0..n-1 on torch's intra-op threads, each thread taking the next free piece, so that a busy core
// does not hold up the others. Little work stays on the calling thread: opening a parallel region costs more than it saves.
struct TorchParallel {
  double work;  // roughly: scalar operations
  static constexpr double worthwhile = 4e5;

  template <class Body>
  void operator()(int64_t n, const Body& body) const {
    if (n <= 0) return;
    const int64_t threads = n == 1 || work < worthwhile ? 1 : std::min<int64_t>(n, torch::stable::get_num_threads());
    if (threads == 1) return body(0, n);
    std::atomic<int64_t> next{0};
    torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
      for (int64_t i = next++; i < n; i = next++) body(i, i + 1);
    });
  }
};

}  // namespace pflcore
