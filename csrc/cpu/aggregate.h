// out[m] = base[m] + lr * sum_n weight[m, n] * x[n]: one pass over the rows x, one write of the
// result.
//
// The columns are walked in panels of 64 (one result of many rows: wide_panel). A panel's rows are
// copied (widened to the accumulator's type) into a small buffer in the first-level cache while the
// next panel is prefetched; then every result row takes its sum from that buffer, in registers. So
// each row is read from memory once whatever the number of results, row strides that are a power of
// two do no harm, and a sum runs over n in order for every element: the result depends neither on
// the cut into pieces nor on the threads. Sums of more than 128 rows are taken 128 at a time and
// added up in float64: neither their error nor the buffer grows with the clients.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "../inputs.h"
#include "scratch.h"
#include "small_gemm.h"

namespace pflcore::cpu {

namespace aggregate_detail {

constexpr int64_t kPanel = 64;  // columns
constexpr int kTogether = 8;    // rows that are added to one result alone at a time
#ifdef PFL_SMALL_PIECES         // tests: all paths at small sizes
constexpr int64_t kChunk = 4, kPacked = 6, kBlocks = 2, kWideBytes = 1024, kBesides = 2;
constexpr int64_t kStreamBytes = 1 << 16;
constexpr double kPieceWork = 1e4, kAloneWork = 2e4;
#else
constexpr int64_t kChunk = 128;    // rows that are summed before they are added to a float64 total
constexpr int64_t kPacked = 4096;  // rows of a sparse sum that are held at a time
constexpr int64_t kBlocks = 16;    // register blocks of results whose totals are held at a time
constexpr int64_t kBesides = 15;   // rows that wide_panel leaves to the other panels
constexpr int64_t kWideBytes = 16 << 10;  // sums of one result alone: half a first-level cache
constexpr int64_t kStreamBytes =
    8 << 20;                        // results of this size and more are written past the caches
constexpr double kPieceWork = 1e5;  // a piece: some five microseconds
constexpr double kAloneWork = 4e5;  // some fifty microseconds: less is not worth another thread
#endif

// The part that all pieces share and only read.
template <class A>
struct Plan {
  Aggregate job;
  int block = 1;          // result rows of one register block
  std::vector<A> weight;  // dense: [m / block][n][block]
  // sparse: result m sums entries first[m] .. first[m + 1), each with its weight and its place in
  // `row`, the rows of x that are read, ascending
  std::vector<int64_t> first, place, row;
  bool packed = true;   // panels go through the buffer
  bool stream = false;  // results are written past the caches
  bool direct = false;  // sums go from registers to the results, which have their type

