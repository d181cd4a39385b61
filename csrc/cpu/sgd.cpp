#include "sgd.h"

#include "../glue/sgd.h"
#include "glue.h"

namespace pflcore {
namespace {

struct SgdOnCpu : OnCpu {
  using OnCpu::OnCpu;
  template <class T>
  void operator()(const Sgd<T>& step) const {
    cpu::sgd_step(step,
                  TorchParallel{4.0 * static_cast<double>(step.s) * static_cast<double>(step.q)});
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CPU, m) { m.impl("sgd_step_", TORCH_BOX(&sgd_step<SgdOnCpu>)); }

}  // namespace pflcore
