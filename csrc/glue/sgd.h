// The tensors of an SGD step: checked, and held for as long as the kernel runs.
#pragma once
#include "common.h"

namespace pflcore {

template <class T>
struct SgdArgs {
  OptionalTensor grad, shift, mask, anchor, mu_rows;
  Sgd<T> step{};  // without its gradient and its buffer, which `learn` adds

  template <class Device>
  SgdArgs(const Device& device, const char* op, const Tensor& w, double lr,
          const OptionalTensor& shift_in, const OptionalTensor& mask_in, double mu,
          const OptionalTensor& mu_rows_in, const OptionalTensor& anchor_in, double momentum,
          double weight_decay)
      : shift(read(device, op, w, shift_in, "shift")),
        mask(read(device, op, w, mask_in, "mask", true)),
        anchor(read(device, op, w, anchor_in, "anchor")) {
    written(op, w);
    device.same(mu_rows_in, "mu");
    if (mu_rows_in) mu_rows = dense_as(*mu_rows_in, ScalarType::Double);
    PFL_CHECK(!mu_rows || mu_rows->numel() == w.size(0), op, ": expected one mu for each row");
    step.s = w.size(0), step.q = w.size(1);
    step.w = mutable_data<T>(w), step.w_row = row_stride(w);
    step.lr = lr;
    step.shift = at(shift), step.shift_row = stride(shift);
    step.mask = at(mask), step.mask_row = stride(mask);
    step.mu = mu, step.mu_rows = mu_rows ? data<double>(*mu_rows) : nullptr;
    step.anchor = at(anchor), step.anchor_row = stride(anchor);
    step.momentum = momentum;
    step.weight_decay = weight_decay;
  }

  template <class Device>
  void learn(const Device& device, const char* op, const Tensor& w, const Tensor& grad_in,
             const OptionalTensor& buffer) {
    PFL_CHECK(step.momentum == 0 || buffer, op, ": expected a buffer where momentum is not 0");
    grad = read(device, op, w, grad_in, "grad");
    step.grad = at(grad), step.grad_row = stride(grad);
    if (!buffer) return;
    written(op, *buffer);
    read(device, op, w, buffer, "buffer");
    step.buffer = step.momentum != 0 ? mutable_data<T>(*buffer) : nullptr;
    step.buffer_row = row_stride(*buffer);
  }

 private:
  static void written(const char* op, const Tensor& t) {
    PFL_CHECK(t.size(1) <= 1 || t.stride(1) == 1, op,
              ": expected w and buffer with contiguous rows");
  }
  template <class Device>
  static OptionalTensor read(const Device& device, const char* op, const Tensor& w,
                             const OptionalTensor& t, const char* name, bool one_row = false) {
    if (!t) return t;
    device.same(*t, name);
    const bool fits = (t->dim() == 2 && t->size(0) == w.size(0) && t->size(1) == w.size(1)) ||
                      (one_row && t->dim() == 1 && t->size(0) == w.size(1));
    PFL_CHECK(fits && t->scalar_type() == w.scalar_type(), op, ": expected ", name,
              " of w's shape and dtype");
    return rows(*t);
  }
  static const T* at(const OptionalTensor& t) { return t ? data<T>(*t) : nullptr; }
  static int64_t stride(const OptionalTensor& t) { return t && t->dim() == 2 ? row_stride(*t) : 0; }
};

// The op "sgd_step_": a Device is what `device(step)` runs on.
template <class Device>
void sgd_step(const Tensor& w, const Tensor& grad, double lr, const OptionalTensor& shift,
              const OptionalTensor& mask, double mu, const OptionalTensor& mu_rows,
              const OptionalTensor& anchor, double momentum, const OptionalTensor& buffer,
              double weight_decay) {
  constexpr const char* op = "sgd_step_";
  PFL_CHECK(w.dim() == 2, op, ": expected w [S, Q]");
  const Device device(w, op);
  float_or_double(op, w, [&](auto zero) {
    SgdArgs<decltype(zero)> args(device, op, w, lr, shift, mask, mu, mu_rows, anchor, momentum,
                                 weight_decay);
    args.learn(device, op, w, grad, buffer);
    device(args.step);
  });
}

}  // namespace pflcore
