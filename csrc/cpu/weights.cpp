#include "weights.h"

#include "../glue/weights.h"
#include "glue.h"

namespace pflcore {
namespace {

struct WeightsOnCpu : OnCpu {
  using OnCpu::OnCpu;
  void waffle(const Waffle& q) const {
    for (int64_t r = 0; r < (q.target_step ? q.rows : 1); ++r)
      PFL_CHECK(q.target[r] >= 0 && q.target[r] < q.n, "waffle_weights: target holds ", q.target[r],
                ", expected 0 to ", q.n - 1);
    cpu::waffle_weights(q, TorchParallel{16.0 * static_cast<double>(q.rows * q.n)});
  }
  template <class T>
  void feddwa(const Feddwa<T>& q) const {
    cpu::feddwa_weights(q, TorchParallel{8.0 * static_cast<double>(q.m * q.n)});
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CPU, m) {
  m.impl("waffle_weights", TORCH_BOX(&waffle_weights<WeightsOnCpu>));
  m.impl("feddwa_weights", TORCH_BOX(&feddwa_weights<WeightsOnCpu>));
}

}  // namespace pflcore
