#include "sqdist.cuh"

#include "../glue/sqdist.h"
#include "glue.cuh"

namespace pflcore {
namespace {

struct SqdistOnCuda : cuda::Call {
  using Call::Call;
  void operator()(Sqdist q, const Tensor& like) const {
    const cuda::SqdistCard card = cuda::sqdist_card();
    const Tensor room = workspace(like, cuda::sqdist_workspace(q, card));
    q.workspace = room.mutable_data_ptr();
    cuda::sqdist(q, card, stream());
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CUDA, m) {
  m.impl("pairwise_sqdist", TORCH_BOX(&pairwise_sqdist<SqdistOnCuda>));
}

}  // namespace pflcore
