// All layers of a chain.
#pragma once
#include <variant>

#include "batch_norm.h"
#include "conv.h"
#include "linear.h"
#include "norm.h"
#include "pointwise.h"
#include "pool.h"

namespace pflcore::cpu::chain {

template <class T, int bytes>
using AnyLayer = std::variant<LinearLayer<T, bytes>, ConvLayer<T, bytes>, PoolLayer<T, bytes>,
                              ActLayer<T, bytes>, DropoutLayer<T, bytes>, NormLayer<T, bytes>,
                              ScaleLayer<T, bytes>, LeakyLayer<T, bytes>, BatchNormLayer<T, bytes>,
                              AddLayer<T, bytes>>;

// The layer of a line: of the alternatives from number i on the one that has the line's kind.
template <class Any, size_t i = 0>
Any make_layer(Lines& lines) {
  if constexpr (i < std::variant_size_v<Any>) {
    using Kind = std::variant_alternative_t<i, Any>;
    if (lines.line().kind == Kind::kind) return Kind(lines);
    return make_layer<Any, i + 1>(lines);
  } else {
    refuse();
  }
}

}  // namespace pflcore::cpu::chain
