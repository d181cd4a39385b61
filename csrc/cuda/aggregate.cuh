// out = base + lr * (weight @ updates), dense or by a sparse gather. Knows nothing of torch.
//
// Each element of a result is one chain of fma over the rows of updates, in their order. So a row
// of the result has the same bits in every kernel, whatever other results the call makes, and
// whatever the alignment. Tensor cores would break this property. Three products of TF32 parts make
// a hundred results 1.4 times as fast, but few results gain nothing. The bits of a row would then
// depend on the number of results, and values below 1e-30 or beyond float32 would still need the
// chain of fma.
//
// `aggregate_plan` takes one of five kernels.
// held: few rows of updates, few results. All loads of a thread are on their way at a time, to
//   registers.
// ringed: one to four results of more rows, such as the average of all clients. Each thread copies
//   its columns to a ring in shared memory that is its own, many rows ahead, so that no warp waits
//   for another, and memory is the limit.
// streamed: any number of rows and results. The warps of a block share a strip of columns, whose
//   rows come through a ring in shared memory. A warp makes 20 results (4 where `precise` widens
//   the rows) x 16 bytes of sums a lane, so that for many results arithmetic is the limit, not
//   memory.
// tiled: by index. All rows that are used come to shared memory for a tile of columns; every result
//   is made from there. Two buffers: the next tile is on its way meanwhile.
// direct: by index, where a tile does not fit. Rows come to registers; one that many results use is
//   found in L1.
//
// A place outside [0, n) makes its row of the result NaN: a kernel cannot raise an error without
// stopping the stream.
#pragma once
#include "common.cuh"

