// The op "pairwise_sqdist", tensors checked: a Device is what `device(problem, like)` runs on.
#pragma once
#include "common.h"

namespace pflcore {

template <class Device>
Tensor pairwise_sqdist(const Tensor& a_in, const OptionalTensor& b_in,
                       const OptionalTensor& index_in) {
  constexpr const char* op = "pairwise_sqdist";
  PFL_CHECK(a_in.dim() == 2, op, ": expected a [M, P]");
  const Device device(a_in, op);
  device.same(b_in, "b"), device.same(index_in, "index");
  const Tensor a = rows(a_in), b = b_in ? rows(*b_in) : a;
  PFL_CHECK(b.dim() == 2 && b.size(1) == a.size(1), op,
            ": expected a [M, P] and b [N, P] with the same P");
  PFL_CHECK(b.scalar_type() == a.scalar_type(), op, ": expected a and b of one dtype");

  Sqdist q{};
  q.dtype = dtype_of(a, op);
  q.a = a.const_data_ptr(), q.a_row = row_stride(a), q.m = a.size(0);
  q.symmetric = !b_in;
  q.b = b.const_data_ptr(), q.b_row = row_stride(b), q.n = b.size(0);
  q.p = a.size(1);
  Tensor index = a;
  if (index_in) {
    PFL_CHECK(index_in->dim() == 2 && index_in->size(0) == q.m &&
                  index_in->scalar_type() == ScalarType::Long,
              op, ": expected index [M, L] int64");
    index = dense(*index_in), q.index = data<int64_t>(index), q.listed = index.size(1);
  }
  const Tensor out = make(a, {q.m, q.across()}, ScalarType::Double);
  q.out = mutable_data<double>(out);
  device(q, a);
  return out;
}

}  // namespace pflcore
