#include "sgd.cuh"

#include "../glue/sgd.h"
#include "glue.cuh"

namespace pflcore {
namespace {

struct SgdOnCuda : cuda::Call {
  using Call::Call;
  template <class T>
  void operator()(const Sgd<T>& step) const {
    cuda::sgd_step(step, stream());
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CUDA, m) {
  m.impl("sgd_step_", TORCH_BOX(&sgd_step<SgdOnCuda>));
}

}  // namespace pflcore
