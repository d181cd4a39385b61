// Distances of many rows of float32 through their Gram matrix in float64, on tensor cores:
//
//   d_ij = (g_ii + g_jj) - 2 g_ij, g_ij = sum over the columns of (x_i - c)(x_j - c).
//
// The centre c of a column is its element of the least size: of models that differ by little it is
// one of theirs, and outliers that are larger do not move it. It depends on the rows, not on their
// order, and every entry of g is summed by one schedule (the same columns in the same places of the
// same instructions; products commute), so that results follow the rows when these are permuted.
//
// The pairs that are right: let u = 2^-53. x - c is rounded once, which changes d by at most
// 2 u sqrt(d) (sqrt(g_ii) + sqrt(g_jj)) <= 2 sqrt(2) u sqrt(d (g_ii + g_jj)). A product and its
// addition are one rounding (that of fma), so each term of a g meets at most n roundings, in
// whatever order the tensor core adds: n = columns of a block + partial sums that a thread adds +
// threads that share an entry + 1. With gamma = n u / (1 - n u) the g that is found is off by at
// most gamma sum |x_i x_j| <= gamma (g_ii + g_jj) / 2, and g_ii by gamma g_ii. The sum g_ii + g_jj
// and the difference round once more:
//   |d' - d| <= (2 gamma + u) (g_ii + g_jj) (1 + u) + u d + 2 sqrt(2) u sqrt(d (g_ii + g_jj)).
// A pair is accepted where d' >= tau (g_ii + g_jj), tau = 1.02e6 (2 n + 4) u: the first part is
// then at most 1e-6 / 1.02 (1 + 1e-9) of d', the others are below 1e-9 of d. So its relative error
// is below 1e-6. Squares of differences of floats neither underflow nor overflow in float64, so
// g_ii + g_jj = 0 means that both rows are c, and 0 is exact.
//
// All other pairs (of NaN, of infinity, of rows whose distance is small against that from c) become
// NaN here and are done again by windows.
#pragma once
#include <utility>

#include "sqdist_plan.cuh"

namespace pflcore::cuda {

// ---- which blocks of 8 x 8 entries an instruction makes ----

// An instruction multiplies two groups of 8 rows, r0 and r1, with one of 8 columns, c. A triangle
// of G groups is cut into as few of them as there can be: block (r, c) stands for (c, r) too.
struct GramTiles {
  int count;
  unsigned char r0[72], r1[72], c[72];
};

constexpr GramTiles gram_tiles(int groups) {
  GramTiles tiles{};
  int rows[16][18] = {}, count[16] = {};
  for (int c = 0; c < groups; ++c) {
    const int half = groups % 2 ? (groups + 1) / 2 : groups / 2 + (c < groups / 2 ? 1 : 0);
    for (int i = 0; i < half; ++i) rows[c][count[c]++] = (c + i) % groups;
  }
  for (int c = 0; c + 1 < groups; ++c)  // two odd columns: block (c + 1, c) becomes (c, c + 1)
    if (count[c] % 2 && count[c + 1] % 2) {
      int kept = 0;
      for (int i = 0; i < count[c]; ++i)
        if (rows[c][i] != c + 1) rows[c][kept++] = rows[c][i];
      count[c] = kept;
      rows[c + 1][count[c + 1]++] = c;
    }
  for (int c = 0; c < groups; ++c)
    for (int i = 0; i < count[c]; i += 2) {
      tiles.r0[tiles.count] = static_cast<unsigned char>(rows[c][i]);
      tiles.r1[tiles.count] = static_cast<unsigned char>(rows[c][i + 1 < count[c] ? i + 1 : i]);
      tiles.c[tiles.count] = static_cast<unsigned char>(c);
      ++tiles.count;
    }
  return tiles;
}
template <int G>
constexpr GramTiles kGramTiles = gram_tiles(G);

// Do the tiles `from` to `to` touch group r?
constexpr bool gram_touches(const GramTiles& tiles, int from, int to, int r) {
  for (int m = from; m < to; ++m)
    if (tiles.r0[m] == r || tiles.r1[m] == r || tiles.c[m] == r) return true;
  return false;
}

// f(0), ..., f(N - 1), each number a constant.
template <class F, int... I>
__device__ __forceinline__ void for_each_constant(std::integer_sequence<int, I...>, F&& f) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
__device__ __forceinline__ void for_each_constant(F&& f) {
  for_each_constant(std::make_integer_sequence<int, N>{}, f);
}

// ---- one column's centre, one lane's fragments ----
// Order by size, of equals the positive one first; infinity and NaN come last.
__device__ __forceinline__ unsigned gram_key(float v) {
  const unsigned bits = __float_as_uint(v);
  return bits << 1 | bits >> 31;
}
__device__ __forceinline__ unsigned gram_least(unsigned a, unsigned b) { return a < b ? a : b; }
__device__ __forceinline__ float gram_centre(unsigned key) {
  return key < 0xff000000u ? __uint_as_float(key >> 1 | key << 31) : 0.0f;  // 0: nothing is finite
}
// The least of the 8 lanes that hold one column.
__device__ __forceinline__ float gram_column_centre(unsigned key) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2)
    key = gram_least(key, __shfl_xor_sync(0xffffffffu, key, step));
  return gram_centre(key);
}