  int64_t reads() const {
    return job.sparse ? static_cast<int64_t>(row.size()) : job.n;
  }  // rows of x
};

// Rows of register blocks, and the vectors of a row that a block of so many rows takes at a time:
// 32 vector registers hold 6 x 4 sums, 16 hold 6 x 2. One row alone takes 256 bytes.
constexpr int kMaxBlock = 6;
template <int bytes, int block>
constexpr int kAcross = block == 1                    ? std::min(256 / bytes, 8)
                        : kRoomy<bytes> || block == 2 ? 4
                                                      : 2;

template <class T>
PFL_INLINE void fetch_panel(const T* from) {
  for (size_t i = 0; i < kPanel * sizeof(T); i += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(from) + i);
}

// Rows first .. last of x; by `row` or, where it is nullptr, by number. What is worth fetching
// meanwhile lies `ahead`.
template <int bytes, class A>
PFL_INLINE void pack_here(A* panel, const Aggregate& job, const int64_t* row, int64_t first,
                          int64_t last, int64_t column, int64_t width, int64_t ahead) {
  with_type(job.in, [&](auto zero) PFL_LAMBDA {
    const auto* const x = static_cast<const decltype(zero)*>(job.updates) + column;
    for (int64_t i = first; i < last; i++, panel += kPanel) {
      const auto* const from = x + (row ? row[i] : i) * job.updates_row;
      if (width == kPanel) {
        fetch_panel(from + ahead);
        copy_as<bytes>(panel, from, kPanel);
      } else {
        std::fill_n(panel, kPanel, A(0));
        copy_as<bytes>(panel, from, width);
      }
    }
  });
}
template <int bytes, class A>
PFL_INLINE void pack(A* panel, const Aggregate& job, const int64_t* row, int64_t first,
                     int64_t last, int64_t column, int64_t width, int64_t ahead) {
  shared<bytes>([&](auto) PFL_LAMBDA {
    pack_here<bytes>(panel, job, row, first, last, column, width, ahead);
  });
}

// The place for a block of results: memory of their type, row by row. Where there is a `base`, it
// is added to the sums.
template <class A>
struct Place {
  A* to;
  int64_t stride;
  const A* base;
  int64_t base_stride;
};

// Writes the sums of a block, `column` columns into its panel.
template <int bytes, class A, int block, int across>
PFL_INLINE void put_block(const Place<A>& place, int64_t column,
                          Vec<A, bytes> (&acc)[block][across]) {
  constexpr int lanes = bytes / sizeof(A);
  if (place.base) {
    const A* const base = place.base + column;
    PFL_EACH(r, block,
             PFL_EACH(c, across, Vec<A, bytes> v;
                      const A* const at = base + r * place.base_stride + c * lanes;
                      __builtin_prefetch(at + kPanel); load(v, at); acc[r][c] += v));
  }
  A* const to = place.to + column;
  PFL_EACH(r, block, PFL_EACH(c, across, store(to + r * place.stride + c * lanes, acc[r][c])));
}

// sum_n weight[n, r] * x[n, 0..width) for `block` result rows; the width is whole panels.
template <int bytes, class A, int block>
PFL_INLINE void dense_block(const Place<A>& place, int64_t width, const A* x, int64_t stride,
                            int64_t n, const A* weight, int64_t ahead) {
  constexpr int lanes = bytes / sizeof(A), across = kAcross<bytes, block>;
  for (int64_t column = 0; column < width; column += across * lanes) {
    Vec<A, bytes> acc[block][across];
    clear(acc);
    sum_outer<block, across>(acc, n, weight, 1, block, [&](int64_t i, int c) PFL_LAMBDA {
      const A* const at = x + i * stride + column + c * lanes;
      if (ahead && c * bytes % 64 == 0) __builtin_prefetch(at + ahead);
      return at;
    });
    put_block<bytes, A, block, across>(place, column, acc);
  }
}

// The rule for the place of an entry's row of x: as many panels on as its number says, as many as
// there are entries before it, or an offset.
enum class Rows { numbered, in_order, apart };

// The same sum over a list of `n` entries, for one result row.
template <int bytes, class A, Rows rows>
PFL_INLINE void sparse(const Place<A>& to, const A* x, const int64_t* offset, const int64_t* place,
                       const A* weight, int64_t n, int64_t ahead) {
  constexpr int lanes = bytes / sizeof(A), across = kAcross<bytes, 1>;
  for (int64_t column = 0; column < kPanel; column += across * lanes) {
    Vec<A, bytes> acc[1][across];
    clear(acc);
    sum_outer<1, across>(acc, n, weight, 0, 1, [&](int64_t i, int c) PFL_LAMBDA {
      const int64_t from = rows == Rows::apart      ? offset[place[i]]
                           : rows == Rows::in_order ? i * kPanel
                                                    : place[i] * kPanel;
      const A* const at = x + from + column + c * lanes;
      if (ahead && c * bytes % 64 == 0) __builtin_prefetch(at + ahead);
      return at;
    });
    put_block<bytes, A, 1, across>(to, column, acc);
  }
}

// sum += base over one panel.
template <int bytes, class A>
PFL_INLINE void add_base(A* sum, const Aggregate& job, int64_t row, int64_t column, int64_t width) {
  with_type(job.out_dtype, [&](auto zero) PFL_LAMBDA {
    using T = decltype(zero);
    const T* base = static_cast<const T*>(job.base) + row * job.base_row + column;
    T tail[kPanel] = {};
    if (width < kPanel) {
      std::memcpy(tail, base, sizeof(T) * width);
      base = tail;
    } else {
      fetch_panel(base + kPanel);
    }
    for (size_t c = 0; c < kPanel; c += bytes / sizeof(A)) {
      Vec<A, bytes> s, b;
      load(s, sum + c);
      load_as<bytes, A>(b, base + c);
      s += b;
      store(sum + c, s);
    }
  });
}

template <int bytes, class A>
PFL_INLINE void put(const Aggregate& job, int64_t at, const A* sum, int64_t width) {
  constexpr int lanes = bytes / sizeof(A);
  with_type(job.out_dtype, [&](auto zero) PFL_LAMBDA {
    using T = decltype(zero);
    T* const out = static_cast<T*>(job.out) + at;
    Vec<A, bytes> s;
    int64_t c = 0;
    for (; c + lanes <= width; c += lanes) {
      load(s, sum + c);
      store_as<bytes, A>(out + c, s);
    }
    if (c == width) return;
    T tail[lanes];
    load(s, sum + c);  // sums are 64 wide: never past the end
    store_as<bytes, A>(tail, s);
    std::memcpy(out + c, tail, sizeof(T) * (width - c));
  });
}

// Writes a panel past the caches in whole lines of 64 bytes, wherever the row begins: what is left
// of a line at the panel's end waits in `kept` (one line) for the next panel. `sum` has space
// for one line before it.
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

// The places for the results of one panel.
template <class A>
struct Target {
  const Plan<A>& plan;
  A* kept;  // a line for each result row
  int64_t column, width;
  bool first, last;  // panel

