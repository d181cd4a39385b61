// Register blocks of squared distances: 4 x 4 pairs of rows over a strip of columns, for each
// instruction set. Knows nothing of torch.
//
// A float32 lane takes 10 products. Then the lanes are folded into one another until the sums of
// the 16 pairs lie side by side, and are added to float64 totals, and a block costs the same over
// few columns as over many. So a square meets 16 roundings of 2^-24 at most: its difference's,
// which counts twice, 10 in its lane and, with 16 lanes, 4 of folds. That is 9.6e-7.
#pragma once
#include <algorithm>
#include <cstdint>

#include "isa.h"
#include "simd.h"

namespace pflcore::cpu {
namespace sqdist_detail {

constexpr int64_t kTile = 4;   // rows of a register block
constexpr int kProducts = 10;  // in a float32 lane before it is folded and flushed
constexpr int64_t kGroup =
    160;  // columns that every instruction set takes in whole flushes: 10 products in 16 lanes

// sum[i][j] += the lanes of acc[i][j], by two shuffles and an addition for each vector. acc is used
// up.
template <int bytes, int rows>
PFL_INLINE void flush(Vec<float, bytes> (&acc)[rows][kTile], double* sum) {
  constexpr int together = bytes / 16;  // rows whose sums fill a vector
  PFL_UNROLL
  for (int i = 0; i < rows; i += together) {
    fold_all<float, false>(acc[i]);
    add_wide<bytes>(sum + i * kTile, acc[i][0]);
  }
}

template <int bytes>
PFL_INLINE double sum_lanes(const Vec<double, bytes>& v) {
  if constexpr (bytes == 16) {
    return v[0] + v[1];
  } else {
    Vec<double, bytes / 2> half[2];
    __builtin_memcpy(half, &v, bytes);
    half[0] += half[1];
    return sum_lanes<bytes / 2>(half[0]);
  }
}

// One vector of columns of rows x kTile pairs. triangle: b is a, and only j > i is computed. (The
// first product is added to zero like the others: of d * d + e * e compilers may fuse either
// product with the sum, and would not choose the same in each kind of block.)
template <bool triangle, int rows, int room, class F>
PFL_INLINE void step(F (&acc)[room][kTile], const float* const* a, const float* const* b,
                     int64_t at) {
  F x[rows];
  PFL_UNROLL
  for (int i = 0; i < rows; ++i) load(x[i], a[i] + at);
  PFL_UNROLL
  for (int j = 0; j < kTile; ++j) {
    F y;
    if constexpr (triangle)
      y = x[j];
    else
      load(y, b[j] + at);
    PFL_UNROLL
    for (int i = 0; i < rows; ++i) {
      if (triangle && i >= j) continue;
      const F d = x[i] - y;
      acc[i][j] += d * d;
    }
  }
}

// sum[i][j] += sum over columns [begin, end), whole groups, of (a_i - b_j)^2 in float32 lanes.
template <int bytes, bool triangle, int rows>
PFL_INLINE void tile(const float* const* a, const float* const* b, int64_t begin, int64_t end,
                     double* sum) {
  constexpr int lanes = bytes / 4, room = std::max(rows, bytes / 16),
                folds = bytes == 64   ? 4
                        : bytes == 32 ? 3
                                      : 2;
  static_assert((2 + kProducts + folds) * 0x1p-24 < 1e-6, "the relative error that is promised");
  for (int64_t c = begin; c < end; c += lanes * kProducts) {
    Vec<float, bytes> acc[room][kTile] = {};
    for (int64_t at = c; at < c + lanes * kProducts; at += lanes)
      step<triangle, rows>(acc, a, b, at);
    flush<bytes>(acc, sum);
  }
}

// Rows whose sums with kTile others fit the registers.
template <int bytes>
constexpr int kAtOnce = kRoomy<bytes> ? 4 : 2;

// The same in float64 lanes: for float64 rows, and for pairs of float32 rows that are done again.
template <int bytes, int rows, class T>
PFL_INLINE void tile_wide(const T* const* a, const T* const* b, int64_t begin, int64_t end,
                          double* sum) {
  constexpr int lanes = bytes / 8;
  using D = Vec<double, bytes>;
  D total[rows][kTile] = {};
  for (int64_t c = begin; c < end; c += kGroup) {
    for (int64_t at = c; at < c + kGroup; at += lanes) {
      D x[rows];
      PFL_UNROLL
      for (int i = 0; i < rows; ++i) load_as<bytes, double>(x[i], a[i] + at);
      PFL_UNROLL
      for (int j = 0; j < kTile; ++j) {
        D y;
        load_as<bytes, double>(y, b[j] + at);
        PFL_UNROLL
        for (int i = 0; i < rows; ++i) {
          const D d = x[i] - y;
          total[i][j] += d * d;
        }
      }
    }
  }
  PFL_UNROLL
  for (int i = 0; i < rows; ++i) PFL_UNROLL
  for (int j = 0; j < kTile; ++j) sum[i * kTile + j] += sum_lanes<bytes>(total[i][j]);
}

// The kind of lanes: the type of the rows and that of the sums.
enum class Kind { narrow, triangle, wide };

// sum[i][j] += sum over columns [begin, end) of (a_i - b_j)^2 for `rows` rows of a and kTile of b.
template <Kind kind, int rows, class T>
void sum_block(Isa now, const T* const* a, const T* const* b, int64_t begin, int64_t end,
               double* sum) {
  on_isa(
      [&](auto bytes) PFL_LAMBDA {
        if constexpr (kind == Kind::wide) {
          tile_wide<bytes, rows>(a, b, begin, end, sum);
        } else {
          constexpr bool triangle = kind == Kind::triangle;
          constexpr int at_once = triangle ? rows : std::min(rows, kAtOnce<bytes>);
          for (int i = 0; i < rows; i += at_once)
            tile<bytes, triangle, at_once>(a + i, b, begin, end, sum + i * kTile);
        }
      },
      now);
}

}  // namespace sqdist_detail
}  // namespace pflcore::cpu
