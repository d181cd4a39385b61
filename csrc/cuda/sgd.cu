#include "sgd.cuh"

#include "glue.cuh"

namespace pflcore {
namespace {

template <class T>
void sgd_typed(const Tensor& w, const Tensor& grad_in, double lr, const OptionalTensor& shift_in, const OptionalTensor& mask_in, double mu,
               const OptionalTensor& mu_rows_in, const OptionalTensor& anchor_in, double momentum, const OptionalTensor& buffer,
               double weight_decay) {
  const char* const op = "sgd_step_";
  const cuda::Call call(w, op);
  const auto read = [&](const OptionalTensor& t, const char* name, bool one_row = false) -> OptionalTensor {
    if (!t) return t;
    call.same(*t, name);
    const bool fits = (t->dim() == 2 && t->size(0) == w.size(0) && t->size(1) == w.size(1)) ||
                      (one_row && t->dim() == 1 && t->size(0) == w.size(1));
    PFL_CHECK(fits && t->scalar_type() == w.scalar_type(), op, ": expected ", name, " of w's shape and dtype");
    return rows(*t);
  };
  const auto from = [](const OptionalTensor& t) { return t ? cuda::data<T>(*t) : nullptr; };
  const auto step = [](const OptionalTensor& t) { return t && t->dim() == 2 ? row_stride(*t) : 0; };
  const OptionalTensor grad = read(grad_in, "grad"), shift = read(shift_in, "shift"), mask = read(mask_in, "mask", true);
  const OptionalTensor anchor = read(anchor_in, "anchor");
  PFL_CHECK(momentum == 0 || buffer, op, ": expected a buffer where momentum is not 0");
  for (const Tensor* t : {&w, buffer ? &*buffer : &w})
    PFL_CHECK(t->size(1) <= 1 || t->stride(1) == 1, op, ": expected w and buffer with contiguous rows");
  if (buffer) read(buffer, "buffer");
  call.same(mu_rows_in, "mu");
  const OptionalTensor mu_rows = mu_rows_in ? OptionalTensor(dense_as(*mu_rows_in, ScalarType::Double)) : std::nullopt;
  PFL_CHECK(!mu_rows || mu_rows->numel() == w.size(0), op, ": expected one mu for each row");

  cuda::Sgd<T> a{};
  a.s = w.size(0), a.q = w.size(1);
  a.w = cuda::mutable_data<T>(w), a.w_row = row_stride(w);
  a.grad = from(grad), a.grad_row = step(grad);
  a.lr = lr;
  a.shift = from(shift), a.shift_row = step(shift);
  a.mask = from(mask), a.mask_row = step(mask);
  a.mu = mu, a.mu_rows = mu_rows ? cuda::data<double>(*mu_rows) : nullptr;
  a.anchor = from(anchor), a.anchor_row = step(anchor);
  a.momentum = momentum;
  a.buffer = buffer && momentum != 0 ? cuda::mutable_data<T>(*buffer) : nullptr;
  a.buffer_row = a.buffer ? row_stride(*buffer) : 0;
  a.weight_decay = weight_decay;
  cuda::sgd_step(a, call.stream());
}

void sgd_step_cuda(const Tensor& w, const Tensor& grad, double lr, const OptionalTensor& shift, const OptionalTensor& mask, double mu,
                   const OptionalTensor& mu_rows, const OptionalTensor& anchor, double momentum, const OptionalTensor& buffer,
                   double weight_decay) {
  PFL_CHECK(w.dim() == 2, "sgd_step_: expected w [S, Q]");
  if (w.scalar_type() == ScalarType::Float)
    return sgd_typed<float>(w, grad, lr, shift, mask, mu, mu_rows, anchor, momentum, buffer, weight_decay);
  PFL_CHECK(w.scalar_type() == ScalarType::Double, "sgd_step_: expected float32 or float64");
  sgd_typed<double>(w, grad, lr, shift, mask, mu, mu_rows, anchor, momentum, buffer, weight_decay);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CUDA, m) { m.impl("sgd_step_", TORCH_BOX(&sgd_step_cuda)); }

}  // namespace pflcore