  bool direct() const { return plan.direct && width >= kPanel; }
  // The panel's part of the results from `row` on.
  Place<A> place(int64_t row) const {
    const Aggregate& job = plan.job;
    const A* const base = static_cast<const A*>(job.base);
    return {static_cast<A*>(job.out) + row * job.out_row + column, job.out_row,
            base ? base + row * job.base_row + column : nullptr, job.base_row};
  }
};

template <int bytes, class A>
PFL_INLINE void finish(const Target<A>& to, int64_t row, A* sum) {
  constexpr int64_t line = 64 / sizeof(A);
  const Aggregate& job = to.plan.job;
  if (job.base) add_base<bytes>(sum, job, row, to.column, to.width);
  const int64_t at = row * job.out_row + to.column;
  if (to.plan.stream)
    put_lines<bytes, A>(static_cast<A*>(job.out) + at, sum, to.kept + row * line, to.width,
                        to.first, to.last);
  else
    put<bytes>(job, at, sum, to.width);
}
// The same for sums of many rows, beside which the time of a call is nothing.
template <int bytes, class A>
PFL_INLINE void finish_total(const Target<A>& to, int64_t row, A* sum) {
  shared<bytes>([&](auto) PFL_LAMBDA { finish<bytes>(to, row, sum); });
}

// total[0 .. 64) += sum.
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
// One panel of a dense product: register blocks of results, kBlocks of them at a time; kChunk rows
// of x at a time.
template <int bytes, class A>
PFL_INLINE void dense_panel(const Target<A>& to, A* panel, double* total, A* sum) {
  constexpr int64_t sum_stride = kPanel + 64 / sizeof(A);
  const Plan<A>& plan = to.plan;
  const Aggregate& job = plan.job;
  const bool through = plan.packed || to.width < kPanel, single = job.n <= kChunk,
             direct = single && to.direct();
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
        const Place<A> place = direct ? to.place(row) : Place<A>{sum, sum_stride, nullptr, 0};
        fixed<kMaxBlock>(count, [&](auto block) PFL_LAMBDA {
          dense_block<bytes, A, block>(place, std::max(to.width, kPanel), x,
                                       through ? kPanel : job.updates_row, some, weight,
                                       through ? 0 : ahead);
        });
        for (int64_t r = 0; !direct && r < count; r++) {
          if (single)
            finish<bytes, A>(to, row + r, sum + r * sum_stride);
          else
            add_panel<bytes, A>(total + (row + r - top) * kPanel, sum + r * sum_stride);
        }
      }
    }
    for (int64_t row = top; !single && row < bottom; row++) {
      copy_as<bytes>(sum, total + (row - top) * kPanel, kPanel);
      finish_total<bytes, A>(to, row, sum);
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
    int64_t entry = plan.first[row];
    const int64_t end = plan.first[row + 1];
    const bool single = end - entry <= kChunk, direct = single && to.direct();
    const Place<A> goal = direct ? to.place(row) : Place<A>{sum, 0, nullptr, 0};
    if (!single) std::fill(total, total + kPanel, 0.0);
    do {
      const int64_t some = std::min(kChunk, end - entry);
      const int64_t* const place = plan.place.data() + entry;
      const A* const weight = plan.weight.data() + entry;
      if (!through) {
        sparse<bytes, A, Rows::apart>(goal, x, offset, place, weight, some, ahead);
      } else if (all) {
        sparse<bytes, A, Rows::numbered>(goal, x, nullptr, place, weight, some, 0);
      } else {
        for (int64_t i = 0; i < some; i++)
          pack<bytes, A>(panel + i * kPanel, job, plan.row.data(), place[i], place[i] + 1,
                         to.column, to.width, ahead);
        sparse<bytes, A, Rows::in_order>(goal, x, nullptr, place, weight, some, 0);
      }
      if (!single) add_panel<bytes, A>(total, sum);
      entry += some;
    } while (entry < end);
    if (!single) copy_as<bytes>(sum, total, kPanel);
    if (!direct) finish<bytes, A>(to, row, sum);
  }
}

