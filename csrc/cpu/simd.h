// Vectors for kernels that are written once and compiled for several instruction sets.
//
// A kernel body is a PFL_INLINE template over the vector's size in bytes. It names no instruction
// set; `on_isa` inlines it into functions of each set. Vectors are GCC/clang vector extensions, so
// the same body builds on ARM. They are passed by reference only: a vector argument passed by value
// changes the ABI between functions of different instruction sets.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

#include "../inputs.h"
#include "isa.h"

#if defined(__clang__)
#define PFL_UNROLL _Pragma("unroll")
#else
#define PFL_UNROLL _Pragma("GCC unroll 16")
#endif
// The statement for i = 0 .. n - 1, each a constant: a compiler gives memory to an array that a
// loop walks through, registers to one that it does not. And for all of a tile's R x N, row by row.
#define PFL_EACH(i, n, ...) \
  each([&](auto i) PFL_LAMBDA { __VA_ARGS__; }, std::make_integer_sequence<int, n>{})
#define PFL_TILE(...) PFL_EACH(k_, R* N, constexpr int r = k_ / N, j = k_ % N; __VA_ARGS__)
// The lanes of x and y, numbered on from x's, that the constants name.
#if defined(__clang__)
#define PFL_SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define PFL_SHUFFLE(x, y, ...) __builtin_shuffle(x, y, decltype(x < y){__VA_ARGS__})
#endif