namespace pflcore::cuda {

enum class AggregateWay { held, ringed, streamed, tiled, direct };

// The facts on a card that a plan depends on.
struct AggregateCard {
  int64_t multiprocessors;
  int64_t block_shared;  // bytes of shared memory that a block may ask for
  int64_t shared;        // bytes of shared memory of a multiprocessor
  bool copies;           // copies to shared memory run during the arithmetic (sm_80 and newer)
};

struct AggregatePlan {
  AggregateWay way;
  bool many;           // held, streamed: a warp makes kManyResults, not kFewResults
  int threads;         // of a block
  int results;         // of a block
  int64_t blocks_m;    // blocks side by side that make all results of the same columns
  int tile_cols;       // columns of a block at a time, a power of two
  int single_cols;     // held, direct: the same where packs of columns are not aligned
  int64_t walkers;     // the largest number of blocks that walk over the tiles
  int64_t shared;      // bytes of a block
  int access;          // bytes of updates that are copied to shared memory at a time
  int chunk;           // ringed, streamed: rows whose weights are in shared memory at a time
  bool resident;       // ringed, streamed: these are all rows, loaded once by each block
  int buffer_rows;     // tiled: rows of updates that a buffer holds
  int warps_m;         // direct: warps that make different results of the same columns
  int64_t begin, end;  // columns of a launch, by `set_columns`
  int64_t tiles, grid;
  bool out_aligned;  // the result, and the base, can be accessed in packs
};

constexpr int kFewResults = 4, kManyResults = 20;  // of a thread
constexpr int kHeldRows = 20;                      // rows of updates in registers at a time
constexpr int kHeldThreads = 128;
constexpr int kRingThreads = 128, kRingBlocks = 6;  // of a block, and blocks of a multiprocessor
constexpr int kRingRows = 16;                       // a power of two; all but one on their way
constexpr int kRingBytes = kRingRows * kRingThreads * 16;
constexpr int kStages = 4, kStageBytes = 5 * 1024;  // the ring of a streamed block
constexpr int kStreamWarps = 5;                     // the largest number that share a ring
constexpr int kManyWarps = 16, kFewWarps = 28;      // of a multiprocessor: its registers hold them
constexpr int kTileThreads = 512, kTileWarps = 32;  // at most, of a block and of a multiprocessor
constexpr int kDirectThreads = 256;
constexpr int64_t kDirectBlocks = 16 * 1024;
constexpr int64_t kStreamShared = 74 * 1024;  // bytes: three such blocks fit the 228 KiB of sm_90
constexpr int64_t kBlockShared = 1024;        // bytes that a card keeps of each block
constexpr int64_t kEnoughWarps = 16;          // of a multiprocessor, to hide memory's latency

// `precise` on narrower types: these have one kernel, dense, for any number of results.
template <class T, class Acc>
constexpr bool is_widened = sizeof(Acc) > 4 && sizeof(T) < sizeof(Acc);

// A thread's share of a row of sums is 16 bytes.
template <class Acc>
constexpr int sum_cols = 16 / static_cast<int>(sizeof(Acc));

// Neighbours that a thread moves at a time between memory and these: 8 bytes of T.
template <class T, class Acc>
constexpr int sum_pack = is_widened<T, Acc> ? 1 : 8 / static_cast<int>(sizeof(T));

template <class Acc>
struct AggregateEntry {
  Acc weight;
  int at;  // where the row begins in a buffer, in elements
};

// ---- plans ----
inline int64_t sum_bytes(const Aggregate& q) { return q.wide || q.in == Dtype::f64 ? 8 : 4; }

inline bool is_widened_input(const Aggregate& q) {
  return sum_bytes(q) > 4 && bytes_of(q.in) < sum_bytes(q);
}

inline bool is_aligned(const void* first, int64_t row_bytes, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(first) % static_cast<uintptr_t>(bytes) == 0 &&
         row_bytes % bytes == 0;
}

// May packs of `count` elements of the result, and of the base, be accessed at once?
inline bool packs_fit(const Aggregate& q, int count) {
  const int64_t bytes = bytes_of(q.out_dtype), pack = count * bytes;
  return (pack == 8 || pack == 16) && is_aligned(q.out, q.out_row * bytes, pack) &&
         (q.base == nullptr || is_aligned(q.base, q.base_row * bytes, pack));
}

inline int copy_bytes(const Aggregate& q) {
  const int64_t bytes = bytes_of(q.in);
  int64_t access = 16;
  while (access > bytes && !is_aligned(q.updates, q.updates_row * bytes, access)) access /= 2;
  return static_cast<int>(access);
}

// Blocks of `shared` bytes and `warps` warps that a multiprocessor holds at a time, where its
// registers hold `most_warps`.
inline int64_t resident_blocks(const AggregateCard& card, int64_t shared, int64_t warps,
                               int64_t most_warps) {
  int64_t blocks = card.shared / (shared + kBlockShared);
  if (most_warps / warps < blocks) blocks = most_warps / warps;
  constexpr int64_t most_blocks = 16;  // of every card
  if (most_blocks < blocks) blocks = most_blocks;
  return blocks < 1 ? 1 : blocks;
}

// All loads of a thread are on their way at a time. Cards that cannot copy during the arithmetic
// take more rows in turns.
inline bool plan_held(AggregatePlan& plan, const Aggregate& q, const AggregateCard& card) {
  const int64_t element = bytes_of(q.in), sum = sum_bytes(q);
  if (is_widened_input(q)) return false;
  const int64_t most = element == sum ? kManyResults : kFewResults;
  if (q.m > most || (q.n > kHeldRows && card.copies)) return false;
  plan.many = q.m > kFewResults;
  plan.results = plan.many ? kManyResults : kFewResults;
  plan.shared = q.n * plan.results * sum;
  if (plan.shared > kAlwaysShared) return false;
  plan.way = AggregateWay::held;
  plan.threads = kHeldThreads;
  plan.blocks_m = 1;
  plan.tile_cols = static_cast<int>(kHeldThreads * 8 / element);
  plan.single_cols = kHeldThreads * (element < 8 ? 2 : 1);
  plan.walkers = INT64_MAX;
  return true;
}

// The weights of a block lie behind its ring of `ring_bytes`: those of all rows where they fit,
// else of as many whole stages of `stage_rows` as fit.
inline void plan_weights(AggregatePlan& plan, const Aggregate& q, const AggregateCard& card,
                         int64_t ring_bytes, int64_t stage_rows) {
  const int64_t most = card.block_shared < kStreamShared ? card.block_shared : kStreamShared;
  const int64_t row_bytes = plan.results * sum_bytes(q);
  const int64_t room = (most - ring_bytes) / row_bytes;
  const int64_t needed = ceil_div(q.n, stage_rows) * stage_rows;
  plan.resident = needed <= room;
  plan.chunk = static_cast<int>(plan.resident ? needed : room / stage_rows * stage_rows);
  plan.shared = ring_bytes + plan.chunk * row_bytes;
}

inline bool plan_ringed(AggregatePlan& plan, const Aggregate& q, const AggregateCard& card) {
  if (q.m > kFewResults || is_widened_input(q)) return false;
  const int64_t element = bytes_of(q.in);
  plan.way = AggregateWay::ringed;
  plan.threads = kRingThreads;
  plan.results = kFewResults;
  plan.blocks_m = 1;
  plan.tile_cols = static_cast<int>(kRingThreads * 16 / element);
  plan.access = copy_bytes(q);
  while (q.p * element % plan.access != 0) plan.access /= 2;  // no copy leaves a row
  plan_weights(plan, q, card, kRingBytes, 1);
  constexpr int64_t warps = kRingThreads / 32;
  plan.walkers =
      resident_blocks(card, plan.shared, warps, kRingBlocks * warps) * card.multiprocessors;
  return true;
}

inline void plan_streamed(AggregatePlan& plan, const Aggregate& q, const AggregateCard& card) {
  const int64_t element = bytes_of(q.in), sum = sum_bytes(q);
  plan.way = AggregateWay::streamed;
  plan.many = !is_widened_input(q);
  const int64_t warp_results = plan.many ? kManyResults : kFewResults;
  const int64_t groups = ceil_div(q.m, warp_results);
  plan.blocks_m = ceil_div(groups, kStreamWarps);
  const int64_t warps = ceil_div(groups, plan.blocks_m);
  plan.threads = static_cast<int>(32 * warps);
  plan.results = static_cast<int>(warps * warp_results);
  plan.tile_cols = static_cast<int>(32 * 16 / sum);
  plan.access = copy_bytes(q);

  plan_weights(plan, q, card, kStages * kStageBytes, kStageBytes / (plan.tile_cols * element));
  // as many blocks as the card holds at a time: each loads its weights once
  const int64_t blocks =
      resident_blocks(card, plan.shared, warps, plan.many ? kManyWarps : kFewWarps);
  plan.walkers = ceil_div(blocks * card.multiprocessors, plan.blocks_m);
}

// Bytes of a block whose tiles have `cols` columns: two buffers, whose first row is zeros, the
// entries, the rows that are used, and the place of every row.
inline int64_t tile_shared(const AggregatePlan& plan, const Aggregate& q, int64_t cols) {
  const int64_t entry =
      sum_bytes(q) == 8 ? sizeof(AggregateEntry<double>) : sizeof(AggregateEntry<float>);
  const int64_t buffers = 2 * (plan.buffer_rows + int64_t{1}) * cols * bytes_of(q.in);
  return buffers + q.m * q.k * entry + (plan.buffer_rows + q.n + 1) * int64_t{sizeof(int)};
}

inline bool plan_tiled(AggregatePlan& plan, const Aggregate& q, const AggregateCard& card) {
  if (!card.copies || is_widened_input(q)) return false;
  constexpr int64_t most_entries = 1 << 20;  // far more than fit
  if (q.n > most_entries || q.k > most_entries || q.m > most_entries / (q.k < 1 ? 1 : q.k))
    return false;
  const int64_t entries = q.m * q.k;
  plan.buffer_rows = static_cast<int>(q.n < entries ? q.n : entries);
  const auto tile_threads = [](int64_t cols) { return cols > 128 ? kTileThreads : 256; };
  const auto tile_blocks = [&](int64_t cols) {
    return resident_blocks(card, tile_shared(plan, q, cols), tile_threads(cols) / 32, kTileWarps);
  };
  const auto enough_warps = [&](int64_t cols) {
    return tile_blocks(cols) * tile_threads(cols) / 32 >= kEnoughWarps;
  };
  // 128 columns; more where a multiprocessor holds few blocks of them, fewer where it holds none
  int64_t cols = 128;
  if (tile_blocks(128) <= 2 && tile_shared(plan, q, 256) <= card.block_shared) cols = 256;
  while (cols > 32 && (tile_shared(plan, q, cols) > card.block_shared || !enough_warps(cols)))
    cols /= 2;
  plan.shared = tile_shared(plan, q, cols);
  if (plan.shared > card.block_shared) return false;
  plan.way = AggregateWay::tiled;
  plan.threads = tile_threads(cols);
  plan.results = 1;
  plan.blocks_m = 1;
  plan.tile_cols = static_cast<int>(cols);
  plan.access = copy_bytes(q);
  plan.walkers = tile_blocks(cols) * card.multiprocessors;
  return true;
}

inline void plan_direct(AggregatePlan& plan, const Aggregate& q) {
  plan.way = AggregateWay::direct;
  plan.threads = kDirectThreads;
  plan.warps_m = 1;
  while (plan.warps_m < kDirectThreads / 32 && plan.warps_m < q.m) plan.warps_m *= 2;
  plan.results = 1;
  plan.blocks_m = 1;
  plan.tile_cols = static_cast<int>(kDirectThreads / plan.warps_m * 16 / bytes_of(q.in));
  plan.single_cols = plan.tile_cols;
  plan.walkers = kDirectBlocks;
  plan.shared = 0;
}

inline AggregatePlan aggregate_plan(const Aggregate& q, const AggregateCard& card) {
  AggregatePlan plan{};
  if (q.sparse) {
    if (!plan_tiled(plan, q, card)) plan_direct(plan, q);
  } else {
    if (!plan_held(plan, q, card) && !plan_ringed(plan, q, card)) plan_streamed(plan, q, card);
  }
  return plan;
}

// The columns of one launch: whole packs of aligned rows, or any columns one by one.
inline void set_columns(AggregatePlan& plan, int64_t begin, int64_t end) {
  plan.begin = begin, plan.end = end;
  plan.tiles = ceil_div(end - begin, plan.tile_cols);
  plan.grid = plan.blocks_m * (plan.tiles < plan.walkers ? plan.tiles : plan.walkers);
}

inline AggregateCard aggregate_card() {
#ifdef PFLCORE_CUDA_ON_CPU
  const cuda_on_cpu::Device& d = cuda_on_cpu::device();
  return {multiprocessors(), d.shared_most, d.shared_most + kBlockShared, d.copies};
#else
  AggregateCard card{multiprocessors(), kAlwaysShared, kAlwaysShared + kBlockShared, false};
  int device = 0, block = 0, all = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
          cudaSuccess ||
      cudaDeviceGetAttribute(&all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device) !=
          cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess)
    return card;
  if (block > card.block_shared) card.block_shared = block;
  if (all > card.shared) card.shared = all;
  card.copies = major >= 8;
  return card;
#endif
}