// sum[0..width) += weight[r] * x[r] for `rows` rows of x, which follow each other.
template <int bytes, int rows, class A, class T>
PFL_INLINE void add_rows(A* sum, int64_t width, const T* x, int64_t stride, const A* weight) {
  constexpr int64_t lanes = bytes / sizeof(A);
  // Where numbers are converted, that takes longer than a loop's own steps.
  constexpr int64_t across = std::is_same_v<A, T> ? kAcross<bytes, 1> : 1;
  Vec<A, bytes> w[rows];
  PFL_EACH(r, rows, w[r] = weight[r] - Vec<A, bytes>{});
  for (int64_t column = 0; column < width; column += across * lanes)
    PFL_EACH(c, across, A* const at = sum + column + c * lanes; Vec<A, bytes> acc; load(acc, at);
             PFL_EACH(r, rows, Vec<A, bytes> v;
                      load_as<bytes, A>(v, x + r * stride + column + c * lanes); acc += w[r] * v);
             store(at, acc));
}

// One result of many rows, up to wide_columns of it. Its time is that of reading x, and memory is
// read fastest in few and long runs: some rows at a time are added to the sums of many columns,
// which stay in the first-level cache. Up to 15 rows side by side are as fast; more are read side
// by side at half the rate, with AVX2 as with AVX-512.
template <int bytes, class A>
PFL_INLINE void wide_panel(const Target<A>& to, double* total, A* sum) {
  const Aggregate& job = to.plan.job;
  const A* const weight = to.plan.weight.data();
  const bool single = job.n <= kChunk;
  if (!single) std::fill_n(total, to.width, 0.0);
  for (int64_t first = 0; first == 0 || first < job.n; first += kChunk) {
    std::fill_n(sum, to.width, A(0));
    with_type(job.in, [&](auto zero) PFL_LAMBDA {
      const int64_t end = std::min(first + kChunk, job.n), stride = job.updates_row;
      const auto* const x = static_cast<const decltype(zero)*>(job.updates) + to.column;
      int64_t row = first;
      for (; row + kTogether <= end; row += kTogether)
        add_rows<bytes, kTogether>(sum, to.width, x + row * stride, stride, weight + row);
      for (; row + kTogether / 2 <= end; row += kTogether / 2)
        add_rows<bytes, kTogether / 2>(sum, to.width, x + row * stride, stride, weight + row);
      for (; row < end; row++)
        add_rows<bytes, 1>(sum, to.width, x + row * stride, stride, weight + row);
    });
    for (int64_t c = 0; !single && c < to.width; c += kPanel)
      add_panel<bytes, A>(total + c, sum + c);
  }
  if (!single) copy_as<bytes>(sum, total, to.width);
  for (int64_t c = 0; c < to.width; c += kPanel)
    finish_total<bytes, A>({to.plan, to.kept, to.column + c, kPanel, to.first && c == 0,
                            to.last && c + kPanel == to.width},
                           0, sum + c);
}

