#include "aggregate.cuh"

#include "glue.cuh"

namespace pflcore {
namespace {

void aggregate_out_cuda(const Tensor& updates_in, const Tensor& weight_in, const OptionalTensor& index_in, const OptionalTensor& base_in,
                        double lr, bool precise, const Tensor& out) {
  const char* const op = "aggregate";
  PFL_CHECK(updates_in.dim() == 2 && weight_in.dim() == 2 && out.dim() == 2, op, ": expected updates [N, P], weight [M, K], out [M, P]");
  const cuda::Call call(updates_in, op);
  call.same(weight_in, "weight"), call.same(index_in, "index"), call.same(base_in, "base"), call.same(out, "out");
  const Tensor updates = rows(updates_in), weight = dense_as(weight_in, ScalarType::Double);
  const Tensor index = index_in ? dense(*index_in) : weight, base = base_in ? rows(*base_in) : out;

  cuda::Aggregate q{};
  q.in = cuda::dtype(updates, op), q.out_dtype = cuda::dtype(out, op);
  q.wide = precise || q.out_dtype == cuda::Dtype::f64;
  q.n = updates.size(0), q.p = updates.size(1), q.m = weight.size(0), q.k = weight.size(1);
  q.updates = updates.const_data_ptr(), q.updates_row = row_stride(updates);
  q.weight = cuda::data<double>(weight);
  q.lr = lr;
  q.out = out.mutable_data_ptr(), q.out_row = row_stride(out);
  PFL_CHECK(out.size(0) == q.m && out.size(1) == q.p && (q.p <= 1 || out.stride(1) == 1), op, ": expected out [M, P] with contiguous rows");
  if (index_in) {
    PFL_CHECK(index.scalar_type() == ScalarType::Long && index.dim() == 2 && index.size(0) == q.m && index.size(1) == q.k, op,
              ": expected an int64 index of weight's shape");
    q.sparse = true, q.index = cuda::data<int64_t>(index);
  } else {
    PFL_CHECK(q.k == q.n, op, ": expected a dense weight [M, N] with N = ", q.n, ", got ", q.k, " columns");
  }
  if (base_in) {
    PFL_CHECK(base.scalar_type() == out.scalar_type() && base.size(base.dim() - 1) == q.p && (base.dim() == 1 || base.size(0) == q.m), op,
              ": expected base [P] or [M, P] of out's dtype");
    q.base = base.const_data_ptr(), q.base_row = base.dim() == 1 ? 0 : row_stride(base);
  }
  cuda::aggregate(q, call.stream());
}

Tensor aggregate_cuda(const Tensor& updates, const Tensor& weight, const OptionalTensor& index, const OptionalTensor& base, double lr,
                      bool precise) {
  PFL_CHECK(updates.dim() == 2 && weight.dim() == 2, "aggregate: expected updates [N, P] and weight [M, K]");
  const ScalarType dtype = base ? base->scalar_type() : updates.scalar_type();
  const Tensor out = make(updates, {weight.size(0), updates.size(1)}, dtype);
  aggregate_out_cuda(updates, weight, index, base, lr, precise, out);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CUDA, m) {
  m.impl("aggregate", TORCH_BOX(&aggregate_cuda));
  m.impl("aggregate_out", TORCH_BOX(&aggregate_out_cuda));
}

}  // namespace pflcore
