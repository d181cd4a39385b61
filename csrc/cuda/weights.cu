#include "weights.cuh"

#include <algorithm>
#include <tuple>

#include "glue.cuh"

namespace pflcore {
namespace {

Tensor waffle_weights_cuda(const Tensor& dist_in, const Tensor& target_in, double omega, double psi, bool uniform_ties) {
  const char* const op = "waffle_weights";
  PFL_CHECK(dist_in.dim() >= 1, op, ": expected dist [..., N]");
  const cuda::Call call(dist_in, op);
  call.same(target_in, "target");
  const int64_t n = dist_in.size(dist_in.dim() - 1), rows = n ? dist_in.numel() / n : 0;
  PFL_CHECK(target_in.scalar_type() == ScalarType::Long && (target_in.numel() == 1 || target_in.numel() == rows), op,
            ": expected one int64 target, or one for each row");
  const Tensor dist = dense_as(dist_in, ScalarType::Double), target = dense(target_in);
  const Tensor weight = make(dist, dist.sizes());
  cuda::waffle_weights({cuda::data<double>(dist), rows, n, cuda::data<int64_t>(target), target.numel() == 1 ? 0 : 1, omega, psi, uniform_ties,
                        cuda::mutable_data<double>(weight)},
                       call.stream());
  return weight;
}

std::tuple<Tensor, Tensor> feddwa_weights_cuda(const Tensor& sqdist_in, int64_t k) {
  const char* const op = "feddwa_weights";
  PFL_CHECK(sqdist_in.dim() == 2 && k > 0, op, ": expected sqdist [M, N] and k > 0");
  const cuda::Call call(sqdist_in, op);
  const bool single = sqdist_in.scalar_type() == ScalarType::Float;
  const Tensor sqdist = single ? rows(sqdist_in) : dense_as(sqdist_in, ScalarType::Double);
  const int64_t m = sqdist.size(0), n = sqdist.size(1), kept = std::min(k, n);
  PFL_CHECK(n > 0, op, ": expected at least one column in sqdist");
  const Tensor weight = make(sqdist, {m, kept}, ScalarType::Double);
  const Tensor index = make(sqdist, {m, kept}, ScalarType::Long);
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    cuda::feddwa_weights<T>({cuda::data<T>(sqdist), row_stride(sqdist), m, n, kept, cuda::mutable_data<double>(weight),
                             cuda::mutable_data<int64_t>(index)},
                            call.stream());
  };
  single ? run(float{}) : run(double{});
  return {weight, index};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CUDA, m) {
  m.impl("waffle_weights", TORCH_BOX(&waffle_weights_cuda));
  m.impl("feddwa_weights", TORCH_BOX(&feddwa_weights_cuda));
}

}  // namespace pflcore
