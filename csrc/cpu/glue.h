// Parts that the CPU glue of every op shares: torch's own threads as the kernels' `parallel`.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <exception>

#include "../glue/common.h"

namespace pflcore {

// The device of a call, as cuda::Call is on a GPU. There is nothing to check: torch's dispatcher
// calls this code for tensors on the CPU only.
struct OnCpu {
  OnCpu(const Tensor&, const char*) {}
  template <class T>
  void same(const T&, const char*) const {}
};

// Runs `body(begin, end)` over pieces 0..n-1 on torch's intra-op threads, each thread taking the
// next free piece, so that a busy core does not hold up the others. Little work stays on the
// calling thread: opening a parallel region costs more than it saves. The first exception is thrown
// again on the calling thread: one that went through torch's own code would come out as another.
struct TorchParallel {
  double work;  // roughly: scalar operations
  static constexpr double worthwhile = 4e5;

  template <class Body>
  void operator()(int64_t n, const Body& body) const {
    if (n <= 0) return;
    const int64_t threads =
        n == 1 || work < worthwhile ? 1 : std::min<int64_t>(n, torch::stable::get_num_threads());
    if (threads == 1) return body(0, n);
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error;
    torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
      try {
        for (int64_t i = next++; i < n; i = next++) body(i, i + 1);
      } catch (...) {
        next = n;
        if (!failed.exchange(true)) error = std::current_exception();
      }
    });
    if (error) std::rethrow_exception(error);
  }
};

}  // namespace pflcore
