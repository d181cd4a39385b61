#include "sqdist.h"

#include "../glue/sqdist.h"
#include "glue.h"

namespace pflcore {
namespace {

struct SqdistOnCpu : OnCpu {
  using OnCpu::OnCpu;
  void operator()(const Sqdist& q, const Tensor&) const {
    static const int64_t none = 0;  // an empty list has no address, which would say "all pairs"
    const int64_t size = q.m * q.across();
    const int64_t* const list = q.listed < 0 ? nullptr : size ? q.index : &none;
    for (int64_t k = 0; k < size && list; ++k)
      PFL_CHECK(list[k] < q.n, "pairwise_sqdist: expected index below N = ", q.n, ", got ",
                list[k]);
    const TorchParallel parallel{static_cast<double>(size) * static_cast<double>(q.p) /
                                 (q.symmetric && !list ? 2 : 1)};
    cpu::sqdist(q.dtype, q.a, q.a_row, q.m, q.symmetric ? nullptr : q.b, q.b_row, q.n, q.p, q.out,
                parallel, list, q.across());
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CPU, m) {
  m.impl("pairwise_sqdist", TORCH_BOX(&pairwise_sqdist<SqdistOnCpu>));
}

}  // namespace pflcore
