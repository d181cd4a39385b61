#include "sqdist.cuh"

#include "glue.cuh"

namespace pflcore {
namespace {

Tensor pairwise_sqdist_cuda(const Tensor& a_in, const OptionalTensor& b_in, const OptionalTensor& index_in) {
  const char* const op = "pairwise_sqdist";
  PFL_CHECK(a_in.dim() == 2, op, ": expected a [M, P]");
  const cuda::Call call(a_in, op);
  call.same(b_in, "b");
  const Tensor a = rows(a_in), b = b_in ? rows(*b_in) : a;
  PFL_CHECK(b.dim() == 2 && b.size(1) == a.size(1), op, ": expected a [M, P] and b [N, P] with the same P");
  PFL_CHECK(b.scalar_type() == a.scalar_type(), op, ": expected a and b of one dtype");

  cuda::Sqdist q{};
  q.dtype = cuda::dtype(a, op);
  q.a = a.const_data_ptr(), q.a_row = row_stride(a), q.m = a.size(0);
  q.symmetric = !b_in;
  q.b = b.const_data_ptr(), q.b_row = row_stride(b), q.n = b.size(0);
  q.p = a.size(1);
  Tensor index = a;
  if (index_in) {
    call.same(index_in, "index");
    PFL_CHECK(index_in->dim() == 2 && index_in->size(0) == q.m && index_in->scalar_type() == ScalarType::Long, op, ": expected index [M, L] int64");
    index = dense(*index_in), q.index = cuda::data<int64_t>(index), q.listed = index.size(1);
  }
  const Tensor out = make(a, {q.m, q.across()}, ScalarType::Double);
  const Tensor workspace = call.workspace(a, cuda::sqdist_workspace(q));
  q.out = cuda::mutable_data<double>(out), q.workspace = workspace.mutable_data_ptr();
  cuda::sqdist(q, call.stream());
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CUDA, m) { m.impl("pairwise_sqdist", TORCH_BOX(&pairwise_sqdist_cuda)); }

}  // namespace pflcore
