// What the kernels' library says of itself, in C, to every Python. Its ops register themselves when
// it is loaded (torch.ops.load_library).
#include <torch/headeronly/version.h>

#include "cpu/isa.h"

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

PFL_PUBLIC int pflcore_cuda() {
#ifdef PFLCORE_CUDA
  return 1;
#else
  return 0;
#endif
}

// The instruction set that the CPU kernels use: plain, avx2 or avx512.
PFL_PUBLIC const char* pflcore_isa() { return pflcore::cpu::name(pflcore::cpu::isa()); }

// Chooses it (tests do); returns the one chosen: never more than the machine has.
PFL_PUBLIC const char* pflcore_set_isa(const char* wanted) {
  pflcore::cpu::isa_slot() = pflcore::cpu::isa_from(wanted);
  return pflcore_isa();
}