// ---- columns of a thread ----
// The offset of a lane's column v from its first one, for `lanes` side by side. Columns come in
// packs of neighbours, so that lanes that are neighbours access neighbours.
template <int kPack>
__device__ __forceinline__ int column_offset(int lanes, int v) {
  return v / kPack * (lanes * kPack) + v % kPack;
}

// One access where it can be one; else one by one.
template <int kPack, class T>
__device__ __forceinline__ Pack<T, kPack> load_neighbours(const T* p) {
  if constexpr (kPack > 1) {
    return load_pack<kPack>(p);
  } else {
    return {{*p}};
  }
}

// ---- results ----
// The sums of one row to `out`, the lane's first column, on `base`; `left` columns are left there.
template <class Out, class Acc, int kCols, int kPack, bool kBase>
__device__ __forceinline__ void write_row(Out* out, const Out* base, bool packs, int64_t left,
                                          int lanes, const Acc* sum) {
  constexpr int kBytes = kPack * static_cast<int>(sizeof(Out));
  if constexpr (kPack > 1 && (kBytes == 8 || kBytes == 16)) {
    if (packs) {
#pragma unroll
      for (int v0 = 0; v0 < kCols; v0 += kPack) {
        const int at = column_offset<kPack>(lanes, v0);
        Pack<Out, kPack> value;
        if constexpr (kBase) value = load_pack<kPack>(base + at);
#pragma unroll
        for (int v = 0; v < kPack; ++v)
          value.v[v] = convert<Out>(kBase ? convert<Acc>(value.v[v]) + sum[v0 + v] : sum[v0 + v]);
        if constexpr (sizeof(Out) == 2 && sizeof(Acc) == 8)
          store_pack_global_plain(out + at, value);
        else
          store_pack_global(out + at, value);
      }
      return;
    }
  }
#pragma unroll
  for (int v = 0; v < kCols; ++v) {
    const int at = column_offset<kPack>(lanes, v);
    if (at < left) out[at] = convert<Out>(kBase ? convert<Acc>(base[at]) + sum[v] : sum[v]);
  }
}

// `count` rows of sums from `row` on, of the columns of a lane, the first of which is c. Pointers
// walk: kRows places, kept from tile to tile, would be more than the registers hold.
template <class Out, class Acc, int kRows, int kCols, int kPack, bool kUnrolled>
__device__ __forceinline__ void write_rows_as(const Aggregate& q, const AggregatePlan& plan,
                                              int64_t row, int count, int64_t c, int lanes,
                                              const Acc (&sum)[kRows][kCols]) {
  const int64_t left = plan.end - c;
  const bool packs = plan.out_aligned && column_offset<kPack>(lanes, kCols - 1) < left;
  Out* out = static_cast<Out*>(q.out) + row * q.out_row + c;
  if (q.base == nullptr) {
#pragma unroll(kUnrolled ? kRows : 1)
    for (int r = 0; r < kRows; ++r, out += q.out_row)
      if (r < count)
        write_row<Out, Acc, kCols, kPack, false>(out, nullptr, packs, left, lanes, sum[r]);
    return;
  }
  const Out* base = static_cast<const Out*>(q.base) + row * q.base_row + c;
#pragma unroll(kUnrolled ? kRows : 1)
  for (int r = 0; r < kRows; ++r, out += q.out_row, base += q.base_row)
    if (r < count) write_row<Out, Acc, kCols, kPack, true>(out, base, packs, left, lanes, sum[r]);
}