// d += (rows r0, r1) (columns c)^T over 8 columns of the data. Lane 4 g + t holds columns 2 t and
// 2 t + 1 of row g of each group; d is entry (g, 2 t), (g, 2 t + 1) of r0, then of r1.
__device__ __forceinline__ void gram_mma(double (&d)[4], const double (&r0)[2],
                                         const double (&r1)[2], const double (&c)[2]) {
#ifdef PFLCORE_CUDA_ON_CPU
  if (cuda_on_cpu::device().generation >= 90) {
    const double a[4] = {r0[0], r1[0], r0[1], r1[1]};
    cuda_on_cpu::mma_m16n8k8(d, a, c);
  } else {
    for (int k = 0; k < 2; ++k) {
      cuda_on_cpu::mma_m8n8k4(d[0], d[1], r0[k], c[k]);
      cuda_on_cpu::mma_m8n8k4(d[2], d[3], r1[k], c[k]);
    }
  }
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
      : "d"(r0[0]), "d"(r1[0]), "d"(r0[1]), "d"(r1[1]), "d"(c[0]), "d"(c[1]));
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  for (int k = 0; k < 2; ++k) {
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
        : "+d"(d[0]), "+d"(d[1])
        : "d"(r0[k]), "d"(c[k]));
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
        : "+d"(d[2]), "+d"(d[3])
        : "d"(r1[k]), "d"(c[k]));
  }
#endif
}

// Code for cards without these instructions: the kernels are there, and empty, and no plan takes
// them (sqdist_card).
#if defined(PFLCORE_CUDA_ON_CPU) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800)
#define PFLCORE_GRAM_CODE 1
#else
#define PFLCORE_GRAM_CODE 0
#endif

__device__ __forceinline__ Pack<float, 2> gram_load(const float* p) { return load_pack<2>(p); }

// ---- up to 128 rows: all pairs in one block ----
// Adds a stage to the tiles of warp kWarp. Rows past the end repeat the last one: the centre does
// not change, their entries are dropped.
template <int G, int kWarp, int kTiles>
__device__ __forceinline__ void gram_triangle_stage(double (&sum)[kTiles][4], const float* now,
                                                    int first, const int (&last)[3]) {
  constexpr int kFrom = kGramTiles<G>.count * kWarp / 4,
                kTo = kGramTiles<G>.count * (kWarp + 1) / 4;
#pragma unroll 2
  for (int step = 0; step < kGramChunk / 8; ++step) {
    Pack<float, 2> v[G];
    unsigned key0 = ~0u, key1 = ~0u;
    for_each_constant<G>([&](auto r) {
      const int row = r < G - 3 ? first + r * 8 * kGramPitch : last[r < G - 3 ? 0 : r - (G - 3)];
      v[r] = gram_load(now + row + 8 * step);
      key0 = gram_least(key0, gram_key(v[r].v[0]));
      key1 = gram_least(key1, gram_key(v[r].v[1]));
    });
    const double c0 = static_cast<double>(gram_column_centre(key0)),
                 c1 = static_cast<double>(gram_column_centre(key1));
    double x[G][2];
    for_each_constant<G>([&](auto r) {
      if constexpr (gram_touches(kGramTiles<G>, kFrom, kTo, r)) {
        x[r][0] = static_cast<double>(v[r].v[0]) - c0;
        x[r][1] = static_cast<double>(v[r].v[1]) - c1;
      }
    });
    for_each_constant<kTo - kFrom>([&](auto m) {
      constexpr int r0 = kGramTiles<G>.r0[m + kFrom], r1 = kGramTiles<G>.r1[m + kFrom],
                    c = kGramTiles<G>.c[m + kFrom];
      gram_mma(sum[m], x[r0], x[r1], x[c]);
    });
  }
}

