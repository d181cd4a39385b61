#define PFL_CHAIN_TARGET
#define PFL_CHAIN_NAME ChainPlain
#define PFL_CHAIN_BYTES 16
#include "worker.h"

namespace pflcore::cpu {
template struct ChainRun<float, ChainPlain<float>>;
#ifndef PFL_SMALL_PIECES  // a sanitizer's program has enough to compile
template struct ChainRun<double, ChainPlain<double>>;
#endif
}  // namespace pflcore::cpu