// A result of the type of the updates is written from registers. Any other goes through a rolled
// loop over a copy in (cached) local memory: one copy of the code for each of the other types is
// worth more than their last few percent.
template <class T, class Acc, int kRows, int kCols, int kPack>
__device__ __forceinline__ void write_rows(const Aggregate& q, const AggregatePlan& plan,
                                           int64_t row, int count, int64_t c, int lanes,
                                           const Acc (&sum)[kRows][kCols]) {
  if (q.out_dtype == dtype_of<T>)
    return write_rows_as<T, Acc, kRows, kCols, kPack, true>(q, plan, row, count, c, lanes, sum);
  Acc kept[kRows][kCols];
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int v = 0; v < kCols; ++v) kept[r][v] = sum[r][v];
  const auto write_as = [&](auto zero) {
    using Out = decltype(zero);
    if constexpr (!std::is_same_v<T, Out>)
      write_rows_as<Out, Acc, kRows, kCols, kPack, false>(q, plan, row, count, c, lanes, kept);
  };
  if (q.out_dtype == Dtype::f32) return write_as(float{});
  if (q.out_dtype == Dtype::f64) return write_as(double{});
  if (q.out_dtype == Dtype::f16) return write_as(__half{});
  write_as(__nv_bfloat16{});
}

// ---- dense ----
// The weights of `results` results from m0 on and of `count` updates from n0 on, times lr:
// weights[update][result], 0 past the last result. Several loads are on their way at a time.
template <class Acc, int kUnroll>
__device__ __forceinline__ void load_weights(Acc* weights, const Aggregate& q, int64_t m0,
                                             int results, int64_t n0, int count) {
  if (count == 0) return;
  const int step = static_cast<int>(blockDim.x), down = step / count, right = step % count;
  int row = static_cast<int>(threadIdx.x) / count, j = static_cast<int>(threadIdx.x) % count;
#pragma unroll(kUnroll)
  for (int e = static_cast<int>(threadIdx.x); e < results * count; e += step) {
    weights[j * results + row] =
        m0 + row < q.m ? static_cast<Acc>(q.lr * q.weight[(m0 + row) * q.k + n0 + j]) : Acc(0);
    row += down, j += right;
    if (j >= count) j -= count, ++row;
  }
}

// One row of updates more in all sums; the weights lie on a 16-byte boundary.
template <class Acc, int kRows, int kCols>
__device__ __forceinline__ void add_row(Acc (&sum)[kRows][kCols], const Acc* weights,
                                        const Acc (&u)[kCols]) {
  constexpr int kWide = per16<Acc>;
  static_assert(kRows % kWide == 0, "whole accesses");
#pragma unroll
  for (int r = 0; r < kRows; r += kWide) {
    const Pack<Acc> some = load16(weights + r);
#pragma unroll
    for (int i = 0; i < kWide; ++i)
#pragma unroll
      for (int v = 0; v < kCols; ++v) sum[r + i][v] += some.v[i] * u[v];
  }
}

// The part of a row that a thread holds: whole words, as elements of 2 bytes would take a register
// each.
template <class T, int kPack>
using HeldPiece = std::conditional_t<(kPack > 1), Pack<unsigned, 2>, Pack<T, 1>>;

template <class T, class Acc, int kRows, int kPack>
__global__ void __launch_bounds__(kHeldThreads, kRows > kFewResults ? 4 : 6)
    aggregate_held(Aggregate q, AggregatePlan plan) {
  // 8 bytes of a row; one by one, narrow types would take more registers than there are
  constexpr int kCols = kPack > 1 ? kPack : sizeof(T) < 8 ? 2 : 1, kPieces = kCols / kPack;
  PFLCORE_DYNAMIC_SHARED(shared);
  Acc* const weights = reinterpret_cast<Acc*>(shared);  // [n][kRows]
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t c = plan.begin +
                    (static_cast<int64_t>(blockIdx.x) * (kHeldThreads / 32) + warp) * (32 * kCols) +
                    lane * kPack;
  const T* from[kPieces];
#pragma unroll
  for (int x = 0; x < kPieces; ++x) {
    const int64_t at = c + column_offset<kPack>(32, x * kPack);
    // never out of the row; the sums of columns past the end are dropped
    from[x] = static_cast<const T*>(q.updates) + (at < plan.end ? at : plan.end - kPack);
  }
  Acc sum[kRows][kCols] = {};
  for (int n0 = 0; n0 < q.n; n0 += kHeldRows) {
    HeldPiece<T, kPack> rows[kHeldRows][kPieces];
#pragma unroll
    for (int i = 0; i < kHeldRows; ++i)
      if (n0 + i < q.n) {
#pragma unroll
        for (int x = 0; x < kPieces; ++x) {
          if constexpr (kPack > 1)
            rows[i][x] = load_pack<2>(reinterpret_cast<const unsigned*>(from[x]));
          else
            rows[i][x] = {{*from[x]}};
          from[x] += q.updates_row;
        }
      }
    if (n0 == 0) {
      load_weights<Acc, 1>(weights, q, 0, kRows, 0, static_cast<int>(q.n));
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kHeldRows; ++i)
      if (n0 + i < q.n) {
        Acc u[kCols];
#pragma unroll
        for (int x = 0; x < kPieces; ++x) {
          Pack<T, kPack> piece;
          memcpy(&piece, &rows[i][x], sizeof piece);
#pragma unroll
          for (int v = 0; v < kPack; ++v) u[x * kPack + v] = convert<Acc>(piece.v[v]);
        }
        add_row(sum, weights + (n0 + i) * kRows, u);
      }
  }
  write_rows<T, Acc, kRows, kCols, kPack>(q, plan, 0, static_cast<int>(q.m), c, 32, sum);
}

