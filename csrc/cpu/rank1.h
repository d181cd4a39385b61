// y = ((x w_b^T) * lam) w_a^T, a linear layer made of rank-1 factors, batched over clients. Knows nothing of torch.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace pflcore::cpu {

// Batch strides are 0 where all clients read the same input; `shared` says that they also share its gradient, which is then summed.
// Factors with lam == 0 are skipped.
template <class T>
struct Rank1 {
  int64_t n, b, i, f, o;                      // clients, batch, inputs, factors, outputs
  const T* x; int64_t x_batch, x_row; bool x_shared;        // [n, b, i]
  const T* w_a; int64_t w_a_batch, w_a_row; bool w_a_shared;  // [n, o, f]
  const T* lam; int64_t lam_batch; bool lam_shared;         // [n, f]
  const T* w_b; int64_t w_b_batch, w_b_row; bool w_b_shared;  // [n, f, i]
};

// y [n, b, o], contiguous.
template <class T, class Parallel>
void rank1_forward(const Rank1<T>& q, T* y, const Parallel& parallel) {
  parallel(q.n * q.b, [&](int64_t begin, int64_t end) {
    std::vector<T> hidden(q.f);
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t n = piece / q.b, b = piece % q.b;
      const T* x = q.x + n * q.x_batch + b * q.x_row;
      const T* lam = q.lam + n * q.lam_batch;
      for (int64_t f = 0; f < q.f; ++f) {
        const T* w = q.w_b + n * q.w_b_batch + f * q.w_b_row;
        T sum = 0;
        if (lam[f] != 0)
          for (int64_t i = 0; i < q.i; ++i) sum += x[i] * w[i];
        hidden[f] = sum * lam[f];
      }
      for (int64_t o = 0; o < q.o; ++o) {
        const T* w = q.w_a + n * q.w_a_batch + o * q.w_a_row;
        T sum = 0;
        for (int64_t f = 0; f < q.f; ++f)
          if (lam[f] != 0) sum += hidden[f] * w[f];
        y[piece * q.o + o] = sum;
      }
    }
  });
}

// Gradients in the shapes of the inputs, contiguous, nullptr where not wanted; those of shared inputs are summed over the clients.
// grad [n, b, o], contiguous.
template <class T, class Parallel>
void rank1_backward(const Rank1<T>& q, const T* grad, T* gx, T* ga, T* glam, T* gb, const Parallel& parallel) {
  parallel(1, [&](int64_t, int64_t) {
    if (gx) std::fill(gx, gx + (q.x_shared ? 1 : q.n) * q.b * q.i, T(0));
    if (ga) std::fill(ga, ga + (q.w_a_shared ? 1 : q.n) * q.o * q.f, T(0));
    if (glam) std::fill(glam, glam + (q.lam_shared ? 1 : q.n) * q.f, T(0));
    if (gb) std::fill(gb, gb + (q.w_b_shared ? 1 : q.n) * q.f * q.i, T(0));
    for (int64_t n = 0; n < q.n; ++n)
      for (int64_t b = 0; b < q.b; ++b) {
        const T* x = q.x + n * q.x_batch + b * q.x_row;
        const T* g = grad + (n * q.b + b) * q.o;
        T* dx = gx ? gx + ((q.x_shared ? 0 : n) * q.b + b) * q.i : nullptr;
        for (int64_t f = 0; f < q.f; ++f) {
          const T lam = q.lam[n * q.lam_batch + f];
          if (lam == 0 && !glam) continue;
          const T* w_b = q.w_b + n * q.w_b_batch + f * q.w_b_row;
          T hidden = 0, back = 0;
          for (int64_t i = 0; i < q.i; ++i) hidden += x[i] * w_b[i];
          for (int64_t o = 0; o < q.o; ++o) back += g[o] * q.w_a[n * q.w_a_batch + o * q.w_a_row + f];
          if (glam) glam[(q.lam_shared ? 0 : n * q.f) + f] += hidden * back;
          if (lam == 0) continue;
          if (ga)
            for (int64_t o = 0; o < q.o; ++o) ga[((q.w_a_shared ? 0 : n) * q.o + o) * q.f + f] += g[o] * hidden * lam;
          if (gb)
            for (int64_t i = 0; i < q.i; ++i) gb[((q.w_b_shared ? 0 : n) * q.f + f) * q.i + i] += back * lam * x[i];
          if (dx)
            for (int64_t i = 0; i < q.i; ++i) dx[i] += back * lam * w_b[i];
        }
      }
  });
}

}  // namespace pflcore::cpu
