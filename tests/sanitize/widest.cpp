// The kernels of a chain for the widest vectors, compiled for any machine: the compiler makes smaller ones of them.
#define PFL_CHAIN_LOWERED
#define PFL_CHAIN_NAME ChainAvx512
#define PFL_CHAIN_BYTES 64
#include "cpu/chain_worker.h"

namespace pflcore::cpu {
template struct ChainRun<float, ChainAvx512<float>>;
}  // namespace pflcore::cpu
