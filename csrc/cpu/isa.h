// The instruction set that the CPU kernels use: chosen at run time, or by
// PFLCORE_ISA=plain|avx2|avx512, as tests do.
#pragma once
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#if (defined(__x86_64__) || defined(_M_X64)) && (defined(__GNUC__) || defined(__clang__))
#define PFL_X86 1
#define PFL_AVX2 __attribute__((target("avx2,fma,f16c")))
#define PFL_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#else
#define PFL_X86 0
#endif

// A file that is compiled for one instruction set (chain/avx2.cpp) gives its attribute as
// PFL_TARGET before it includes anything: GCC makes poor code of vectors in a function of another
// set even where that is inlined into one that has them.
#if !defined(PFL_TARGET)
#define PFL_TARGET
#endif
#define PFL_INLINE_MEMBER inline __attribute__((always_inline)) PFL_TARGET
#define PFL_INLINE static PFL_INLINE_MEMBER
#define PFL_LAMBDA __attribute__((always_inline)) PFL_TARGET

namespace pflcore {
namespace cpu {

template <int n>
using Int = std::integral_constant<int, n>;

enum class Isa { plain = 0, avx2 = 1, avx512 = 2 };

inline const char* name([[maybe_unused]] Isa isa) {
#if defined(__aarch64__)
  return "neon";  // the compiler makes it of plain vectors there
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

// f(Int<the vectors' size in bytes>), compiled for the instruction set that runs, or `now`: f is a
// PFL_LAMBDA, whose code is inlined here, once for each set.
#if PFL_X86
template <class F>
[[gnu::noinline]] PFL_AVX2 void on_avx2(const F& f) {
  f(Int<32>{});
}
template <class F>
[[gnu::noinline]] PFL_AVX512 void on_avx512(const F& f) {
  f(Int<64>{});
}
#endif
template <class F>
[[gnu::noinline]] void on_plain(const F& f) {
  f(Int<16>{});
}
template <class F>
void on_isa(const F& f, [[maybe_unused]] Isa now = isa()) {
#if PFL_X86
  if (now == Isa::avx512) return on_avx512(f);
  if (now == Isa::avx2) return on_avx2(f);
#endif
  on_plain(f);
}

// f(Int<bytes>) from code of that set, as a function that its callers share, where copies of the
// code in each of them would only take longer to compile. The lambda calls a function that takes
// its values: where it reads them itself, each store makes it read them again.
template <int bytes, class F>
PFL_INLINE void shared(const F& f) {
#if PFL_X86
  if constexpr (bytes == 64) return on_avx512(f);
  if constexpr (bytes == 32) return on_avx2(f);
#endif
  if constexpr (bytes == 16) on_plain(f);
}

// The number of elements of type T that a vector of that set holds.
template <class T>
int64_t lanes_of() {
  return (16 << static_cast<int>(isa())) / sizeof(T);
}

}  // namespace cpu
}  // namespace pflcore
