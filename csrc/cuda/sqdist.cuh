// out[i][j] = sum over the columns of (a_i - b_j)^2: differences first, float64 totals. Knows
// nothing of torch. How the work is cut: sqdist_plan.cuh.
//
// A block holds a window of at most 64 rows of a against 64 of b. A thread owns 4 x 4 pairs (rows
// ti + r * groups_a, tj + s * groups_b) and every `lanes`-th 16-byte pack of the staged columns: 8
// packs read from shared memory for 64 (double: 32) differences and squares. Every pair of rows is
// summed by the same schedule, so that results follow the rows when these are permuted.
//
// A float32 lane adds 8 squares, then kSqdistSums such sums where no two threads share a tile and
// registers suffice, before it is flushed to float64: a pair's error stays below
// (8 + 3 + 2) 2^-24 = 7.8e-7 for every input.
#pragma once
#include "sqdist_few.cuh"
#include "sqdist_gram.cuh"
#include "sqdist_plan.cuh"

namespace pflcore::cuda {

// Stages `packs` packs of each of `rows` rows, zeros from column `end` on. S is the staged type:
// float, or double where T is double. Rows of a half type that are not aligned wait for their
// values.
template <class T, class S>
__device__ __forceinline__ void sqdist_stage(S* to, int pitch, int packs_log2, const T* from,
                                             int64_t row_stride, int rows, bool aligned,
                                             int64_t column, int64_t end) {
  constexpr int kWide = per16<S>;
  const int threads = static_cast<int>(blockDim.x);
  if (aligned) {
#pragma unroll 1
    for (int e = static_cast<int>(threadIdx.x); e < rows << packs_log2; e += threads) {
      const int row = e >> packs_log2, pack = e & ((1 << packs_log2) - 1);
      const int64_t c = column + static_cast<int64_t>(pack) * kWide, left = end - c;
      copy_async<16>(to + (static_cast<int64_t>(row) * pitch + pack) * kWide,
                     from + row * row_stride + (left > 0 ? c : 0),
                     left >= kWide ? 16
                     : left > 0    ? static_cast<int>(left * static_cast<int64_t>(sizeof(T)))
                                   : 0);
    }
  } else {
    const int per_row_log2 = packs_log2 + (kWide == 4 ? 2 : 1);
#pragma unroll 1
    for (int e = static_cast<int>(threadIdx.x); e < rows << per_row_log2; e += threads) {
      const int row = e >> per_row_log2, i = e & ((1 << per_row_log2) - 1);
      const int64_t c = column + i;
      const bool inside = c < end;
      S* const dst = to + static_cast<int64_t>(row) * pitch * kWide + i;
      const T* const src = from + row * row_stride + (inside ? c : 0);
      if constexpr (sizeof(T) == sizeof(S)) {
        copy_async<sizeof(T)>(dst, src, inside ? static_cast<int>(sizeof(T)) : 0);
      } else {
        *dst = inside ? convert<S>(*src) : S(0);
      }
    }
  }
}

// Aligned rows of a half type are staged as they are, 16 bytes (two packs) after 16 bytes, and
// converted by the thread that copied them: it need not wait for the others.
template <class T>
__device__ __forceinline__ void sqdist_fetch(T* raw, int packs_log2, const T* from,
                                             int64_t row_stride, int rows, int64_t column,
                                             int64_t end) {
  constexpr int kLoad = per16<T>;
  const int loads_log2 = packs_log2 - 1, threads = static_cast<int>(blockDim.x);
#pragma unroll 1
  for (int e = static_cast<int>(threadIdx.x); e < rows << loads_log2; e += threads) {
    const int row = e >> loads_log2, load = e & ((1 << loads_log2) - 1);
    const int64_t c = column + static_cast<int64_t>(load) * kLoad, left = end - c;
    copy_async<16>(raw + e * kLoad, from + row * row_stride + (left > 0 ? c : 0),
                   left >= kLoad ? 16
                   : left > 0    ? static_cast<int>(left * static_cast<int64_t>(sizeof(T)))
                                 : 0);
  }
}

template <class T>
__device__ __forceinline__ void sqdist_unpack(float* to, int pitch, int packs_log2, const T* raw,
                                              int rows) {
  constexpr int kWide = per16<float>, kLoad = per16<T>;
  const int loads_log2 = packs_log2 - 1, threads = static_cast<int>(blockDim.x);
#pragma unroll 1
  for (int e = static_cast<int>(threadIdx.x); e < rows << loads_log2; e += threads) {
    const int row = e >> loads_log2, load = e & ((1 << loads_log2) - 1);
    float* const dst = to + (row * pitch + 2 * load) * kWide;
    const Pack<T> in = load16(raw + e * kLoad);
    for (int k = 0; k < 2; ++k) {
      Pack<float> out;
      for (int i = 0; i < kWide; ++i) out.v[i] = convert<float>(in.v[k * kWide + i]);
      store16_shared(dst + k * kWide, out);
    }
  }
}

// Do any rows of a thread's 4 x 4 pairs differ in its packs of a stage? What is not finite differs
// from itself.
template <class S>
__device__ __forceinline__ bool sqdist_differ(const S* now, const int (&from_a)[4],
                                              const int (&from_b)[4], int lane, int lanes,
                                              int packs) {
  unsigned bits = 0;
#pragma unroll 1
  for (int pack = lane; pack < packs; pack += lanes) {
    Pack<S> va[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) va[r] = load16(now + from_a[r] + pack * per16<S>);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const Pack<S> vb = load16(now + from_b[s] + pack * per16<S>);
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < per16<S>; ++c) bits |= __float_as_uint(va[r].v[c] - vb.v[c]);
    }
  }
  return bits != 0;
}

