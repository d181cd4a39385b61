// out = base + lr * (weight @ updates), dense or by a sparse gather. Knows nothing of torch.
//
// Dense, few rows of the result: a warp owns 32 packs of columns, all rows, and reads the updates
// into registers. Dense, more rows: a block owns a strip of columns and up to 128 rows of the
// result. The strip's part of each row of updates is copied into shared memory once, some rows
// ahead of the arithmetic, and every row of the result is made from there: 16 rows x 4 columns to a
// thread (double: 2), so that arithmetic, not memory, is what a block of 100 x 100 weights waits
// for. Blocks with the same columns run side by side and share them in L2. The weights stay in
// shared memory, as far as they fit, while a block walks over the columns. Sparse: a block owns 32
// packs of columns for all rows of the result, so that a row chosen by many is fetched once and
// then found in L1. A place outside [0, n) makes its row of the result NaN: a kernel cannot raise
// an error without stopping the stream.
#pragma once
#include "common.cuh"

namespace pflcore::cuda {

constexpr int kAggregateThreads = 256;
constexpr int64_t kAggregateShared =
    48 * 1024;  // bytes for the weights: what every card gives without asking
constexpr int64_t kStagedShared = 80 * 1024;  // bytes for weights and stages, where the card gives
                                              // them: two blocks fit an A100's 164 KiB
constexpr int64_t kAggregateBlocks = 4096;

// Rows of the result per thread: as many as 32 registers of sums hold.
template <class T, class Acc>
constexpr int aggregate_rows = 32 / (per16<T> * static_cast<int>(sizeof(Acc)) / 4);

// Columns [begin, end) of the whole matrix: whole packs of aligned rows, or any columns one by one.
struct AggregatePlan {
  int64_t begin, end;
  int64_t tiles;         // tiles of columns
  int warps_m, warps_c;  // how the block's 8 warps are spread over rows and columns
  int rows;              // rows of the result a block does at a time
  int chunk;             // rows of updates whose weights are in shared memory at a time
  bool resident;         // all of them: they are loaded once per block
  bool out_aligned;
};

template <class T, class Acc, int kRows>
AggregatePlan aggregate_plan(const Aggregate& q, int64_t begin, int64_t end) {
  AggregatePlan plan{};
  plan.begin = begin, plan.end = end;
  plan.warps_m = 1;
  while (plan.warps_m < 8 && static_cast<int64_t>(plan.warps_m) * kRows < q.m) plan.warps_m *= 2;
  plan.warps_c = 8 / plan.warps_m;
  plan.tiles = ceil_div(end - begin, static_cast<int64_t>(plan.warps_c) * 32 * per16<T>);
  const int64_t busy = ceil_div(q.m, kRows);
  plan.rows = static_cast<int>(busy < plan.warps_m ? busy : plan.warps_m) * kRows;
  const int64_t room = kAggregateShared / (plan.rows * static_cast<int64_t>(sizeof(Acc)));
  plan.chunk = static_cast<int>(q.n < room ? (q.n < 1 ? 1 : q.n) : room);
  plan.resident = q.n <= plan.chunk;
  plan.out_aligned = aligned16(q.out, q.out_row, bytes_of(q.out_dtype)) &&
                     (q.base == nullptr || aligned16(q.base, q.base_row, bytes_of(q.out_dtype)));
  return plan;
}

// The columns a thread owns of a warp's tile that starts at c: neighbours where they can be
// accessed as a pack, else every 32nd, so that a warp accesses neighbours either way.
template <int kCols, bool kPacks>
__device__ __forceinline__ int64_t owned(int64_t c, int lane, int v) {
  return kPacks ? c + lane * kCols + v : c + lane + 32 * v;
}

template <class T, bool kAligned>
__device__ __forceinline__ Pack<T> load_owned(const T* row, int64_t c, int lane, int64_t end) {
  if constexpr (kAligned) {
    return load16(row + owned<per16<T>, true>(c, lane, 0));
  } else {
    Pack<T> out;
#pragma unroll
    for (int v = 0; v < per16<T>; ++v) {
      const int64_t at = owned<per16<T>, false>(c, lane, v);
      out.v[v] = row[at < end ? at : end - 1];  // never out of the row; the sums of columns past
                                                // the end are dropped
    }
    return out;
  }
}

template <class Out, class Acc, int kCols, bool kPacks>
__device__ __forceinline__ void write_typed(const Aggregate& q, bool out_aligned, int64_t row,
                                            int64_t c, int lane, int64_t end, const Acc* sum) {
  Out* const out = static_cast<Out*>(q.out) + row * q.out_row;
  const Out* const base = q.base ? static_cast<const Out*>(q.base) + row * q.base_row : nullptr;
  constexpr int kBytes = kCols * static_cast<int>(sizeof(Out));
  if constexpr (kPacks && (kBytes == 8 || kBytes == 16)) {
    const int64_t at = owned<kCols, true>(c, lane, 0);
    if (out_aligned && at + kCols <= end) {
      Pack<Out, kCols> value;
      if (base) value = load_pack<kCols>(base + at);
#pragma unroll
      for (int v = 0; v < kCols; ++v)
        value.v[v] = convert<Out>(base ? convert<Acc>(value.v[v]) + sum[v] : sum[v]);
      if constexpr (sizeof(Out) == 2 && sizeof(Acc) == 8)
        store_pack_global_plain(out + at, value);
      else
        store_pack_global(out + at, value);
      return;
    }
  }
#pragma unroll
  for (int v = 0; v < kCols; ++v) {
    const int64_t at = owned<kCols, kPacks>(c, lane, v);
    if (at < end) out[at] = convert<Out>(base ? convert<Acc>(base[at]) + sum[v] : sum[v]);
  }
}

// `count` rows of sums. A result of the type of the updates is written from registers; any other
// goes through a rolled loop, whose sums lie in (cached) local memory: one copy of the code for
// each of the other types is worth more than their last few percent.
template <class T, class Acc, int kRows, int kCols, bool kPacks>
__device__ __forceinline__ void write(const Aggregate& q, bool out_aligned, int64_t row, int count,
                                      int64_t c, int lane, int64_t end,
                                      const Acc (&sum)[kRows][kCols]) {
  if (q.out_dtype == dtype_of<T>) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (r < count)
        write_typed<T, Acc, kCols, kPacks>(q, out_aligned, row + r, c, lane, end, sum[r]);
    return;
  }
#pragma unroll 1
  for (int r = 0; r < count; ++r) {
    if constexpr (!std::is_same_v<T, float>)
      if (q.out_dtype == Dtype::f32)
        write_typed<float, Acc, kCols, kPacks>(q, out_aligned, row + r, c, lane, end, sum[r]);
    if constexpr (!std::is_same_v<T, double>)
      if (q.out_dtype == Dtype::f64)
        write_typed<double, Acc, kCols, kPacks>(q, out_aligned, row + r, c, lane, end, sum[r]);
    if constexpr (!std::is_same_v<T, __half>)
      if (q.out_dtype == Dtype::f16)
        write_typed<__half, Acc, kCols, kPacks>(q, out_aligned, row + r, c, lane, end, sum[r]);
    if constexpr (!std::is_same_v<T, __nv_bfloat16>)
      if (q.out_dtype == Dtype::bf16)
        write_typed<__nv_bfloat16, Acc, kCols, kPacks>(q, out_aligned, row + r, c, lane, end,
                                                       sum[r]);
  }
}

