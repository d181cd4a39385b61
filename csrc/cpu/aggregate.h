// out[m] = base[m] + lr * sum_n weight[m, n] * x[n]: one pass over the rows x, one write of the
// result.
//
// The columns are walked in panels of 64. A panel's rows are copied (widened to the accumulator's
// type) into a small buffer in the first-level cache while the next panel is prefetched; then every
// result row takes its sum from that buffer, in registers. So each row is read from memory once
// whatever the number of results, row strides that are a power of two do no harm, and a sum runs
// over n in order for every element: the result depends neither on the cut into pieces nor on the
// threads. Sums of more than 128 rows are taken 128 at a time and added up in float64: neither
// their error nor the buffer grows with the clients.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "../inputs.h"
#include "isa.h"
#include "scratch.h"
#include "simd.h"

namespace pflcore::cpu {

namespace aggregate_detail {

constexpr int64_t kPanel = 64;  // columns
#ifdef PFL_SMALL_PIECES         // tests: all paths at small sizes
constexpr int64_t kChunk = 4, kPacked = 6, kBlocks = 2;
constexpr int64_t kStreamBytes = 1 << 16;
constexpr double kPieceWork = 1e4, kAloneWork = 2e4;
#else
constexpr int64_t kChunk = 128;    // rows that are summed before they are added to a float64 total
constexpr int64_t kPacked = 4096;  // rows of a sparse sum that are held at a time
constexpr int64_t kBlocks = 16;    // register blocks of results whose totals are held at a time
constexpr int64_t kStreamBytes =
    8 << 20;                          // results of this size and more are written past the caches
constexpr double kPieceWork = 1e5;    // a piece: some five microseconds
constexpr double kAloneWork = 2.5e6;  // some hundred microseconds: less is not worth another thread
#endif

template <class A>
struct Entry {
  int64_t row;
  A weight;
};

// What all pieces share, read only.
template <class A>
struct Plan {
  Aggregate job;
  int block = 1;          // result rows of one register block
  std::vector<A> weight;  // dense: [m / block][n][block]
  std::vector<Entry<A>>
      entry;  // sparse: result m sums entry[first[m] .. first[m + 1]); row: a slot in `row`
  std::vector<int64_t> first;
  std::vector<int64_t> row;  // sparse: rows of x that are read, ascending
  bool packed = true;        // panels go through the buffer
  bool stream = false;

