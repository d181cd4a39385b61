// The mean of each column's numbers without its `removed` least and largest: the trimmed mean, and
// with all but one or two removed the median. And the mean of the `kept` numbers nearest to the
// median, which are neighbours in a sorted column.
//
// The columns are walked in panels, whose rows lie in the first-level cache. Batcher's odd-even
// merge sort orders all columns of a panel at once: a comparator puts the lesser numbers of two
// rows into one of them and the larger ones into the other. Groups of kGroup rows are sorted in
// registers while they are read; a list of steps merges the groups. It has no comparator that the
// wanted rows do not depend on. Columns of very many rows are sorted one by one. A column's result
// depends on that column alone, so neither on the panels nor on the threads.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "../inputs.h"
#include "scratch.h"
#include "simd.h"

namespace pflcore::cpu {

namespace robust_detail {

constexpr int kGroup = 8;       // rows that are sorted in registers
constexpr int64_t kChunk = 16;  // rows that are summed before they are added to the total
#ifdef PFL_SMALL_PIECES         // tests: all paths at small sizes
constexpr int64_t kWideRows = 5, kNetworkRows = 70;
constexpr double kPieceWork = 1e4;
#else
constexpr int64_t kWideRows = 112;      // more rows of wide panels do not fit the first-level cache
constexpr int64_t kNetworkRows = 8192;  // of more rows the list of steps would take much memory
constexpr double kPieceWork = 2e6;      // comparisons of a piece: some hundred microseconds
#endif
constexpr size_t kKeptMerges = 8;           // lists of steps that are kept between calls
constexpr size_t kMostKeptSteps = 1 << 15;  // of such a list, 640 KB; 1,000 rows have some 9,000

// Two rows to be put in order.
struct Comparator {
  int32_t low, high;
};

// f(low, high) for each comparator of Batcher's odd-even merge sort (1968) of n rows that merges
// sorted groups of `first` or more rows.
template <class F>
constexpr void sorting_network(int64_t n, int64_t first, F&& f) {
  for (int64_t p = first; p < n; p *= 2)
    for (int64_t k = p; k > 0; k /= 2)
      for (int64_t j = k % p; j < n - k; j += 2 * k)
        for (int64_t i = j; i < std::min(j + k, n - k); i++)
          if (i / (2 * p) == (i + k) / (2 * p)) f(i, i + k);
}

// A comparator; or three on four rows, which are loaded and stored once: `first` and `second`, and
// then one of second.low and first.high. Such threes are three quarters of a merge.
struct Step {
  Comparator first, second;
  bool three;
};

// The steps that merge groups of kGroup rows, without comparators that no row of first .. last
// depends on.
inline std::vector<Step> merges(int64_t n, int64_t first, int64_t last) {
  struct Node {
    Comparator rows;
    int level;  // more than that of the comparators whose results it takes
    bool taken;
  };
  std::vector<Node> all, used;
  std::vector<int> level(n, 0);
  sorting_network(n, kGroup, [&](int64_t low, int64_t high) {
    level[low] = level[high] = std::max(level[low], level[high]) + 1;
    all.push_back({{static_cast<int32_t>(low), static_cast<int32_t>(high)}, level[low], false});
  });
  std::vector<char> wanted(n, 0);
  std::fill(wanted.begin() + first, wanted.begin() + last, 1);
  for (auto c = all.rbegin(); c != all.rend(); ++c)
    if (wanted[c->rows.low] || wanted[c->rows.high]) {
      wanted[c->rows.low] = wanted[c->rows.high] = 1;
      used.push_back(*c);
    }
  std::reverse(used.begin(), used.end());

  std::vector<std::pair<int, Step>> steps;  // with their levels
  std::vector<Node*> before(n, nullptr);    // the last comparator of each row
  for (Node& c : used) {
    Node *const x = before[c.rows.high], *const y = before[c.rows.low];
    if (x && y && x->level == y->level && !x->taken && !y->taken && x->rows.high == c.rows.high &&
        y->rows.low == c.rows.low && x != y) {
      x->taken = y->taken = c.taken = true;
      steps.push_back({x->level, {x->rows, y->rows, true}});
    }
    before[c.rows.low] = before[c.rows.high] = &c;
  }
  for (const Node& c : used)
    if (!c.taken) steps.push_back({c.level, {c.rows, c.rows, false}});
  // A step's level is that of its first comparators, and each depends on lower levels only.
  std::stable_sort(steps.begin(), steps.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Step> out;
  for (const auto& step : steps) out.push_back(step.second);
  return out;
}

// The last lists of `merges`, for calls on all threads: to make one takes longer than a small call,
// and most calls ask for the same few.
class KeptMerges {
 public:
  using Steps = std::shared_ptr<const std::vector<Step>>;

  static Steps find_or_make(int64_t n, int64_t first, int64_t last) {
    static KeptMerges kept;
    return kept.find_or_make({n, first, last});
  }

 private:
  struct Rows {
    int64_t n, first, last;
    bool operator==(const Rows& o) const { return n == o.n && first == o.first && last == o.last; }
  };
  struct Entry {
    Rows rows{};
    Steps steps;
  };

  Steps find_or_make(const Rows& rows) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (const Entry& entry : entries_)
        if (entry.steps && entry.rows == rows) return entry.steps;
    }
    const auto steps =
        std::make_shared<const std::vector<Step>>(merges(rows.n, rows.first, rows.last));
    if (steps->size() <= kMostKeptSteps) {
      const std::lock_guard<std::mutex> lock(mutex_);
      entries_[oldest_] = {rows, steps};
      oldest_ = (oldest_ + 1) % kKeptMerges;
    }
    return steps;
  }