// A lane's columns lie in packs of kBytes, the width of a copy.
template <class T, class Acc, int kBytes>
__global__ void __launch_bounds__(kRingThreads, kRingBlocks)
    aggregate_ringed(Aggregate q, AggregatePlan plan) {
  constexpr int kCols = per16<T>, kPack = kBytes / static_cast<int>(sizeof(T));
  constexpr int kPieces = kCols / kPack, kTile = kRingThreads * kCols;
  PFLCORE_DYNAMIC_SHARED(shared);
  const int t = static_cast<int>(threadIdx.x), n = static_cast<int>(q.n);
  T* const ring = reinterpret_cast<T*>(shared) + t * kPack;  // [kRingRows][kPieces][kRingThreads]
  Acc* const weights = reinterpret_cast<Acc*>(shared + kRingBytes);  // [chunk][kFewResults]
  // The first column of the thread in the first tile of the block, and how far apart its tiles are.
  const int64_t first =
      static_cast<int64_t>(blockIdx.x) * kTile + t / 32 * (32 * kCols) + t % 32 * kPack;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kTile;

  int64_t fill_c = first;  // what is copied next: columns from here on, of this row
  int fill_row = 0, fill_pieces = 0;
  const T* from = nullptr;
  const auto start_tile = [&] {
    from = static_cast<const T*>(q.updates) + fill_c;
    const int64_t left = plan.end - fill_c;  // none past the last tile
    fill_pieces =
        static_cast<int>(left < 32 * kCols ? (left + 32 * kPack - 1) / (32 * kPack) : kPieces);
  };
  const auto fill = [&](int slot) {
    T* const into = ring + slot * kTile;
#pragma unroll
    for (int x = 0; x < kPieces; ++x) {
      if (x >= fill_pieces) continue;
      if constexpr (kBytes >= 4)
        copy_async<kBytes>(into + x * kRingThreads * kPack, from + x * 32 * kPack, kBytes);
      else
        into[x * kRingThreads] = from[x * 32];
    }
    copy_commit();  // a group for every row, empty ones too: the count to wait for is constant
    from += q.updates_row;
    if (++fill_row < n) return;
    fill_row = 0, fill_c += step;
    start_tile();
  };
  start_tile();
#pragma unroll 1
  for (int slot = 0; slot < kRingRows - 1; ++slot) fill(slot);

  if (plan.resident) {
    load_weights<Acc, 8>(weights, q, 0, kFewResults, 0, n);
    __syncthreads();
  }
  int slot = 0;
  int64_t c = first;
  for (int64_t tile = blockIdx.x; tile < plan.tiles; tile += gridDim.x, c += step) {
    Acc sum[kFewResults][kCols] = {};
    for (int n0 = 0; n0 < n; n0 += plan.chunk) {
      const int count = n - n0 < plan.chunk ? n - n0 : plan.chunk;
      if (!plan.resident) {
        __syncthreads();  // no thread still reads the weights before these
        load_weights<Acc, 8>(weights, q, 0, kFewResults, n0, count);
        __syncthreads();
      }
      const Acc* w = weights;
#pragma unroll 2
      for (int j = 0; j < count; ++j, w += kFewResults) {
        copy_wait<kRingRows - 2>();
        Acc u[kCols];
#pragma unroll
        for (int x = 0; x < kPieces; ++x) {
          const Pack<T, kPack> pack =
              load_neighbours<kPack>(ring + slot * kTile + x * kRingThreads * kPack);
#pragma unroll
          for (int v = 0; v < kPack; ++v) u[x * kPack + v] = convert<Acc>(pack.v[v]);
        }
        add_row(sum, w, u);
        fill((slot - 1) & (kRingRows - 1));  // where the row before was
        slot = (slot + 1) & (kRingRows - 1);
      }
    }
    write_rows<T, Acc, kFewResults, kCols, kPack>(q, plan, 0, static_cast<int>(q.m), c, 32, sum);
  }
}

// Copies `count` rows of a tile of 1 << cols_log2 columns, kBytes at a time; `row(i)` is where row
// i begins, of which `left` columns are left. What lies past the end of a row is not touched.
template <int kBytes, class T, class Row>
__device__ __forceinline__ void copy_rows(T* to, int cols_log2, int count, int64_t left,
                                          const Row& row) {
  constexpr int kCount = kBytes / static_cast<int>(sizeof(T));
  constexpr int kCountLog2 = kCount == 8 ? 3 : kCount == 4 ? 2 : kCount == 2 ? 1 : 0;
  const int pieces_log2 = cols_log2 - kCountLog2;
#pragma unroll 1
  for (int e = static_cast<int>(threadIdx.x); e < count << pieces_log2;
       e += static_cast<int>(blockDim.x)) {
    const int i = e >> pieces_log2, x = (e & ((1 << pieces_log2) - 1)) * kCount;
    if (x >= left) continue;
    T* const into = to + (i << cols_log2) + x;
    if constexpr (kBytes >= 4) {
      const int valid =
          x + kCount <= left ? kBytes : static_cast<int>(left - x) * static_cast<int>(sizeof(T));
      copy_async<kBytes>(into, row(i) + x, valid);
    } else {
      *into = row(i)[x];
    }
  }
}

template <class T, class Row>
__device__ __forceinline__ void copy_tile(int access, T* to, int cols_log2, int count, int64_t left,
                                          const Row& row) {
  if (access == 16) return copy_rows<16>(to, cols_log2, count, left, row);
  if (access == 8) return copy_rows<8>(to, cols_log2, count, left, row);
  if constexpr (sizeof(T) <= 4)
    if (access == 4) return copy_rows<4>(to, cols_log2, count, left, row);
  if constexpr (sizeof(T) == 2) copy_rows<2>(to, cols_log2, count, left, row);
}

template <int kRows>
constexpr int stream_blocks = (kRows > kFewResults ? kManyWarps : kFewWarps) / kStreamWarps;

