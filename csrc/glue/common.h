// Functions that the glue of every op shares on either device: dtypes, rows, memory.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "../check.h"
#include "../inputs.h"

namespace pflcore {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline Dtype dtype_of(const Tensor& t, const char* op) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return Dtype::f32;
    case ScalarType::Double:
      return Dtype::f64;
    case ScalarType::Half:
      return Dtype::f16;
    case ScalarType::BFloat16:
      return Dtype::bf16;
    default:
      break;
  }
  PFL_CHECK(false, op, ": expected a float16, bfloat16, float32 or float64 tensor");
  return Dtype::f32;
}

// The error that a card reports, such as an illegal access of an earlier kernel; empty where it
// reports none, and where there is no card (library.cpp).
std::string device_fault();

// torch's C interface says no more than that a call failed. Where all it has to do is to find
// memory, we know why, and say so: a card that has failed before, or no memory.
template <class Allocate>
Tensor allocated(const Tensor& like, int64_t elements, const Allocate& allocate) {
  try {
    return allocate();
  } catch (const std::exception&) {
    const std::string fault = like.is_cuda() ? device_fault() : std::string();
    if (!fault.empty())
      throw std::runtime_error(text("the card reports an error of earlier work: ", fault));
    throw std::runtime_error(
        text("out of memory: there is no room for ", elements, " more elements"));
  }
}

// An empty tensor on the device of `like`. It is taken from torch's C interface: to call an op of
// torch by its name takes some microseconds, as long as a small call of ours does.
template <class Sizes = std::initializer_list<int64_t>>
Tensor make(const Tensor& like, const Sizes& sizes,
            std::optional<ScalarType> dtype = std::nullopt) {
  const std::vector<int64_t> shape(sizes.begin(), sizes.end());
  std::vector<int64_t> strides(shape.size());
  int64_t elements = 1, stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(shape[i], 1);
    elements *= shape[i];
  }
  int32_t device = 0, index = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &index));
  const auto type = torch::stable::detail::to<int32_t>(
      torch::stable::detail::from(dtype.value_or(like.scalar_type())));
  return allocated(like, elements, [&] {
    AtenTensorHandle made = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()),
                                                    shape.data(), strides.data(), type, device,
                                                    index, &made));
    return Tensor(made);
  });
}

inline Tensor dense(const Tensor& t) {
  return t.is_contiguous() ? t
                           : allocated(t, t.numel(), [&] { return torch::stable::contiguous(t); });
}

inline Tensor converted(const Tensor& t, ScalarType dtype) {
  return t.scalar_type() == dtype
             ? t
             : allocated(t, t.numel(), [&] { return torch::stable::to(t, dtype); });
}

// A tensor whose last dimension is contiguous: itself, or a copy.
inline Tensor rows(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  return last < 0 || t.size(last) <= 1 || t.stride(last) == 1 ? t : dense(t);
}

// True where two matrices are the same elements in the same memory.
inline bool same_view(const Tensor& a, const Tensor& b) {
  return a.const_data_ptr() == b.const_data_ptr() && a.size(0) == b.size(0) &&
         a.size(1) == b.size(1) && a.stride(0) == b.stride(0) && a.stride(1) == b.stride(1);
}

template <class T>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <class T>
T* mutable_data(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

inline Tensor dense_as(const Tensor& t, ScalarType dtype) {
  const bool widens = t.scalar_type() == ScalarType::Float && dtype == ScalarType::Double;
  if (!widens || !t.is_cpu() || !t.is_contiguous()) return dense(converted(t, dtype));
  // Weights are few numbers, which are copied before torch's own conversion has been called.
  const Tensor out = make(t, t.sizes(), dtype);
  std::copy_n(data<float>(t), t.numel(), mutable_data<double>(out));
  return out;
}

// run(a zero of the tensor's type).
template <class Run>
auto float_or_double(const char* op, const Tensor& t, const Run& run) {
  if (t.scalar_type() == ScalarType::Float) return run(float{});
  PFL_CHECK(t.scalar_type() == ScalarType::Double, op, ": expected float32 or float64");
  return run(double{});
}

inline int64_t row_stride(const Tensor& t) { return t.size(0) > 1 ? t.stride(0) : t.size(1); }

}  // namespace pflcore
