// The plan that cuts squared distances into blocks, by sizes, dtype and card alone, and the parts
// that its kernels share. Knows nothing of torch.
//
// windows: any card, rows and dtype (sqdist.cuh). A block holds a window of at most 64 rows of a
//   against 64 of b, subtracts first, and sums in float32 with flushes to float64.
// few: 16 to 20 rows of float32 (sqdist_few.cuh). The same arithmetic, all rows in one block.
// gram: more rows of float32, on a card whose tensor cores have float64 at speed (sqdist_gram.cuh).
//   A certificate says which pairs are right; the others are done again by windows.
//
// In each of them the columns are split over the blocks and the partial sums are added up in a
// fixed order: no atomics, the same bits every time. The splits depend on the sizes alone.
#pragma once
#include "common.cuh"

namespace pflcore::cuda {

constexpr int kSqdistWindow = 64;  // rows of a block's window
constexpr int kSqdistThreads = 256;
constexpr int kSqdistShared = 48 * 1024;  // what every card gives without asking
constexpr int kSqdistPacksLog2 = 3;       // packs of a row staged at a time, at least
constexpr int64_t kSqdistBlocks = 2048;   // enough to fill any card several times
constexpr int64_t kSqdistFill = 528;      // enough to fill it once
constexpr int64_t kSqdistDeep = 16;       // stages that are worth the start of a block
constexpr int64_t kSqdistMost = int64_t{65535} * kSqdistWindow;
constexpr int kSqdistSums = 4;         // float32 sums of 8 that are added before they are flushed
constexpr double kSqdistTiny = 1e-30;  // below it float32 squares may have underflowed

constexpr int kFewLeast = 16, kFewRows = 20;  // fewer rows are quicker by windows
constexpr int kFewChunk = 128;                // columns of a stage: 4 for each lane
constexpr int kFewFlush = 3;                  // stages whose squares are summed in float32
constexpr int kFewStages = 2 * kFewFlush;
constexpr int kFewShared = kFewStages * kFewRows * kFewChunk * static_cast<int>(sizeof(float));
constexpr int64_t kFewSplits = 264;

constexpr int kGramRows = 128;  // rows that one block holds, as one triangle or as a window of 64
                                // against 64
constexpr int kGramChunk = 64;  // columns of a stage
constexpr int kGramPitch = kGramChunk + 8;  // floats: 8 rows x 4 reads of 8 bytes on 32 banks
constexpr int kGramStages = 3;
constexpr int kGramThreads = 128;
constexpr int64_t kGramLeast = 24;                // rows of each of two operands
constexpr int64_t kGramWorth = int64_t{1} << 25;  // pairs * columns that pay for more launches

enum class SqdistPath { windows, few, gram };

// The order in which a pair may be computed: by its path, again in float32 where the certificate
// does not hold, at last in float64 where float32 cannot be trusted. Also the place of the flag
// that says that a turn has work to do.
enum SqdistTurn : int { kFirst, kAgain, kLast };

// The facts on a card that a plan depends on.
struct SqdistCard {
  bool tensor_float64 = false;
  int64_t worth = kGramWorth;  // see kGramWorth
};

// Tensor cores that have float64 at speed: those of A100, of H100 and H200, of B200. Others of
// their generations have a thirty-second of it or less.
inline bool has_fast_float64_mma(int generation) {
  return generation == 80 || generation == 90 || generation == 100;
}

// The sums before the pairs that are done again: columns of a block, partial results, their
// entries.
struct SqdistSplit {
  int64_t columns, count, entries;
};

struct SqdistPlan {
  int64_t m, n, p;
  int64_t pairs;  // m * n: entries of one partial result
  bool symmetric;
  bool a_aligned, b_aligned;
  int lanes_log2;  // lanes = threads that share a tile of 4 x 4 pairs, a power of two up to 32
  int packs_log2;  // packs = 16-byte packs of a row staged at a time
  int pitch;   // packs from one staged row to the next: the padding keeps 8 neighbouring threads on
               // 32 different banks
  int stages;  // staged column chunks: one in use, the others on their way
  int stage_bytes;
  int raw_bytes;  // half types: of a chunk as it is in memory; stages - 1 of them are staged,
                  // and two as float32. Else 0
  int threads;
  int64_t chunk;      // columns of a stage
  int64_t per_split;  // columns of a block, a multiple of chunk
  int64_t splits;