template <class T, class Acc, int kRows, int kPack>
__global__ void __launch_bounds__(32 * kStreamWarps, stream_blocks<kRows>)
    aggregate_streamed(Aggregate q, AggregatePlan plan) {
  constexpr int kCols = sum_cols<Acc>, kTile = 32 * kCols, kTileLog2 = kTile == 128 ? 7 : 6;
  constexpr int kStageRows = kStageBytes / (kTile * static_cast<int>(sizeof(T)));
  constexpr int kPieces = kCols / kPack;
  PFLCORE_DYNAMIC_SHARED(shared);
  T* const ring = reinterpret_cast<T*>(shared);  // [kStages][kStageRows][kTile]
  Acc* const weights = reinterpret_cast<Acc*>(shared + kStages * kStageBytes);  // [chunk][results]
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  // blocks of other results of the same columns are neighbours: they share the columns in L2
  const int blocks_m = static_cast<int>(plan.blocks_m);
  const int64_t m0 = static_cast<int64_t>(static_cast<int>(blockIdx.x) % blocks_m) * plan.results;
  const int64_t my_m = m0 + warp * kRows;
  const int n = static_cast<int>(q.n), tiles = static_cast<int>(plan.tiles);
  const int first = static_cast<int>(blockIdx.x) / blocks_m;
  const int step = static_cast<int>(gridDim.x) / blocks_m;

  int fill_tile = first, fill_row = 0, fill_slot = 0;  // what is copied next, and where to
  const auto fill = [&] {
    if (fill_tile < tiles) {
      const int count = n - fill_row < kStageRows ? n - fill_row : kStageRows;
      const int64_t c = static_cast<int64_t>(fill_tile) * kTile;
      const T* const from = static_cast<const T*>(q.updates) + fill_row * q.updates_row + c;
      copy_tile(plan.access, ring + fill_slot * kStageRows * kTile, kTileLog2, count, plan.end - c,
                [&](int i) { return from + i * q.updates_row; });
      fill_row += kStageRows;
      if (fill_row >= n) fill_row = 0, fill_tile += step;
    }
    copy_commit();  // a group for every stage, empty ones too, so that the count of groups to wait
                    // for is constant
    fill_slot = fill_slot + 1 == kStages ? 0 : fill_slot + 1;
  };
#pragma unroll 1
  for (int s = 0; s < kStages - 1; ++s) fill();

  if (plan.resident) load_weights<Acc, 8>(weights, q, m0, plan.results, 0, n);
  int slot = 0;
  for (int tile = first; tile < tiles; tile += step) {
    Acc sum[kRows][kCols] = {};
    int chunk_row = plan.chunk;  // within the weights that are there
    for (int n0 = 0; n0 < n; n0 += kStageRows, chunk_row += kStageRows) {
      if (chunk_row == plan.chunk) {
        chunk_row = 0;
        if (!plan.resident) {
          __syncthreads();  // no thread still reads the weights before these
          load_weights<Acc, 1>(weights, q, m0, plan.results, n0,
                               n - n0 < plan.chunk ? n - n0 : plan.chunk);
        }
      }
      copy_wait<kStages - 2>();
      // The stage and the weights are there for all threads, and no thread still reads the slot
      // that is filled next.
      __syncthreads();
      fill();
      const T* from = ring + slot * kStageRows * kTile + lane * kPack;
      slot = slot + 1 == kStages ? 0 : slot + 1;
      if (my_m >= q.m) continue;
      const int count = n - n0 < kStageRows ? n - n0 : kStageRows;
      const Acc* w = weights + chunk_row * plan.results + warp * kRows;
      Pack<T, kPack> row[kPieces];
      const auto load_row = [&] {
#pragma unroll
        for (int x = 0; x < kPieces; ++x) row[x] = load_neighbours<kPack>(from + x * 32 * kPack);
      };
      load_row();
      // the next row comes during the arithmetic; an unrolled loop would need more registers
#pragma unroll 1
      for (int j = 0; j < count; ++j, w += plan.results) {
        Acc u[kCols];
#pragma unroll
        for (int v = 0; v < kCols; ++v) u[v] = convert<Acc>(row[v / kPack].v[v % kPack]);
        if (j + 1 < count) from += kTile;
        load_row();
        add_row(sum, w, u);
      }
    }
    if (my_m < q.m)
      write_rows<T, Acc, kRows, kCols, kPack>(
          q, plan, my_m, static_cast<int>(q.m - my_m < kRows ? q.m - my_m : kRows),
          static_cast<int64_t>(tile) * kTile + lane * kPack, 32, sum);
  }
}

// ---- by index ----
// Fills `entries` [m, k] and `rows`, the rows of updates that are used, in order, and returns their
// number. All threads of the block take part. `slots` [n] and `total` are scratch memory.
template <class Acc>
__device__ __forceinline__ int list_rows(AggregateEntry<Acc>* entries, int* rows, int* slots,
                                         int* total, const Aggregate& q, int cols) {
  const int n = static_cast<int>(q.n), count = static_cast<int>(q.m * q.k);
  const int t = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  for (int j = t; j < n; j += threads) slots[j] = 0;
  __syncthreads();
#pragma unroll 4
  for (int e = t; e < count; e += threads) {
    const Acc weight = static_cast<Acc>(q.lr * q.weight[e]);
    const int64_t row = q.index[e];
    const bool inside = row >= 0 && row < n;
    // what counts is the weight as it is summed. -0 times the row of zeros changes no sum, not even
    // one of -0
    AggregateEntry<Acc> entry{static_cast<Acc>(-0.0), -1};
    if (weight != 0) {
      entry.weight = inside ? weight : static_cast<Acc>(NAN);
      entry.at = inside ? static_cast<int>(row) : -1;
      if (inside) slots[row] = 1;
    }
    entries[e] = entry;
  }
  __syncthreads();
  if (t < 32) {
    int used = 0;
    for (int j0 = 0; j0 < n; j0 += 32) {
      const int j = j0 + t;
      const unsigned marks = __ballot_sync(0xffffffffu, j < n && slots[j < n ? j : 0] != 0);
      const int place = used + __popc(marks & ((1u << t) - 1));
      if (marks >> t & 1) rows[place] = j, slots[j] = place + 1;
      used += __popc(marks);
    }
    if (t == 0) *total = used;
  }
  __syncthreads();
  for (int e = t; e < count; e += threads) {
    const int row = entries[e].at;
    entries[e].at = row < 0 ? 0 : slots[row] * cols;
  }
  return *total;
}