// The weights of `rows` rows of the result from m0 on and of `count` updates from n0 on, times lr:
// weights[update][row], 0 past the last row.
template <class Acc>
__device__ __forceinline__ void load_weights(Acc* weights, const Aggregate& q, int64_t m0, int rows,
                                             int64_t n0, int count) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int row = warp; row < rows; row += kAggregateThreads / 32)
    for (int j = lane; j < count; j += 32)
      weights[j * rows + row] =
          m0 + row < q.m ? static_cast<Acc>(q.lr * q.weight[(m0 + row) * q.k + n0 + j]) : Acc(0);
}

template <class T, class Acc, int kRows, bool kAligned>
__global__ void __launch_bounds__(kAggregateThreads, 2)
    aggregate_dense(Aggregate q, AggregatePlan plan) {
  constexpr int kWide = per16<T>,
                kAhead = kRows == 1 ? 8 : 4;  // rows of updates on their way at a time
  PFLCORE_DYNAMIC_SHARED(shared);
  Acc* const weights = reinterpret_cast<Acc*>(shared);  // [chunk][rows]
  const int rows = plan.rows, warp = static_cast<int>(threadIdx.x) / 32,
            lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_m = warp % plan.warps_m, warp_c = warp / plan.warps_m;
  const Acc* const mine = weights + warp_m * kRows;
  const T* const updates = static_cast<const T*>(q.updates);
  const int64_t blocks_m =
      (q.m + rows - 1) / rows;  // blocks of rows are neighbours in the grid: they share the columns
  const int64_t m0 = blockIdx.x % blocks_m * rows, my_m = m0 + warp_m * kRows;
  const int64_t step = gridDim.x / blocks_m;
  bool loaded = false;
  for (int64_t tile = blockIdx.x / blocks_m; tile < plan.tiles; tile += step) {
    const int64_t c = plan.begin + (tile * plan.warps_c + warp_c) * 32 * kWide;
    const bool active =
        warp_m * kRows < rows && my_m < q.m && owned<kWide, kAligned>(c, lane, 0) < plan.end;
    Acc sum[kRows][kWide] = {};
    for (int64_t n0 = 0; n0 < q.n; n0 += plan.chunk) {
      const int count = static_cast<int>(q.n - n0 < plan.chunk ? q.n - n0 : plan.chunk);
      if (!(plan.resident && loaded)) {
        __syncthreads();  // nobody reads the weights before these any more
        load_weights(weights, q, m0, rows, n0, count);
        __syncthreads();
        loaded = true;
      }
      if (!active) continue;
      const T* from = updates + n0 * q.updates_row;
      for (int j = 0; j < count; j += kAhead, from += kAhead * q.updates_row) {
        Pack<T> u[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
          if (j + i < count)
            u[i] = load_owned<T, kAligned>(from + i * q.updates_row, c, lane, plan.end);
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
          if (j + i < count) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
              const Acc w = mine[(j + i) * rows + r];
#pragma unroll
              for (int v = 0; v < kWide; ++v) sum[r][v] += w * convert<Acc>(u[i].v[v]);
            }
          }
      }
    }
    if (active)
      write<T, Acc, kRows, kWide, kAligned>(
          q, plan.out_aligned, my_m, static_cast<int>(q.m - my_m < kRows ? q.m - my_m : kRows), c,
          lane, plan.end, sum);
  }
}

