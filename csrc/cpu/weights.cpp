#include "weights.h"

#include <tuple>

#include "../glue.h"

namespace pflcore {
namespace {

Tensor waffle_weights_cpu(const Tensor& dist_in, const Tensor& target_in, double omega, double psi, bool uniform_ties) {
  PFL_CHECK(dist_in.dim() >= 1, "waffle_weights: expected dist [..., N]");
  const int64_t n = dist_in.size(dist_in.dim() - 1), rows = n ? dist_in.numel() / n : 0;
  const Tensor dist = dense_as(dist_in, ScalarType::Double);
  PFL_CHECK(target_in.scalar_type() == ScalarType::Long && (target_in.numel() == 1 || target_in.numel() == rows),
            "waffle_weights: expected one int64 target, or one for each row");
  const Tensor target = dense(target_in);
  const int64_t* targets = static_cast<const int64_t*>(target.const_data_ptr());
  for (int64_t r = 0; r < target.numel(); ++r)
    PFL_CHECK(targets[r] >= 0 && targets[r] < n, "waffle_weights: target holds ", targets[r], ", expected 0 to ", n - 1);
  Tensor weight = make(dist, dist.sizes());
  cpu::waffle_weights(static_cast<const double*>(dist.const_data_ptr()), rows, n, targets, target.numel() == 1 ? 0 : 1, omega, psi,
                      uniform_ties, static_cast<double*>(weight.mutable_data_ptr()), TorchParallel{16.0 * static_cast<double>(dist.numel())});
  return weight;
}

std::tuple<Tensor, Tensor> feddwa_weights_cpu(const Tensor& sqdist_in, int64_t k) {
  PFL_CHECK(sqdist_in.dim() == 2 && k > 0, "feddwa_weights: expected sqdist [M, N] and k > 0");
  const bool single = sqdist_in.scalar_type() == ScalarType::Float;
  const Tensor sqdist = single ? rows(sqdist_in) : dense_as(sqdist_in, ScalarType::Double);
  const int64_t m = sqdist.size(0), n = sqdist.size(1), kept = std::min(k, n);
  PFL_CHECK(n > 0, "feddwa_weights: expected at least one column in sqdist");
  Tensor weight = make(sqdist, {m, kept}, ScalarType::Double);
  Tensor index = make(sqdist, {m, kept}, ScalarType::Long);
  double* w = static_cast<double*>(weight.mutable_data_ptr());
  int64_t* i = static_cast<int64_t*>(index.mutable_data_ptr());
  const TorchParallel parallel{8.0 * static_cast<double>(m) * static_cast<double>(n)};
  if (single)
    cpu::feddwa_weights(static_cast<const float*>(sqdist.const_data_ptr()), row_stride(sqdist), m, n, kept, w, i, parallel);
  else
    cpu::feddwa_weights(static_cast<const double*>(sqdist.const_data_ptr()), row_stride(sqdist), m, n, kept, w, i, parallel);
  return {weight, index};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CPU, m) {
  m.impl("waffle_weights", TORCH_BOX(&waffle_weights_cpu));
  m.impl("feddwa_weights", TORCH_BOX(&feddwa_weights_cpu));
}

}  // namespace pflcore