// kEntries is the number of entries of a result, or 0 for any.
template <class T, class Acc, int kPack, int kEntries>
__global__ void __launch_bounds__(kTileThreads, kTileWarps * 32 / kTileThreads)
    aggregate_tiled(Aggregate q, AggregatePlan plan) {
  constexpr int kCols = sum_cols<Acc>;
  PFLCORE_DYNAMIC_SHARED(shared);
  const int m = static_cast<int>(q.m), cols = plan.tile_cols;
  const int k = kEntries > 0 ? kEntries : static_cast<int>(q.k);
  const int t = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int buffer = (plan.buffer_rows + 1) * cols;
  T* const buffers = reinterpret_cast<T*>(shared);  // [2][1 + buffer_rows][cols]
  auto* const entries = reinterpret_cast<AggregateEntry<Acc>*>(buffers + 2 * buffer);  // [m][k]
  int* const rows = reinterpret_cast<int*>(entries + m * k);  // [buffer_rows]
  int* const slots = rows + plan.buffer_rows;                 // [n], then the total
  const int used = list_rows(entries, rows, slots, slots + q.n, q, cols);
  for (int x = t; x < 2 * cols; x += threads)
    buffers[x < cols ? x : buffer + x - cols] = convert<T>(0.0f);

  int cols_log2 = 5;
  while (1 << cols_log2 < cols) ++cols_log2;
  const int tiles = static_cast<int>(plan.tiles), step = static_cast<int>(gridDim.x);
  int next = static_cast<int>(blockIdx.x);
  const auto fill = [&](int b) {
    if (next < tiles) {
      const int64_t c = static_cast<int64_t>(next) * cols;
      const T* const from = static_cast<const T*>(q.updates) + c;
      copy_tile(plan.access, buffers + b * buffer + cols, cols_log2, used, plan.end - c,
                [&](int i) { return from + rows[i] * q.updates_row; });
    }
    copy_commit();
    next += step;
  };
  fill(0), fill(1);

  const int lanes = cols / kCols, lane = t % lanes, group = t / lanes, groups = threads / lanes;
  int b = 0;
  for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += step, b ^= 1) {
    copy_wait<1>();
    __syncthreads();  // the tile is there for all, and so are the entries
    const T* const from = buffers + b * buffer + lane * kPack;
    const int64_t c = static_cast<int64_t>(tile) * cols + lane * kPack;
    for (int row = group; row < m; row += groups) {
      Acc sum[1][kCols] = {};
      const AggregateEntry<Acc>* const mine = entries + row * k;
#pragma unroll(kEntries > 0 ? kEntries : 4)
      for (int j = 0; j < k; ++j) {
        const AggregateEntry<Acc> entry = mine[j];
#pragma unroll
        for (int v0 = 0; v0 < kCols; v0 += kPack) {
          const Pack<T, kPack> pack =
              load_neighbours<kPack>(from + entry.at + column_offset<kPack>(lanes, v0));
#pragma unroll
          for (int v = 0; v < kPack; ++v) sum[0][v0 + v] += entry.weight * convert<Acc>(pack.v[v]);
        }
      }
      write_rows<T, Acc, 1, kCols, kPack>(q, plan, row, 1, c, lanes, sum);
    }
    __syncthreads();  // no thread still reads this buffer
    fill(b);
  }
}

template <class T, class Acc, int kPack>
__global__ void __launch_bounds__(kDirectThreads, 2)
    aggregate_direct(Aggregate q, AggregatePlan plan) {
  constexpr int kCols = per16<T>, kAhead = 4;  // rows of updates on their way at a time
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_m = warp % plan.warps_m, warp_c = warp / plan.warps_m;
  const T* const updates = static_cast<const T*>(q.updates);
  for (int64_t tile = blockIdx.x; tile < plan.tiles; tile += gridDim.x) {
    const int64_t c = plan.begin + tile * plan.tile_cols + warp_c * 32 * kCols + lane * kPack;
    const bool active = c < plan.end;
    for (int64_t row = warp_m; row < q.m; row += plan.warps_m) {
      Acc sum[1][kCols] = {};
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
          for (int v = 0; v < kCols; ++v) sum[0][v] = static_cast<Acc>(NAN);
        }
        for (int j = 0; j < count; j += kAhead) {
          Pack<T> u[kAhead];
          Acc wj[kAhead];
#pragma unroll
          for (int i = 0; i < kAhead; ++i) {
            wj[i] = __shfl_sync(0xffffffffu, w, j + i);
            const T* const from = updates + __shfl_sync(0xffffffffu, at, j + i) * q.updates_row;
            if (active && (used >> (j + i) & 1)) {
#pragma unroll
              for (int v0 = 0; v0 < kCols; v0 += kPack) {
                // never out of the row; the sums of columns past the end are dropped
                const int64_t own = c + column_offset<kPack>(32, v0);
                const Pack<T, kPack> pack =
                    load_neighbours<kPack>(from + (own < plan.end ? own : plan.end - kPack));
#pragma unroll
                for (int v = 0; v < kPack; ++v) u[i].v[v0 + v] = pack.v[v];
              }
            }
          }
#pragma unroll
          for (int i = 0; i < kAhead; ++i)
            if (active && (used >> (j + i) & 1)) {
#pragma unroll
              for (int v = 0; v < kCols; ++v) sum[0][v] += wj[i] * convert<Acc>(u[i].v[v]);
            }
        }
      }
      if (active) write_rows<T, Acc, 1, kCols, kPack>(q, plan, row, 1, c, 32, sum);
    }
  }
}

// ---- launches ----
using AggregateKernel = void (*)(Aggregate, AggregatePlan);

inline void aggregate_launch(AggregateKernel kernel, const Aggregate& q, const AggregatePlan& plan,
                             cudaStream_t stream) {
  allow_shared(reinterpret_cast<const void*>(kernel), plan.shared);
  PFLCORE_LAUNCH(kernel, static_cast<unsigned>(plan.grid), plan.threads, plan.shared, stream, q,
                 plan);
}