// ---- many rows ----
constexpr int kStages = 4, kStageBytes = 8 * 1024, kStagedRows = 16;
template <class Acc>
constexpr int staged_cols = 16 / static_cast<int>(sizeof(Acc));

struct StagedPlan {
  int64_t tiles;         // strips of columns
  int64_t blocks_m;      // blocks of rows
  int warps_m, warps_c;  // how the block's 8 warps are spread over rows and columns
  int rows;              // rows of the result a block does
  int row_log2;          // a strip's bytes of one row of updates
  int stage_rows;        // rows of updates staged at a time
  int access;      // bytes of updates copied at a time: 16, 8 or 4 as alignment allows, else one
                   // element
  int chunk;       // rows of updates whose weights are in shared memory at a time, a multiple of
                   // stage_rows
  bool resident;   // all of them: they are loaded once per block
  int64_t shared;  // bytes
};

template <class T, class Acc>
StagedPlan staged_plan(const Aggregate& q, int64_t shared) {
  StagedPlan plan{};
  plan.blocks_m = ceil_div(q.m, 8 * kStagedRows);
  const int64_t busy =
      ceil_div(ceil_div(q.m, plan.blocks_m), kStagedRows);  // warps that have rows to do
  plan.rows = static_cast<int>(busy) * kStagedRows;
  plan.blocks_m = ceil_div(q.m, plan.rows);
  plan.warps_m = 1;
  while (plan.warps_m < busy) plan.warps_m *= 2;
  plan.warps_c = 8 / plan.warps_m;
  const int64_t cols = static_cast<int64_t>(plan.warps_c) * 32 * staged_cols<Acc>;
  plan.tiles = ceil_div(q.p, cols);
  while ((int64_t{1} << plan.row_log2) < cols * static_cast<int64_t>(sizeof(T))) ++plan.row_log2;
  plan.stage_rows = kStageBytes >> plan.row_log2;
  plan.access = 16;
  while (plan.access > static_cast<int>(sizeof(T)) &&
         (reinterpret_cast<uintptr_t>(q.updates) % plan.access ||
          q.updates_row * static_cast<int64_t>(sizeof(T)) % plan.access))
    plan.access /= 2;
  const int64_t weights = plan.rows * static_cast<int64_t>(sizeof(Acc));
  const int64_t room = (shared - kStages * kStageBytes) / weights,
                needed = ceil_div(q.n, plan.stage_rows) * plan.stage_rows;
  plan.resident = needed <= room;
  plan.chunk = static_cast<int>(plan.resident ? needed : room / plan.stage_rows * plan.stage_rows);
  plan.shared = kStages * kStageBytes + plan.chunk * weights;
  return plan;
}