template <int G, int kWarp, int kTiles>
__device__ __forceinline__ void gram_triangle_write(const double (&sum)[kTiles][4], int rows,
                                                    double* partial) {
  constexpr int kFrom = kGramTiles<G>.count * kWarp / 4,
                kTo = kGramTiles<G>.count * (kWarp + 1) / 4;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  for_each_constant<kTo - kFrom>([&](auto m) {
    constexpr int r0 = kGramTiles<G>.r0[m + kFrom], r1 = kGramTiles<G>.r1[m + kFrom],
                  c = kGramTiles<G>.c[m + kFrom];
    for_each_constant<r0 == r1 ? 2 : 4>([&](auto e) {
      const int i = 8 * (e < 2 ? r0 : r1) + lane / 4, j = 8 * c + 2 * (lane % 4) + e % 2;
      const int low = i < j ? i : j, high = i < j ? j : i;
      const bool twice = (e < 2 ? r0 : r1) == c && i > j;  // both halves of a block on the diagonal
      if (high < rows && !twice) partial[low * rows + high] = sum[m][e];
    });
  });
}

// One block: one piece of the columns -> partial[split][i][j] = g_ij, i <= j. Four warps share the
// columns and split the tiles.
template <int G>
__global__ void __launch_bounds__(kGramThreads, G <= 6   ? 4
                                                : G <= 9 ? 3
                                                         : 2)
    gram_triangle(const float* __restrict__ a, int64_t a_row, SqdistPlan plan, int* flags,
                  double* partial) {
#if PFLCORE_GRAM_CODE
  PFLCORE_DYNAMIC_SHARED(shared);
  sqdist_idle(flags, kFirst);
  float* const stages = reinterpret_cast<float*>(shared);
  const int rows = static_cast<int>(plan.m), stage_floats = rows * kGramPitch;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * plan.first.columns;
  const int64_t end = begin + plan.first.columns < plan.p ? begin + plan.first.columns : plan.p;
  const int chunks = static_cast<int>((end - begin + kGramChunk - 1) / kGramChunk);
  const auto stage = [&](int k) {
    if (k < chunks)
      sqdist_copy_rows<kGramChunk>(plan.a_bytes, stages + k % kGramStages * stage_floats,
                                   kGramPitch, a, a_row, rows,
                                   begin + static_cast<int64_t>(k) * kGramChunk, end);
    copy_commit();
  };
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int first = lane / 4 * kGramPitch + 2 * (lane % 4);
  int last[3];  // where the rows of the last three groups stand: no more than two are empty
  for (int r = 0; r < 3; ++r) {
    const int row = (G - 3 + r) * 8 + lane / 4;
    last[r] = (row < rows ? row : rows - 1) * kGramPitch + 2 * (lane % 4);
  }
  constexpr int kTiles = (kGramTiles<G>.count + 3) / 4;
  double sum[kTiles][4] = {};
  for (int k = 0; k < kGramStages - 1; ++k) stage(k);
  for (int k = 0; k < chunks; ++k) {
    copy_wait<kGramStages - 2>();
    // Chunk k is there for all threads, and no thread still reads the buffer of the next chunk.
    __syncthreads();
    stage(k + kGramStages - 1);
    const float* const now = stages + k % kGramStages * stage_floats;
    switch (warp) {
      case 0:
        gram_triangle_stage<G, 0>(sum, now, first, last);
        break;
      case 1:
        gram_triangle_stage<G, 1>(sum, now, first, last);
        break;
      case 2:
        gram_triangle_stage<G, 2>(sum, now, first, last);
        break;
      default:
        gram_triangle_stage<G, 3>(sum, now, first, last);
    }
  }
  double* const to = partial + static_cast<int64_t>(blockIdx.x) * plan.first.entries;
  switch (warp) {
    case 0:
      gram_triangle_write<G, 0>(sum, rows, to);
      break;
    case 1:
      gram_triangle_write<G, 1>(sum, rows, to);
      break;
    case 2:
      gram_triangle_write<G, 2>(sum, rows, to);
      break;
    default:
      gram_triangle_write<G, 3>(sum, rows, to);
  }
#endif
}

