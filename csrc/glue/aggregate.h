// The ops "aggregate" and "aggregate_out", tensors checked: a Device is what `device(problem)` runs
// on, and what readies a fresh result.
#pragma once
#include "common.h"

namespace pflcore {

template <class Device>
void aggregate_out(const Tensor& updates_in, const Tensor& weight_in,
                   const OptionalTensor& index_in, const OptionalTensor& base_in, double lr,
                   bool precise, const Tensor& out) {
  constexpr const char* op = "aggregate";
  PFL_CHECK(updates_in.dim() == 2 && weight_in.dim() == 2 && out.dim() == 2, op,
            ": expected updates [N, P], weight [M, K], out [M, P]");
  const Device device(updates_in, op);
  device.same(weight_in, "weight"), device.same(index_in, "index"), device.same(base_in, "base"),
      device.same(out, "out");
  const Tensor updates = rows(updates_in), weight = dense_as(weight_in, ScalarType::Double);
  const Tensor index = index_in ? dense(*index_in) : weight, base = base_in ? rows(*base_in) : out;

  Aggregate q{};
  q.in = dtype_of(updates, op), q.out_dtype = dtype_of(out, op);
  q.wide = precise || q.out_dtype == Dtype::f64;
  q.n = updates.size(0), q.p = updates.size(1), q.m = weight.size(0), q.k = weight.size(1);
  q.updates = updates.const_data_ptr(), q.updates_row = row_stride(updates);
  q.weight = data<double>(weight);
  q.lr = lr;
  q.out = out.mutable_data_ptr(), q.out_row = row_stride(out);
  PFL_CHECK(out.size(0) == q.m && out.size(1) == q.p && (q.p <= 1 || out.stride(1) == 1), op,
            ": expected out [M, P] with contiguous rows");
  if (index_in) {
    PFL_CHECK(index.scalar_type() == ScalarType::Long && index.dim() == 2 && index.size(0) == q.m &&
                  index.size(1) == q.k,
              op, ": expected an int64 index of weight's shape");
    q.sparse = true, q.index = data<int64_t>(index);
  } else {
    PFL_CHECK(q.k == q.n, op, ": expected a dense weight [M, N] with N = ", q.n, ", got ", q.k,
              " columns");
  }
  if (base_in) {
    PFL_CHECK(base.scalar_type() == out.scalar_type() && base.size(base.dim() - 1) == q.p &&
                  (base.dim() == 1 || base.size(0) == q.m),
              op, ": expected base [P] or [M, P] of out's dtype");
    q.base = base.const_data_ptr(), q.base_row = base.dim() == 1 ? 0 : row_stride(base);
  }
  device(q);
}

template <class Device>
Tensor aggregate(const Tensor& updates, const Tensor& weight, const OptionalTensor& index,
                 const OptionalTensor& base, double lr, bool precise) {
  PFL_CHECK(updates.dim() == 2 && weight.dim() == 2,
            "aggregate: expected updates [N, P] and weight [M, K]");
  const Tensor out = make(updates, {weight.size(0), updates.size(1)},
                          base ? base->scalar_type() : updates.scalar_type());
  Device::ready(out);
  aggregate_out<Device>(updates, weight, index, base, lr, precise, out);
  return out;
}

}  // namespace pflcore
