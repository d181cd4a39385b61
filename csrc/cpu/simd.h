// Vectors for kernels that are written once and compiled for several instruction sets.
//
// A kernel body is a PFL_INLINE template over the vector's size in bytes. It names no instruction
// set; the functions that call it carry PFL_AVX512, PFL_AVX2 or nothing, and the body is inlined
// into them and compiled for that set. Vectors are GCC/clang vector extensions, so the same body
// builds on ARM. They are passed by reference only: a vector argument passed by value changes the
// ABI between functions of different instruction sets.
#pragma once
#include <cstdint>
#include <cstring>

#include "../inputs.h"
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

template <class T, int bytes>
struct vector_of {
  typedef T type __attribute__((vector_size(bytes)));
};
template <class T, int bytes>
using Vec = typename vector_of<T, bytes>::type;

// Do tiles of sums for 32 vector registers fit? AVX-512 and NEON have them; others have 16.
#if defined(__aarch64__)
template <int bytes>
constexpr bool kRoomy = true;
#else
template <int bytes>
constexpr bool kRoomy = bytes == 64;
#endif

template <class V, class T>
PFL_INLINE void load(V& v, const T* p) {
  __builtin_memcpy(&v, p, sizeof(V));
}
template <class V, class T>
PFL_INLINE void store(T* p, const V& v) {
  __builtin_memcpy(p, &v, sizeof(V));
}

// A store that goes past the caches; p is aligned to the vector's size. fence() after the last one
// of a thread.
template <class V, class T>
PFL_INLINE void stream(T* p, const V& v) {
#if defined(__clang__)
  __builtin_nontemporal_store(v, reinterpret_cast<V*>(p));
#elif PFL_X86
  if constexpr (sizeof(V) == 64)
    asm volatile("vmovntps %1, %0" : "=m"(*reinterpret_cast<V*>(p)) : "v"(v));
  else if constexpr (sizeof(V) == 32)
    asm volatile("vmovntps %1, %0" : "=m"(*reinterpret_cast<V*>(p)) : "x"(v));
  else
    asm volatile("movntps %1, %0" : "=m"(*reinterpret_cast<V*>(p)) : "x"(v));
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
  const U one_up = magnitude + 0x38800000u;  // 2^-14 + a subnormal: no float32 subnormal on the
                                             // way, which a processor may flush to zero
  Vec<float, bytes> f;
  __builtin_memcpy(&f, &one_up, sizeof f);
  f -= 0x1p-14f;
  U subnormal;
  __builtin_memcpy(&subnormal, &f, sizeof subnormal);
  const U small = U(magnitude < 0x00800000u),
          large = U(magnitude >= 0x0f800000u);  // infinity and NaN keep the largest exponent
  U u = (small & subnormal) | (~small & (magnitude + 0x38000000u)) | (large & 0x7f800000u);
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
  f += 0.5f;  // shifts a subnormal's bits to the end of the mantissa, rounded to even by the
              // addition
  U subnormal;
  __builtin_memcpy(&subnormal, &f, sizeof subnormal);
  subnormal -= 0x3f000000u;
  const U extreme = (nan & 0x7e00u) | (~nan & 0x7c00u);
  const U r = (large & extreme) | (small & subnormal) | (~(large | small) & normal);
  h = __builtin_convertvector(r | sign, Vec<uint16_t, bytes / 2>);
}

// total[..] += v. GCC splits the conversion in two when it is inlined into another instruction set,
// hence the instruction by name; clang takes no vector in assembly that the function around it has
// no registers for, and converts in one instruction anyway.
template <int bytes>
PFL_INLINE void add_wide(double* total, const Vec<float, bytes>& v) {
  Vec<double, bytes> d[2];
#if PFL_X86 && !defined(__clang__)
  if constexpr (bytes > 16) {
    Vec<float, bytes / 2> half[2];
    __builtin_memcpy(half, &v, bytes);
    for (int h = 0; h < 2; ++h) asm("vcvtps2pd %1, %0" : "=v"(d[h]) : "v"(half[h]));
  } else
#endif
  {
    const auto both = __builtin_convertvector(v, Vec<double, 2 * bytes>);
    __builtin_memcpy(d, &both, sizeof d);
  }
  for (int h = 0; h < 2; ++h) {
    Vec<double, bytes> sum;
    load(sum, total + h * bytes / 8);
    sum += d[h];
    store(total + h * bytes / 8, sum);
  }
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

}  // namespace pflcore::cpu