// One block: one window of pairs, one piece of the columns -> partial[split][i][j]. C is the type
// of the differences: float with flushes, or double. After the first turn only the pairs that the
// turn wants are done, and a block without any returns at once. kOneLane: no two threads share a
// tile, as where there are many rows; arithmetic is the bottleneck then, and all places in shared
// memory become constants.
template <class T, class S, class C, bool kOneLane>
__global__ void __launch_bounds__(kSqdistThreads, 2)
    sqdist_partial(const T* __restrict__ a, int64_t a_row, const T* __restrict__ b, int64_t b_row,
                   SqdistPlan plan, int turn, int* flags, const double* out, double* partial) {
  constexpr int kWide = per16<S>;
  if (sqdist_idle(flags, turn)) return;
  const int64_t row_a = static_cast<int64_t>(blockIdx.y) * kSqdistWindow,
                row_b = static_cast<int64_t>(blockIdx.x) * kSqdistWindow;
  if (plan.symmetric && row_a > row_b) return;
  const bool triangle = plan.symmetric && row_a == row_b;
  const int rows_a =
      static_cast<int>(plan.m - row_a < kSqdistWindow ? plan.m - row_a : kSqdistWindow);
  const int rows_b =
      static_cast<int>(plan.n - row_b < kSqdistWindow ? plan.n - row_b : kSqdistWindow);
  const int groups_a = (rows_a + 3) / 4, groups_b = (rows_b + 3) / 4;

  const int lanes_log2 = kOneLane ? 0 : plan.lanes_log2,
            packs_log2 = kOneLane ? kSqdistPacksLog2 : plan.packs_log2;
  const int lanes = 1 << lanes_log2, packs = 1 << packs_log2,
            pitch = kOneLane ? packs + 1 : plan.pitch;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1),
            tile = static_cast<int>(threadIdx.x) >> lanes_log2;
  int ti = 0, tj = 0;
  if (triangle) {  // tiles row by row of the upper triangle
    tj = tile;
    while (ti < groups_a && tj >= groups_a - ti) tj -= groups_a - ti++;
    tj += ti;
  } else {
    ti = tile / groups_b, tj = tile % groups_b;
  }
  bool active = ti < groups_a;
  if (!active) ti = tj = 0;

  int wanted = 0;  // bit 4 r + s: pair (ti + r groups_a, tj + s groups_b) is to be written
  for (int r = 0; r < 4; ++r)
    for (int s = 0; s < 4; ++s) {
      const int i = ti + r * groups_a, j = tj + s * groups_b;
      bool want = active && i < rows_a && j < rows_b && !(triangle && i >= j && ti == tj);
      if (turn != kFirst && want) {
        const int64_t lo = triangle && i > j ? j : i, hi = triangle && i > j ? i : j;
        want = sqdist_wanted(out[(row_a + lo) * plan.n + row_b + hi], turn);
      }
      wanted |= want ? 1 << (4 * r + s) : 0;
    }
  active = wanted != 0;
  if (turn != kFirst && !__syncthreads_or(active)) return;

  PFLCORE_DYNAMIC_SHARED(shared);
  const int64_t begin = static_cast<int64_t>(blockIdx.z) * plan.per_split;
  const int64_t end = begin + plan.per_split < plan.p ? begin + plan.per_split : plan.p;
  const int chunks = static_cast<int>((end - begin + plan.chunk - 1) / plan.chunk);
  constexpr bool kRaw = sizeof(T) == 2;
  const auto raw_stage = [&](int k) {
    return reinterpret_cast<T*>(shared + 2 * plan.stage_bytes +
                                k % (plan.stages - 1) * plan.raw_bytes);
  };
  const int raw_b = (rows_a << (packs_log2 - 1)) * per16<T>;
  const auto stage = [&](int k) {
    if (k < chunks) {
      const int64_t column = begin + k * plan.chunk;
      if constexpr (kRaw) {
        T* const raw = raw_stage(k);
        if (plan.a_aligned)
          sqdist_fetch(raw, packs_log2, a + row_a * a_row, a_row, rows_a, column, end);
        if (plan.b_aligned && !triangle)
          sqdist_fetch(raw + raw_b, packs_log2, b + row_b * b_row, b_row, rows_b, column, end);
      } else {
        S* const to =
            reinterpret_cast<S*>(shared + static_cast<int64_t>(k % plan.stages) * plan.stage_bytes);
        sqdist_stage<T, S>(to, pitch, packs_log2, a + row_a * a_row, a_row, rows_a, plan.a_aligned,
                           column, end);
        if (!triangle)
          sqdist_stage<T, S>(to + static_cast<int64_t>(rows_a) * pitch * kWide, pitch, packs_log2,
                             b + row_b * b_row, b_row, rows_b, plan.b_aligned, column, end);
      }
    }
    copy_commit();  // a group for every chunk, empty ones too, so that the count of groups to wait
                    // for is constant
  };
  // Half types: chunk k, of which this thread's copies have arrived, into one of two buffers.
  [[maybe_unused]] const auto unpack = [&](int k) {
    if constexpr (kRaw) {
      float* const to_a = reinterpret_cast<float*>(shared + k % 2 * plan.stage_bytes);
      float* const to_b = to_a + rows_a * pitch * kWide;
      const int64_t column = begin + k * plan.chunk;
      if (plan.a_aligned)
        sqdist_unpack(to_a, pitch, packs_log2, raw_stage(k), rows_a);
      else
        sqdist_stage<T, float>(to_a, pitch, packs_log2, a + row_a * a_row, a_row, rows_a, false,
                               column, end);
      if (triangle) return;
      if (plan.b_aligned)
        sqdist_unpack(to_b, pitch, packs_log2, raw_stage(k) + raw_b, rows_b);
      else
        sqdist_stage<T, float>(to_b, pitch, packs_log2, b + row_b * b_row, b_row, rows_b, false,
                               column, end);
    }
  };

  int from_a[4], from_b[4];  // where my rows stand in a stage; rows past the end repeat the last
                             // one, their results are dropped
  for (int r = 0; r < 4; ++r) {
    const int i = ti + r * groups_a < rows_a ? ti + r * groups_a : rows_a - 1,
              j = tj + r * groups_b < rows_b ? tj + r * groups_b : rows_b - 1;
    from_a[r] = i * pitch * kWide;
    from_b[r] = (j + (triangle ? 0 : rows_a)) * pitch * kWide;
  }

  // Of rows that are equal float32 has found 0, and so it is: float64 is for those that differ.
  constexpr bool kLook = std::is_same_v<S, float> && std::is_same_v<C, double>;
  // A thread that has all packs of a stage adds its sums before they are flushed; for other types
  // registers are short.
  constexpr bool kSums = kOneLane && std::is_same_v<T, float>;
  static_assert(1 << kSqdistPacksLog2 == 2 * kSqdistSums, "a stage is one flush");
  double total[4][4] = {};
  for (int k = 0; k < plan.stages - 1; ++k) stage(k);
  for (int k = 0; k < chunks; ++k) {
    if (plan.stages == 2)
      copy_wait<0>();
    else
      copy_wait<2>();
    if constexpr (kRaw) unpack(k);
    // Chunk k is there for all threads, and no thread still reads the buffer of the next chunk.
    __syncthreads();
    stage(k + plan.stages - 1);
    if (!active) continue;
    const int buffer = kRaw ? k % 2 : k % plan.stages;
    const S* const now =
        reinterpret_cast<const S*>(shared + static_cast<int64_t>(buffer) * plan.stage_bytes);
    if constexpr (kLook) {
      if (!sqdist_differ<S>(now, from_a, from_b, lane, lanes, packs)) continue;
    }
    [[maybe_unused]] float some[4][4] = {};
#pragma unroll(kOneLane && !kRaw ? 2 : 1)
    for (int pack = lane; pack < packs; pack += 2 * lanes) {
      [[maybe_unused]] C sum[4][4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = (pack + half * lanes) * kWide;
        Pack<S> va[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) va[r] = load16(now + from_a[r] + at);
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          const Pack<S> vb = load16(now + from_b[s] + at);
#pragma unroll
          for (int r = 0; r < 4; ++r)
#pragma unroll
            for (int c = 0; c < kWide; ++c) {
              const C d = static_cast<C>(va[r].v[c]) - static_cast<C>(vb.v[c]);
              if constexpr (kLook)
                total[r][s] += d * d;
              else
                sum[r][s] += d * d;
            }
        }
      }
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          if constexpr (kSums)
            some[r][s] += sum[r][s];
          else if constexpr (!kLook)
            total[r][s] += static_cast<double>(sum[r][s]);
        }
    }
    if constexpr (kSums) {
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int s = 0; s < 4; ++s) total[r][s] += static_cast<double>(some[r][s]);
    }
  }