// Copies `rows` rows of a strip, kBytes at a time, zeros where it reaches past the end of a row.
template <int kBytes, class T>
__device__ __forceinline__ void stage_rows(unsigned char* to, const T* from, int64_t row_stride,
                                           int rows, int row_log2, int64_t left) {
  constexpr int kCount = kBytes / static_cast<int>(sizeof(T));
  constexpr int kBytesLog2 = kBytes == 16 ? 4 : kBytes == 8 ? 3 : kBytes == 4 ? 2 : 1;
  const int per_row_log2 = row_log2 - kBytesLog2;
  for (int e = static_cast<int>(threadIdx.x); e < rows << per_row_log2; e += kAggregateThreads) {
    const int row = e >> per_row_log2, i = (e & ((1 << per_row_log2) - 1)) * kCount;
    const int valid = i + kCount <= left ? kBytes
                      : i < left         ? static_cast<int>(left - i) * static_cast<int>(sizeof(T))
                                         : 0;
    unsigned char* const dst = to + (row << row_log2) + i * static_cast<int>(sizeof(T));
    const T* const src = from + row * row_stride + (valid ? i : 0);
    if constexpr (kBytes >= 4) {
      copy_async<kBytes>(dst, src, valid);
    } else {
      *reinterpret_cast<T*>(dst) = valid ? *src : convert<T>(0.0f);
    }
  }
}

