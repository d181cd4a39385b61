// What an SGD step takes beside the gradient, as tensors: checked and held for as long as the kernel runs.
#pragma once
#include "../glue.h"
#include "sgd.h"

namespace pflcore {

template <class T>
struct SgdArgs {
  OptionalTensor shift, mask, anchor, mu_rows;
  cpu::Sgd<T> step{};   // without its gradient and its buffer

  SgdArgs(const char* op, const Tensor& w, double lr, const OptionalTensor& shift_in, const OptionalTensor& mask_in, double mu,
          const OptionalTensor& mu_rows_in, const OptionalTensor& anchor_in, double momentum, double weight_decay)
      : shift(read(op, w, shift_in, "shift")), mask(read(op, w, mask_in, "mask", true)), anchor(read(op, w, anchor_in, "anchor")) {
    written(op, w);
    if (mu_rows_in) mu_rows = dense_as(*mu_rows_in, ScalarType::Double);
    PFL_CHECK(!mu_rows || mu_rows->numel() == w.size(0), op, ": expected one mu for each row");
    step.s = w.size(0), step.q = w.size(1);
    step.w = static_cast<T*>(w.mutable_data_ptr()), step.w_row = row_stride(w);
    step.lr = lr;
    step.shift = data(shift), step.shift_row = stride(shift);
    step.mask = data(mask), step.mask_row = stride(mask);
    step.mu = mu, step.mu_rows = mu_rows ? static_cast<const double*>(mu_rows->const_data_ptr()) : nullptr;
    step.anchor = data(anchor), step.anchor_row = stride(anchor);
    step.momentum = momentum;
    step.weight_decay = weight_decay;
  }

  static void written(const char* op, const Tensor& t) {
    PFL_CHECK(t.size(1) <= 1 || t.stride(1) == 1, op, ": expected w and buffer with contiguous rows");
  }
  static OptionalTensor read(const char* op, const Tensor& w, const OptionalTensor& t, const char* name, bool one_row = false) {
    if (!t) return t;
    const bool fits = (t->dim() == 2 && t->size(0) == w.size(0) && t->size(1) == w.size(1)) ||
                      (one_row && t->dim() == 1 && t->size(0) == w.size(1));
    PFL_CHECK(fits && t->scalar_type() == w.scalar_type(), op, ": expected ", name, " of w's shape and dtype");
    return rows(*t);
  }
  static const T* data(const OptionalTensor& t) { return t ? static_cast<const T*>(t->const_data_ptr()) : nullptr; }
  static int64_t stride(const OptionalTensor& t) { return t && t->dim() == 2 ? row_stride(*t) : 0; }
};

}  // namespace pflcore
