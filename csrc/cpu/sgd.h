// One step of SGD on flat rows with every correction fused: each array is read once, w and buffer
// are written once. Knows nothing of torch.
#pragma once
#include <algorithm>
#include <cstdint>

#include "../inputs.h"
#include "isa.h"
#include "simd.h"

namespace pflcore::cpu {

namespace sgd_detail {

template <class T>
struct Row {
  T* w;
  const T *grad, *shift, *mask, *anchor;
  T* buffer;
  T lr, mu, momentum, decay;
};

// Row s, with its gradient and its buffer.
template <class T>
Row<T> row_of(const Sgd<T>& a, int64_t s, const T* grad, T* buffer) {
  const auto at = [s](const T* p, int64_t stride) { return p ? p + s * stride : p; };
  return {a.w + s * a.w_row,          grad,
          at(a.shift, a.shift_row),   at(a.mask, a.mask_row),
          at(a.anchor, a.anchor_row), buffer,
          static_cast<T>(a.lr),       static_cast<T>(a.mu_rows ? a.mu_rows[s] : a.mu),
          static_cast<T>(a.momentum), static_cast<T>(a.weight_decay)};
}

// `count` vectors from element c on. The tests on the pointers are the same for a whole row:
// predicted, and shared by the vectors.
template <class V, int count, class T>
PFL_INLINE void step(const Row<T>& a, int64_t c) {
  constexpr int64_t lanes = sizeof(V) / sizeof(T);
  V w[count], d[count], t;
  PFL_UNROLL
  for (int i = 0; i < count; i++) {
    load(w[i], a.w + c + i * lanes);
    load(d[i], a.grad + c + i * lanes);
  }
  if (a.shift) PFL_UNROLL
  for (int i = 0; i < count; i++) {
    load(t, a.shift + c + i * lanes);
    d[i] += t;
  }
  if (a.anchor) PFL_UNROLL
  for (int i = 0; i < count; i++) {
    load(t, a.anchor + c + i * lanes);
    d[i] += a.mu * (w[i] - t);
  }
  if (a.decay != 0) PFL_UNROLL
  for (int i = 0; i < count; i++) d[i] += a.decay * w[i];
  if (a.buffer) PFL_UNROLL
  for (int i = 0; i < count; i++) {
    load(t, a.buffer + c + i * lanes);
    d[i] += a.momentum * t;
    store(a.buffer + c + i * lanes, d[i]);
  }
  if (a.mask) PFL_UNROLL
  for (int i = 0; i < count; i++) {
    load(t, a.mask + c + i * lanes);
    d[i] *= t;
  }
  PFL_UNROLL
  for (int i = 0; i < count; i++) {
    w[i] -= a.lr * d[i];
    store(a.w + c + i * lanes, w[i]);
  }
}

template <int bytes, class T>
PFL_INLINE void row(const Row<T>& a, int64_t c, int64_t end) {
  constexpr int64_t lanes = bytes / sizeof(T), few = 16 / sizeof(T);
  for (; c + 4 * lanes <= end; c += 4 * lanes) step<Vec<T, bytes>, 4>(a, c);
  for (; c + lanes <= end; c += lanes) step<Vec<T, bytes>, 1>(a, c);
  if constexpr (bytes > 16)
    for (; c + few <= end; c += few) step<Vec<T, 16>, 1>(a, c);
  for (; c < end; c++) step<T, 1>(a, c);
}

constexpr int64_t kStrip = 16384;

// Pieces begin .. end: a piece is one strip of one row.
template <int bytes, class T>
PFL_INLINE void pieces(const Sgd<T>& a, int64_t begin, int64_t end) {
  const int64_t strips = (a.q + kStrip - 1) / kStrip;
  int64_t s = begin / strips, strip = begin % strips;
  for (int64_t piece = begin; piece < end; piece++) {
    const Row<T> r =
        row_of(a, s, a.grad + s * a.grad_row, a.buffer ? a.buffer + s * a.buffer_row : nullptr);
    row<bytes, T>(r, strip * kStrip, std::min(a.q, (strip + 1) * kStrip));
    if (++strip == strips) strip = 0, s++;
  }
}

}  // namespace sgd_detail

template <class T, class Parallel>
void sgd_step(Sgd<T> a, const Parallel& parallel) {
  if (a.s == 0 || a.q == 0) return;
  const auto whole = [&](const T* p, int64_t stride) { return !p || stride == a.q; };
  if (!(a.mu_rows && a.anchor) && a.w_row == a.q && a.grad_row == a.q &&
      whole(a.shift, a.shift_row) && whole(a.mask, a.mask_row) && whole(a.anchor, a.anchor_row) &&
      whole(a.buffer, a.buffer_row)) {
    a.q *= a.s;  // rows without gaps are one long row: no tails in between
    a.s = 1;
    a.mu_rows = nullptr;
  }
  const int64_t strips = (a.q + sgd_detail::kStrip - 1) / sgd_detail::kStrip;
  parallel(a.s * strips, [&a](int64_t begin, int64_t end) {
    on_isa([&](auto bytes) PFL_LAMBDA { sgd_detail::pieces<bytes, T>(a, begin, end); });
  });
}

}  // namespace pflcore::cpu
