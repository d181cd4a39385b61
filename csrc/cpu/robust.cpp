#include "robust.h"

#include "../glue/robust.h"
#include "glue.h"

namespace pflcore {
namespace {

struct RobustOnCpu : OnCpu {
  using OnCpu::OnCpu;
  template <class Problem>
  void operator()(const Problem& q, const Tensor&) const {
    // It cuts little work into one piece itself.
    cpu::mean_of_columns(q, TorchParallel{TorchParallel::worthwhile});
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CPU, m) {
  m.impl("trimmed_mean", TORCH_BOX(&trimmed_mean<RobustOnCpu>));
  m.impl("mean_around_median", TORCH_BOX(&mean_around_median<RobustOnCpu>));
}

}  // namespace pflcore
