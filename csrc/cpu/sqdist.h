// Exact pairwise squared distances: subtract, square, sum. Knows nothing of torch.
#pragma once
#include <algorithm>
#include <cstdint>

#include "convert.h"
#include "isa.h"

namespace pflcore::cpu {

template <class T, class Parallel>
void sqdist_typed(const T* a, int64_t lda, int64_t m, const T* b, int64_t ldb, int64_t n, int64_t p, double* out, const Parallel& parallel) {
  const bool symmetric = b == nullptr;
  parallel(m, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      for (int64_t j = symmetric ? i : 0; j < n; ++j) {
        const T* u = a + i * lda;
        const T* v = symmetric ? a + j * lda : b + j * ldb;
        double lane[8] = {};
        if (!(symmetric && i == j))
          for (int64_t c = 0; c < p; ++c) {
            const double d = convert<double>(u[c]) - convert<double>(v[c]);
            lane[c % 8] += d * d;
          }
        const double sum = ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
        out[i * n + j] = sum;
        if (symmetric) out[j * n + i] = sum;
      }
  });
}

// out [m, n] <- sum((a_i - b_j)^2). a [m, p], b [n, p] with rows lda, ldb elements apart; b == nullptr: b is a, the diagonal exactly 0.
template <class Parallel>
void sqdist(Dtype dtype, const void* a, int64_t lda, int64_t m, const void* b, int64_t ldb, int64_t n, int64_t p, double* out,
            const Parallel& parallel) {
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    sqdist_typed(static_cast<const T*>(a), lda, m, static_cast<const T*>(b), ldb, n, p, out, parallel);
  };
  switch (dtype) {
    case Dtype::f32: return run(float{});
    case Dtype::f64: return run(double{});
    case Dtype::f16: return run(Half{});
    case Dtype::bf16: return run(BFloat16{});
  }
}

}  // namespace pflcore::cpu