  SqdistPath path;
  SqdistSplit first;       // of few or gram
  int a_bytes, b_bytes;    // few, gram: what one copy of a row's elements takes, 4, 8 or 16
  int window_a, window_b;  // gram: rows of a window
  double tau;              // gram: what the certificate asks of a pair
};

inline int sqdist_shared(const SqdistPlan& plan) {
  return plan.raw_bytes > 0 ? 2 * plan.stage_bytes + (plan.stages - 1) * plan.raw_bytes
                            : plan.stages * plan.stage_bytes;
}

// Bytes of one copy to shared memory, of rows that start at `base`: 16, 8 or 4.
inline int copy_bytes(const void* base, int64_t row) {
  const uintptr_t both = reinterpret_cast<uintptr_t>(base) | static_cast<uintptr_t>(row * 4);
  return both % 16 == 0 ? 16 : both % 8 == 0 ? 8 : 4;
}

inline int sqdist_ways(int64_t splits) {  // threads that add the partial sums of a pair
  int ways = 1;
  while (ways < 32 && ways * 8 < splits) ways *= 2;
  return ways;
}

inline SqdistSplit sqdist_split(int64_t p, int64_t chunk, int64_t splits, int64_t entries) {
  const int64_t chunks = ceil_div(p, chunk);
  splits = splits < chunks ? splits : chunks;
  if (splits < 1) splits = 1;
  SqdistSplit split{};
  split.columns = ceil_div(chunks, splits) * chunk;
  split.count = ceil_div(p, split.columns);
  split.entries = entries;
  return split;
}

// Pairs that are listed are computed as `few` would, or by windows: there is no Gram matrix.
inline SqdistPath sqdist_path(const Sqdist& q, const SqdistPlan& plan, const SqdistCard& card) {
  if (q.dtype != Dtype::f32 || plan.p == 0) return SqdistPath::windows;
  if (plan.symmetric && plan.m >= kFewLeast && plan.m <= kFewRows) return SqdistPath::few;
  const bool enough =
      plan.symmetric ? plan.m > kFewRows : plan.m >= kGramLeast && plan.n >= kGramLeast;
  const int64_t pairs = plan.symmetric ? plan.pairs / 2 : plan.pairs;
  const bool gram =
      q.listed < 0 && enough && card.tensor_float64 && pairs >= ceil_div(card.worth, plan.p);
  return gram ? SqdistPath::gram : SqdistPath::windows;
}

inline bool is_gram_triangle(const SqdistPlan& plan) {
  return plan.symmetric && plan.m <= kGramRows;
}

inline void sqdist_gram_plan(SqdistPlan& plan) {
  const auto window = [](int64_t rows) {
    const int64_t even = ceil_div(rows, ceil_div(rows, kGramRows / 2));
    return static_cast<int>(ceil_div(even, 16) * 16);
  };
  plan.window_a = window(plan.m), plan.window_b = window(plan.n);
  const int64_t windows_a = ceil_div(plan.m, plan.window_a),
                windows_b = ceil_div(plan.n, plan.window_b);
  const int64_t blocks = is_gram_triangle(plan) ? 1
                         : plan.symmetric       ? windows_a * (windows_a + 1) / 2
                                                : windows_a * windows_b;
  const int64_t chunks = ceil_div(plan.p, kGramChunk);
  int64_t splits = ceil_div(kSqdistFill, blocks);
  splits = splits < chunks / 4 ? splits : chunks / 4;
  plan.first =
      sqdist_split(plan.p, kGramChunk, splits, plan.pairs + (plan.symmetric ? 0 : plan.m + plan.n));
  const int ways = sqdist_ways(plan.first.count);
  const int64_t roundings =
      plan.first.columns + ceil_div(plan.first.count, int64_t{ways}) + ways + 1;
  plan.tau = 1.02e6 * (2.0 * static_cast<double>(roundings) + 4) * 0x1p-53;
}

inline SqdistPlan sqdist_plan(const Sqdist& q, const SqdistCard& card) {
  SqdistPlan plan{};
  plan.symmetric = q.symmetric;
  plan.m = q.m, plan.n = plan.symmetric ? q.m : q.n, plan.p = q.p;
  plan.pairs = plan.m * plan.n;
  if (plan.pairs == 0) return plan;
  plan.a_aligned = aligned16(q.a, q.a_row, bytes_of(q.dtype));
  plan.b_aligned = plan.symmetric ? plan.a_aligned : aligned16(q.b, q.b_row, bytes_of(q.dtype));
  const int64_t rows_a = plan.m < kSqdistWindow ? plan.m : kSqdistWindow,
                rows_b = plan.n < kSqdistWindow ? plan.n : kSqdistWindow;
  const int64_t windows_a = ceil_div(plan.m, kSqdistWindow),
                windows_b = ceil_div(plan.n, kSqdistWindow);
  const bool one_triangle = plan.symmetric && windows_a == 1;
  const int64_t groups_a = ceil_div(rows_a, 4), groups_b = ceil_div(rows_b, 4);
  const int64_t tiles = one_triangle ? groups_a * (groups_a + 1) / 2 : groups_a * groups_b;
  const int64_t rows = one_triangle ? rows_a : rows_a + rows_b;
  for (plan.lanes_log2 = 5;; --plan.lanes_log2) {
    const int lanes = 1 << plan.lanes_log2;
    plan.packs_log2 = lanes > 4 ? plan.lanes_log2 + 1 : kSqdistPacksLog2;
    plan.pitch = (1 << plan.packs_log2) + (lanes < 8 ? lanes : 0);
    plan.stage_bytes = static_cast<int>(rows) * plan.pitch * 16;
    plan.raw_bytes = bytes_of(q.dtype) == 2 ? static_cast<int>(rows) << (plan.packs_log2 + 3) : 0;
    plan.stages = 2;
    if (lanes == 1 || (tiles * lanes <= kSqdistThreads && sqdist_shared(plan) <= kSqdistShared))
      break;
  }
  plan.stages = 4;
  if (sqdist_shared(plan) > kSqdistShared) plan.stages = 2;
  plan.threads = static_cast<int>(ceil_div(tiles << plan.lanes_log2, 32) * 32);
  plan.chunk = static_cast<int64_t>(q.dtype == Dtype::f64 ? 2 : 4) << plan.packs_log2;
  const int64_t chunks = ceil_div(plan.p, plan.chunk);
  const int64_t window_pairs =
      plan.symmetric ? windows_a * (windows_a + 1) / 2 : windows_a * windows_b;
  int64_t splits = kSqdistBlocks / window_pairs;
  const int64_t worth =
      plan.p / (16 * rows);  // a block writes rows^2 doubles: let it read clearly more than that
  splits = splits < worth ? splits : worth;
  splits = splits < chunks ? splits : chunks;
  const int64_t fill = ceil_div(kSqdistFill, window_pairs), deep = chunks / kSqdistDeep;
  const int64_t many = fill > deep ? fill : deep;  // the more blocks, the more of them only begin
  splits = splits < many ? splits : many;
  if (splits < 1) splits = 1;
  plan.per_split = ceil_div(chunks, splits) * plan.chunk;
  plan.splits = plan.per_split == 0 ? 0 : ceil_div(plan.p, plan.per_split);

  plan.path = sqdist_path(q, plan, card);
  if (plan.path == SqdistPath::windows) return plan;
  plan.a_bytes = copy_bytes(q.a, q.a_row);
  plan.b_bytes = plan.symmetric ? plan.a_bytes : copy_bytes(q.b, q.b_row);
  if (plan.path == SqdistPath::gram) {
    sqdist_gram_plan(plan);
  } else {
    int64_t few = ceil_div(plan.p, kFewChunk) / 64;
    few = few < kFewSplits ? kFewSplits : few < 2 * kFewSplits ? few : 2 * kFewSplits;
    plan.first = sqdist_split(plan.p, kFewChunk, few, q.listed < 0 ? plan.pairs : q.m * q.listed);
  }
  return plan;
}

// The workspace, in this order: the flags of the turns; the least element of each column; the norms
// of all rows; partial results of one turn at a time.
struct SqdistRoom {
  int* flags;
  float* centre;
  double *norms, *partial;
  int64_t bytes;
};

inline SqdistRoom sqdist_room(const Sqdist& q, const SqdistPlan& plan) {
  const bool gram = plan.path == SqdistPath::gram;
  const int64_t centre = gram && !is_gram_triangle(plan) ? ceil_div(plan.p, 4) * 4 : 0;
  const int64_t norms = gram ? plan.m + plan.n : 0;
  const int64_t entries = q.listed < 0 ? plan.pairs : q.m * q.listed;
  // a single partial sum of windows lies in the result itself
  const int64_t windows = plan.splits > 1 ? plan.splits * entries : 0;
  const int64_t first = plan.first.count * plan.first.entries;
  SqdistRoom room{};
  unsigned char* const base = static_cast<unsigned char*>(q.workspace);
  int64_t at = 16;
  room.flags = reinterpret_cast<int*>(base);
  room.centre = reinterpret_cast<float*>(base + at);
  at += centre * static_cast<int64_t>(sizeof(float));
  room.norms = reinterpret_cast<double*>(base + at);
  at += norms * static_cast<int64_t>(sizeof(double));
  room.partial = reinterpret_cast<double*>(base + at);
  room.bytes = at + (windows > first ? windows : first) * static_cast<int64_t>(sizeof(double));
  return room;
}

// `most`: rows of a that one grid holds; more are done in parts.
inline int64_t sqdist_workspace(const Sqdist& q, const SqdistCard& card,
                                int64_t most = kSqdistMost) {
  if (q.m > most && !q.symmetric) {
    Sqdist part = q, rest = q;
    part.m = most, rest.m = q.m % most;
    const int64_t some = sqdist_workspace(part, card, most),
                  last = sqdist_workspace(rest, card, most);
    return some > last ? some : last;
  }
  return sqdist_room(q, sqdist_plan(q, card)).bytes;
}

// A float32 result that cannot be trusted: overflow, NaN, or so small that squares may have
// underflowed.
__device__ __forceinline__ bool sqdist_suspect(double value) {
  return !(value >= kSqdistTiny && value <= DBL_MAX);
}

// Is the pair to be done in this turn? In `out` is what the turn before it found: NaN where it
// found nothing.
__device__ __forceinline__ bool sqdist_wanted(double value, int turn) {
  return turn == kAgain ? value != value : turn == kFirst || sqdist_suspect(value);
}

// Nothing of the turn is left to do? The first one clears the flags of the others.
__device__ __forceinline__ bool sqdist_idle(int* flags, int turn) {
  if (turn != kFirst) return flags[turn] == 0;
  if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0)
    flags[kAgain] = flags[kLast] = 0;
  return false;
}