namespace pflcore::cpu {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

inline int64_t size_of(Dtype t) { return t == Dtype::f64 ? 8 : t == Dtype::f32 ? 4 : 2; }

template <class T, int bytes>
struct vector_of {
  typedef T type __attribute__((vector_size(bytes)));
};
template <class T, int bytes>
using Vec = typename vector_of<T, bytes>::type;

// f(a value of the type).
template <class F>
PFL_INLINE void with_type(Dtype type, const F& f) {
  switch (type) {
    case Dtype::f32:
      return f(float{});
    case Dtype::f64:
      return f(double{});
    case Dtype::f16:
      return f(Half{});
    case Dtype::bf16:
      return f(BFloat16{});
  }
}

constexpr int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

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

// Whether any bit of a comparison's result is set.
template <class V>
PFL_INLINE bool any(const V& mask) {
  uint64_t parts[sizeof(V) / sizeof(uint64_t)], all = 0;
  __builtin_memcpy(parts, &mask, sizeof parts);
  for (uint64_t part : parts) all |= part;
  return all != 0;
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

// ---- 16-bit floats: the same numbers on every instruction set, NaN with any payload ----
template <int bytes>
PFL_INLINE void widen(Vec<float, bytes>& v, const Vec<uint16_t, bytes / 2>& h, BFloat16) {
  const Vec<uint32_t, bytes> x = __builtin_convertvector(h, Vec<uint32_t, bytes>) << 16;
  __builtin_memcpy(&v, &x, sizeof v);
}
template <int bytes>
PFL_INLINE void widen(Vec<float, bytes>& v, const Vec<uint16_t, bytes / 2>& h, Half) {
#if PFL_X86 && !defined(__clang__)
  if constexpr (bytes > 16) {  // the same numbers, subnormal ones too
    asm("vcvtph2ps %1, %0" : "=v"(v) : "v"(h));
    return;
  }
#endif
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

// n elements from `from` on, as A; `to` has space for whole vectors.
template <int bytes, class A, class T>
PFL_INLINE void copy_as(A* to, const T* from, int64_t n) {
  constexpr int64_t lanes = bytes / sizeof(A);
  Vec<A, bytes> v;
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    load_as<bytes, A>(v, from + i);
    store(to + i, v);
  }
  if (i == n) return;
  T tail[lanes] = {};
  std::memcpy(tail, from + i, sizeof(T) * (n - i));
  load_as<bytes, A>(v, tail);
  store(to + i, v);
}

// ---- sizes that are constants ----
template <class F, int... i>
PFL_INLINE void each(F&& f, std::integer_sequence<int, i...>) {
  (f(Int<i>{}), ...);
}
// f(Int<n>) for n in 1 .. most.
template <class F, int... i>
PFL_INLINE void fixed_of(int64_t n, F&& f, std::integer_sequence<int, i...>) {
  static_cast<void>(((n == i + 1 && (f(Int<i + 1>{}), true)) || ...));
}
template <int most, class F>
PFL_INLINE void fixed(int64_t n, F&& f) {
  fixed_of(n, f, std::make_integer_sequence<int, most>{});
}
// f(first, count) over 0 .. n in even tiles of at most `most`.
template <class F>
PFL_INLINE void split(int64_t n, int64_t most, F&& f) {
  const int64_t tiles = (n + most - 1) / most;
  for (int64_t t = 0; t < tiles; t++) f(n * t / tiles, n * (t + 1) / tiles - n * t / tiles);
}

// The same with a count that is a constant.
template <int most, class F>
PFL_INLINE void tiled(int64_t n, F&& f) {
  split(n, most, [&](int64_t first, int64_t count) PFL_LAMBDA {
    fixed<most>(count, [&](auto tile) PFL_LAMBDA { f(first, tile); });
  });
}
// f(first row, rows, first column, columns) of such tiles of a matrix, column by column.
template <int most_r, int most_c, class F>
PFL_INLINE void tiles(int64_t rows, int64_t cols, F&& f) {
  tiled<most_c>(cols, [&](int64_t c, auto N) PFL_LAMBDA {
    tiled<most_r>(rows, [&](int64_t r, auto R) PFL_LAMBDA { f(r, R, c, N); });
  });
}

// ---- the first n elements ----
// Copies them: whole vectors, the last one over the one before.
template <int bytes, class T>
PFL_INLINE void copy(T* to, const T* from, int64_t n) {
  constexpr int64_t lanes = bytes / sizeof(T);
  Vec<T, bytes> v;
  if (n >= lanes) {
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) {
      load(v, from + i);
      store(to + i, v);
    }
    if (i == n) return;
    load(v, from + n - lanes);
    store(to + n - lanes, v);
  } else if constexpr (bytes > 16) {
    copy<bytes / 2>(to, from, n);
  } else {
    for (int64_t i = 0; i < n; i++) to[i] = from[i];
  }
}
// Those of v, all where it has no more.
template <class T, class V>
PFL_INLINE void store_first(T* to, const V& v, int64_t n) {
  constexpr int64_t lanes = sizeof(V) / sizeof(T);
  if (n >= lanes) return store(to, v);
  T all[lanes];
  store(all, v);
  copy<(sizeof(V) > 16 ? sizeof(V) / 2 : 16)>(to, static_cast<const T*>(all), n);
}

// ---- sums of lanes ----
// The source of lane k of a fold: groups of 2 * half lanes of x, then of y (numbered on from
// x's), give the first half of their lanes. Groups within 128 bits, `few` lanes, stay there: x's
// and y's take turns, and one cheap instruction does it.
template <int lanes, int few, int half>
constexpr int source(int k) {
  constexpr int width = half < few ? few : lanes, groups = width / (2 * half);
  const int group = k % width / half;
  return k / width * width + group % groups * 2 * half + k % half + (group < groups ? 0 : lanes);
}
// x = the sums of x and of y over groups of 2 * half lanes, as sums over groups of half as many.
template <int half, class V, int... k>
PFL_INLINE void fold(V& x, const V& y, std::integer_sequence<int, k...>) {
  constexpr int lanes = sizeof...(k), few = 16 * lanes / sizeof(V);
  x = PFL_SHUFFLE(x, y, source<lanes, few, half>(k)...) +
      PFL_SHUFFLE(x, y, (source<lanes, few, half>(k) + half)...);
}

// v[0] = the sums of the lanes of as many vectors as one has lanes; the others are used up. Halves
// of a vector are added first, then halves of those; or (`blocks_first`) the lanes of 128 bits, and
// then neighbours.
template <class T, bool blocks_first, int stage = 1, class V>
PFL_INLINE void fold_all(V* v) {
  constexpr int lanes = sizeof(V) / sizeof(T), few = 16 / sizeof(T), blocks = lanes / few;
  constexpr int half = !blocks_first ? lanes / 2 / stage : stage < few ? few / 2 / stage : few;
  constexpr bool within = !blocks_first && half < few;  // 128 bits, where one block is left
  constexpr int apart = blocks_first ? stage : within ? stage / blocks : stage * few;
  constexpr int some =
      blocks_first || within ? 1 : few;  // neighbours that are folded in the same way
  PFL_EACH(i, within ? few : lanes,
           if constexpr (i % (2 * apart) < some)
               fold<half>(v[i], v[i + apart], std::make_integer_sequence<int, lanes>{}));
  if constexpr (2 * stage < lanes) fold_all<T, blocks_first, 2 * stage>(v);
}

// ---- transposition ----
// One stage of a square block's: rows `size` apart swap the blocks of `size` lanes next to
// their diagonal.
template <int size, class V, int... lane>
PFL_INLINE void swap_blocks(V& a, V& b, std::integer_sequence<int, lane...>) {
  constexpr int n = sizeof...(lane);
  const V first = PFL_SHUFFLE(a, b, (lane / size % 2 ? lane - size + n : lane)...);
  b = PFL_SHUFFLE(a, b, (lane / size % 2 ? lane + n : lane + size)...);
  a = first;
}
template <int size, int lanes, class V>
PFL_INLINE void transpose_square(V (&v)[lanes]) {
  PFL_EACH(i, lanes,
           if constexpr (i / size % 2 == 0)
               swap_blocks<size>(v[i], v[i + size], std::make_integer_sequence<int, lanes>{}));
  if constexpr (size > 1) transpose_square<size / 2>(v);
}
// to[j * to_row + i] = row(i)[j] for i < rows, j < cols.
template <int bytes, class T, class Row>
PFL_INLINE void turn(T* to, int64_t to_row, Row&& row, int64_t rows, int64_t cols) {
  constexpr int lanes = bytes / sizeof(T);
  int64_t i = 0;
  for (; i + lanes <= rows; i += lanes) {
    int64_t j = 0;
    for (; j + lanes <= cols; j += lanes) {
      Vec<T, bytes> v[lanes];
      PFL_EACH(r, lanes, load(v[r], row(i + r) + j));
      transpose_square<lanes / 2>(v);
      PFL_EACH(c, lanes, store(to + (j + c) * to_row + i, v[c]));
    }
    for (; j < cols; j++)
      for (int64_t r = i; r < i + lanes; r++) to[j * to_row + r] = row(r)[j];
  }
  if constexpr (bytes > 16) {
    if (i < rows)
      turn<bytes / 2>(
          to + i, to_row, [&](int64_t r) PFL_LAMBDA { return row(i + r); }, rows - i, cols);
  } else {
    for (; i < rows; i++) {
      const T* const from = row(i);
      for (int64_t j = 0; j < cols; j++) to[j * to_row + i] = from[j];
    }
  }
}

}  // namespace pflcore::cpu
