#include "aggregate.cuh"

#include "../glue/aggregate.h"
#include "glue.cuh"

namespace pflcore {
namespace {

struct AggregateOnCuda : cuda::Call {
  using Call::Call;
  void operator()(const Aggregate& q) const { cuda::aggregate(q, stream()); }
  static void ready(const Tensor&) {}
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CUDA, m) {
  m.impl("aggregate", TORCH_BOX(&aggregate<AggregateOnCuda>));
  m.impl("aggregate_out", TORCH_BOX(&aggregate_out<AggregateOnCuda>));
}

}  // namespace pflcore
