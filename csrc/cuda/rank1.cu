#include "rank1.cuh"

#include "../glue/rank1.h"
#include "glue.cuh"

namespace pflcore {
namespace {

struct Rank1OnCuda : cuda::Call {
  using Call::Call;
  template <class T>
  void forward(Rank1<T> q, const Tensor& like, T* y) const {
    const Tensor room = workspace(like, cuda::rank1_workspace(q));
    q.workspace = room.mutable_data_ptr();
    cuda::rank1_forward(q, y, stream());
  }
  template <class T>
  void backward(Rank1<T> q, const Tensor& like, const T* grad, const Rank1Grads<T>& out) const {
    const Tensor room = workspace(like, cuda::rank1_workspace(q));
    q.workspace = room.mutable_data_ptr();
    cuda::rank1_backward(q, grad, out, stream());
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CUDA, m) {
  m.impl("rank1_listed", TORCH_BOX(&rank1_linear<Rank1OnCuda>));
  m.impl("rank1_listed_backward", TORCH_BOX(&rank1_linear_backward<Rank1OnCuda>));
}

}  // namespace pflcore
