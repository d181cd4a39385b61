#include "../cpu/isa.h"
#if PFL_X86
#define PFL_CHAIN_TARGET PFL_AVX2
#define PFL_CHAIN_NAME ChainAvx2
#define PFL_CHAIN_BYTES 32
#include "worker.h"

namespace pflcore::cpu {
template struct ChainRun<float, ChainAvx2<float>>;
#ifndef PFL_SMALL_PIECES  // a sanitizer's program has enough to compile
template struct ChainRun<double, ChainAvx2<double>>;
#endif
}  // namespace pflcore::cpu
#endif