#pragma unroll
  for (int r = 0; r < 4; ++r)
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      double value = total[r][s];
      for (int step = lanes / 2; step > 0; step /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, step);
      if (lane == 0 && (wanted >> (4 * r + s) & 1)) {
        int64_t i = ti + r * groups_a, j = tj + s * groups_b;
        if (triangle && i > j) {
          const int64_t swap = i;
          i = j, j = swap;
        }
        partial[blockIdx.z * plan.pairs + (row_a + i) * plan.n + row_b + j] = value;
      }
    }
}

// Adds the partial sums up and mirrors a symmetric result: a column of 32 neighbouring pairs per
// block, blockDim.y threads to a pair. A single partial sum lies in `out` already, so that after a
// later turn nothing shows which were done in it: all are mirrored once more.
PFLCORE_PLAIN_KERNEL void __launch_bounds__(1024)
    sqdist_total(const double* partial, SqdistPlan plan, int turn, int* flags, double* out) {
  __shared__ double sums[32][33];
  if (turn != kFirst && flags[turn] == 0) return;
  const int64_t pair = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  const int64_t i = pair / plan.n, j = pair % plan.n;
  bool active = pair < plan.pairs && !(plan.symmetric && i > j);
  const bool zero = plan.symmetric && i == j;
  if (turn != kFirst)
    active = active && !zero && (plan.splits == 1 || sqdist_wanted(out[pair], turn));
  double sum = 0;
  if (active && !zero)
    for (int64_t s = threadIdx.y; s < plan.splits; s += blockDim.y)
      sum += partial[s * plan.pairs + pair];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || !active) return;
  for (int y = 1; y < static_cast<int>(blockDim.y); ++y) sum += sums[y][threadIdx.x];
  out[pair] = sum;
  if (plan.symmetric) out[j * plan.n + i] = sum;
  if (turn != kLast && !zero && sqdist_suspect(sum)) flags[kLast] = 1;
}