// kPacks: a thread's columns are neighbours, as the result can be written in packs; else every
// 32nd.
template <class T, class Acc, bool kPacks>
__global__ void __launch_bounds__(kAggregateThreads, 2)
    aggregate_staged(Aggregate q, StagedPlan plan) {
  constexpr int kCols = staged_cols<Acc>, kRows = kStagedRows;
  PFLCORE_DYNAMIC_SHARED(shared);
  Acc* const weights = reinterpret_cast<Acc*>(shared + kStages * kStageBytes);  // [chunk][rows]
  const int rows = plan.rows, warp = static_cast<int>(threadIdx.x) / 32,
            lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_m = warp % plan.warps_m, warp_c = warp / plan.warps_m, mine = warp_c * 32 * kCols;
  const int64_t cols = static_cast<int64_t>(plan.warps_c) * 32 * kCols;
  const int64_t m0 = blockIdx.x % plan.blocks_m * rows,
                my_m =
                    m0 + warp_m * kRows;  // blocks of rows are neighbours: they share the columns
  const int64_t first = blockIdx.x / plan.blocks_m, step = gridDim.x / plan.blocks_m;

  int64_t fill_tile = first, fill_row = 0;  // what is copied next, and where to
  int fill_slot = 0;
  const auto fill = [&] {
    if (fill_tile < plan.tiles) {
      const int count =
          static_cast<int>(q.n - fill_row < plan.stage_rows ? q.n - fill_row : plan.stage_rows);
      unsigned char* const to = shared + fill_slot * kStageBytes;
      const T* const from =
          static_cast<const T*>(q.updates) + fill_row * q.updates_row + fill_tile * cols;
      const int64_t left = q.p - fill_tile * cols;
      if (plan.access == 16)
        stage_rows<16>(to, from, q.updates_row, count, plan.row_log2, left);
      else if (plan.access == 8)
        stage_rows<8>(to, from, q.updates_row, count, plan.row_log2, left);
      else if (sizeof(T) <= 4 && plan.access == 4)
        stage_rows<(sizeof(T) <= 4 ? 4 : 8)>(to, from, q.updates_row, count, plan.row_log2, left);
      else
        stage_rows<static_cast<int>(sizeof(T))>(to, from, q.updates_row, count, plan.row_log2,
                                                left);
      fill_row += plan.stage_rows;
      if (fill_row >= q.n) fill_row = 0, fill_tile += step;
    }
    copy_commit();  // a group for every stage, empty ones too, so that the count of groups to wait
                    // for is constant
    fill_slot = (fill_slot + 1) % kStages;
  };
  for (int k = 0; k < kStages - 1; ++k) fill();

  bool loaded = false;
  int slot = 0;
  for (int64_t tile = first; tile < plan.tiles; tile += step) {
    const int64_t c = tile * cols + mine;
    const bool active = warp_m * kRows < rows && my_m < q.m && c < q.p;
    Acc sum[kRows][kCols] = {};
    int at = plan.chunk;  // within the weights that are there
    for (int64_t n0 = 0; n0 < q.n; n0 += plan.stage_rows, at += plan.stage_rows) {
      if (at == plan.chunk) {
        at = 0;
        if (!(plan.resident && loaded)) {
          __syncthreads();  // nobody reads the weights before these any more
          load_weights(weights, q, m0, rows, n0,
                       static_cast<int>(q.n - n0 < plan.chunk ? q.n - n0 : plan.chunk));
          loaded = true;
        }
      }
      copy_wait<kStages - 2>();
      __syncthreads();  // the stage and the weights are there for all, and nobody reads the slot
                        // any more that is filled next
      fill();
      const T* const strip = reinterpret_cast<const T*>(shared + slot * kStageBytes) + mine;
      slot = (slot + 1) % kStages;
      if (!active) continue;
      const int count = static_cast<int>(q.n - n0 < plan.stage_rows ? q.n - n0 : plan.stage_rows);
      const Acc* w = weights + at * rows + warp_m * kRows;
#pragma unroll 2
      for (int j = 0; j < count; ++j, w += rows) {
        const T* const from = strip + j * cols;
        Acc u[kCols];
        if constexpr (kPacks) {
          const Pack<T, kCols> pack = load_pack<kCols>(from + lane * kCols);
#pragma unroll
          for (int v = 0; v < kCols; ++v) u[v] = convert<Acc>(pack.v[v]);
        } else {
#pragma unroll
          for (int v = 0; v < kCols; ++v) u[v] = convert<Acc>(from[lane + 32 * v]);
        }
#pragma unroll
        for (int r = 0; r < kRows; r += kCols) {
          const Pack<Acc> some = load16(w + r);
#pragma unroll
          for (int i = 0; i < kCols; ++i)
#pragma unroll
            for (int v = 0; v < kCols; ++v) sum[r + i][v] += some.v[i] * u[v];
        }
      }
    }
    if (active)
      write<T, Acc, kRows, kCols, kPacks>(q, kPacks, my_m,
                                          static_cast<int>(q.m - my_m < kRows ? q.m - my_m : kRows),
                                          c, lane, q.p, sum);
  }
}