// ---- more rows, or two operands: windows of up to 64 rows against 64 ----
// The centre of each column over all rows: the same for every window.
PFLCORE_PLAIN_KERNEL void __launch_bounds__(kSqdistThreads)
    gram_centres(const float* __restrict__ a, int64_t a_row, const float* __restrict__ b,
                 int64_t b_row, SqdistPlan plan, float* centre) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kSqdistThreads + threadIdx.x;
  if (column >= plan.p) return;
  unsigned key = ~0u;
#pragma unroll 8
  for (int64_t i = 0; i < plan.m; ++i) key = gram_least(key, gram_key(a[i * a_row + column]));
  if (!plan.symmetric)
#pragma unroll 8
    for (int64_t j = 0; j < plan.n; ++j) key = gram_least(key, gram_key(b[j * b_row + column]));
  centre[column] = gram_centre(key);
}

// One block: one window of pairs, one piece of the columns -> partial[split][i][j] = g_ij, and
// after them the norms g_ii of the rows of a and those of b where they are two. Warp w has the rows
// 16 w to 16 w + 15 of b, against all rows of a, 16 at a time. Rows past the end repeat the last
// one.
PFLCORE_PLAIN_KERNEL void __launch_bounds__(kGramThreads, 2)
    gram_windows(const float* __restrict__ a, int64_t a_row, const float* __restrict__ b,
                 int64_t b_row, const float* __restrict__ centre, SqdistPlan plan, int* flags,
                 double* partial) {
#if PFLCORE_GRAM_CODE
  PFLCORE_DYNAMIC_SHARED(shared);
  sqdist_idle(flags, kFirst);
  if (plan.symmetric && blockIdx.y > blockIdx.x) return;
  const bool diagonal = plan.symmetric && blockIdx.y == blockIdx.x;
  const int64_t row_a = static_cast<int64_t>(blockIdx.y) * plan.window_a,
                row_b = static_cast<int64_t>(blockIdx.x) * plan.window_b;
  const int rows_a =
                static_cast<int>(plan.m - row_a < plan.window_a ? plan.m - row_a : plan.window_a),
            rows_b =
                static_cast<int>(plan.n - row_b < plan.window_b ? plan.n - row_b : plan.window_b);
  const int from_b = diagonal ? 0 : rows_a, from_centre = diagonal ? rows_a : rows_a + rows_b;
  const int stage_floats = (from_centre + 1) * kGramPitch;
  const int64_t begin = static_cast<int64_t>(blockIdx.z) * plan.first.columns;
  const int64_t end = begin + plan.first.columns < plan.p ? begin + plan.first.columns : plan.p;
  const int chunks = static_cast<int>((end - begin + kGramChunk - 1) / kGramChunk);
  float* const stages = reinterpret_cast<float*>(shared);
  const auto stage = [&](int k) {
    if (k < chunks) {
      float* const to = stages + k % kGramStages * stage_floats;
      const int64_t column = begin + static_cast<int64_t>(k) * kGramChunk;
      sqdist_copy_rows<kGramChunk>(plan.a_bytes, to, kGramPitch, a + row_a * a_row, a_row, rows_a,
                                   column, end);
      if (!diagonal)
        sqdist_copy_rows<kGramChunk>(plan.b_bytes, to + from_b * kGramPitch, kGramPitch,
                                     b + row_b * b_row, b_row, rows_b, column, end);
      sqdist_copy_rows<16, kGramChunk>(to + from_centre * kGramPitch, kGramPitch, centre, 0, 1,
                                       column, end);
    }
    copy_commit();
  };

  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int g = lane / 4, t = lane % 4;
  const bool norms = !plan.symmetric && (blockIdx.x == 0 || blockIdx.y == 0);
  const int all = (rows_a + 15) / 16;
  // of a window on the diagonal, the tiles that reach above it
  const int tiles = diagonal && warp + 1 < all ? warp + 1 : all;
  const bool active = 16 * warp < rows_b || norms;
  int at_a[8], at_b[2];  // where the rows of my groups stand
  for (int r = 0; r < 8; ++r)
    at_a[r] = (8 * r + g < rows_a ? 8 * r + g : rows_a - 1) * kGramPitch + 2 * t;
  for (int q = 0; q < 2; ++q) {
    const int row = 16 * warp + 8 * q + g;
    at_b[q] = (from_b + (row < rows_b ? row : rows_b - 1)) * kGramPitch + 2 * t;
  }

  double sum[4][2][4] = {}, norm_a[2] = {}, norm_b[2] = {};
  for (int k = 0; k < kGramStages - 1; ++k) stage(k);
  for (int k = 0; k < chunks; ++k) {
    copy_wait<kGramStages - 2>();
    // Chunk k is there for all threads, and no thread still reads the buffer of the next chunk.
    __syncthreads();
    stage(k + kGramStages - 1);
    if (!active) continue;
    const float* const now = stages + k % kGramStages * stage_floats;
    for (int step = 0; step < kGramChunk / 8; ++step) {
      const Pack<float, 2> c = gram_load(now + from_centre * kGramPitch + 2 * t + 8 * step);
      const auto load = [&](double (&x)[2], int at) {
        const Pack<float, 2> v = gram_load(now + at + 8 * step);
        for (int e = 0; e < 2; ++e)
          x[e] = static_cast<double>(v.v[e]) - static_cast<double>(c.v[e]);
      };
      double y[2][2];
#pragma unroll
      for (int q = 0; q < 2; ++q) load(y[q], at_b[q]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i >= tiles) break;
        double x[2][2];
#pragma unroll
        for (int h = 0; h < 2; ++h) load(x[h], at_a[2 * i + h]);
#pragma unroll
        for (int q = 0; q < 2; ++q) gram_mma(sum[i][q], x[0], x[1], y[q]);
        if (norms && i == warp)
#pragma unroll
          for (int h = 0; h < 2; ++h) norm_a[h] += x[h][0] * x[h][0] + x[h][1] * x[h][1];
      }
      if (norms)
#pragma unroll
        for (int q = 0; q < 2; ++q) norm_b[q] += y[q][0] * y[q][0] + y[q][1] * y[q][1];
    }
  }

  double* const to = partial + static_cast<int64_t>(blockIdx.z) * plan.first.entries;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int q = 0; q < 2; ++q)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = 16 * i + 8 * (e / 2) + g, s = 16 * warp + 8 * q + 2 * t + e % 2;
        if (r < rows_a && s < rows_b && !(diagonal && r > s))
          to[(row_a + r) * plan.n + row_b + s] = sum[i][q][e];
      }
  if (!norms) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = 16 * warp + 8 * h + g;
    double of_a = norm_a[h], of_b = norm_b[h];
    for (int step = 1; step < 4; step *= 2) {
      of_a += __shfl_xor_sync(0xffffffffu, of_a, step);
      of_b += __shfl_xor_sync(0xffffffffu, of_b, step);
    }
    if (t == 0 && blockIdx.x == 0 && row < rows_a) to[plan.pairs + row_a + row] = of_a;
    if (t == 0 && blockIdx.y == 0 && row < rows_b) to[plan.pairs + plan.m + row_b + row] = of_b;
  }
