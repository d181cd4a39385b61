// The cards that have machine code in the library.
#include "common.cuh"

// Their names, such as "sm_75, sm_90".
extern "C" __attribute__((visibility("default"))) const char* pflcore_architectures() {
  static const std::string names = pflcore::cuda::architectures();
  return names.c_str();
}