// A pack of a row's columns, zeros from `end` on.
template <class S, class T>
__device__ __forceinline__ Pack<S> sqdist_pack(const T* row, bool aligned, int64_t column,
                                               int64_t end) {
  constexpr int kWide = per16<S>;
  Pack<S> out;
  if (aligned && column + kWide <= end) {
    const Pack<T, kWide> in = load_pack<kWide>(row + column);
    for (int c = 0; c < kWide; ++c) out.v[c] = convert<S>(in.v[c]);
  } else {
    for (int c = 0; c < kWide; ++c)
      out.v[c] = column + c < end ? convert<S>(row[column + c]) : S(0);
  }
  return out;
}

// This lane's part of the sum over one pair's columns `begin` to `end`, as sqdist_few does.
__device__ __forceinline__ double sqdist_few_lane(const float* x, const float* y, bool x_aligned,
                                                  bool y_aligned, int lane, int64_t begin,
                                                  int64_t end) {
  double total = 0;
  for (int64_t column = begin; column < end; column += kFewFlush * kFewChunk) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kFewFlush; ++i) {
      const int64_t at = column + i * kFewChunk + 4 * lane;
      sqdist_few_add(sum, sqdist_pack<float>(x, x_aligned, at, end),
                     sqdist_pack<float>(y, y_aligned, at, end));
    }
    total += static_cast<double>(sum);
  }
  return total;
}

