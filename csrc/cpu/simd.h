// Vectors for kernels that are written once and compiled for several instruction sets.
//
// A kernel body is a PFL_INLINE template over the vector's size in bytes. It names no instruction set; the functions that
// call it carry PFL_AVX512, PFL_AVX2 or nothing, and the body is inlined into them and compiled for that set.
// Vectors are GCC/clang vector extensions, so the same body builds on ARM. They are passed by reference only: a vector
// argument passed by value changes the ABI between functions of different instruction sets.
#pragma once
#include <cstdint>
#include <cstring>

#include "convert.h"
#include "isa.h"

#define PFL_INLINE_MEMBER inline __attribute__((always_inline))
#define PFL_INLINE static PFL_INLINE_MEMBER

#if defined(__clang__)
#define PFL_UNROLL _Pragma("unroll")
#else
#define PFL_UNROLL _Pragma("GCC unroll 16")
#endif

namespace pflcore::cpu {

inline int64_t size_of(Dtype t) { return t == Dtype::f64 ? 8 : t == Dtype::f32 ? 4 : 2; }

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

template <class T, int bytes>
struct vector_of { typedef T type __attribute__((vector_size(bytes))); };
template <class T, int bytes>
using Vec = typename vector_of<T, bytes>::type;

template <class V, class T>
PFL_INLINE void load(V& v, const T* p) { __builtin_memcpy(&v, p, sizeof(V)); }
template <class V, class T>
PFL_INLINE void store(T* p, const V& v) { __builtin_memcpy(p, &v, sizeof(V)); }

// A store that goes past the caches; p is aligned to the vector's size. fence() after the last one of a thread.
template <class V, class T>
PFL_INLINE void stream(T* p, const V& v) {
#if PFL_X86
  if constexpr (sizeof(V) == 64) asm volatile("vmovntps %1, %0" : "=m"(*reinterpret_cast<V*>(p)) : "v"(v));
  else if constexpr (sizeof(V) == 32) asm volatile("vmovntps %1, %0" : "=m"(*reinterpret_cast<V*>(p)) : "x"(v));
  else asm volatile("movntps %1, %0" : "=m"(*reinterpret_cast<V*>(p)) : "x"(v));
#else
  store(p, v);
#endif
}
PFL_INLINE void fence() {
#if PFL_X86
  asm volatile("sfence" ::: "memory");
#endif
}

// ---- 16-bit floats, as integer arithmetic: the same on every instruction set ----
template <int bytes>
PFL_INLINE void widen(Vec<float, bytes>& v, const Vec<uint16_t, bytes / 2>& h, BFloat16) {
  const Vec<uint32_t, bytes> x = __builtin_convertvector(h, Vec<uint32_t, bytes>) << 16;
  __builtin_memcpy(&v, &x, sizeof v);
}
template <int bytes>
PFL_INLINE void widen(Vec<float, bytes>& v, const Vec<uint16_t, bytes / 2>& h, Half) {
  using U = Vec<uint32_t, bytes>;
  const U x = __builtin_convertvector(h, U);
  const U magnitude = (x & 0x7fffu) << 13;
  Vec<float, bytes> f;
  __builtin_memcpy(&f, &magnitude, sizeof f);
  f *= 0x1p112f;   // the exponent's bias, and subnormals made normal, in one product
  U u;
  __builtin_memcpy(&u, &f, sizeof u);
  u |= U(magnitude >= 0x0f800000u) & 0x7f800000u;   // infinity and NaN keep the largest exponent
  u |= (x & 0x8000u) << 16;
  __builtin_memcpy(&v, &u, sizeof v);
}
template <int bytes>
PFL_INLINE void narrow(Vec<uint16_t, bytes / 2>& h, const Vec<float, bytes>& v, BFloat16) {
  using U = Vec<uint32_t, bytes>;
  U x;
  __builtin_memcpy(&x, &v, sizeof x);
  const U nan = U((x & 0x7fffffffu) > 0x7f800000u);
  const U even = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
  h = __builtin_convertvector((nan & 0x7fc0u) | (~nan & even), Vec<uint16_t, bytes / 2>);
}
template <int bytes>
PFL_INLINE void narrow(Vec<uint16_t, bytes / 2>& h, const Vec<float, bytes>& v, Half) {
  using U = Vec<uint32_t, bytes>;
  U x;
  __builtin_memcpy(&x, &v, sizeof x);
  const U sign = (x >> 16) & 0x8000u;
  x &= 0x7fffffffu;
  const U large = U(x >= 0x47800000u), small = U(x < 0x38800000u), nan = U(x > 0x7f800000u);
  const U normal = (x + 0xc8000fffu + ((x >> 13) & 1u)) >> 13;
  Vec<float, bytes> f;
  __builtin_memcpy(&f, &x, sizeof f);
  f += 0.5f;   // shifts a subnormal's bits to the end of the mantissa, rounded to even by the addition
  U subnormal;
  __builtin_memcpy(&subnormal, &f, sizeof subnormal);
  subnormal -= 0x3f000000u;
  const U extreme = (nan & 0x7e00u) | (~nan & 0x7c00u);
  const U r = (large & extreme) | (small & subnormal) | (~(large | small) & normal);
  h = __builtin_convertvector(r | sign, Vec<uint16_t, bytes / 2>);
}

// bytes / sizeof(A) elements of type T at p, as a vector of A, and back.
template <int bytes, class A, class T>
PFL_INLINE void load_as(Vec<A, bytes>& v, const T* p) {
  if constexpr (sizeof(T) == sizeof(A)) {
    load(v, p);
  } else if constexpr (sizeof(A) == 4 && sizeof(T) == 8) {
    Vec<double, bytes * 2> d;
    load(d, p);
    v = __builtin_convertvector(d, Vec<A, bytes>);
  } else if constexpr (sizeof(A) == 4) {
    Vec<uint16_t, bytes / 2> h;
    load(h, p);
    widen<bytes>(v, h, T{});
  } else {
    Vec<float, bytes / 2> f;
    load_as<bytes / 2, float>(f, p);
    v = __builtin_convertvector(f, Vec<A, bytes>);
  }
}
template <int bytes, class A, class T>
PFL_INLINE void store_as(T* p, const Vec<A, bytes>& v) {
  if constexpr (sizeof(T) == sizeof(A)) {
    store(p, v);
  } else if constexpr (sizeof(A) == 4 && sizeof(T) == 8) {
    const Vec<double, bytes * 2> d = __builtin_convertvector(v, Vec<double, bytes * 2>);
    store(p, d);
  } else if constexpr (sizeof(A) == 4) {
    Vec<uint16_t, bytes / 2> h;
    narrow<bytes>(h, v, T{});
    store(p, h);
  } else {
    const Vec<float, bytes / 2> f = __builtin_convertvector(v, Vec<float, bytes / 2>);
    store_as<bytes / 2, float>(p, f);
  }
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

}  // namespace pflcore::cpu
