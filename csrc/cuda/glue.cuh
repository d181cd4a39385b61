// Parts that the CUDA glue of every op shares: the device, torch's current stream on it, tensors on
// one device, workspaces.
#pragma once
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/shim_utils.h>

#include "../glue/common.h"
#include "common.cuh"

namespace pflcore::cuda {

// For the time of a call the tensor's device is the current one, and work goes to the stream that
// torch has there: no other stream is touched and nothing waits, so that a call can be captured in
// a CUDA graph. Temporaries come from torch's allocator, which knows about both.
class Call {
 public:
  Call(const Tensor& t, const char* op) : op_(op), device_(device_of(t, op)), guard_(device_) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  cudaStream_t stream() const { return stream_; }

  void same(const Tensor& t, const char* name) const {
    PFL_CHECK(t.is_cuda() && t.get_device_index() == device_, op_, ": expected ", name,
              " on cuda:", device_, " like the first argument, got ",
              t.is_cuda() ? text("cuda:", t.get_device_index()) : std::string("another device"));
  }
  void same(const OptionalTensor& t, const char* name) const {
    if (t) same(*t, name);
  }

  Tensor workspace(const Tensor& like, int64_t bytes) const {
    return make(like, {bytes}, ScalarType::Byte);
  }

 private:
  static int32_t device_of(const Tensor& t, const char* op) {
    PFL_CHECK(t.is_cuda(), op,
              ": expected all tensors on one GPU, got the first on another device");
    return t.get_device_index();
  }

  const char* op_;
  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace pflcore::cuda