// The same as a window's thread does.
template <class T, class S, class C>
__device__ __forceinline__ double sqdist_window_lane(const T* x, const T* y, const SqdistPlan& plan,
                                                     int lane, int64_t begin, int64_t end) {
  constexpr int kWide = per16<S>;
  constexpr bool kSums = std::is_same_v<T, float> && std::is_same_v<C, float>;
  constexpr bool kDirect = std::is_same_v<S, float> && std::is_same_v<C, double>;
  const int lanes = 1 << plan.lanes_log2, packs = 1 << plan.packs_log2;
  const int most = kSums && lanes == 1 ? kSqdistSums : 1;
  double total = 0;
  C some = 0;
  int held = 0;
  for (int64_t column = begin; column < end; column += plan.chunk)
    for (int pack = lane; pack < packs; pack += 2 * lanes) {
      C sum = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t at = column + (pack + half * lanes) * kWide;
        const Pack<S> va = sqdist_pack<S>(x, plan.a_aligned, at, end),
                      vb = sqdist_pack<S>(y, plan.b_aligned, at, end);
#pragma unroll
        for (int c = 0; c < kWide; ++c) {
          const C d = static_cast<C>(va.v[c]) - static_cast<C>(vb.v[c]);
          if constexpr (kDirect)
            total += d * d;
          else
            sum += d * d;
        }
      }
      some += sum;
      if (++held == most) {
        total += static_cast<double>(some);
        some = 0;
        held = 0;
      }
    }
  return total + static_cast<double>(some);
}

// Listed pairs: `lanes` threads to a pair, which take its columns as all pairs' kernel does under
// the plan of all pairs, so the bits are the same.
template <class T, class S, class C>
__global__ void __launch_bounds__(kSqdistThreads)
    sqdist_listed(const T* __restrict__ a, int64_t a_row, const T* __restrict__ b, int64_t b_row,
                  SqdistPlan plan, int turn, int* flags, const int64_t* index, int64_t listed,
                  const double* out, double* partial) {
  if (sqdist_idle(flags, turn)) return;
  constexpr bool kFloat = std::is_same_v<T, float> && std::is_same_v<C, float>;
  const bool few = kFloat && plan.path == SqdistPath::few;
  const int lanes_log2 = few ? 5 : plan.lanes_log2, lanes = 1 << lanes_log2,
            lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int64_t columns = few ? plan.first.columns : plan.per_split;
  const int64_t pair = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) >> lanes_log2;
  const bool active = pair < plan.m * listed && (turn == kFirst || sqdist_wanted(out[pair], turn));
  const int64_t i = active ? pair / listed : 0, j = active ? index[pair] : 0;
  double total = j < 0        ? static_cast<double>(INFINITY)
                 : j < plan.n ? 0.0
                              : static_cast<double>(NAN);
  if (active && j >= 0 && j < plan.n && !(plan.symmetric && i == j)) {
    const int64_t begin = static_cast<int64_t>(blockIdx.y) * columns;
    const int64_t end = begin + columns < plan.p ? begin + columns : plan.p;
    const T *const x = a + i * a_row, *const y = b + j * b_row;
    if constexpr (kFloat) {
      total = few ? sqdist_few_lane(x, y, plan.a_aligned, plan.b_aligned, lane, begin, end)
                  : sqdist_window_lane<T, S, C>(x, y, plan, lane, begin, end);
    } else {
      total = sqdist_window_lane<T, S, C>(x, y, plan, lane, begin, end);
    }
  }
  for (int step = lanes / 2; step > 0; step /= 2)
    total += __shfl_xor_sync(0xffffffffu, total, step);
  if (lane == 0 && active) partial[blockIdx.y * plan.m * listed + pair] = total;
}

