#include "robust.cuh"

#include "../glue/robust.h"
#include "glue.cuh"

namespace pflcore {
namespace {

struct RobustOnCuda : cuda::Call {
  using Call::Call;
  void operator()(TrimmedMean q, const Tensor& like) const {
    const Tensor room = workspace(like, cuda::trimmed_mean_workspace(q));
    q.workspace = room.mutable_data_ptr();
    cuda::trimmed_mean(q, stream());
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CUDA, m) {
  m.impl("trimmed_mean", TORCH_BOX(&trimmed_mean<RobustOnCuda>));
}

}  // namespace pflcore
