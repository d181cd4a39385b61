#define PFL_TARGET PFL_AVX2
#include "../cpu/isa.h"
#if PFL_X86
#include "worker.h"

namespace pflcore::cpu {
template struct ChainRun<float, 32>;
#ifndef PFL_SMALL_PIECES  // a sanitizer's program has enough to compile
template struct ChainRun<double, 32>;
#endif
}  // namespace pflcore::cpu
#endif
