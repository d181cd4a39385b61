// Register blocks of squared distances: 4 x 4 pairs of rows over a strip of columns, for each
// instruction set. Knows nothing of torch.
//
// A float32 sum has 16 lanes on every instruction set, in one vector or several, and each lane
// takes 10 products. Then the vectors are added lane by lane, and the lanes are folded into one
// another until the sums of the 16 pairs lie side by side, and are added to float64 totals: a block
// costs the same over few columns as over many. Everywhere lanes that are 8 apart are added first,
// then 4, 2 and 1, so that the order is one, and instruction sets differ by fused multiply-adds
// alone.
//
// The bound: with u = 2^-24, a rounded difference is (a - b) (1 + e) with |e| <= u, and its square
// has that factor twice. A product meets at most 10 roundings in its lane: its own, or that of its
// fused addition, and one in each of the 9 additions after it; the first one is added to zero,
// which is exact. Then it meets 4 in the tree. No term is negative, so the sum of 160 products has
// a relative error of at most (1 + u)^16 - 1 < 9.54e-7; so has the total, but for float64's
// roundings.
#pragma once
#include <algorithm>
#include <cstdint>

#include "isa.h"
#include "simd.h"

namespace pflcore::cpu {
namespace sqdist_detail {

constexpr int64_t kTile = 4;                    // rows of a register block
constexpr int kProducts = 10;                   // in a float32 lane
constexpr int kLanes = 16;                      // of a float32 sum
constexpr int kLevels = 4;                      // of the tree that adds the lanes up
constexpr int64_t kGroup = kProducts * kLanes;  // columns between two flushes to float64
static_assert(1 << kLevels == kLanes);
static_assert((2 + kProducts + kLevels) * 0x1p-24 < 1e-6, "the relative error that is promised");

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

// Loads a vector into a register: GCC would load it anew for each subtraction, and a processor that
// subtracts twice in a cycle does not load much more often.
template <class V>
PFL_INLINE void load_once(V& v, const float* p) {
  load(v, p);
#if PFL_X86 && !defined(__clang__)
  if constexpr (sizeof(V) == 32) asm("" : "+x"(v));
#endif
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
    else if constexpr (rows > 1)
      load_once(y, b[j] + at);
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

// acc[i][j] = sums over a group of columns from `at` on: `vectors` of them, of kProducts products
// in each lane, are added lane by lane. Without `whole` only `products` are taken, and those left
// out are zeros, which change no bit.
template <int bytes, bool triangle, bool whole, int rows, int vectors = 4 * kLanes / bytes,
          int room>
PFL_INLINE void sum_group(Vec<float, bytes> (&acc)[room][kTile], const float* const* a,
                          const float* const* b, int64_t at, int64_t products) {
  if constexpr (vectors > 1) {
    sum_group<bytes, triangle, whole, rows, vectors / 2>(acc, a, b, at, products);
    Vec<float, bytes> others[room][kTile];
    sum_group<bytes, triangle, whole, rows, vectors / 2>(others, a, b, at + kLanes / vectors,
                                                         products);
    PFL_UNROLL
    for (int i = 0; i < rows; ++i) PFL_UNROLL
    for (int j = 0; j < kTile; ++j) acc[i][j] += others[i][j];
  } else {
    PFL_UNROLL
    for (int i = 0; i < room; ++i) PFL_UNROLL
    for (int j = 0; j < kTile; ++j) acc[i][j] = Vec<float, bytes>{};
    if constexpr (whole && bytes == 32) {  // the loop's own instructions would be a tenth of all
      PFL_UNROLL
      for (int k = 0; k < kProducts; ++k) step<triangle, rows>(acc, a, b, at + k * kLanes);
    } else {
      const int64_t end = at + (whole ? kProducts : products) * kLanes;
      for (; at < end; at += kLanes) step<triangle, rows>(acc, a, b, at);
    }
  }
}

// acc[0][j] = sums over group j of a pair's columns, by the vectors and in the order of sum_group.
template <int bytes, int vectors = 4 * kLanes / bytes, int room>
PFL_INLINE void sum_groups(Vec<float, bytes> (&acc)[room][kTile], const float* a, const float* b) {
  if constexpr (vectors > 1) {
    sum_groups<bytes, vectors / 2>(acc, a, b);
    Vec<float, bytes> others[room][kTile];
    constexpr int64_t next = kLanes / vectors;
    sum_groups<bytes, vectors / 2>(others, a + next, b + next);
    PFL_UNROLL
    for (int j = 0; j < kTile; ++j) acc[0][j] += others[0][j];
  } else {
    PFL_UNROLL
    for (int i = 0; i < room; ++i) PFL_UNROLL
    for (int j = 0; j < kTile; ++j) acc[i][j] = Vec<float, bytes>{};
    for (int64_t at = 0; at < kGroup; at += kLanes) {
      PFL_UNROLL
      for (int j = 0; j < kTile; ++j) {
        Vec<float, bytes> x, y;
        load(x, a + at + j * kGroup);
        load(y, b + at + j * kGroup);
        x -= y;
        acc[0][j] += x * x;
      }
    }
  }
}

// sum[i][j] += sum over columns [begin, end), a multiple of kLanes, of (a_i - b_j)^2 in float32
// lanes.
template <int bytes, bool triangle, int rows>
PFL_INLINE void tile(const float* const* a, const float* const* b, int64_t begin, int64_t end,
                     double* sum) {
  Vec<float, bytes> acc[std::max(rows, bytes / 16)][kTile];
  int64_t c = begin;
  for (; c + kGroup <= end; c += kGroup) {
    sum_group<bytes, triangle, true, rows>(acc, a, b, c, kProducts);
    flush<bytes>(acc, sum);
  }
  if (c < end) {
    sum_group<bytes, triangle, false, rows>(acc, a, b, c, (end - c) / kLanes);
    flush<bytes>(acc, sum);
  }
}

// sum += the same for one pair alone. Its sums over kTile groups of columns lie where those of four
// pairs would, and are added one after another as everywhere.
template <int bytes>
PFL_INLINE void tile_of_one(const float* a, const float* b, int64_t begin, int64_t end,
                            double* sum) {
  constexpr int64_t together = kTile * kGroup;
  Vec<float, bytes> acc[bytes / 16][kTile];
  int64_t c = begin;
  for (; c + together <= end; c += together) {
    sum_groups<bytes>(acc, a + c, b + c);
    double groups[bytes / 16 * kTile] = {};
    flush<bytes>(acc, groups);
    PFL_UNROLL
    for (int j = 0; j < kTile; ++j) *sum += groups[j];
  }
  const float* const repeated[kTile] = {b, b, b, b};
  double rest[bytes / 16 * kTile] = {*sum};
  tile<bytes, false, 1>(&a, repeated, c, end, rest);
  *sum = rest[0];
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
  for (int64_t at = begin; at < end; at += lanes) {
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
  PFL_UNROLL
  for (int i = 0; i < rows; ++i) PFL_UNROLL
  for (int j = 0; j < kTile; ++j) sum[i * kTile + j] += sum_lanes<bytes>(total[i][j]);
}

// The kind of lanes: the type of the rows and that of the sums; and of narrow ones the pairs that
// are wanted: all, those with j > i, or the first one alone.
enum class Kind { narrow, triangle, one, wide };

// sum[i][j] += sum over columns [begin, end) of (a_i - b_j)^2 for `rows` rows of a and kTile of b.
template <Kind kind, int rows, class T>
void sum_block(Isa now, const T* const* a, const T* const* b, int64_t begin, int64_t end,
               double* sum) {
  on_isa(
      [&](auto bytes) PFL_LAMBDA {
        if constexpr (kind == Kind::wide) {
          tile_wide<bytes, rows>(a, b, begin, end, sum);
        } else if constexpr (kind == Kind::one) {
          tile_of_one<bytes>(a[0], b[0], begin, end, sum);
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
