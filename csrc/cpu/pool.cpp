#include "pool.h"

#include "glue.h"

namespace pflcore {
namespace {

template <class T, bool average>
Tensor forward(const Tensor& x) {
  const int64_t n = x.size(0), c = x.size(1), h = x.size(2), w = x.size(3);
  Tensor y = make(x, {n, c, h / 2, w / 2});
  cpu::pool_forward<average>(cpu::Pool{n * c, h, w}, static_cast<const T*>(x.const_data_ptr()), static_cast<T*>(y.mutable_data_ptr()),
                             TorchParallel{static_cast<double>(x.numel())});
  return y;
}

template <class T, bool average>
Tensor backward(const Tensor& grad, const Tensor& x) {
  const int64_t n = x.size(0), c = x.size(1), h = x.size(2), w = x.size(3);
  Tensor gx = make(x, x.sizes());
  cpu::pool_backward<average>(cpu::Pool{n * c, h, w}, static_cast<const T*>(x.const_data_ptr()),
                              static_cast<const T*>(grad.const_data_ptr()), static_cast<T*>(gx.mutable_data_ptr()),
                              TorchParallel{static_cast<double>(x.numel())});
  return gx;
}

Tensor input(const Tensor& x) {
  PFL_CHECK(x.dim() == 4 && x.size(2) > 1 && x.size(3) > 1, "pool2x2: expected images [B, C, H, W] of at least 2x2");
  PFL_CHECK(x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::Double, "pool2x2: expected float32 or float64");
  return dense(x);
}

Tensor pool2x2_cpu(const Tensor& x_in, bool average) {
  const Tensor x = input(x_in);
  if (x.scalar_type() == ScalarType::Float) return average ? forward<float, true>(x) : forward<float, false>(x);
  return average ? forward<double, true>(x) : forward<double, false>(x);
}

Tensor pool2x2_backward_cpu(const Tensor& grad_in, const Tensor& x_in, bool average) {
  const Tensor x = input(x_in), grad = dense(grad_in);
  PFL_CHECK(grad.dim() == 4 && grad.scalar_type() == x.scalar_type() && grad.size(0) == x.size(0) && grad.size(1) == x.size(1) &&
                grad.size(2) == x.size(2) / 2 && grad.size(3) == x.size(3) / 2,
            "pool2x2_backward: expected grad of the result's shape and dtype");
  if (x.scalar_type() == ScalarType::Float) return average ? backward<float, true>(grad, x) : backward<float, false>(grad, x);
  return average ? backward<double, true>(grad, x) : backward<double, false>(grad, x);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CPU, m) {
  m.impl("pool2x2", TORCH_BOX(&pool2x2_cpu));
  m.impl("pool2x2_backward", TORCH_BOX(&pool2x2_backward_cpu));
}

}  // namespace pflcore
