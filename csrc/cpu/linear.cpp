#include "linear.h"

#include <string>

#include "sgd_args.h"

namespace pflcore {
namespace {

cpu::Criterion criterion_of(const std::string& name) {
  if (name == "cross_entropy") return cpu::Criterion::cross_entropy;
  if (name == "squared") return cpu::Criterion::squared;
  if (name == "half_squared") return cpu::Criterion::half_squared;
  PFL_CHECK(name == "hinge", "linear_sgd_: expected criterion cross_entropy, squared, half_squared or hinge, got ", name);
  return cpu::Criterion::hinge;
}

template <class T>
Tensor linear_typed(const Tensor& w, const Tensor& x_in, const Tensor& y_in, const OptionalTensor& relabel_in, const Tensor& order_in,
                    const Tensor& size_in, const Tensor& steps_in, int64_t batch, bool drop_last, cpu::Criterion criterion, bool bias,
                    const cpu::Sgd<T>& sgd, const OptionalTensor& grad_sum) {
  const int64_t s = w.size(0), q = w.size(1);
  const Tensor x = rows(x_in), order = dense_as(order_in, ScalarType::Long);
  const Tensor size = dense_as(size_in, ScalarType::Long), steps = dense_as(steps_in, ScalarType::Long), y = dense(y_in);
  PFL_CHECK(x.dim() == 2 && x.scalar_type() == w.scalar_type(), "linear_sgd_: expected x [n, I] of w's dtype");
  const int64_t columns = x.size(1) + (bias ? 1 : 0);
  PFL_CHECK(columns > 0 && q % columns == 0, "linear_sgd_: expected w of length C * (I + bias)");
  PFL_CHECK(y.dim() == 1 && y.size(0) == x.size(0), "linear_sgd_: expected one label for each sample");
  PFL_CHECK(order.dim() == 3 && order.size(0) == s, "linear_sgd_: expected order [S, passes, n]");
  PFL_CHECK(size.numel() == s && steps.numel() == s, "linear_sgd_: expected a size and a number of steps for each client");
  PFL_CHECK(batch >= 1, "linear_sgd_: expected a batch size of at least 1");
  OptionalTensor relabel;
  if (relabel_in) relabel = dense_as(*relabel_in, ScalarType::Long);
  PFL_CHECK(!relabel || (relabel->dim() == 2 && relabel->size(0) == s), "linear_sgd_: expected relabel [S, C]");
  const bool labels = y.scalar_type() == ScalarType::Long;
  PFL_CHECK(labels || (y.scalar_type() == w.scalar_type() && !relabel), "linear_sgd_: expected y of int64 or of w's dtype");

  cpu::LinearSgd<T> a{};
  a.sgd = sgd, a.classes = q / columns, a.features = x.size(1), a.bias = bias;
  a.criterion = criterion;
  PFL_CHECK(a.criterion == cpu::Criterion::cross_entropy ? labels : a.classes == 1,
            "linear_sgd_: expected int64 labels for cross entropy, one output for the other criteria");
  a.x = static_cast<const T*>(x.const_data_ptr()), a.x_row = row_stride(x), a.pool = x.size(0);
  if (labels) a.label = static_cast<const int64_t*>(y.const_data_ptr());
  else a.value = static_cast<const T*>(y.const_data_ptr());
  if (relabel) a.relabel = static_cast<const int64_t*>(relabel->const_data_ptr()), a.names = relabel->size(1);
  a.order = static_cast<const int64_t*>(order.const_data_ptr()), a.passes = order.size(1), a.longest = order.size(2);
  a.size = static_cast<const int64_t*>(size.const_data_ptr()), a.steps = static_cast<const int64_t*>(steps.const_data_ptr());
  a.batch = batch, a.drop_last = drop_last;
  if (grad_sum) {
    PFL_CHECK(grad_sum->is_contiguous() && grad_sum->numel() == s * q && grad_sum->scalar_type() == w.scalar_type(),
              "linear_sgd_: expected a contiguous grad_sum of w's shape and dtype");
    a.grad_sum = static_cast<T*>(grad_sum->mutable_data_ptr());
  }
  Tensor loss = make(w, {s}, ScalarType::Double);
  a.loss = static_cast<double*>(loss.mutable_data_ptr());
  torch::stable::zero_(loss);
  PFL_CHECK(cpu::linear_sgd(a, TorchParallel{6.0 * static_cast<double>(order.numel()) * static_cast<double>(q)}),
            "linear_sgd_: a label or a place in the pool is out of range, or a client takes more steps than it has batches");
  return loss;
}

Tensor linear_sgd_cpu(const Tensor& w, const Tensor& x, const Tensor& y, const OptionalTensor& relabel, const Tensor& order, const Tensor& size,
                      const Tensor& steps, int64_t batch, bool drop_last, const std::string& criterion, bool bias, double lr,
                      const OptionalTensor& shift, const OptionalTensor& mask, double mu, const OptionalTensor& mu_rows,
                      const OptionalTensor& anchor, double momentum, double weight_decay, const OptionalTensor& grad_sum) {
  PFL_CHECK(w.dim() == 2, "linear_sgd_: expected w [S, Q]");
  const auto run = [&](auto zero) {
    const SgdArgs<decltype(zero)> sgd("linear_sgd_", w, lr, shift, mask, mu, mu_rows, anchor, momentum, weight_decay);
    return linear_typed(w, x, y, relabel, order, size, steps, batch, drop_last, criterion_of(criterion), bias, sgd.step, grad_sum);
  };
  if (w.scalar_type() == ScalarType::Float) return run(float{});
  PFL_CHECK(w.scalar_type() == ScalarType::Double, "linear_sgd_: expected float32 or float64");
  return run(double{});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CPU, m) { m.impl("linear_sgd_", TORCH_BOX(&linear_sgd_cpu)); }

}  // namespace pflcore
