// One step of SGD on flat rows, every correction fused. Knows nothing of torch.
#pragma once
#include <algorithm>
#include <cstdint>

namespace pflcore::cpu {

// d = grad + shift + mu * (w - anchor); d += weight_decay * w; buffer = momentum * buffer + d; w -= lr * mask * buffer
template <class T>
struct Sgd {
  int64_t s, q;                            // rows and their length
  T* w; int64_t w_row;                     // row strides in elements
  const T* grad; int64_t grad_row;
  double lr;
  const T* shift; int64_t shift_row;       // nullptr: none
  const T* mask; int64_t mask_row;         // nullptr: none; row stride 0: one mask for all rows
  double mu; const double* mu_rows;        // mu_rows [s], where given, replaces mu
  const T* anchor; int64_t anchor_row;     // nullptr: none
  double momentum;
  T* buffer; int64_t buffer_row;           // nullptr: no momentum
  double weight_decay;
};

template <class T, class Parallel>
void sgd_step(const Sgd<T>& a, const Parallel& parallel) {
  constexpr int64_t strip = 16384;
  const int64_t strips = (a.q + strip - 1) / strip;
  parallel(a.s * strips, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t row = piece / strips, c0 = piece % strips * strip, c1 = std::min(a.q, c0 + strip);
      T* w = a.w + row * a.w_row;
      T* buffer = a.buffer ? a.buffer + row * a.buffer_row : nullptr;
      const T* grad = a.grad + row * a.grad_row;
      const T* shift = a.shift ? a.shift + row * a.shift_row : nullptr;
      const T* mask = a.mask ? a.mask + row * a.mask_row : nullptr;
      const T* anchor = a.anchor ? a.anchor + row * a.anchor_row : nullptr;
      const T lr = static_cast<T>(a.lr), decay = static_cast<T>(a.weight_decay), momentum = static_cast<T>(a.momentum);
      const T mu = static_cast<T>(a.mu_rows ? a.mu_rows[row] : a.mu);
      for (int64_t c = c0; c < c1; ++c) {
        T d = grad[c];
        if (shift) d += shift[c];
        if (anchor) d += mu * (w[c] - anchor[c]);
        d += decay * w[c];
        if (buffer) d = buffer[c] = momentum * buffer[c] + d;
        w[c] -= mask ? lr * mask[c] * d : lr * d;
      }
    }
  });
}

}  // namespace pflcore::cpu