template <class T, class Acc, bool kAligned>
__global__ void __launch_bounds__(kAggregateThreads, 2)
    aggregate_sparse(Aggregate q, AggregatePlan plan) {
  constexpr int kWide = per16<T>, kAhead = 4;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_m = warp % plan.warps_m, warp_c = warp / plan.warps_m;
  const T* const updates = static_cast<const T*>(q.updates);
  for (int64_t tile = blockIdx.x; tile < plan.tiles; tile += gridDim.x) {
    const int64_t c = plan.begin + (tile * plan.warps_c + warp_c) * 32 * kWide;
    const bool active = owned<kWide, kAligned>(c, lane, 0) < plan.end;
    for (int64_t row = warp_m; row < q.m; row += plan.warps_m) {
      Acc sum[1][kWide] = {};
      for (int64_t k0 = 0; k0 < q.k;
           k0 += 32) {  // each lane fetches one weight and its index, all lanes use all of them
        const int count = static_cast<int>(q.k - k0 < 32 ? q.k - k0 : 32);
        const double weight = lane < count ? q.weight[row * q.k + k0 + lane] : 0.0;
        const Acc w = static_cast<Acc>(
            q.lr * weight);  // what counts is this: it may be 0 where the weight is not
        const int64_t at = w != 0 ? q.index[row * q.k + k0 + lane] : 0;
        const bool inside = at >= 0 && at < q.n;
        const unsigned used = __ballot_sync(0xffffffffu, w != 0 && inside);
        if (__ballot_sync(0xffffffffu, w != 0 && !inside)) {
#pragma unroll
          for (int v = 0; v < kWide; ++v) sum[0][v] = static_cast<Acc>(NAN);
        }
        for (int j = 0; j < count; j += kAhead) {
          Pack<T> u[kAhead];
          Acc wj[kAhead];
#pragma unroll
          for (int i = 0; i < kAhead; ++i) {
            wj[i] = __shfl_sync(0xffffffffu, w, j + i);
            const int64_t from = __shfl_sync(0xffffffffu, at, j + i);
            if (active && (used >> (j + i) & 1))
              u[i] = load_owned<T, kAligned>(updates + from * q.updates_row, c, lane, plan.end);
          }
#pragma unroll
          for (int i = 0; i < kAhead; ++i)
            if (active && (used >> (j + i) & 1)) {
#pragma unroll
              for (int v = 0; v < kWide; ++v) sum[0][v] += wj[i] * convert<Acc>(u[i].v[v]);
            }
        }
      }
      if (active)
        write<T, Acc, 1, kWide, kAligned>(q, plan.out_aligned, row, 1, c, lane, plan.end, sum);
    }
  }
}

template <class T, class Acc, int kRows, bool kAligned>
void aggregate_dense_launch(const Aggregate& q, int64_t begin, int64_t end, cudaStream_t stream) {
  const AggregatePlan plan = aggregate_plan<T, Acc, kRows>(q, begin, end);
  const int64_t blocks_m = ceil_div(q.m, plan.rows), walkers = ceil_div(kAggregateBlocks, blocks_m);
  const unsigned grid =
      static_cast<unsigned>(blocks_m * (plan.tiles < walkers ? plan.tiles : walkers));
  auto* const kernel = &aggregate_dense<T, Acc, kRows, kAligned>;
  PFLCORE_LAUNCH(kernel, grid, kAggregateThreads,
                 plan.chunk * plan.rows * static_cast<int64_t>(sizeof(Acc)), stream, q, plan);
}

