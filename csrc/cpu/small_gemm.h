// The two products of small matrices that rank1 is made of, and the transposition between them, on
// rows padded to whole vectors: no packing into panels, since the matrices fit in the caches. Every
// element's sum has one fixed order, whatever the blocks around it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>

#include "isa.h"
#include "simd.h"

namespace pflcore::cpu {

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define PFL_SHUFFLE 1
#endif
#endif

#ifdef PFL_SHUFFLE
// Two vectors of blocks of `size` lanes, each block one sum in the making -> one vector of blocks
// of half the size: a0 b0 a1 b1 ...
template <int size, class V, size_t... lane>
PFL_INLINE void fold_pair(V& a, const V& b, std::index_sequence<lane...>) {
  constexpr size_t half = size / 2, lanes = sizeof...(lane);
  const V first = __builtin_shufflevector(
      a, b, (lane / half % 2 * lanes + lane / half / 2 * size + lane % half)...);
  const V second = __builtin_shufflevector(
      a, b, (lane / half % 2 * lanes + lane / half / 2 * size + lane % half + half)...);
  a = first + second;
}
template <int size, class V, int lanes>
PFL_INLINE void fold(V* v) {
  PFL_UNROLL
  for (int i = 0; i < size / 2; i++)
    fold_pair<size>(v[i], v[i + size / 2], std::make_index_sequence<lanes>{});
  if constexpr (size > 2) fold<size / 2, V, lanes>(v);
}
#endif

// sum[i] = the sum of v[i]'s lanes, for as many vectors as a vector has lanes; v is used up.
template <class T, class V>
PFL_INLINE void sum_lanes(T* sum, V* v) {
  constexpr int lanes = sizeof(V) / sizeof(T);
#ifdef PFL_SHUFFLE
  fold<lanes, V, lanes>(v);
  store(sum, v[0]);
#else
  for (int i = 0; i < lanes; i++) {
    sum[i] = 0;
    for (int j = 0; j < lanes; j++) sum[i] += v[i][j];
  }
#endif
}

template <int bytes, int rows, class T>
PFL_INLINE void dots_tile(int cols, int64_t k, const T* const* a, const T* const* b, T* c,
                          int64_t c_row) {
  constexpr int lanes = bytes / sizeof(T), groups = (rows * 4 + lanes - 1) / lanes;
  using V = Vec<T, bytes>;
  V acc[groups * lanes];
  PFL_UNROLL
  for (int i = 0; i < groups * lanes; i++) acc[i] = V{};
  const T* at[rows];
  for (int r = 0; r < rows; r++) at[r] = a[r];
  const T *b0 = b[0], *b1 = b[std::min(1, cols - 1)], *b2 = b[std::min(2, cols - 1)],
          *b3 = b[std::min(3, cols - 1)];
  for (int64_t i = 0; i < k; i += lanes) {
    V v[4], x;
    load(v[0], b0 + i);
    load(v[1], b1 + i);
    load(v[2], b2 + i);
    load(v[3], b3 + i);
    PFL_UNROLL
    for (int r = 0; r < rows; r++) {
      load(x, at[r] + i);
      PFL_UNROLL
      for (int j = 0; j < 4; j++) acc[r * 4 + j] += x * v[j];
    }
  }
  T sum[groups * lanes];
  PFL_UNROLL
  for (int g = 0; g < groups; g++) sum_lanes(sum + g * lanes, acc + g * lanes);
  for (int r = 0; r < rows; r++)
    for (int j = 0; j < cols; j++) c[r * c_row + j] = sum[r * 4 + j];
}

template <int bytes, class T>
PFL_INLINE void dots_rows(int64_t rows, int cols, int64_t k, const T* const* a, const T* const* b,
                          T* c, int64_t c_row) {
  if constexpr (kRoomy<bytes>) {
    if (rows == 4) return dots_tile<bytes, 4, T>(cols, k, a, b, c, c_row);
    if (rows == 3) return dots_tile<bytes, 3, T>(cols, k, a, b, c, c_row);
  }
  if (rows == 2) return dots_tile<bytes, 2, T>(cols, k, a, b, c, c_row);
  dots_tile<bytes, 1, T>(cols, k, a, b, c, c_row);
}

// c[r, j] = a[r] . b[j] over k elements (a multiple of the lanes), rows given by pointers.
template <int bytes, class T>
PFL_INLINE void dots(int64_t rows, int64_t cols, int64_t k, const T* const* a, const T* const* b,
                     T* c, int64_t c_row) {
  // 64 rows of a and 32 of b fit the second-level cache, 8 rows of a the first-level one.
  constexpr int64_t tile = kRoomy<bytes> ? 4 : 2, near = 8, far = 64, panel = 32;
  for (int64_t block = 0; block < rows; block += far)
    for (int64_t first = 0; first < cols; first += panel)
      for (int64_t r0 = block; r0 < std::min(rows, block + far); r0 += near) {
        const int64_t some = std::min(near, rows - r0), tiles = (some + tile - 1) / tile;
        for (int64_t j = first; j < std::min(cols, first + panel); j += 4) {
          const int across = static_cast<int>(std::min<int64_t>(4, cols - j));
          for (int64_t t = 0; t < tiles; t++) {
            const int64_t r = r0 + some * t / tiles, count = r0 + some * (t + 1) / tiles - r;
            dots_rows<bytes, T>(count, across, k, a + r, b + j, c + r * c_row + j, c_row);
          }
        }
      }
}

template <int bytes, int rows, int across, class T>
PFL_INLINE void outer_tile(int64_t k, const T* a, int64_t a_row, int64_t a_step, const T* const* b,
                           int64_t column, T* const* c, int64_t width, bool add) {
  constexpr int lanes = bytes / sizeof(T);
  using V = Vec<T, bytes>;
  V acc[rows][across];
  PFL_UNROLL
  for (int r = 0; r < rows; r++) PFL_UNROLL
  for (int j = 0; j < across; j++) acc[r][j] = V{};
  for (int64_t i = 0; i < k; i++, a += a_step) {
    V v[across];
    PFL_UNROLL
    for (int j = 0; j < across; j++) load(v[j], b[i] + column + j * lanes);
    PFL_UNROLL
    for (int r = 0; r < rows; r++) {
      const V wide = a[r * a_row] - V{};
      PFL_UNROLL
      for (int j = 0; j < across; j++) acc[r][j] += wide * v[j];
    }
  }
  PFL_UNROLL
  for (int r = 0; r < rows; r++) {
    T* const to = c[r] + column;
    PFL_UNROLL
    for (int j = 0; j < across; j++) {
      const int64_t left = width - column - j * lanes;
      if (left >= lanes) {
        if (add) {
          V old;
          load(old, to + j * lanes);
          acc[r][j] += old;
        }
        store(to + j * lanes, acc[r][j]);
      } else if (left > 0) {
        T tail[lanes];
        store(tail, acc[r][j]);
        for (int64_t e = 0; e < left; e++)
          to[j * lanes + e] = add ? to[j * lanes + e] + tail[e] : tail[e];
      }
    }
  }
}

template <int bytes, int across, class T>
PFL_INLINE void outer_rows(int64_t rows, int64_t k, const T* a, int64_t a_row, int64_t a_step,
                           const T* const* b, int64_t column, T* const* c, int64_t width,
                           bool add) {
  int64_t r = 0;
  const auto done = [&](int64_t count) { r += count, a += count * a_row, c += count; };
  for (; r + 6 <= rows; done(6))
    outer_tile<bytes, 6, across, T>(k, a, a_row, a_step, b, column, c, width, add);
  for (; r + 4 <= rows; done(4))
    outer_tile<bytes, 4, across, T>(k, a, a_row, a_step, b, column, c, width, add);
  for (; r + 2 <= rows; done(2))
    outer_tile<bytes, 2, across, T>(k, a, a_row, a_step, b, column, c, width, add);
  if (r < rows) outer_tile<bytes, 1, across, T>(k, a, a_row, a_step, b, column, c, width, add);
}

// c[r][0..width) = (itself where `add`) + sum_i a[r * a_row + i * a_step] * b[i]; rows of b are
// padded to whole vectors.
template <int bytes, class T>
PFL_INLINE void outer(int64_t rows, int64_t width, int64_t k, const T* a, int64_t a_row,
                      int64_t a_step, const T* const* b, T* const* c, bool add) {
  constexpr int64_t lanes = bytes / sizeof(T), most = kRoomy<bytes> ? 4 : 2;
  int64_t column = 0;
  for (; column + (most - 1) * lanes < width; column += most * lanes)
    outer_rows<bytes, most, T>(rows, k, a, a_row, a_step, b, column, c, width, add);
  if constexpr (most == 4)
    if (column + lanes < width) {
      outer_rows<bytes, 2, T>(rows, k, a, a_row, a_step, b, column, c, width, add);
      column += 2 * lanes;
    }
  if (column < width) outer_rows<bytes, 1, T>(rows, k, a, a_row, a_step, b, column, c, width, add);
}

// to[i] *= by[i], but 0 where `by` is 0 whatever `to` holds; n a multiple of the lanes.
template <int bytes, class T>
PFL_INLINE void scale(T* to, const T* by, int64_t n) {
  for (int64_t i = 0; i < n; i += bytes / sizeof(T)) {
    Vec<T, bytes> v, s;
    load(v, to + i);
    load(s, by + i);
    v = s != 0 ? v * s : Vec<T, bytes>{};
    store(to + i, v);
  }
}

#ifdef PFL_SHUFFLE
// One stage of a square block's transposition: rows `size` apart swap the blocks of `size` lanes
// beside their diagonal.
template <int size, class V, size_t... lane>
PFL_INLINE void swap_blocks(V& a, V& b, std::index_sequence<lane...>) {
  constexpr size_t s = size, lanes = sizeof...(lane);
  const V first = __builtin_shufflevector(a, b, (lane / s % 2 ? lane - s + lanes : lane)...);
  b = __builtin_shufflevector(a, b, (lane / s % 2 ? lane + lanes : lane + s)...);
  a = first;
}
template <int size, int lanes, class V>
PFL_INLINE void transpose_stages(V* v) {
  PFL_UNROLL
  for (int i = 0; i < lanes; i++)
    if (i / size % 2 == 0) swap_blocks<size>(v[i], v[i + size], std::make_index_sequence<lanes>{});
  if constexpr (size > 1) transpose_stages<size / 2, lanes>(v);
}
template <int bytes, class T>
PFL_INLINE void transpose_block(T* to, int64_t to_row, const T* from, int64_t from_row) {
  constexpr int lanes = bytes / sizeof(T);
  Vec<T, bytes> v[lanes];
  PFL_UNROLL
  for (int i = 0; i < lanes; i++) load(v[i], from + i * from_row);
  transpose_stages<lanes / 2, lanes>(v);
  PFL_UNROLL
  for (int i = 0; i < lanes; i++) store(to + i * to_row, v[i]);
}
#else
template <int bytes, class T>
PFL_INLINE void transpose_block(T* to, int64_t to_row, const T* from, int64_t from_row) {
  for (size_t i = 0; i < bytes / sizeof(T); i++)
    for (size_t j = 0; j < bytes / sizeof(T); j++) to[j * to_row + i] = from[i * from_row + j];
}
#endif

// to[j, i] = from[i, j] for rows x cols of `from`: whole blocks, smaller ones along the edges,
// single elements in the corner.
template <int bytes, class T>
PFL_INLINE void transpose(T* to, int64_t to_row, const T* from, int64_t from_row, int64_t rows,
                          int64_t cols) {
  constexpr int64_t large = bytes / sizeof(T), small = 16 / sizeof(T);
  int64_t i = 0;
  for (; i + large <= rows; i += large)
    for (int64_t j = 0; j + large <= cols; j += large)
      transpose_block<bytes>(to + j * to_row + i, to_row, from + i * from_row + j, from_row);
  const auto edge = [&](int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
    for (int64_t r = r0; r < r1; r += small)
      for (int64_t c = c0; c < c1; c += small) {
        if (r + small <= r1 && c + small <= c1) {
          transpose_block<16>(to + c * to_row + r, to_row, from + r * from_row + c, from_row);
        } else {
          for (int64_t y = r; y < std::min(r1, r + small); y++)
            for (int64_t x = c; x < std::min(c1, c + small); x++)
              to[x * to_row + y] = from[y * from_row + x];
        }
      }
  };
  edge(0, i, cols / large * large, cols);
  edge(i, rows, 0, cols);
}

// The three compiled forms.
#define PFL_SMALL_GEMM(NAME, BYTES, TARGET)                                                      \
  template <class T>                                                                             \
  struct NAME {                                                                                  \
    static constexpr int64_t lanes = BYTES / sizeof(T);                                          \
    TARGET static void dots(int64_t rows, int64_t cols, int64_t k, const T* const* a,            \
                            const T* const* b, T* c, int64_t c_row) {                            \
      cpu::dots<BYTES, T>(rows, cols, k, a, b, c, c_row);                                        \
    }                                                                                            \
    TARGET static void outer(int64_t rows, int64_t width, int64_t k, const T* a, int64_t a_row,  \
                             int64_t a_step, const T* const* b, T* const* c, bool add) {         \
      cpu::outer<BYTES, T>(rows, width, k, a, a_row, a_step, b, c, add);                         \
    }                                                                                            \
    TARGET static void scale(T* to, const T* by, int64_t n) { cpu::scale<BYTES, T>(to, by, n); } \
    TARGET static void transpose(T* to, int64_t to_row, const T* from, int64_t from_row,         \
                                 int64_t rows, int64_t cols) {                                   \
      cpu::transpose<BYTES, T>(to, to_row, from, from_row, rows, cols);                          \
    }                                                                                            \
  };
PFL_SMALL_GEMM(SmallGemmPlain, 16, )
#if PFL_X86
PFL_SMALL_GEMM(SmallGemmAvx2, 32, PFL_AVX2)
PFL_SMALL_GEMM(SmallGemmAvx512, 64, PFL_AVX512)
#endif
#undef PFL_SMALL_GEMM

}  // namespace pflcore::cpu
