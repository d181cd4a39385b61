// One step of SGD on flat rows with every correction fused: each array is read once, w and buffer
// are written once. Knows nothing of torch.
#pragma once
#include "common.cuh"

namespace pflcore::cuda {

constexpr int kSgdThreads = 256;

template <class T, bool kAligned>
__device__ __forceinline__ void sgd_at(const Sgd<T>& a, int64_t row, int64_t c, T mu) {
  constexpr int kWide = kAligned ? per16<T> : 1;
  using Lane = Pack<T, kWide>;
  const auto load = [&](const T* from, int64_t stride) {
    const T* const at = from + row * stride + c;
    if constexpr (kAligned)
      return load16(at);
    else
      return Lane{{*at}};
  };
  const auto store = [&](T* to, int64_t stride, const Lane& value) {
    T* const at = to + row * stride + c;
    if constexpr (kAligned)
      store_pack_global(at, value);
    else
      *at = value.v[0];
  };
  const T lr = static_cast<T>(a.lr), decay = static_cast<T>(a.weight_decay),
          momentum = static_cast<T>(a.momentum);
  Lane w = load(a.w, a.w_row), d = load(a.grad, a.grad_row);
  if (a.shift) {
    const Lane shift = load(a.shift, a.shift_row);
    for (int i = 0; i < kWide; ++i) d.v[i] += shift.v[i];
  }
  if (a.anchor) {
    const Lane anchor = load(a.anchor, a.anchor_row);
    for (int i = 0; i < kWide; ++i) d.v[i] += mu * (w.v[i] - anchor.v[i]);
  }
  if (decay != 0)
    for (int i = 0; i < kWide; ++i) d.v[i] += decay * w.v[i];
  if (a.buffer) {
    const Lane buffer = load(a.buffer, a.buffer_row);
    for (int i = 0; i < kWide; ++i) d.v[i] += momentum * buffer.v[i];
    store(a.buffer, a.buffer_row, d);
  }
  if (a.mask) {
    const Lane mask = load(a.mask, a.mask_row);
    for (int i = 0; i < kWide; ++i) d.v[i] *= mask.v[i];
  }
  for (int i = 0; i < kWide; ++i) w.v[i] -= lr * d.v[i];
  store(a.w, a.w_row, w);
}

// Rows along y, columns along x. The columns that fill no pack go one by one, to the first threads
// of the row.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kSgdThreads) sgd_kernel(Sgd<T> a) {
  constexpr int kWide = kAligned ? per16<T> : 1;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kSgdThreads,
                first = static_cast<int64_t>(blockIdx.x) * kSgdThreads + threadIdx.x;
  const int64_t packs = a.q / kWide;
  for (int64_t row = blockIdx.y; row < a.s; row += gridDim.y) {
    const T mu = static_cast<T>(a.mu_rows ? a.mu_rows[row] : a.mu);
    for (int64_t i = first; i < packs; i += step) sgd_at<T, kAligned>(a, row, i * kWide, mu);
    if (packs * kWide + first < a.q) sgd_at<T, false>(a, row, packs * kWide + first, mu);
  }
}

template <class T>
void sgd_step(Sgd<T> a, cudaStream_t stream) {
  if (a.s == 0 || a.q == 0) return;
  const auto whole = [&](const T* p, int64_t row) { return !p || row == a.q; };
  if (!(a.mu_rows && a.anchor) && a.w_row == a.q && a.grad_row == a.q &&
      whole(a.shift, a.shift_row) && whole(a.mask, a.mask_row) && whole(a.anchor, a.anchor_row) &&
      whole(a.buffer, a.buffer_row)) {
    a.q *= a.s;  // rows without gaps are one long row: aligned whatever the length of each was
    a.s = 1;
    a.w_row = a.grad_row = a.shift_row = a.mask_row = a.anchor_row = a.buffer_row = a.q;
    a.mu_rows = nullptr;
  }
  const auto fits = [&](const T* p, int64_t row) {
    return !p || aligned16(p, a.s > 1 ? row : 0, sizeof(T));
  };
  const bool aligned = fits(a.w, a.w_row) && fits(a.grad, a.grad_row) &&
                       fits(a.shift, a.shift_row) && fits(a.mask, a.mask_row) &&
                       fits(a.anchor, a.anchor_row) && fits(a.buffer, a.buffer_row);
  const int64_t packs = ceil_div(a.q, aligned ? per16<T> : 1);
  const dim3 grid(grid_for(ceil_div(packs, kSgdThreads)), grid_for(a.s, 65535));
  auto* const kernel = aligned ? &sgd_kernel<T, true> : &sgd_kernel<T, false>;
  PFLCORE_LAUNCH(kernel, grid, kSgdThreads, 0, stream, a);
}

}  // namespace pflcore::cuda
