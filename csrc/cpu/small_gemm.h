// Sums of products in registers, which every product of matrices here is made of, and the products
// of small matrices of rank1: rows are padded to whole vectors and nothing is packed into panels,
// since the matrices fit in the caches. Every element's sum has one fixed order, whatever the tile
// around it.
#pragma once
#include <algorithm>
#include <cstdint>

#include "isa.h"
#include "simd.h"

namespace pflcore::cpu {

// Keeps v in a register: GCC would read it from memory again at every use.
template <class V>
PFL_INLINE void hold(V& v) {
#if PFL_X86 && !defined(__clang__)
  if constexpr (sizeof(V) == 64)
    asm("" : "+v"(v));
  else
    asm("" : "+x"(v));
#else
  (void)v;
#endif
}

template <int R, int N, class V>
PFL_INLINE void clear(V (&acc)[R][N]) {
  PFL_TILE(acc[r][j] = V{});
}

// acc[r][j] += sum over i < k of a[r * a_row + i * a_step] times the vector at b(i, j). (The factor
// as a vector is no variable: GCC would build it lane by lane in memory.)
template <int R, int N, class V, class T, class At>
PFL_INLINE void sum_outer(V (&acc)[R][N], int64_t k, const T* a, int64_t a_row, int64_t a_step,
                          const At& b) {
  for (int64_t i = 0; i < k; i++, a += a_step) {
    V v[N];  // held for several rows; for one, which uses it once, memory is as good a place
    PFL_EACH(j, N, load(v[j], b(i, j)); if constexpr (R > 1) hold(v[j]));
    PFL_EACH(r, R, const T s = a[r * a_row]; PFL_EACH(j, N, acc[r][j] += (s - V{}) * v[j]));
  }
}

// acc[r][j] += a(r) . b[j] over k elements, whole vectors: lane by lane.
template <int R, int N, class V, class A, class T>
PFL_INLINE void sum_dots(V (&acc)[R][N], int64_t k, const A& a, const T* const (&b)[N]) {
  for (int64_t i = 0; i < k; i += sizeof(V) / sizeof(T)) {
    V v[R];
    PFL_EACH(r, R, load(v[r], a(r) + i); hold(v[r]));
    PFL_EACH(j, N, V x; load(x, b[j] + i); hold(x); PFL_EACH(r, R, acc[r][j] += v[r] * x));
  }
}
// to[j * R + r] = the sum of acc[r][j]'s lanes; to has space for whole vectors.
template <bool blocks_first, int R, int N, class T, class V>
PFL_INLINE void sum_tile(T* to, const V (&acc)[R][N]) {
  constexpr int lanes = sizeof(V) / sizeof(T);
  PFL_EACH(g, (R * N + lanes - 1) / lanes, V v[lanes];
           PFL_EACH(i, lanes, constexpr int at = g * lanes + i;
                    if constexpr (at < R * N) v[i] = acc[at % R][at / R]; else v[i] = V{});
           fold_all<T, blocks_first>(v); store(to + g * lanes, v[0]));
}

// c[r, j] = a[r] . b[j] over k elements (a multiple of the lanes), rows given by pointers.
template <int bytes, class T>
PFL_INLINE void dots(int64_t rows, int64_t cols, int64_t k, const T* const* a, const T* const* b,
                     T* c, int64_t c_row) {
  // 64 rows of a and 32 of b fit the second-level cache, 8 rows of a the first-level one.
  constexpr int64_t near = 8, far = 64, panel = 32;
  constexpr int most = kRoomy<bytes> ? 4 : 2;
  for (int64_t block = 0; block < rows; block += far)
    for (int64_t first = 0; first < cols; first += panel)
      for (int64_t top = block; top < std::min(rows, block + far); top += near)
        tiles<most, 4>(std::min(near, rows - top), std::min(panel, cols - first),
                       [&](int64_t r0, auto R_, int64_t c0, auto N_) PFL_LAMBDA {
                         constexpr int R = R_, N = N_;
                         Vec<T, bytes> acc[R][N];
                         const T *x[R], *y[N];
                         T sum[32], *to = c + (top + r0) * c_row + first + c0;
                         PFL_EACH(r, R, x[r] = a[top + r0 + r]);
                         PFL_EACH(j, N, y[j] = b[first + c0 + j]);
                         clear(acc);
                         sum_dots<R, N>(acc, k, [&](int r) PFL_LAMBDA { return x[r]; }, y);
                         sum_tile<false>(sum, acc);
                         PFL_TILE(to[r * c_row + j] = sum[j * R + r]);
                       });
}

// to[r][first ..] = (itself where `add`) + the n numbers at from + r * stride, for a few rows that
// end within a tile.
template <class T>
PFL_INLINE void put_rest_here(T* const* to, int64_t first, const T* from, int64_t stride,
                              int64_t rows, int64_t n, bool add) {
  for (int64_t r = 0; r < rows; r++) {
    T* const y = to[r] + first;
    const T* const x = from + r * stride;
    for (int64_t e = 0; e < n; e++) y[e] = add ? y[e] + x[e] : x[e];
  }
}
template <int bytes, class T>
PFL_INLINE void put_rest(T* const* to, int64_t first, const T* from, int64_t stride, int64_t rows,
                         int64_t n, bool add) {
  shared<bytes>([&](auto) PFL_LAMBDA { put_rest_here(to, first, from, stride, rows, n, add); });
}

// c[r][0..width) = (itself where `add`) + sum_i a[r * a_row + i * a_step] * b[i]; rows of b are
// padded to whole vectors.
template <int bytes, class T>
PFL_INLINE void outer(int64_t rows, int64_t width, int64_t k, const T* a, int64_t a_row,
                      int64_t a_step, const T* const* b, T* const* c, bool add) {
  constexpr int64_t lanes = bytes / sizeof(T);
  tiles<6, kRoomy<bytes> ? 4 : 2>(
      rows, up(width, lanes) / lanes, [&](int64_t r0, auto R_, int64_t v0, auto N_) PFL_LAMBDA {
        constexpr int R = R_, N = N_;
        Vec<T, bytes> acc[R][N];
        clear(acc);
        sum_outer<R, N>(acc, k, a + r0 * a_row, a_row, a_step,
                        [&](int64_t i, int64_t j) PFL_LAMBDA { return b[i] + (v0 + j) * lanes; });
        const int64_t first = v0 * lanes, left = width - first;
        if (left < N * lanes) {
          T some[R][N * lanes];
          PFL_TILE(store(some[r] + j * lanes, acc[r][j]));
          return put_rest<bytes>(c + r0, first, some[0], N * lanes, R, left, add);
        }
        if (add)
          PFL_TILE(Vec<T, bytes> old; load(old, c[r0 + r] + first + j * lanes); acc[r][j] += old);
        PFL_TILE(store(c[r0 + r] + first + j * lanes, acc[r][j]));
      });
}

}  // namespace pflcore::cpu
