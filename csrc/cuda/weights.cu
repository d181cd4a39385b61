#include "weights.cuh"

#include "../glue/weights.h"
#include "glue.cuh"

namespace pflcore {
namespace {

struct WeightsOnCuda : cuda::Call {
  using Call::Call;
  void waffle(const Waffle& q) const { cuda::waffle_weights(q, stream()); }
  template <class T>
  void feddwa(const Feddwa<T>& q) const {
    cuda::feddwa_weights(q, stream());
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CUDA, m) {
  m.impl("waffle_weights", TORCH_BOX(&waffle_weights<WeightsOnCuda>));
  m.impl("feddwa_weights", TORCH_BOX(&feddwa_weights<WeightsOnCuda>));
}

}  // namespace pflcore
