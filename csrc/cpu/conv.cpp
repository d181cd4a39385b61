#include "conv.h"

#include <tuple>

#include "glue.h"

namespace pflcore {
namespace {

template <class T>
cpu::Conv<T> conv_of(const Tensor& x, const Tensor& weight, int64_t pad_h, int64_t pad_w) {
  cpu::Conv<T> q{};
  q.n = x.size(0), q.c = x.size(1), q.h = x.size(2), q.w = x.size(3);
  q.o = weight.size(0), q.kh = weight.size(2), q.kw = weight.size(3), q.pad_h = pad_h, q.pad_w = pad_w;
  q.x = static_cast<const T*>(x.const_data_ptr()), q.weight = static_cast<const T*>(weight.const_data_ptr());
  return q;
}

template <class T>
TorchParallel parallel_of(const cpu::Conv<T>& q) {
  return {2.0 * static_cast<double>(q.n * q.o * q.c) * static_cast<double>(q.taps() * q.ho() * q.wp())};
}

void check(const Tensor& x, const Tensor& weight, int64_t pad_h, int64_t pad_w) {
  PFL_CHECK(x.dim() == 4 && weight.dim() == 4 && x.size(1) == weight.size(1), "conv2d: expected x [B, C, H, W] and weight [O, C, KH, KW]");
  PFL_CHECK(pad_h >= 0 && pad_w >= 0 && weight.size(2) > 0 && weight.size(3) > 0 && weight.size(2) <= x.size(2) + 2 * pad_h &&
                weight.size(3) <= x.size(3) + 2 * pad_w,
            "conv2d: expected a kernel that fits the padded images");
  PFL_CHECK((x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::Double) && weight.scalar_type() == x.scalar_type(),
            "conv2d: expected x and weight of one dtype, float32 or float64");
}

template <class T>
Tensor forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, int64_t pad_h, int64_t pad_w) {
  cpu::Conv<T> q = conv_of<T>(x, weight, pad_h, pad_w);
  if (bias) q.bias = static_cast<const T*>(bias->const_data_ptr());
  Tensor out = make(x, {q.n, q.o, q.ho(), q.wo()});
  cpu::conv_forward(q, static_cast<T*>(out.mutable_data_ptr()), parallel_of(q));
  return out;
}

template <class T>
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad, const Tensor& x, const Tensor& weight, int64_t pad_h, int64_t pad_w,
                                            bool need_x, bool need_weight, bool need_bias) {
  const cpu::Conv<T> q = conv_of<T>(x, weight, pad_h, pad_w);
  PFL_CHECK(grad.dim() == 4 && grad.scalar_type() == x.scalar_type() && grad.size(0) == q.n && grad.size(1) == q.o &&
                grad.size(2) == q.ho() && grad.size(3) == q.wo(),
            "conv2d_backward: expected grad of the result's shape and dtype");
  Tensor gx = need_x ? make(x, x.sizes()) : make(x, {0});
  Tensor gw = need_weight ? make(weight, weight.sizes()) : make(x, {0});
  Tensor gb = make(x, {need_bias ? q.o : 0});
  const auto data = [](const Tensor& t, bool need) { return need ? static_cast<T*>(t.mutable_data_ptr()) : nullptr; };
  const cpu::ConvGrads<T> out{data(gx, need_x), data(gw, need_weight), data(gb, need_bias)};
  cpu::conv_backward(q, static_cast<const T*>(grad.const_data_ptr()), out, parallel_of(q));
  return {gx, gw, gb};
}

Tensor conv2d_cpu(const Tensor& x_in, const Tensor& weight_in, const OptionalTensor& bias_in, int64_t pad_h, int64_t pad_w) {
  check(x_in, weight_in, pad_h, pad_w);
  const Tensor x = dense(x_in), weight = dense(weight_in);
  OptionalTensor bias;
  if (bias_in) bias = dense(*bias_in);
  PFL_CHECK(!bias || (bias->numel() == weight.size(0) && bias->scalar_type() == x.scalar_type()), "conv2d: expected bias [O] of x's dtype");
  if (x.scalar_type() == ScalarType::Float) return forward<float>(x, weight, bias, pad_h, pad_w);
  return forward<double>(x, weight, bias, pad_h, pad_w);
}

std::tuple<Tensor, Tensor, Tensor> conv2d_backward_cpu(const Tensor& grad_in, const Tensor& x_in, const Tensor& weight_in, int64_t pad_h,
                                                       int64_t pad_w, bool need_x, bool need_weight, bool need_bias) {
  check(x_in, weight_in, pad_h, pad_w);
  const Tensor grad = dense(grad_in), x = dense(x_in), weight = dense(weight_in);
  if (x.scalar_type() == ScalarType::Float) return backward<float>(grad, x, weight, pad_h, pad_w, need_x, need_weight, need_bias);
  return backward<double>(grad, x, weight, pad_h, pad_w, need_x, need_weight, need_bias);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CPU, m) {
  m.impl("conv2d", TORCH_BOX(&conv2d_cpu));
  m.impl("conv2d_backward", TORCH_BOX(&conv2d_backward_cpu));
}

}  // namespace pflcore
