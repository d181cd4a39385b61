// The ops "waffle_weights" and "feddwa_weights", tensors checked: a Device has `waffle(problem)`
// and `feddwa(problem)`.
#pragma once
#include <algorithm>
#include <tuple>

#include "common.h"

namespace pflcore {

template <class Device>
Tensor waffle_weights(const Tensor& dist_in, const Tensor& target_in, double omega, double psi,
                      bool uniform_ties) {
  constexpr const char* op = "waffle_weights";
  PFL_CHECK(dist_in.dim() >= 1, op, ": expected dist [..., N]");
  const Device device(dist_in, op);
  device.same(target_in, "target");
  const int64_t n = dist_in.size(dist_in.dim() - 1), rows = n ? dist_in.numel() / n : 0;
  PFL_CHECK(target_in.scalar_type() == ScalarType::Long &&
                (target_in.numel() == 1 || target_in.numel() == rows),
            op, ": expected one int64 target, or one for each row");
  const Tensor dist = dense_as(dist_in, ScalarType::Double), target = dense(target_in),
               weight = make(dist, dist.sizes());
  device.waffle({data<double>(dist), rows, n, data<int64_t>(target), target.numel() == 1 ? 0 : 1,
                 omega, psi, uniform_ties, mutable_data<double>(weight)});
  return weight;
}

template <class Device>
std::tuple<Tensor, Tensor> feddwa_weights(const Tensor& sqdist_in, int64_t k) {
  constexpr const char* op = "feddwa_weights";
  PFL_CHECK(sqdist_in.dim() == 2 && k > 0, op, ": expected sqdist [M, N] and k > 0");
  const Device device(sqdist_in, op);
  const bool single = sqdist_in.scalar_type() == ScalarType::Float;
  const Tensor sqdist = single ? rows(sqdist_in) : dense_as(sqdist_in, ScalarType::Double);
  const int64_t m = sqdist.size(0), n = sqdist.size(1), kept = std::min(k, n);
  PFL_CHECK(n > 0, op, ": expected at least one column in sqdist");
  const Tensor weight = make(sqdist, {m, kept}, ScalarType::Double),
               index = make(sqdist, {m, kept}, ScalarType::Long);
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    device.feddwa(Feddwa<T>{data<T>(sqdist), row_stride(sqdist), m, n, kept,
                            mutable_data<double>(weight), mutable_data<int64_t>(index)});
  };
  single ? run(float{}) : run(double{});
  return {weight, index};
}

}  // namespace pflcore