#endif
}

// ---- from the sums to distances ----

// Adds the partial sums up: g_ij to `out`, the norms to their own place. A column of 32
// neighbouring entries per block, blockDim.y threads to an entry.
PFLCORE_PLAIN_KERNEL void __launch_bounds__(1024)
    gram_total(const double* partial, SqdistPlan plan, double* norms, double* out) {
  __shared__ double sums[32][33];
  const int64_t entry = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  const int64_t i = entry / plan.n, j = entry % plan.n;
  const bool active = entry < plan.first.entries && !(plan.symmetric && i > j);
  double sum = 0;
  if (active)
    for (int64_t s = threadIdx.y; s < plan.first.count; s += blockDim.y)
      sum += partial[s * plan.first.entries + entry];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || !active) return;
  for (int y = 1; y < static_cast<int>(blockDim.y); ++y) sum += sums[y][threadIdx.x];
  if (entry >= plan.pairs)
    norms[entry - plan.pairs] = sum;
  else if (plan.symmetric && i == j)
    norms[i] = sum;
  else
    out[entry] = sum;
}

// The distances where the certificate holds, NaN elsewhere.
PFLCORE_PLAIN_KERNEL void __launch_bounds__(kSqdistThreads)
    gram_finish(const double* norms, SqdistPlan plan, int* flags, double* out) {
  const int64_t entry = static_cast<int64_t>(blockIdx.x) * kSqdistThreads + threadIdx.x;
  const int64_t i = entry / plan.n, j = entry % plan.n;
  if (entry >= plan.pairs || (plan.symmetric && i > j)) return;
  if (plan.symmetric && i == j) {
    out[entry] = 0;
    return;
  }
  const double both = norms[i] + norms[plan.symmetric ? j : plan.m + j];
  const double found = both - 2 * out[entry];
  const bool right = found >= plan.tau * both && both <= DBL_MAX;
  const double value = right ? found : static_cast<double>(NAN);
  if (!right) flags[kAgain] = 1;
  out[entry] = value;
  if (plan.symmetric) out[j * plan.n + i] = value;
}

