#include "robust.cuh"

#include "../glue/robust.h"
#include "glue.cuh"

namespace pflcore {
namespace {

struct RobustOnCuda : cuda::Call {
  using Call::Call;
  template <class Problem>
  void operator()(Problem q, const Tensor& like) const {
    const Tensor room = workspace(like, cuda::column_workspace(q));
    q.workspace = room.mutable_data_ptr();
    cuda::mean_of_columns(q, stream());
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CUDA, m) {
  m.impl("trimmed_mean", TORCH_BOX(&trimmed_mean<RobustOnCuda>));
  m.impl("mean_around_median", TORCH_BOX(&mean_around_median<RobustOnCuda>));
}

}  // namespace pflcore
