#include "worker.h"

namespace pflcore::cpu {
template struct ChainRun<float, 16>;
#ifndef PFL_SMALL_PIECES  // a sanitizer's program has enough to compile
template struct ChainRun<double, 16>;
#endif
}  // namespace pflcore::cpu