// Stages kColumns columns of each of `rows` rows of float32, zeros from column `end` on.
template <int kBytes, int kColumns>
__device__ __forceinline__ void sqdist_copy_rows(float* to, int pitch, const float* from,
                                                 int64_t row_stride, int rows, int64_t column,
                                                 int64_t end) {
  constexpr int kWide = kBytes / 4, kPer = kColumns / kWide;
  for (int e = static_cast<int>(threadIdx.x); e < rows * kPer; e += static_cast<int>(blockDim.x)) {
    const int row = e / kPer, i = e % kPer * kWide;
    const int64_t c = column + i, left = end - c;
    copy_async<kBytes>(to + row * pitch + i, from + row * row_stride + (left > 0 ? c : 0),
                       left >= kWide ? kBytes
                       : left > 0    ? static_cast<int>(left) * 4
                                     : 0);
  }
}

template <int kColumns>
__device__ __forceinline__ void sqdist_copy_rows(int bytes, float* to, int pitch, const float* from,
                                                 int64_t row_stride, int rows, int64_t column,
                                                 int64_t end) {
  if (bytes == 16)
    sqdist_copy_rows<16, kColumns>(to, pitch, from, row_stride, rows, column, end);
  else if (bytes == 8)
    sqdist_copy_rows<8, kColumns>(to, pitch, from, row_stride, rows, column, end);
  else
    sqdist_copy_rows<4, kColumns>(to, pitch, from, row_stride, rows, column, end);
}

}  // namespace pflcore::cuda