  int64_t reads() const {
    return job.sparse ? static_cast<int64_t>(row.size()) : job.n;
  }  // rows of x
};

// Rows of register blocks: 32 vector registers hold 6 x 4 sums, 16 hold 6 x 2.
template <int bytes>
constexpr int kMaxBlock = 6;
template <int bytes>
constexpr int kAcross = kRoomy<bytes> ? 4 : 2;

template <int bytes, class A, class T>
PFL_INLINE void pack_row(A* to, const T* from, int64_t width, int64_t ahead) {
  constexpr int lanes = bytes / sizeof(A);
  if (width == kPanel) {
    for (size_t i = 0; i < kPanel * sizeof(T); i += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(from + ahead) + i);
    PFL_UNROLL
    for (int64_t c = 0; c < kPanel; c += lanes) {
      Vec<A, bytes> v;
      load_as<bytes, A>(v, from + c);
      store(to + c, v);
    }
  } else {
    T tail[kPanel] = {};
    std::memcpy(tail, from, sizeof(T) * width);
    for (int64_t c = 0; c < kPanel; c += lanes) {
      Vec<A, bytes> v;
      load_as<bytes, A>(v, tail + c);
      store(to + c, v);
    }
  }
}

// Rows first .. last of x; by `row` or, where it is nullptr, by number.
template <int bytes, class A, class T>
PFL_INLINE void pack_rows(A* panel, const Aggregate& job, const int64_t* row, int64_t first,
                          int64_t last, int64_t column, int64_t width, int64_t ahead) {
  const T* x = static_cast<const T*>(job.updates) + column;
  for (int64_t i = first; i < last; i++, panel += kPanel)
    pack_row<bytes, A, T>(panel, x + (row ? row[i] : i) * job.updates_row, width, ahead);
}

template <int bytes, class A>
PFL_INLINE void pack(A* panel, const Aggregate& job, const int64_t* row, int64_t first,
                     int64_t last, int64_t column, int64_t width, int64_t ahead) {
  switch (job.in) {
    case Dtype::f32:
      return pack_rows<bytes, A, float>(panel, job, row, first, last, column, width, ahead);
    case Dtype::f64:
      return pack_rows<bytes, A, double>(panel, job, row, first, last, column, width, ahead);
    case Dtype::f16:
      return pack_rows<bytes, A, Half>(panel, job, row, first, last, column, width, ahead);
    case Dtype::bf16:
      return pack_rows<bytes, A, BFloat16>(panel, job, row, first, last, column, width, ahead);
  }
}

// sum[r, 0..64) = sum_n weight[n, r] * x[n, 0..64) for `block` result rows.
template <int bytes, class A, int block>
PFL_INLINE void dense_block(A* sum, int64_t sum_stride, const A* x, int64_t stride, int64_t n,
                            const A* weight, int64_t ahead) {
  constexpr int lanes = bytes / sizeof(A), across = kAcross<bytes>;
  using V = Vec<A, bytes>;
  for (int64_t column = 0; column < kPanel; column += across * lanes) {
    V acc[block][across];
    PFL_UNROLL
    for (int r = 0; r < block; r++) PFL_UNROLL
    for (int c = 0; c < across; c++) acc[r][c] = V{};
    const A* from = x + column;
    const A* w = weight;
    for (int64_t i = 0; i < n; i++, from += stride, w += block) {
      V v[across];
      PFL_UNROLL
      for (int c = 0; c < across; c++) {
        load(v[c], from + c * lanes);
        if (ahead) __builtin_prefetch(from + c * lanes + ahead);
      }
      PFL_UNROLL
      for (int r = 0; r < block; r++) {
        const V wide = w[r] - V{};
        PFL_UNROLL
        for (int c = 0; c < across; c++) acc[r][c] += wide * v[c];
      }
    }
    PFL_UNROLL
    for (int r = 0; r < block; r++) PFL_UNROLL
    for (int c = 0; c < across; c++) store(sum + r * sum_stride + column + c * lanes, acc[r][c]);
  }
}

template <int bytes, class A>
PFL_INLINE void dense(int rows, A* sum, int64_t sum_stride, const A* x, int64_t stride, int64_t n,
                      const A* weight, int64_t ahead) {
  switch (rows) {
    case 1:
      return dense_block<bytes, A, 1>(sum, sum_stride, x, stride, n, weight, ahead);
    case 2:
      return dense_block<bytes, A, 2>(sum, sum_stride, x, stride, n, weight, ahead);
    case 3:
      return dense_block<bytes, A, 3>(sum, sum_stride, x, stride, n, weight, ahead);
    case 4:
      return dense_block<bytes, A, 4>(sum, sum_stride, x, stride, n, weight, ahead);
    case 5:
      return dense_block<bytes, A, 5>(sum, sum_stride, x, stride, n, weight, ahead);
    default:
      return dense_block<bytes, A, 6>(sum, sum_stride, x, stride, n, weight, ahead);
  }
}

// Where an entry's row of x begins: as many panels on as its number says, as there are entries
// before it, or at an offset.
enum class Rows { numbered, in_order, apart };

// The same sum over a list of entries, for one result row.
template <int bytes, class A, Rows rows>
PFL_INLINE void sparse(A* sum, const A* x, const int64_t* offset, const Entry<A>* entry,
                       const Entry<A>* end, int64_t ahead) {
  constexpr int lanes = bytes / sizeof(A), across = 256 / bytes < 8 ? 256 / bytes : 8;
  using V = Vec<A, bytes>;
  for (int64_t column = 0; column < kPanel; column += across * lanes) {
    V acc[across];
    PFL_UNROLL
    for (int c = 0; c < across; c++) acc[c] = V{};
    for (const Entry<A>* e = entry; e != end; e++) {
      const A* from =
          x +
          (rows == Rows::apart ? offset[e->row]
                               : (rows == Rows::in_order ? e - entry : e->row) * kPanel) +
          column;
      const V wide = e->weight - V{};
      PFL_UNROLL
      for (int c = 0; c < across; c++) {
        V v;
        load(v, from + c * lanes);
        if (ahead) __builtin_prefetch(from + c * lanes + ahead);
        acc[c] += wide * v;
      }
    }
    PFL_UNROLL
    for (int c = 0; c < across; c++) store(sum + column + c * lanes, acc[c]);
  }
}

// sum += base over one panel.
template <int bytes, class A, class T>
PFL_INLINE void add_base(A* sum, const T* base, int64_t width) {
  constexpr int lanes = bytes / sizeof(A);
  T tail[kPanel] = {};
  if (width < kPanel) {
    std::memcpy(tail, base, sizeof(T) * width);
    base = tail;
  } else {
    for (size_t i = 0; i < kPanel * sizeof(T); i += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(base + kPanel) + i);
  }
  for (int64_t c = 0; c < kPanel; c += lanes) {
    Vec<A, bytes> s, b;
    load(s, sum + c);
    load_as<bytes, A>(b, base + c);
    s += b;
    store(sum + c, s);
  }
}

template <int bytes, class A>
PFL_INLINE void add_base_any(A* sum, const Aggregate& job, int64_t row, int64_t column,
                             int64_t width) {
  const int64_t at = row * job.base_row + column;
  switch (job.out_dtype) {
    case Dtype::f32:
      return add_base<bytes, A>(sum, static_cast<const float*>(job.base) + at, width);
    case Dtype::f64:
      return add_base<bytes, A>(sum, static_cast<const double*>(job.base) + at, width);
    case Dtype::f16:
      return add_base<bytes, A>(sum, static_cast<const Half*>(job.base) + at, width);
    case Dtype::bf16:
      return add_base<bytes, A>(sum, static_cast<const BFloat16*>(job.base) + at, width);
  }
}

template <int bytes, class A, class T>
PFL_INLINE void put(T* out, const A* sum, int64_t width) {
  constexpr int lanes = bytes / sizeof(A);
  int64_t c = 0;
  for (; c + lanes <= width; c += lanes) {
    Vec<A, bytes> s;
    load(s, sum + c);
    store_as<bytes, A>(out + c, s);
  }
  if (c < width) {
    T tail[lanes];
    Vec<A, bytes> s;
    load(s, sum + c);  // sums are 64 wide: never past the end
    store_as<bytes, A>(tail, s);
    std::memcpy(out + c, tail, sizeof(T) * (width - c));
  }
}

template <int bytes, class A>
PFL_INLINE void put_any(void* out, Dtype type, int64_t at, const A* sum, int64_t width) {
  switch (type) {
    case Dtype::f32:
      return put<bytes, A>(static_cast<float*>(out) + at, sum, width);
    case Dtype::f64:
      return put<bytes, A>(static_cast<double*>(out) + at, sum, width);
    case Dtype::f16:
      return put<bytes, A>(static_cast<Half*>(out) + at, sum, width);
    case Dtype::bf16:
      return put<bytes, A>(static_cast<BFloat16*>(out) + at, sum, width);
  }
}

// Writes a panel past the caches in whole lines of 64 bytes, wherever the row begins: what is left
// of a line at the panel's end waits in `kept` (one line) for the next panel. `sum` has room for
// one line before it.
template <int bytes, class A>
PFL_INLINE void put_lines(A* out, A* sum, A* kept, int64_t width, bool begin, bool end) {
  constexpr int64_t line = 64 / sizeof(A), lanes = bytes / sizeof(A);
  const int64_t phase = static_cast<int64_t>(reinterpret_cast<uintptr_t>(out) % 64 / sizeof(A));
  int64_t c = -phase;
  if (phase) {
    if (begin) {
      c = std::min(line - phase, width);
      std::memcpy(out, sum, sizeof(A) * c);
    } else {
      std::memcpy(sum - line, kept, 64);
    }
  }
  for (; c + line <= width; c += line) PFL_UNROLL
  for (int64_t i = 0; i < line; i += lanes) {
    Vec<A, bytes> s;
    load(s, sum + c + i);
    stream(out + c + i, s);
  }
  if (end) {
    if (c < width) std::memcpy(out + c, sum + c, sizeof(A) * (width - c));
  } else if (phase) {
    std::memcpy(kept, sum + kPanel - line, 64);
  }
}

// Where the results of one panel go.
template <class A>
struct Target {
  const Plan<A>& plan;
  A* kept;  // a line for each result row
  int64_t column, width;
  bool first, last;  // panel
};

template <int bytes, class A>
PFL_INLINE void finish(const Target<A>& to, int64_t row, A* sum) {
  constexpr int64_t line = 64 / sizeof(A);
  const Aggregate& job = to.plan.job;
  if (job.base) add_base_any<bytes, A>(sum, job, row, to.column, to.width);
  const int64_t at = row * job.out_row + to.column;
  if (to.plan.stream)
    put_lines<bytes, A>(static_cast<A*>(job.out) + at, sum, to.kept + row * line, to.width,
                        to.first, to.last);
  else
    put_any<bytes, A>(job.out, job.out_dtype, at, sum, to.width);
}

// total[0 .. 64) += sum, and back.
template <int bytes, class A>
PFL_INLINE void add_panel(double* total, const A* sum) {
  constexpr int64_t lanes = bytes / sizeof(A);
  for (int64_t c = 0; c < kPanel; c += lanes) {
    Vec<A, bytes> v;
    load(v, sum + c);
    if constexpr (sizeof(A) == 4) {
      add_wide<bytes>(total + c, v);
    } else {
      Vec<A, bytes> t;
      load(t, total + c);
      t += v;
      store(total + c, t);
    }
  }
}
template <int bytes, class A>
PFL_INLINE void round_panel(A* sum, const double* total) {
  for (int64_t c = 0; c < kPanel; c += bytes / sizeof(A)) {
    Vec<A, bytes> v;
    load_as<bytes, A>(v, total + c);
    store(sum + c, v);
  }
}

// One panel of a dense product: register blocks of results, kBlocks of them at a time; kChunk rows
// of x at a time.
template <int bytes, class A>
PFL_INLINE void dense_panel(const Target<A>& to, A* panel, double* total, A* sum) {
  constexpr int64_t sum_stride = kPanel + 64 / sizeof(A);
  const Plan<A>& plan = to.plan;
  const Aggregate& job = plan.job;
  const bool through = plan.packed || to.width < kPanel, single = job.n <= kChunk;
  // what is worth fetching while this panel is worked on: the next one, or, where that many rows
  // would not stay, this one further down
  const int64_t ahead = job.n > 8 * kChunk ? 8 * job.updates_row : to.last ? 0 : kPanel;
  const int64_t together = single ? job.m : kBlocks * plan.block;
  for (int64_t top = 0; top < job.m; top += together) {
    const int64_t bottom = std::min(job.m, top + together);
    if (!single) std::fill(total, total + (bottom - top) * kPanel, 0.0);
    for (int64_t first = 0; first == 0 || first < job.n; first += kChunk) {
      const int64_t some = std::min(kChunk, job.n - first);
      if (through)
        pack<bytes, A>(panel, job, nullptr, first, first + some, to.column, to.width, ahead);
      const A* const x =
          through ? panel
                  : static_cast<const A*>(job.updates) + first * job.updates_row + to.column;
      for (int64_t row = top; row < bottom; row += plan.block) {
        const int64_t count = std::min<int64_t>(plan.block, job.m - row);
        const A* const weight = plan.weight.data() + row * job.n + first * count;
        dense<bytes, A>(static_cast<int>(count), sum, sum_stride, x,
                        through ? kPanel : job.updates_row, some, weight, through ? 0 : ahead);
        for (int64_t r = 0; r < count; r++) {
          if (single)
            finish<bytes, A>(to, row + r, sum + r * sum_stride);
          else
            add_panel<bytes, A>(total + (row + r - top) * kPanel, sum + r * sum_stride);
        }
      }
    }
    for (int64_t row = top; !single && row < bottom; row++) {
      round_panel<bytes, A>(sum, total + (row - top) * kPanel);
      finish<bytes, A>(to, row, sum);
    }
  }
}

// One panel of a sparse product, kChunk entries of a result at a time. The rows that are read lie
// in the panel all together, or, where they are too many, those of the entries at hand.
template <int bytes, class A>
PFL_INLINE void sparse_panel(const Target<A>& to, A* panel, double* total, A* sum,
                             const int64_t* offset) {
  const Plan<A>& plan = to.plan;
  const Aggregate& job = plan.job;
  const bool through = plan.packed || to.width < kPanel, all = plan.reads() <= kPacked;
  const int64_t ahead = to.last ? 0 : kPanel;
  const A* const x = through ? panel : static_cast<const A*>(job.updates) + to.column;
  if (through && all)
    pack<bytes, A>(panel, job, plan.row.data(), 0, plan.row.size(), to.column, to.width, ahead);
  for (int64_t row = 0; row < job.m; row++) {
    const Entry<A>* entry = plan.entry.data() + plan.first[row];
    const Entry<A>* const end = plan.entry.data() + plan.first[row + 1];
    const bool single = end - entry <= kChunk;
    if (!single) std::fill(total, total + kPanel, 0.0);
    do {
      const Entry<A>* const stop = end - entry <= kChunk ? end : entry + kChunk;
      if (!through) {
        sparse<bytes, A, Rows::apart>(sum, x, offset, entry, stop, ahead);
      } else if (all) {
        sparse<bytes, A, Rows::numbered>(sum, x, nullptr, entry, stop, 0);
      } else {
        for (const Entry<A>* e = entry; e != stop; e++)
          pack<bytes, A>(panel + (e - entry) * kPanel, job, plan.row.data(), e->row, e->row + 1,
                         to.column, to.width, ahead);
        sparse<bytes, A, Rows::in_order>(sum, x, nullptr, entry, stop, 0);
      }
      if (!single) add_panel<bytes, A>(total, sum);
      entry = stop;
    } while (entry != end);
    if (!single) round_panel<bytes, A>(sum, total);
    finish<bytes, A>(to, row, sum);
  }
}

// All result rows, columns begin .. end (begin a multiple of the panel).
template <int bytes, class A>
PFL_INLINE void columns(const Plan<A>& plan, int64_t begin, int64_t end) {
  constexpr int64_t line = 64 / sizeof(A), sum_stride = kPanel + line;
  const Aggregate& job = plan.job;
  const int64_t most = job.sparse && plan.reads() <= kPacked ? kPacked : kChunk;
  Scratch<A> panel(std::min(plan.reads(), most) * kPanel), kept(plan.stream ? job.m * line : 0);
  Scratch<double> total(job.sparse ? kPanel : kBlocks * plan.block * kPanel);
  alignas(64) A sums[kMaxBlock<bytes> * sum_stride];
  A* const sum = sums + line;
  std::vector<int64_t> offset;
  if (!plan.packed && job.sparse)
    for (int64_t r : plan.row) offset.push_back(r * job.updates_row);
  for (int64_t column = begin; column < end; column += kPanel) {
    const Target<A> to{plan,
                       kept.data,
                       column,
                       std::min(kPanel, end - column),
                       column == begin,
                       column + kPanel >= end};
    if (job.sparse)
      sparse_panel<bytes, A>(to, panel.data, total.data, sum, offset.data());
    else
      dense_panel<bytes, A>(to, panel.data, total.data, sum);
  }
  if (plan.stream) fence();
}

template <class A>
void columns_plain(const Plan<A>& plan, int64_t begin, int64_t end) {
  columns<16, A>(plan, begin, end);
}
#if PFL_X86
template <class A>
PFL_AVX2 void columns_avx2(const Plan<A>& plan, int64_t begin, int64_t end) {
  columns<32, A>(plan, begin, end);
}
template <class A>
PFL_AVX512 void columns_avx512(const Plan<A>& plan, int64_t begin, int64_t end) {
  columns<64, A>(plan, begin, end);
}
#endif

template <class A>
Plan<A> make_plan(const Aggregate& job) {
  Plan<A> plan;
  plan.job = job;
  const auto weight = [&job](int64_t i, int64_t j) {
    return static_cast<A>(job.lr * job.weight[i * job.k + j]);
  };
  const bool same_type = job.in == (std::is_same_v<A, double> ? Dtype::f64 : Dtype::f32);
  if (job.sparse) {
    std::vector<int64_t> slot(job.n, -1);
    for (int64_t i = 0; i < job.m; i++)
      for (int64_t j = 0; j < job.k; j++)
        if (weight(i, j) != 0) slot[job.index[i * job.k + j]] = 0;
    for (int64_t r = 0; r < job.n; r++)
      if (slot[r] == 0) {
        slot[r] = static_cast<int64_t>(plan.row.size());
        plan.row.push_back(r);
      }
    plan.first.push_back(0);
    for (int64_t i = 0; i < job.m; i++) {
      for (int64_t j = 0; j < job.k; j++)
        if (const A w = weight(i, j); w != 0)
          plan.entry.push_back({slot[job.index[i * job.k + j]], w});
      plan.first.push_back(static_cast<int64_t>(plan.entry.size()));
    }
    plan.packed = !same_type || plan.entry.size() > plan.row.size();
  } else {
    const int64_t blocks = (job.m + 5) / 6;
    plan.block = static_cast<int>((job.m + blocks - 1) / blocks);
    plan.weight.resize(job.m * job.n);
    A* to = plan.weight.data();
    for (int64_t i = 0; i < job.m; i += plan.block) {
      const int64_t count = std::min<int64_t>(plan.block, job.m - i);
      for (int64_t j = 0; j < job.n; j++)
        for (int64_t r = 0; r < count; r++) *to++ = weight(i + r, j);
    }
    plan.packed = !same_type || blocks > 1;
  }
  plan.stream = job.out_dtype == (std::is_same_v<A, double> ? Dtype::f64 : Dtype::f32) &&
                job.m * job.p * size_of(job.out_dtype) >= kStreamBytes;
  return plan;
}

template <class A, class Parallel>
void run(const Aggregate& job, Parallel&& parallel) {
  const Plan<A> plan = make_plan<A>(job);
  const double terms =
      job.sparse ? static_cast<double>(plan.entry.size()) : static_cast<double>(job.m) * job.n;
  const double work = (terms / 16 + plan.reads() + job.m + 1) * static_cast<double>(job.p);
  const int64_t panels = (job.p + kPanel - 1) / kPanel;
  const int64_t pieces =
      work < kAloneWork ? 1
                        : std::min({panels, static_cast<int64_t>(work / kPieceWork), int64_t{512}});
  parallel(pieces, [&plan, panels, pieces](int64_t first, int64_t last) {
    const int64_t begin = panels * first / pieces * kPanel,
                  end = std::min(panels * last / pieces * kPanel, plan.job.p);
    if (begin >= end) return;
#if PFL_X86
    if (isa() == Isa::avx512) return columns_avx512<A>(plan, begin, end);
    if (isa() == Isa::avx2) return columns_avx2<A>(plan, begin, end);
#endif
    columns_plain<A>(plan, begin, end);
  });
}

}  // namespace aggregate_detail

// parallel(n, body) calls body(begin, end) on ranges that cover 0..n, on any threads.
template <class Parallel>
void aggregate(const Aggregate& job, Parallel&& parallel) {
  if (job.m == 0 || job.p == 0) return;
  if (job.wide || job.in == Dtype::f64)
    aggregate_detail::run<double>(job, parallel);
  else
    aggregate_detail::run<float>(job, parallel);
}

}  // namespace pflcore::cpu