// All result rows, columns begin .. end (begin a multiple of the panel).
template <int bytes, class A>
PFL_INLINE void columns(const Plan<A>& plan, int64_t begin, int64_t end) {
  constexpr int64_t line = 64 / sizeof(A), sum_stride = kPanel + line;
  constexpr int64_t wide_columns = kWideBytes / sizeof(A);
  const Aggregate& job = plan.job;
  const int64_t most = job.sparse && plan.reads() <= kPacked ? kPacked : kChunk;
  Scratch<A> panel(std::min(plan.reads(), most) * kPanel), kept(plan.stream ? job.m * line : 0);
  Scratch<double> total(std::max(wide_columns, kBlocks * plan.block * kPanel));
  alignas(64) A sums[std::max(kMaxBlock * sum_stride, line + wide_columns)];
  A* const sum = sums + line;
  std::vector<int64_t> offset;
  if (!plan.packed && job.sparse)
    for (int64_t r : plan.row) offset.push_back(r * job.updates_row);
  // Rows that stay in the caches need not be fetched panel by panel: where nothing is packed
  // either, one panel is as wide as all.
  const bool cached = plan.reads() * job.p * int64_t{sizeof(A)} < kStreamBytes;
  const bool whole = cached && !job.sparse && plan.direct && !plan.packed && job.n <= kChunk;
  const bool wide = job.m == 1 && job.n > kBesides && !job.sparse && !whole;
  const int64_t most_columns = whole ? end - begin : wide ? wide_columns : kPanel;
  int64_t step;
  for (int64_t column = begin; column < end; column += step) {
    step = std::max(std::min(most_columns, end - column) / kPanel, int64_t{1}) * kPanel;
    const Target<A> to{plan,
                       kept.data,
                       column,
                       std::min(step, end - column),
                       column == begin,
                       column + step >= end};
    if (job.sparse)
      sparse_panel<bytes, A>(to, panel.data, total.data, sum, offset.data());
    else if (wide && to.width >= kPanel)
      wide_panel<bytes, A>(to, total.data, sum);
    else
      dense_panel<bytes, A>(to, panel.data, total.data, sum);
  }
  if (plan.stream) fence();
}

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
        if (const A w = weight(i, j); w != 0) {
          plan.place.push_back(slot[job.index[i * job.k + j]]);
          plan.weight.push_back(w);
        }
      plan.first.push_back(static_cast<int64_t>(plan.place.size()));
    }
    plan.packed = !same_type || plan.place.size() > plan.row.size();
  } else {
    const int64_t blocks = (job.m + kMaxBlock - 1) / kMaxBlock;
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
  const bool same_result = job.out_dtype == (std::is_same_v<A, double> ? Dtype::f64 : Dtype::f32);
  // Lines of 64 bytes hold whole numbers only where the numbers lie at multiples of their size,
  // which memory of files need not.
  const int64_t number = size_of(job.out_dtype);
  plan.stream = same_result && job.m * job.p * number >= kStreamBytes &&
                reinterpret_cast<uintptr_t>(job.out) % static_cast<uintptr_t>(number) == 0;
  plan.direct = same_result && !plan.stream;
  return plan;
}

template <class A, class Parallel>
void run(const Aggregate& job, Parallel&& parallel) {
  const Plan<A> plan = make_plan<A>(job);
  const double terms = static_cast<double>(plan.weight.size());
  const double work = (terms / 16 + plan.reads() + job.m + 1) * static_cast<double>(job.p);
  const int64_t panels = (job.p + kPanel - 1) / kPanel;
  const int64_t pieces =
      work < kAloneWork ? 1
                        : std::min({panels, static_cast<int64_t>(work / kPieceWork), int64_t{512}});
  parallel(pieces, [&plan, panels, pieces](int64_t first, int64_t last) {
    const int64_t begin = panels * first / pieces * kPanel,
                  end = std::min(panels * last / pieces * kPanel, plan.job.p);
    if (begin >= end) return;
    on_isa([&](auto bytes) PFL_LAMBDA { columns<bytes, A>(plan, begin, end); });
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
