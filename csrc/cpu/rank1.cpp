#include "rank1.h"

#include "../glue/rank1.h"
#include "glue.h"

namespace pflcore {
namespace {

struct Rank1OnCpu : OnCpu {
  using OnCpu::OnCpu;
  template <class T>
  void forward(const Rank1<T>& q, const Tensor&, T* y) const {
    cpu::rank1_forward(q, y, parallel);
  }
  template <class T>
  void backward(const Rank1<T>& q, const Tensor&, const T* grad, const Rank1Grads<T>& out) const {
    cpu::rank1_backward(q, grad, out, parallel);
  }
  static constexpr TorchParallel parallel{
      TorchParallel::worthwhile};  // the kernels cut little work into one piece themselves
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CPU, m) {
  m.impl("rank1_linear", TORCH_BOX(&rank1_linear<Rank1OnCpu>));
  m.impl("rank1_linear_backward", TORCH_BOX(&rank1_linear_backward<Rank1OnCpu>));
}

}  // namespace pflcore
