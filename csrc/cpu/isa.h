// Which instruction set the CPU kernels use: chosen at run time, forced by
// PFLCORE_ISA=plain|avx2|avx512 (tests do).
#pragma once
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#if (defined(__x86_64__) || defined(_M_X64)) && (defined(__GNUC__) || defined(__clang__))
#define PFL_X86 1
#define PFL_AVX2 __attribute__((target("avx2,fma,f16c")))
#define PFL_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#else
#define PFL_X86 0
#endif

namespace pflcore {
namespace cpu {

enum class Isa { plain = 0, avx2 = 1, avx512 = 2 };

inline const char* name([[maybe_unused]] Isa isa) {
#if defined(__aarch64__)
  return "neon";  // what the compiler makes of plain vectors there
#else
  return isa == Isa::avx512 ? "avx512" : isa == Isa::avx2 ? "avx2" : "plain";
#endif
}

inline Isa best_isa() {
#if PFL_X86
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return Isa::plain;
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return wide ? Isa::avx512 : Isa::avx2;
#else
  return Isa::plain;
#endif
}

// The name's instruction set, or the best one this machine has where it lacks that one or the name
// is unknown.
inline Isa isa_from(const char* wanted) {
  const Isa best = best_isa();
  if (wanted == nullptr) return best;
  for (Isa isa : {Isa::plain, Isa::avx2, Isa::avx512})
    if (std::strcmp(wanted, name(isa)) == 0) return isa <= best ? isa : best;
  return best;
}

inline Isa& isa_slot() {
  static Isa chosen = isa_from(std::getenv("PFLCORE_ISA"));
  return chosen;
}

inline Isa isa() { return isa_slot(); }

}  // namespace cpu
}  // namespace pflcore
