// The facts that the kernels' library tells of itself, in C, to every Python. Its ops register
// themselves when it is loaded (torch.ops.load_library).
#include <torch/headeronly/version.h>

#include <string>

#include "cpu/isa.h"
#ifdef PFLCORE_CUDA
#include <cuda_runtime_api.h>
#endif

#define PFL_PUBLIC extern "C" __attribute__((visibility("default")))

PFL_PUBLIC const char* pflcore_built() {
  return "built with "
#if defined(__clang__)
         "clang " __clang_version__
#elif defined(__GNUC__)
         "gcc " __VERSION__
#endif
         " against torch " TORCH_VERSION;
}

#ifdef PFLCORE_CUDA
PFL_PUBLIC const char* pflcore_architectures();  // cuda/architectures.cu
#else
// The cards that have machine code in here: none.
PFL_PUBLIC const char* pflcore_architectures() { return ""; }
#endif

namespace pflcore {

std::string device_fault() {
#ifdef PFLCORE_CUDA
  cudaError_t error = cudaPeekAtLastError();
  size_t free = 0, total = 0;
  if (error == cudaSuccess) error = cudaMemGetInfo(&free, &total);  // torch may have cleared it
  if (error != cudaSuccess && error != cudaErrorMemoryAllocation) return cudaGetErrorString(error);
#endif
  return "";
}

}  // namespace pflcore

// The instruction set that the CPU kernels use: plain, avx2 or avx512.
PFL_PUBLIC const char* pflcore_isa() { return pflcore::cpu::name(pflcore::cpu::isa()); }

// Chooses it (tests do); returns the one chosen: never more than the machine has.
PFL_PUBLIC const char* pflcore_set_isa(const char* wanted) {
  pflcore::cpu::isa_slot() = pflcore::cpu::isa_from(wanted);
  return pflcore_isa();
}
