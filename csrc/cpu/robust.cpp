#include "robust.h"

#include "../glue/robust.h"
#include "glue.h"

namespace pflcore {
namespace {

struct RobustOnCpu : OnCpu {
  using OnCpu::OnCpu;
  void operator()(const TrimmedMean& q, const Tensor&) const {
    // It cuts little work into one piece itself.
    cpu::trimmed_mean(q, TorchParallel{TorchParallel::worthwhile});
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CPU, m) {
  m.impl("trimmed_mean", TORCH_BOX(&trimmed_mean<RobustOnCpu>));
}

}  // namespace pflcore