template <class T, class Acc>
void aggregate_staged_launch(const Aggregate& q, cudaStream_t stream) {
  const int64_t bytes = bytes_of(q.out_dtype);
  const bool packs = bytes * staged_cols<Acc> <= 16 && aligned16(q.out, q.out_row, bytes) &&
                     (q.base == nullptr || aligned16(q.base, q.base_row, bytes));
  auto* const kernel = packs ? &aggregate_staged<T, Acc, true> : &aggregate_staged<T, Acc, false>;
  const StagedPlan plan =
      staged_plan<T, Acc>(q, shared_for(reinterpret_cast<const void*>(kernel), kStagedShared));
  // as many blocks as the card holds at a time: each loads its weights once
  const int64_t walkers = ceil_div(2 * multiprocessors(), plan.blocks_m);
  const unsigned grid =
      static_cast<unsigned>(plan.blocks_m * (plan.tiles < walkers ? plan.tiles : walkers));
  PFLCORE_LAUNCH(kernel, grid, kAggregateThreads, plan.shared, stream, q, plan);
}

template <class T, class Acc, bool kAligned>
void aggregate_columns(const Aggregate& q, int64_t begin, int64_t end, cudaStream_t stream) {
  if (begin == end) return;
  constexpr bool kCommon =
      sizeof(Acc) == 4 ||
      sizeof(T) == 8;  // `precise` on narrower types has one kernel for any number of rows
  if (q.sparse) {
    const AggregatePlan plan = aggregate_plan<T, Acc, 1>(q, begin, end);
    auto* const kernel = &aggregate_sparse<T, Acc, kAligned>;
    PFLCORE_LAUNCH(kernel, grid_for(plan.tiles, 4 * kAggregateBlocks), kAggregateThreads, 0, stream,
                   q, plan);
  } else if (kCommon && q.m == 1) {
    aggregate_dense_launch<T, Acc, kCommon ? 1 : aggregate_rows<T, Acc>, kAligned>(q, begin, end,
                                                                                   stream);
  } else {
    aggregate_dense_launch<T, Acc, aggregate_rows<T, Acc>, kAligned>(q, begin, end, stream);
  }
}

template <class T, class Acc>
void aggregate_split(const Aggregate& q, cudaStream_t stream) {
  if constexpr (sizeof(Acc) == 4 || sizeof(T) == 8)
    if (!q.sparse && q.m > aggregate_rows<float, float> && q.n > 0)
      return aggregate_staged_launch<T, Acc>(q, stream);
  const int64_t whole =
      aligned16(q.updates, q.updates_row, sizeof(T)) ? q.p / per16<T> * per16<T> : 0;
  aggregate_columns<T, Acc, true>(q, 0, whole, stream);
  aggregate_columns<T, Acc, false>(q, whole, q.p, stream);
}

template <class T>
void aggregate_in(const Aggregate& q, cudaStream_t stream) {
  if (sizeof(T) == 8 || q.wide) return aggregate_split<T, double>(q, stream);
  if constexpr (sizeof(T) < 8) return aggregate_split<T, float>(q, stream);
}

inline void aggregate(const Aggregate& q, cudaStream_t stream) {
  if (q.m == 0 || q.p == 0) return;
  switch (q.in) {
    case Dtype::f32:
      return aggregate_in<float>(q, stream);
    case Dtype::f64:
      return aggregate_in<double>(q, stream);
    case Dtype::f16:
      return aggregate_in<__half>(q, stream);
    case Dtype::bf16:
      return aggregate_in<__nv_bfloat16>(q, stream);
  }
}

}  // namespace pflcore::cuda
