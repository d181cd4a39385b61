#include "sqdist.h"

#include "../glue/sqdist.h"
#include "glue.h"

namespace pflcore {
namespace {

struct SqdistOnCpu : OnCpu {
  using OnCpu::OnCpu;
  void operator()(const Sqdist& q, const Tensor&) const {
    const int64_t size = q.m * q.across();
    for (int64_t k = 0; k < size && q.listed >= 0; ++k)
      PFL_CHECK(q.index[k] < q.n, "pairwise_sqdist: expected index below N = ", q.n, ", got ",
                q.index[k]);
    const double work = static_cast<double>(size) * static_cast<double>(q.p);
    cpu::sqdist(q, TorchParallel{cpu::is_one_matrix(q) ? work / 2 : work});
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CPU, m) {
  m.impl("pairwise_sqdist", TORCH_BOX(&pairwise_sqdist<SqdistOnCpu>));
}

}  // namespace pflcore