  std::mutex mutex_;
  std::array<Entry, kKeptMerges> entries_;
  size_t oldest_ = 0;
};

// The comparators that sort n <= kGroup rows, as constants.
template <int n>
struct GroupNetwork {
  static constexpr int count = [] {
    int c = 0;
    sorting_network(n, 1, [&](int64_t, int64_t) { c++; });
    return c;
  }();
  static constexpr std::array<Comparator, count> pairs = [] {
    std::array<Comparator, count> out{};
    int c = 0;
    sorting_network(n, 1, [&](int64_t low, int64_t high) {
      out[c++] = {static_cast<int32_t>(low), static_cast<int32_t>(high)};
    });
    return out;
  }();
};

// a, b = their lesser and larger lanes; NaN makes either lane any number. GCC makes comparisons
// and choices of `a < b ? a : b` in wide vectors, hence the instructions by name.
template <class T, int bytes>
PFL_INLINE void put_in_order(Vec<T, bytes>& a, Vec<T, bytes>& b) {
  Vec<T, bytes> low, high;
#if PFL_X86 && !defined(__clang__)
  if constexpr (bytes > 16 && sizeof(T) == 4) {
    asm("vminps %2, %1, %0" : "=v"(low) : "v"(a), "v"(b));
    asm("vmaxps %2, %1, %0" : "=v"(high) : "v"(a), "v"(b));
  } else if constexpr (bytes > 16) {
    asm("vminpd %2, %1, %0" : "=v"(low) : "v"(a), "v"(b));
    asm("vmaxpd %2, %1, %0" : "=v"(high) : "v"(a), "v"(b));
  } else
#endif
  {
    low = a < b ? a : b;
    high = b < a ? a : b;
  }
  a = low, b = high;
}

// to = `from` in the lanes where a < b. By name for the same reason: GCC 12 goes lane by lane.
template <class T, int bytes>
PFL_INLINE void replace_where_less(Vec<T, bytes>& to, const Vec<T, bytes>& from,
                                   const Vec<T, bytes>& a, const Vec<T, bytes>& b) {
#if PFL_X86 && !defined(__clang__)
  if constexpr (bytes == 64 && sizeof(T) == 4) {
    asm("vcmpps $1, %3, %2, %%k1\n\tvmovaps %1, %0%{%%k1%}"
        : "+v"(to)
        : "v"(from), "v"(a), "v"(b)
        : "k1");
    return;
  }
  if constexpr (bytes == 64 && sizeof(T) == 8) {
    asm("vcmppd $1, %3, %2, %%k1\n\tvmovapd %1, %0%{%%k1%}"
        : "+v"(to)
        : "v"(from), "v"(a), "v"(b)
        : "k1");
    return;
  }
#endif
  to = a < b ? from : to;
}

template <class A>
struct Panel {
  int64_t columns;
  A* tile;  // [n, columns]
  A* nan;   // [columns]: NaN where a number of the column is, else 0
};

// Rows of a panel at `from`, sorted in groups.
template <int bytes, class A>
PFL_INLINE void sort_groups(const Panel<A>& panel, const A* from, int64_t stride, int64_t n,
                            int64_t ahead) {
  constexpr int64_t lanes = bytes / sizeof(A);
  using V = Vec<A, bytes>;
  for (int64_t first = 0; first < n; first += kGroup) {
    const int64_t count = std::min<int64_t>(kGroup, n - first);
    const A* const x = from + first * stride;
    A* const to = panel.tile + first * panel.columns;
    fixed<kGroup>(count, [&](auto rows) PFL_LAMBDA {
      for (int64_t c = 0; c < panel.columns; c += lanes) {
        V v[rows], nan;
        load(nan, panel.nan + c);
        PFL_EACH(r, rows, load(v[r], x + r * stride + c);
                 __builtin_prefetch(x + r * stride + c + ahead));
        PFL_EACH(r, rows, nan = v[r] == v[r] ? nan : v[r]);
        using Network = GroupNetwork<rows>;
        PFL_EACH(k, Network::count,
                 put_in_order<A, bytes>(v[Network::pairs[k].low], v[Network::pairs[k].high]));
        PFL_EACH(r, rows, store(to + r * panel.columns + c, v[r]));
        store(panel.nan + c, nan);
      }
    });
  }
}

// Vectors of a line of 64 bytes, of which a panel's row has several.
template <int bytes>
constexpr int kLine = bytes < 64 ? 64 / bytes : 1;

template <int bytes, class A>
PFL_INLINE void merge_groups(const Panel<A>& panel, const std::vector<Step>& steps) {
  constexpr int64_t lanes = bytes / sizeof(A);
  using V = Vec<A, bytes>;
  const auto at = [&](int32_t row) PFL_LAMBDA { return panel.tile + row * panel.columns; };
  for (const Step& step : steps) {
    A *const a_row = at(step.first.low), *const b_row = at(step.first.high),
             *const c_row = at(step.second.low), *const d_row = at(step.second.high);
    for (int64_t i = 0; step.three && i < panel.columns; i += kLine<bytes> * lanes)
      PFL_EACH(k, kLine<bytes>, V a, b, c, d; const int64_t from = i + k * lanes;
               load(a, a_row + from); load(b, b_row + from); load(c, c_row + from);
               load(d, d_row + from); put_in_order<A, bytes>(a, b); put_in_order<A, bytes>(c, d);
               put_in_order<A, bytes>(c, b); store(a_row + from, a); store(b_row + from, b);
               store(c_row + from, c); store(d_row + from, d));
    for (int64_t i = 0; !step.three && i < panel.columns; i += kLine<bytes> * lanes)
      PFL_EACH(k, kLine<bytes>, V a, b; const int64_t from = i + k * lanes; load(a, a_row + from);
               load(b, b_row + from); put_in_order<A, bytes>(a, b); store(a_row + from, a);
               store(b_row + from, b));
  }
}

// Sorts the columns one after another. `space`: one number for each of the n rows.
template <class A>
void sort_each(const Panel<A>& panel, int64_t n, A* space) {
  for (int64_t c = 0; c < panel.columns; c++) {
    if (panel.nan[c] != panel.nan[c]) continue;  // NaN has no place in an order
    for (int64_t r = 0; r < n; r++) space[r] = panel.tile[r * panel.columns + c];
    std::sort(space, space + n);
    for (int64_t r = 0; r < n; r++) panel.tile[r * panel.columns + c] = space[r];
  }
}

// mean[0 .. columns) = the means of rows first .. last of the sorted tile.
template <int bytes, class A>
PFL_INLINE void take_means(const Panel<A>& panel, int64_t first, int64_t last, A* mean) {
  constexpr int64_t lanes = bytes / sizeof(A);
  constexpr int across = kLine<bytes>;
  using V = Vec<A, bytes>;
  const V count = V{} + static_cast<A>(last - first);
  for (int64_t column = 0; column < panel.columns; column += across * lanes) {
    V total[across]{}, sum[across]{}, v;
    for (int64_t r = first; r < last; r++) {
      PFL_EACH(c, across, load(v, panel.tile + r * panel.columns + column + c * lanes);
               sum[c] += v);
      if ((r - first + 1) % kChunk == 0) PFL_EACH(c, across, total[c] += sum[c]; sum[c] = V{});
    }
    PFL_EACH(c, across, load(v, panel.nan + column + c * lanes); total[c] += sum[c];
             total[c] = v == v ? total[c] / count : v; store(mean + column + c * lanes, total[c]));
  }
}

// mean[0 .. columns) = the means of the `kept` numbers of the sorted tile nearest to the median.
//
// With `low` and `high` the two numbers in the middle, which are one where n is odd, they are the
// rows from some row s on, s = 0 .. n - kept: s moves up by one if the number that it gains is not
// above `low`, or is less above `high` than the one that it loses is below `low`. The median itself
// would be rounded, and numbers equally far from it would not be so from what is left. As the
// numbers are sorted, the rows at which s moves are the first ones. So row r is in the mean unless
// s moves at r, or does not move at r - kept.
template <int bytes, class A>
PFL_INLINE void take_nearest(const Panel<A>& panel, int64_t n, int64_t kept, A* mean) {
  constexpr int64_t lanes = bytes / sizeof(A);
  using V = Vec<A, bytes>;
  const V count = V{} + static_cast<A>(kept);
  for (int64_t column = 0; column < panel.columns; column += lanes) {
    const A* const first = panel.tile + column;
    V total{}, sum{}, low, high, nan;
    load(low, first + (n - 1) / 2 * panel.columns);
    load(high, first + n / 2 * panel.columns);
    // The halves, because a sum of large numbers would be infinite.
    const V median = low * A(.5) + high * A(.5);
    const V gap = median - median;  // NaN where the median is no finite number and stands for both
    low = gap == gap ? low : median;
    high = gap == gap ? high : median;
    // v = `moved` where s moves up by one
    const auto if_moves = [&](int64_t s, V& v, const V& moved) PFL_LAMBDA {
      V lost, gained, above = v;
      load(lost, first + s * panel.columns);
      load(gained, first + (s + kept) * panel.columns);
      replace_where_less<A, bytes>(above, moved, gained - high, low - lost);
      v = moved;
      replace_where_less<A, bytes>(v, above, low, gained);
    };
    for (int64_t r = 0; r < n; r++) {
      V v, taken{};
      load(v, first + r * panel.columns);
      if (r + kept < n) if_moves(r, v, V{});
      if (r >= kept)
        if_moves(r - kept, taken, v);
      else
        taken = v;
      sum += taken;
      if ((r + 1) % kChunk == 0) total += sum, sum = V{};
    }
    load(nan, panel.nan + column);
    total = (total + sum) / count;
    total = low == low ? total : low;
    total = nan == nan ? total : nan;
    store(mean + column, total);
  }
}

// What an op takes of the sorted columns: the rows that it reads, and their means.
inline std::pair<int64_t, int64_t> needed(const TrimmedMean& job) {
  return {job.removed, job.n - job.removed};
}
inline std::pair<int64_t, int64_t> needed(const MeanAroundMedian& job) { return {0, job.n}; }
template <int bytes, class A>
PFL_INLINE void take(const TrimmedMean& job, const Panel<A>& panel, A* mean) {
  take_means<bytes>(panel, job.removed, job.n - job.removed, mean);
}
template <int bytes, class A>
PFL_INLINE void take(const MeanAroundMedian& job, const Panel<A>& panel, A* mean) {
  take_nearest<bytes>(panel, job.n, job.kept, mean);
}

// n elements from `from` on, which has space for whole vectors, as T.
template <int bytes, class A, class T>
PFL_INLINE void put(T* to, const A* from, int64_t n) {
  constexpr int64_t lanes = bytes / sizeof(A);
  for (int64_t c = 0; c < n; c += lanes) {
    Vec<A, bytes> v;
    T part[lanes];
    load(v, from + c);
    store_as<bytes, A>(part, v);
    std::memcpy(to + c, part, sizeof(T) * std::min(lanes, n - c));
  }
}

// Columns begin .. end, whose numbers are sorted as A.
template <int bytes, class A, class Job>
PFL_INLINE void columns(const Job& job, const std::vector<Step>& steps, int64_t width,
                        int64_t begin, int64_t end) {
  const bool same_type = job.dtype == (std::is_same_v<A, double> ? Dtype::f64 : Dtype::f32);
  const bool copied = !same_type || (end - begin) % width != 0;
  const bool alone = job.n > kNetworkRows;
  Scratch<A> tile(job.n * width), copies(copied ? job.n * width : 0), nan(width), mean(width),
      one(alone ? job.n : 0);
  const Panel<A> panel{width, tile.data, nan.data};
  for (int64_t column = begin; column < end; column += width) {
    const int64_t filled = std::min(width, end - column);
    const bool direct = same_type && filled == width;
    if (!direct)
      with_type(job.dtype, [&](auto zero) PFL_LAMBDA {
        const auto* const rows = static_cast<const decltype(zero)*>(job.rows) + column;
        for (int64_t r = 0; r < job.n; r++) {
          A* const copy = copies.data + r * width;
          if (filled < width) std::fill_n(copy, width, A(0));
          copy_as<bytes>(copy, rows + r * job.row, filled);
        }
      });
    std::fill_n(nan.data, width, A(0));
    sort_groups<bytes>(panel, direct ? static_cast<const A*>(job.rows) + column : copies.data,
                       direct ? job.row : width, job.n, direct ? width : 0);
    if (alone)
      sort_each(panel, job.n, one.data);
    else
      merge_groups<bytes>(panel, steps);
    take<bytes>(job, panel, mean.data);
    with_type(job.dtype, [&](auto zero) PFL_LAMBDA {
      put<bytes>(static_cast<decltype(zero)*>(job.out) + column, mean.data, filled);
    });
  }
}

}  // namespace robust_detail

