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
  if (b_in) {
    PFL_CHECK(b_in->dim() == 2 && b_in->size(1) == a_in.size(1), op,
              ": expected a [M, P] and b [N, P] with the same P");
    PFL_CHECK(b_in->scalar_type() == a_in.scalar_type(), op, ": expected a and b of one dtype");
  }
  // A kernel knows by its pointers that both are one matrix, so one copy serves both.
  const Tensor a = rows(a_in), b = !b_in || same_view(a_in, *b_in) ? a : rows(*b_in);

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
