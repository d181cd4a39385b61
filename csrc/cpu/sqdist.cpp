#include "sqdist.h"

#include "../glue.h"

namespace pflcore {
namespace {

Tensor pairwise_sqdist_cpu(const Tensor& a_in, const OptionalTensor& b_in, const OptionalTensor& index_in) {
  PFL_CHECK(a_in.dim() == 2, "pairwise_sqdist: expected a [M, P]");
  const Dtype dtype = dtype_of(a_in, "pairwise_sqdist");
  const Tensor a = rows(a_in);
  const Tensor b = b_in ? rows(*b_in) : a;
  PFL_CHECK(b.dim() == 2 && b.size(1) == a.size(1), "pairwise_sqdist: expected a [M, P] and b [N, P] with the same P");
  PFL_CHECK(b.scalar_type() == a.scalar_type(), "pairwise_sqdist: expected a and b of one dtype");
  const int64_t m = a.size(0), n = b.size(0), p = a.size(1);
  int64_t across = n;
  const int64_t* list = nullptr;
  Tensor index = a;
  if (index_in) {
    PFL_CHECK(index_in->dim() == 2 && index_in->size(0) == m && index_in->scalar_type() == ScalarType::Long && index_in->is_cpu(),
              "pairwise_sqdist: expected index [M, L] int64 on the CPU");
    index = dense(*index_in), across = index.size(1);
    static const int64_t none = 0;
    list = m * across ? static_cast<const int64_t*>(index.const_data_ptr()) : &none;
    for (int64_t k = 0; k < m * across; ++k) PFL_CHECK(list[k] < n, "pairwise_sqdist: expected index below N = ", n, ", got ", list[k]);
  }
  Tensor out = make(a, {m, across}, ScalarType::Double);
  const double work = static_cast<double>(m) * static_cast<double>(across) * static_cast<double>(p) / (b_in || list ? 1 : 2);
  cpu::sqdist(dtype, a.const_data_ptr(), row_stride(a), m, b_in ? b.const_data_ptr() : nullptr, row_stride(b), n, p,
              static_cast<double*>(out.mutable_data_ptr()), TorchParallel{work}, list, across);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CPU, m) { m.impl("pairwise_sqdist", TORCH_BOX(&pairwise_sqdist_cpu)); }

}  // namespace pflcore
