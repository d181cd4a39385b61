#include "aggregate.h"

#include "../glue/aggregate.h"
#include "glue.h"

namespace pflcore {
namespace {

struct AggregateOnCpu : OnCpu {
  using OnCpu::OnCpu;
  void operator()(const Aggregate& q) const {
    if (q.sparse)
      for (int64_t i = 0; i < q.m * q.k; ++i)
        PFL_CHECK(q.index[i] >= 0 && q.index[i] < q.n, "aggregate: index holds ", q.index[i],
                  ", expected 0 to ", q.n - 1);
    cpu::aggregate(
        q, TorchParallel{TorchParallel::worthwhile});  // it cuts little work into one piece itself
  }
  static void ready(const Tensor& out) {
    const size_t bytes = static_cast<size_t>(out.numel()) *
                         static_cast<size_t>(cpu::size_of(dtype_of(out, "aggregate")));
    cpu::touch_fresh(out.mutable_data_ptr(), bytes, TorchParallel{static_cast<double>(bytes)});
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CPU, m) {
  m.impl("aggregate", TORCH_BOX(&aggregate<AggregateOnCpu>));
  m.impl("aggregate_out", TORCH_BOX(&aggregate_out<AggregateOnCpu>));
}

}  // namespace pflcore