template <class T, class S, class C>
void sqdist_launch(const Sqdist& q, SqdistPlan plan, int turn, const SqdistRoom& room,
                   cudaStream_t stream) {
  const T* const a = static_cast<const T*>(q.a);
  const T* const b = plan.symmetric ? a : static_cast<const T*>(q.b);
  const int64_t b_row = plan.symmetric ? q.a_row : q.b_row;
  const bool few = plan.path == SqdistPath::few && turn == kFirst;
  if (few) plan.splits = plan.first.count;
  double* const partial = plan.splits > 1 || few ? room.partial : q.out;
  if (q.listed >= 0) {
    const int lanes_log2 = few ? 5 : plan.lanes_log2;
    const dim3 grid(static_cast<unsigned>(ceil_div((q.m * q.listed) << lanes_log2, kSqdistThreads)),
                    static_cast<unsigned>(plan.splits));
    auto* const kernel = &sqdist_listed<T, S, C>;
    PFLCORE_LAUNCH(kernel, grid, kSqdistThreads, 0, stream, a, q.a_row, b, b_row, plan, turn,
                   room.flags, q.index, q.listed, q.out, partial);
    plan.symmetric = false, plan.n = q.listed, plan.pairs = q.m * q.listed;
  } else if (few) {
    sqdist_few_launch(q, plan, room, stream);
  } else if (plan.splits > 0) {
    const dim3 grid(static_cast<unsigned>(ceil_div(plan.n, kSqdistWindow)),
                    static_cast<unsigned>(ceil_div(plan.m, kSqdistWindow)),
                    static_cast<unsigned>(plan.splits));
    constexpr bool kOften = std::is_same_v<C, float>;  // worth a second copy of the code
    auto* const kernel = kOften && plan.lanes_log2 == 0 ? &sqdist_partial<T, S, C, kOften>
                                                        : &sqdist_partial<T, S, C, false>;
    PFLCORE_LAUNCH(kernel, grid, plan.threads, sqdist_shared(plan), stream, a, q.a_row, b, b_row,
                   plan, turn, room.flags, q.out, partial);
  }
  auto* const total = &sqdist_total;
  PFLCORE_LAUNCH(total, static_cast<unsigned>(ceil_div(plan.pairs, 32)),
                 dim3(32, static_cast<unsigned>(sqdist_ways(plan.splits))), 0, stream, partial,
                 plan, turn, room.flags, q.out);
}

template <class T>
void sqdist_float(const Sqdist& q, const SqdistPlan& plan, const SqdistRoom& room,
                  cudaStream_t stream) {
  if (plan.path == SqdistPath::gram) {
    sqdist_gram_launch(q, plan, room, stream);
    sqdist_launch<T, float, float>(q, plan, kAgain, room, stream);
  } else {
    sqdist_launch<T, float, float>(q, plan, kFirst, room, stream);
  }
  if (plan.splits > 0) sqdist_launch<T, float, double>(q, plan, kLast, room, stream);
}

inline void sqdist(const Sqdist& q, const SqdistCard& card, cudaStream_t stream,
                   int64_t most = kSqdistMost) {
  SqdistPlan plan = sqdist_plan(q, card);
  if ((q.listed < 0 ? plan.pairs : q.m * q.listed) == 0) return;
  if (plan.m > most && !plan.symmetric) {
    for (int64_t row = 0; row < q.m; row += most) {
      Sqdist part = q;
      part.a = static_cast<const unsigned char*>(q.a) + row * q.a_row * bytes_of(q.dtype);
      part.m = q.m - row < most ? q.m - row : most;
      part.out = q.out + row * q.across();
      if (q.listed >= 0) part.index = q.index + row * q.listed;
      sqdist(part, card, stream, most);
    }
    return;
  }
  const SqdistRoom room = sqdist_room(q, plan);
  if (q.listed >= 0 && plan.splits == 0)
    plan.splits = 1;  // without a column there is still infinity to be written
  switch (q.dtype) {
    case Dtype::f32:
      return sqdist_float<float>(q, plan, room, stream);
    case Dtype::f64:
      return sqdist_launch<double, double, double>(q, plan, kFirst, room, stream);
    case Dtype::f16:
      return sqdist_float<__half>(q, plan, room, stream);
    case Dtype::bf16:
      return sqdist_float<__nv_bfloat16>(q, plan, room, stream);
  }
}

// The abilities of the card, with the code that is there.
inline SqdistCard sqdist_card() {
  auto* const kernel = &gram_windows;
  SqdistCard card{};
  card.tensor_float64 = has_fast_float64_mma(card_generation()) &&
                        code_generation(reinterpret_cast<const void*>(kernel)) >= 80;
  return card;
}

}  // namespace pflcore::cuda
