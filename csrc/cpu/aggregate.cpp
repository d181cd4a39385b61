#include "aggregate.h"

#include "../glue.h"

namespace pflcore {
namespace {

void aggregate_out_cpu(const Tensor& updates_in, const Tensor& weight_in, const OptionalTensor& index_in, const OptionalTensor& base_in,
                       double lr, bool precise, const Tensor& out) {
  PFL_CHECK(updates_in.dim() == 2 && weight_in.dim() == 2 && out.dim() == 2, "aggregate: expected updates [N, P], weight [M, K], out [M, P]");
  const Tensor updates = rows(updates_in);
  const Tensor weight = dense_as(weight_in, ScalarType::Double);
  const Tensor index = index_in ? dense(*index_in) : weight;
  const Tensor base = base_in ? rows(*base_in) : out;

  cpu::Aggregate q{};
  q.in = dtype_of(updates, "aggregate");
  q.out_dtype = dtype_of(out, "aggregate");
  q.wide = precise || q.out_dtype == Dtype::f64;
  q.n = updates.size(0), q.p = updates.size(1), q.m = weight.size(0), q.k = weight.size(1);
  q.updates = updates.const_data_ptr(), q.updates_row = row_stride(updates);
  q.weight = static_cast<const double*>(weight.const_data_ptr());
  q.lr = lr;
  q.out = out.mutable_data_ptr(), q.out_row = row_stride(out);
  PFL_CHECK(out.size(0) == q.m && out.size(1) == q.p && (q.p <= 1 || out.stride(1) == 1), "aggregate: expected out [M, P] with contiguous rows");
  if (index_in) {
    PFL_CHECK(index.scalar_type() == ScalarType::Long && index.dim() == 2 && index.size(0) == q.m && index.size(1) == q.k,
              "aggregate: expected an int64 index of weight's shape");
    q.index = static_cast<const int64_t*>(index.const_data_ptr());
    if (q.m * q.k == 0) q.index = &q.k;  // an empty tensor has no address, which would say "dense"
    for (int64_t i = 0; i < q.m * q.k; ++i)
      PFL_CHECK(q.index[i] >= 0 && q.index[i] < q.n, "aggregate: index holds ", q.index[i], ", expected 0 to ", q.n - 1);
  } else {
    PFL_CHECK(q.k == q.n, "aggregate: expected a dense weight [M, N] with N = ", q.n, ", got ", q.k, " columns");
  }
  if (base_in) {
    PFL_CHECK(base.scalar_type() == out.scalar_type() && base.size(base.dim() - 1) == q.p && (base.dim() == 1 || base.size(0) == q.m),
              "aggregate: expected base [P] or [M, P] of out's dtype");
    q.base = base.const_data_ptr(), q.base_row = base.dim() == 1 ? 0 : row_stride(base);
  }
  cpu::aggregate(q, TorchParallel{TorchParallel::worthwhile});   // it cuts little work into one piece itself
}

Tensor aggregate_cpu(const Tensor& updates, const Tensor& weight, const OptionalTensor& index, const OptionalTensor& base, double lr,
                     bool precise) {
  PFL_CHECK(updates.dim() == 2 && weight.dim() == 2, "aggregate: expected updates [N, P] and weight [M, K]");
  const ScalarType dtype = base ? base->scalar_type() : updates.scalar_type();
  Tensor out = make(updates, {weight.size(0), updates.size(1)}, dtype);
  const size_t bytes = static_cast<size_t>(out.numel()) * static_cast<size_t>(cpu::size_of(dtype_of(out, "aggregate")));
  cpu::touch_fresh(out.mutable_data_ptr(), bytes, TorchParallel{static_cast<double>(bytes)});
  aggregate_out_cpu(updates, weight, index, base, lr, precise, out);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CPU, m) {
  m.impl("aggregate", TORCH_BOX(&aggregate_cpu));
  m.impl("aggregate_out", TORCH_BOX(&aggregate_out_cpu));
}

}  // namespace pflcore