// Packs of columns of aligned rows, and what is left one by one.
template <int kPack>
void aggregate_columns(AggregateKernel packs, AggregateKernel singles, const Aggregate& q,
                       AggregatePlan plan, cudaStream_t stream) {
  const int64_t bytes = bytes_of(q.in);
  const bool aligned = kPack > 1 && is_aligned(q.updates, q.updates_row * bytes, kPack * bytes);
  const int64_t whole = aligned ? q.p / kPack * kPack : 0;
  plan.out_aligned = packs_fit(q, kPack);
  if (whole > 0) {
    set_columns(plan, 0, whole);
    aggregate_launch(packs, q, plan, stream);
  }
  if (whole < q.p) {
    plan.tile_cols = plan.single_cols;
    set_columns(plan, whole, q.p);
    aggregate_launch(singles, q, plan, stream);
  }
}

template <class T, class Acc, int kRows>
void aggregate_held_launch(const Aggregate& q, const AggregatePlan& plan, cudaStream_t stream) {
  constexpr int kPack = 8 / static_cast<int>(sizeof(T));
  aggregate_columns<kPack>(&aggregate_held<T, Acc, kRows, kPack>, &aggregate_held<T, Acc, kRows, 1>,
                           q, plan, stream);
}

// All columns; whether a thread's are neighbours is for the result to say.
template <int kPack>
void aggregate_tiles(AggregateKernel packs, AggregateKernel singles, const Aggregate& q,
                     AggregatePlan plan, cudaStream_t stream) {
  set_columns(plan, 0, q.p);
  plan.out_aligned = kPack > 1 && packs_fit(q, kPack);
  aggregate_launch(plan.out_aligned ? packs : singles, q, plan, stream);
}

template <class T, class Acc, int kEntries>
void aggregate_tiled_launch(const Aggregate& q, const AggregatePlan& plan, cudaStream_t stream) {
  constexpr int kPack = sum_pack<T, Acc>;
  aggregate_tiles<kPack>(&aggregate_tiled<T, Acc, kPack, kEntries>,
                         &aggregate_tiled<T, Acc, 1, kEntries>, q, plan, stream);
}

// Usual numbers of entries are constants where rows are float32: with five, a result takes 76
// instructions before it is stored, by the loop 113.
template <class T, class Acc>
void aggregate_tiled_by_entries(const Aggregate& q, const AggregatePlan& plan,
                                cudaStream_t stream) {
  if constexpr (std::is_same_v<T, float>) {
    if (q.k == 1) return aggregate_tiled_launch<T, Acc, 1>(q, plan, stream);
    if (q.k == 3) return aggregate_tiled_launch<T, Acc, 3>(q, plan, stream);
    if (q.k == 5) return aggregate_tiled_launch<T, Acc, 5>(q, plan, stream);
    if (q.k == 10) return aggregate_tiled_launch<T, Acc, 10>(q, plan, stream);
  }
  aggregate_tiled_launch<T, Acc, 0>(q, plan, stream);
}

template <class T, class Acc, int kBytes>
void aggregate_ringed_launch(const Aggregate& q, AggregatePlan plan, cudaStream_t stream) {
  set_columns(plan, 0, q.p);
  plan.out_aligned = packs_fit(q, kBytes / static_cast<int>(sizeof(T)));
  aggregate_launch(&aggregate_ringed<T, Acc, kBytes>, q, plan, stream);
}

template <class T, class Acc>
void aggregate_ringed_by_access(const Aggregate& q, const AggregatePlan& plan,
                                cudaStream_t stream) {
  if (plan.access == 16) return aggregate_ringed_launch<T, Acc, 16>(q, plan, stream);
  if (plan.access == 8) return aggregate_ringed_launch<T, Acc, 8>(q, plan, stream);
  if constexpr (sizeof(T) <= 4)
    if (plan.access == 4) return aggregate_ringed_launch<T, Acc, 4>(q, plan, stream);
  if constexpr (sizeof(T) == 2) aggregate_ringed_launch<T, Acc, 2>(q, plan, stream);
}

template <class T, class Acc, int kRows>
void aggregate_streamed_launch(const Aggregate& q, const AggregatePlan& plan, cudaStream_t stream) {
  constexpr int kPack = sum_pack<T, Acc>;
  aggregate_tiles<kPack>(&aggregate_streamed<T, Acc, kRows, kPack>,
                         &aggregate_streamed<T, Acc, kRows, 1>, q, plan, stream);
}

template <class T, class Acc>
void aggregate_in(const Aggregate& q, cudaStream_t stream) {
  const AggregatePlan plan = aggregate_plan(q, aggregate_card());
  if (plan.way == AggregateWay::direct)
    return aggregate_columns<per16<T>>(&aggregate_direct<T, Acc, per16<T>>,
                                       &aggregate_direct<T, Acc, 1>, q, plan, stream);
  if constexpr (is_widened<T, Acc>) {
    aggregate_streamed_launch<T, Acc, kFewResults>(q, plan, stream);
  } else {
    if (plan.way == AggregateWay::tiled) return aggregate_tiled_by_entries<T, Acc>(q, plan, stream);
    if (plan.way == AggregateWay::ringed)
      return aggregate_ringed_by_access<T, Acc>(q, plan, stream);
    if (plan.way == AggregateWay::streamed)
      return aggregate_streamed_launch<T, Acc, kManyResults>(q, plan, stream);
    if constexpr (sizeof(T) == sizeof(Acc))
      if (plan.many) return aggregate_held_launch<T, Acc, kManyResults>(q, plan, stream);
    aggregate_held_launch<T, Acc, kFewResults>(q, plan, stream);
  }
}

inline void aggregate(const Aggregate& q, cudaStream_t stream) {
  if (q.m == 0 || q.p == 0) return;
  switch (q.in) {
    case Dtype::f32:
      return q.wide ? aggregate_in<float, double>(q, stream)
                    : aggregate_in<float, float>(q, stream);
    case Dtype::f64:
      return aggregate_in<double, double>(q, stream);
    case Dtype::f16:
      return q.wide ? aggregate_in<__half, double>(q, stream)
                    : aggregate_in<__half, float>(q, stream);
    case Dtype::bf16:
      return q.wide ? aggregate_in<__nv_bfloat16, double>(q, stream)
                    : aggregate_in<__nv_bfloat16, float>(q, stream);
  }
}

}  // namespace pflcore::cuda