inline void sqdist_gram_launch(const Sqdist& q, const SqdistPlan& plan, const SqdistRoom& room,
                               cudaStream_t stream) {
  const float* const a = static_cast<const float*>(q.a);
  const float* const b = plan.symmetric ? a : static_cast<const float*>(q.b);
  const int64_t b_row = plan.symmetric ? q.a_row : q.b_row;
  const unsigned splits = static_cast<unsigned>(plan.first.count);
  if (is_gram_triangle(plan)) {
    const auto launch = [&](auto groups) {
      auto* const kernel = &gram_triangle<groups()>;
      const int64_t bytes = kGramStages * plan.m * kGramPitch * int64_t{sizeof(float)};
      allow_shared(reinterpret_cast<const void*>(kernel), bytes);
      PFLCORE_LAUNCH(kernel, splits, kGramThreads, bytes, stream, a, q.a_row, plan, room.flags,
                     room.partial);
    };
    if (plan.m <= 32)
      launch(std::integral_constant<int, 4>{});
    else if (plan.m <= 48)
      launch(std::integral_constant<int, 6>{});
    else if (plan.m <= 64)
      launch(std::integral_constant<int, 8>{});
    else if (plan.m <= 80)
      launch(std::integral_constant<int, 10>{});
    else if (plan.m <= 104)
      launch(std::integral_constant<int, 13>{});
    else
      launch(std::integral_constant<int, 16>{});
  } else {
    auto* const centres = &gram_centres;
    PFLCORE_LAUNCH(centres, static_cast<unsigned>(ceil_div(plan.p, kSqdistThreads)), kSqdistThreads,
                   0, stream, a, q.a_row, b, b_row, plan, room.centre);
    auto* const kernel = &gram_windows;
    const dim3 grid(static_cast<unsigned>(ceil_div(plan.n, plan.window_b)),
                    static_cast<unsigned>(ceil_div(plan.m, plan.window_a)), splits);
    const int64_t bytes = kGramStages * (int64_t{plan.window_a} + plan.window_b + 1) * kGramPitch *
                          int64_t{sizeof(float)};
    allow_shared(reinterpret_cast<const void*>(kernel), bytes);
    PFLCORE_LAUNCH(kernel, grid, kGramThreads, bytes, stream, a, q.a_row, b, b_row, room.centre,
                   plan, room.flags, room.partial);
  }
  auto* const total = &gram_total;
  PFLCORE_LAUNCH(total, static_cast<unsigned>(ceil_div(plan.first.entries, 32)),
                 dim3(32, static_cast<unsigned>(sqdist_ways(plan.first.count))), 0, stream,
                 room.partial, plan, room.norms, q.out);
  auto* const finish = &gram_finish;
  PFLCORE_LAUNCH(finish, static_cast<unsigned>(ceil_div(plan.pairs, kSqdistThreads)),
                 kSqdistThreads, 0, stream, room.norms, plan, room.flags, q.out);
}

}  // namespace pflcore::cuda