// A Job is a TrimmedMean or a MeanAroundMedian. parallel(n, body) calls body(begin, end) on ranges
// that cover 0..n, on any threads.
template <class Job, class Parallel>
void mean_of_columns(const Job& job, const Parallel& parallel) {
  using namespace robust_detail;
  if (job.p == 0) return;
  const auto [first_row, last_row] = needed(job);
  KeptMerges::Steps kept = std::make_shared<const std::vector<Step>>();
  if (job.n <= kNetworkRows) kept = KeptMerges::find_or_make(job.n, first_row, last_row);
  const std::vector<Step>& steps = *kept;
  const int64_t number = job.dtype == Dtype::f64 ? 8 : 4;
  const int64_t width = (job.n <= kWideRows * 4 / number ? 256 : 64) / number;
  const int64_t panels = (job.p + width - 1) / width;
  const double work =
      static_cast<double>(job.p) *
      (job.n > kNetworkRows ? 40.0 * job.n : static_cast<double>(2 * steps.size() + 3 * job.n));
  const int64_t pieces =
      std::min({panels, static_cast<int64_t>(work / kPieceWork) + 1, int64_t{512}});
  parallel(pieces, [&](int64_t first, int64_t last) {
    const int64_t begin = panels * first / pieces * width,
                  end = std::min(panels * last / pieces * width, job.p);
    if (begin >= end) return;
    on_isa([&](auto bytes) PFL_LAMBDA {
      if (job.dtype == Dtype::f64)
        columns<bytes, double>(job, steps, width, begin, end);
      else
        columns<bytes, float>(job, steps, width, begin, end);
    });
  });
}

}  // namespace pflcore::cpu
