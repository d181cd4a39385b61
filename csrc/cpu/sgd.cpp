#include "sgd.h"

#include "sgd_args.h"

namespace pflcore {
namespace {

template <class T>
void sgd_typed(const Tensor& w, const Tensor& grad_in, double lr, const OptionalTensor& shift, const OptionalTensor& mask, double mu,
               const OptionalTensor& mu_rows, const OptionalTensor& anchor, double momentum, const OptionalTensor& buffer,
               double weight_decay) {
  using Args = SgdArgs<T>;
  const char* op = "sgd_step_";
  Args args(op, w, lr, shift, mask, mu, mu_rows, anchor, momentum, weight_decay);
  const OptionalTensor grad = Args::read(op, w, grad_in, "grad");
  PFL_CHECK(momentum == 0 || buffer, op, ": expected a buffer where momentum is not 0");
  cpu::Sgd<T>& a = args.step;
  a.grad = Args::data(grad), a.grad_row = Args::stride(grad);
  if (buffer) {
    Args::written(op, *buffer);
    Args::read(op, w, buffer, "buffer");
    a.buffer = momentum != 0 ? static_cast<T*>(buffer->mutable_data_ptr()) : nullptr;
    a.buffer_row = row_stride(*buffer);
  }
  cpu::sgd_step(a, TorchParallel{4.0 * static_cast<double>(w.numel())});
}

void sgd_step_cpu(const Tensor& w, const Tensor& grad, double lr, const OptionalTensor& shift, const OptionalTensor& mask, double mu,
                  const OptionalTensor& mu_rows, const OptionalTensor& anchor, double momentum, const OptionalTensor& buffer,
                  double weight_decay) {
  PFL_CHECK(w.dim() == 2, "sgd_step_: expected w [S, Q]");
  if (w.scalar_type() == ScalarType::Float)
    return sgd_typed<float>(w, grad, lr, shift, mask, mu, mu_rows, anchor, momentum, buffer, weight_decay);
  PFL_CHECK(w.scalar_type() == ScalarType::Double, "sgd_step_: expected float32 or float64");
  sgd_typed<double>(w, grad, lr, shift, mask, mu, mu_rows, anchor, momentum, buffer, weight_decay);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CPU, m) { m.impl("sgd_step_", TORCH_BOX(&sgd_step_cpu)); }

}  // namespace pflcore
