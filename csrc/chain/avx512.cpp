#define PFL_TARGET PFL_AVX512
#include "../cpu/isa.h"
#if PFL_X86
#include "worker.h"

namespace pflcore::cpu {
template struct ChainRun<float, 64>;
}  // namespace pflcore::cpu
#endif
