#include "../cpu/isa.h"
#if PFL_X86
#define PFL_CHAIN_TARGET PFL_AVX512
#define PFL_CHAIN_NAME ChainAvx512
#define PFL_CHAIN_BYTES 64
#include "worker.h"

namespace pflcore::cpu {
template struct ChainRun<float, ChainAvx512<float>>;
}  // namespace pflcore::cpu
#endif
