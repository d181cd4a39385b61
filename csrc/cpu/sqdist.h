// out[i][j] = sum over the columns of (a_i - b_j)^2: differences first, float64 totals. Knows
// nothing of torch.
//
// Columns are walked in blocks that fit the second-level cache with all their rows; a block's pairs
// are taken 4 x 4 in registers while the next block is prefetched. A float32 sum meets at most 16
// roundings before it is flushed to float64, so that constant rows, whose errors all point one way,
// keep a relative error below 1e-6 (sqdist_tile.h). A pair whose sum is not finite or below 1e-30
// is done again in float64.
//
// The order in which a pair is summed depends on the number of columns and the type alone: not on
// the threads, not on where the pair stands, and not on how many rows there are. So listed pairs,
// and tiles of a matrix that is taken in parts, have the very bits of all pairs.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "isa.h"
#include "scratch.h"
#include "sqdist_tile.h"

namespace pflcore::cpu {
namespace sqdist_detail {

constexpr int64_t kBand = 16;    // rows whose strips stay in the first-level cache
constexpr int64_t kMacro = 128;  // rows of a window on either side
constexpr int64_t kBlockBytes =
    160 << 10;  // of a column block: with the next one it stays in the second-level cache
constexpr int64_t kMany = 48;             // rows from which on pages and cache sets run short
constexpr int64_t kStretch = 2 * kGroup;  // columns between two totals of float64 lanes
constexpr int64_t kUnit = 2 * kStretch;   // a chunk of columns is so many units
constexpr int64_t kSkew =
    16;  // elements between packed rows, so that they do not fall into the same cache sets
constexpr double kTiny = 1e-30;  // below it float32 squares may have underflowed

// Rows of In, read as rows of T: in place where they are T already, else (and in a last, short
// block) by a copy padded with zeros.
template <class In, class T>
struct Rows {
  const In* data;
  int64_t row;  // elements from one row to the next
  const int64_t* index =
      nullptr;  // row r is the data's row index[r]; negative: any, its results are dropped

  const In* at(int64_t r) const {
    return data + (index ? std::max<int64_t>(index[r], 0) : r) * row;
  }

  // Is a copy needed whatever the speed?
  bool must_copy(int64_t width) const { return !std::is_same_v<In, T> || width % kLanes != 0; }

  // Many rows are read many times: then it pays to copy those that start off the cache lines, or
  // all in the same cache sets.
  bool better_copied(int64_t rows) const {
    const auto at = reinterpret_cast<uintptr_t>(data) % 64,
               step = static_cast<uintptr_t>(row) * sizeof(In);
    return rows >= kMany && (at != 0 || step % 64 != 0 || step % 4096 == 0);
  }

  // at[i] = row first + i (the last one again up to whole tiles), columns [c, c + width), padded to
  // whole lanes; packed: space for a copy.
  void block(int64_t first, int64_t many, int64_t tile, int64_t c, int64_t width, bool copy,
             T* packed, const T** at) const {
    const int64_t padded = up(width, kLanes);
    for (int64_t i = 0; i < up(many, tile); ++i) {
      if (i >= many) {
        at[i] = at[many - 1];
        continue;
      }
      const In* from = this->at(first + i) + c;
      if constexpr (std::is_same_v<In, T>) {
        if (!copy && !must_copy(width)) {
          at[i] = from;
          continue;
        }
      }
      T* to = packed + i * (padded + kSkew);
      if constexpr (std::is_same_v<In, T>)
        std::memcpy(to, from, sizeof(T) * width);
      else
        on_isa([&](auto bytes) PFL_LAMBDA { copy_as<bytes>(to, from, width); });
      std::fill(to + width, to + padded, T(0));
      at[i] = to;
    }
  }
};

// Columns are cut into chunks that depend on their number alone. A chunk is summed apart (so that
// threads need not wait for one another), and the chunks' sums are added up in order.
struct Plan {
  const Sqdist& q;
  int64_t block;  // columns of a block, whole stretches
  int64_t strip;  // columns of a block that all register blocks take before the next ones
  int64_t chunk, chunks;
  int64_t together;  // chunks that are summed at a time
  int64_t run;       // blocks of one chunk between two barriers
  bool list;

  Plan(const Sqdist& q, int64_t windows, int64_t size) : q(q), list(q.listed >= 0) {
    const int64_t units = (q.p + kUnit - 1) / kUnit,
                  most = std::clamp<int64_t>(std::max(units / 32, std::min<int64_t>(units, 16)), 1,
                                             64);
    chunk = (units + most - 1) / most * kUnit, chunks = (q.p + chunk - 1) / chunk;
    block = std::clamp<int64_t>(kBlockBytes / (rows() * size) / kStretch * kStretch, kStretch,
                                std::min(16 * kGroup, chunk));
    // short strips stay in the first-level cache; many rows are more pages than the processor
    // remembers, to be looked up anew for each strip
    strip = size == 4 && rows() < kMany ? kGroup : kStretch;
    // enough pieces for many threads, partial results of 32 MB at most
    const int64_t room = (32 << 20) / (8 * q.m * q.across());
    together = std::clamp<int64_t>(std::min(room, 64 / windows), 1, chunks);
    run = (chunk + block - 1) / block;
    // with several windows the blocks between two barriers should stay in the last-level cache,
    // where the other windows find them
    if (windows > 1)
      run = std::clamp<int64_t>((8 << 20) / (together * (q.m + q.n) * block * size), 1, run);
  }

  int64_t rows() const {
    return std::min(list ? 1 : q.m, kMacro) +
           (q.symmetric && !list && q.m <= kMacro ? 0 : std::min(q.across(), kMacro));
  }  // that a window reads
  int64_t end(int64_t k) const { return std::min(q.p, (k + 1) * chunk); }
};

// A window of at most kMacro x kMacro pairs, cut into register blocks whose 16 sums lie together:
// sums[first + t * 16 + i * 4 + j].
struct Window {
  int64_t i0, j0, mi, nj;  // first row and number of rows on either side
  bool diagonal;
  int64_t first;  // of its sums

  int64_t down() const { return (mi + kTile - 1) / kTile; }
  int64_t across() const { return (nj + kTile - 1) / kTile; }
  int64_t tiles() const { return diagonal ? down() * (down() + 1) / 2 : down() * across(); }
  int64_t pairs() const { return diagonal ? mi * (mi - 1) / 2 : mi * nj; }

  // The register blocks, band by band of rows, in a band column by column: the band stays in the
  // first-level cache, and the pages of the columns' rows are looked up once for all its blocks.
  template <class Body>
  void each(const Body& body) const {
    int64_t t = 0;
    for (int64_t i0 = 0; i0 < mi; i0 += kBand)
      for (int64_t j = diagonal ? i0 : 0; j < nj; j += kTile)
        for (int64_t i = i0; i < std::min(diagonal ? std::min(mi, j + kTile) : mi, i0 + kBand);
             i += kTile)
          body(t++, i, j);
  }
};

// All pairs; or for each row its list, less what is negative at its end.
inline std::vector<Window> windows_of(const Sqdist& q) {
  std::vector<Window> out;
  int64_t first = 0;
  const auto add = [&](int64_t i0, int64_t j0, int64_t mi, int64_t nj, bool diagonal) {
    const Window w{i0, j0, mi, std::min(kMacro, nj), diagonal, first};
    first += w.tiles() * kTile * kTile;
    out.push_back(w);
  };
  if (q.listed >= 0) {
    for (int64_t i = 0; i < q.m; ++i) {
      int64_t many = q.listed;
      while (many > 0 && q.index[i * q.listed + many - 1] < 0) --many;
      for (int64_t j = 0; j < many; j += kMacro) add(i, i * q.listed + j, 1, many - j, false);
    }
  } else {
    for (int64_t i = 0; i < q.m; i += kMacro)
      for (int64_t j = q.symmetric ? i : 0; j < q.n; j += kMacro)
        add(i, j, std::min(kMacro, q.m - i), q.n - j, q.symmetric && i == j);
  }
  return out;
}

// Fetches the rows' next block from memory while this one is worked on: some cache lines of a row
// before each register block, for bursts would hold up the loads. The hint is for the second-level
// cache, where the block waits without driving this one's strips out of the first: 1.4 times as
// fast as a hint for all caches with 10 rows, 1.3 times with 20. That was measured on a processor
// with AVX-512. One with AVX2 alone often dropped such a hint, so there it is for all caches.
struct Ahead {
  static constexpr int64_t kPiece = 512;  // bytes
  const char* row[2 * kMacro];            // first byte of each row's next block
  int64_t rows = 0, bytes = 0;            // of a row
  int64_t r = 0, at = 0;                  // the next one

  int64_t pieces() const { return rows * ((bytes + kPiece - 1) / kPiece); }
  void fetch(int64_t pieces, bool second_level) {
    for (; pieces > 0 && r < rows; --pieces) {
      const char* from = row[r] + at;
      if (second_level) {
        PFL_UNROLL
        for (int64_t k = 0; k < kPiece; k += 64) __builtin_prefetch(from + k, 0, 2);
      } else {
        PFL_UNROLL
        for (int64_t k = 0; k < kPiece; k += 64) __builtin_prefetch(from + k);
      }
      at += kPiece;
      if (at >= bytes) at = 0, ++r;
    }
  }
};

template <Kind kind, class In, class T>
struct Worker {
  const Rows<In, T>& a;
  const Rows<In, T>& b;
  const Plan& plan;
  Isa now = isa();
  std::unique_ptr<Scratch<T>> room = {};  // of the copies, made when first needed
  const T* at_a[kMacro] = {};
  const T* at_b[kMacro] = {};

  // Adds the pairs of a window over one column block; fetches the next block meanwhile where there
  // is `another`, and it is whole.
  void operator()(const Window& w, int64_t c, int64_t width, bool another, double* sums) {
    const int64_t columns = up(width, kLanes);
    const int64_t rows =
        plan.list ? 0 : w.mi + (w.diagonal ? 0 : w.nj);  // a list's rows are read once
    const bool copy_a = a.better_copied(rows), copy_b = b.better_copied(rows);
    if (!room && (copy_a || copy_b || a.must_copy(width)))
      room = std::make_unique<Scratch<T>>(plan.rows() * (plan.block + kSkew));
    T* const packed = room ? room->data : nullptr;
    a.block(w.i0, w.mi, w.mi == 1 && !w.diagonal ? 1 : kTile, c, width, copy_a, packed, at_a);
    T* const packed_b = room ? room->data + w.mi * (plan.block + kSkew) : nullptr;
    if (!w.diagonal) b.block(w.j0, w.nj, kTile, c, width, copy_b, packed_b, at_b);
    const T* const* right = w.diagonal ? at_a : at_b;

    Ahead ahead;
    if (another) {
      const auto add = [&](const Rows<In, T>& rows, int64_t first, int64_t many) {
        for (int64_t i = 0; i < many; ++i)
          ahead.row[ahead.rows++] =
              reinterpret_cast<const char*>(rows.at(first + i) + c + plan.block);
      };
      add(a, w.i0, w.mi);
      if (!w.diagonal) add(b, w.j0, w.nj);
      ahead.bytes = plan.block * static_cast<int64_t>(sizeof(In));
    }
    const bool alone = kind == Kind::narrow && w.pairs() == 1;
    const int64_t strip = alone ? kTile * kGroup : plan.strip,
                  turns = w.tiles() * (up(columns, strip) / strip),
                  pieces = (ahead.pieces() + turns - 1) / turns;
    for (int64_t from = 0; from < columns; from += strip)
      w.each([&](int64_t t, int64_t i, int64_t j) {
        ahead.fetch(pieces, now == Isa::avx512);
        const int64_t to = std::min(columns, from + strip);
        double* const total = sums + w.first + t * kTile * kTile;
        if constexpr (kind == Kind::narrow)
          if (alone) {
            const int other = w.diagonal ? 1 : 0;  // of a diagonal block the first pair is (0, 1)
            return sum_block<Kind::one, 1, T>(now, at_a, right + other, from, to, total + other);
          }
        constexpr Kind half = kind == Kind::wide ? kind : Kind::triangle;
        auto* const sum = w.diagonal && i == j ? &sum_block<half, kTile, T>
                          : w.mi == 1          ? &sum_block<kind, 1, T>
                                               : &sum_block<kind, kTile, T>;
        sum(now, at_a + i, right + j, from, to, total);
      });
  }
};

// Calls body(result, i, j) for the pairs of a register block: i, j from its corner.
template <class Body>
void each_pair(const Plan& plan, const Window& w, int64_t ti, int64_t tj, const Body& body) {
  for (int64_t i = ti; i < std::min(w.mi, ti + kTile); ++i)
    for (int64_t j = tj; j < std::min(w.nj, tj + kTile); ++j)
      if (!(w.diagonal && i >= j) && !(plan.list && plan.q.index[w.j0 + j] < 0))
        body(plan.q.out[(plan.list ? 0 : (w.i0 + i) * plan.q.n) + w.j0 + j], i - ti, j - tj);
}

template <Kind kind, class In, class T, class Parallel>
void all_pairs(const Rows<In, T>& a, const Rows<In, T>& b, const Plan& plan,
               const std::vector<Window>& windows, const Parallel& parallel) {
  const int64_t many = static_cast<int64_t>(windows.size()),
                size = windows.back().first + windows.back().tiles() * kTile * kTile;
  std::vector<double> sums(size * plan.together);
  for (int64_t k0 = 0; k0 < plan.chunks; k0 += plan.together) {
    const int64_t chunks = std::min(plan.together, plan.chunks - k0);
    if (k0) std::fill(sums.begin(), sums.end(), 0.0);
    for (int64_t wave = 0; wave < plan.chunk; wave += plan.run * plan.block)
      parallel(chunks * many, [&](int64_t begin, int64_t end) {
        Worker<kind, In, T> work{a, b, plan};
        for (int64_t piece = begin; piece < end; ++piece) {
          const int64_t k = piece / many, first = (k0 + k) * plan.chunk + wave,
                        last = std::min(plan.end(k0 + k), first + plan.run * plan.block);
          for (int64_t c = first; c < last; c += plan.block)
            work(windows[piece % many], c, std::min(plan.block, last - c),
                 c + 2 * plan.block <= last, sums.data() + k * size);
        }
      });
    parallel(many, [&](int64_t begin, int64_t end) {
      for (int64_t v = begin; v < end; ++v)
        windows[v].each([&](int64_t t, int64_t ti, int64_t tj) {
          const double* sum = sums.data() + windows[v].first + t * kTile * kTile;
          each_pair(plan, windows[v], ti, tj, [&](double& value, int64_t i, int64_t j) {
            for (int64_t k = 0; k < chunks; ++k)
              value = k0 + k ? value + sum[k * size + i * kTile + j] : sum[i * kTile + j];
          });
        });
    });
  }
}

inline bool suspect(double value) { return !(value >= kTiny && value <= 1.7976931348623157e308); }

// Does the suspect pairs again in float64, register block by register block; the other pairs keep
// their value.
template <class In, class Parallel>
void again(const Rows<In, float>& a, const Rows<In, float>& b, const Plan& plan,
           const std::vector<Window>& windows, const Parallel& parallel) {
  struct Block {
    const Window* w;
    int64_t i, j;
  };
  std::vector<Block> blocks;
  for (const Window& w : windows)
    w.each([&](int64_t, int64_t i, int64_t j) {
      bool bad = false;
      each_pair(plan, w, i, j, [&](double& value, int64_t, int64_t) { bad |= suspect(value); });
      if (bad) blocks.push_back({&w, i, j});
    });
  if (blocks.empty()) return;
  constexpr int64_t square = kTile * kTile;
  const int64_t many = static_cast<int64_t>(blocks.size()),
                split = many < 64 ? plan.chunks : 1;  // how the work is cut, not how it is summed
  std::vector<double> sums(many * split * square);
  parallel(many * split, [&](int64_t begin, int64_t end) {
    Scratch<float> packed(2 * kTile * (kStretch + kSkew));
    const float *at_a[kTile], *at_b[kTile];
    for (int64_t piece = begin; piece < end; ++piece) {
      const Block at = blocks[piece / split];
      const int64_t rows = at.w->mi == 1 ? 1 : kTile;
      double* sum = sums.data() + piece * square;
      for (int64_t k = split == 1 ? 0 : piece % split;
           k < (split == 1 ? plan.chunks : piece % split + 1); ++k) {
        double in_chunk[square] = {};
        for (int64_t c = k * plan.chunk; c < plan.end(k); c += kStretch) {
          const int64_t width = std::min(kStretch, plan.end(k) - c);
          a.block(at.w->i0 + at.i, std::min(kTile, at.w->mi - at.i), rows, c, width, false,
                  packed.data, at_a);
          b.block(at.w->j0 + at.j, std::min(kTile, at.w->nj - at.j), kTile, c, width, false,
                  packed.data + kTile * (kStretch + kSkew), at_b);
          (rows == 1 ? &sum_block<Kind::wide, 1, float>
                     : &sum_block<Kind::wide, kTile, float>)(isa(), at_a, at_b, 0,
                                                             up(width, kLanes), in_chunk);
        }
        for (int64_t s = 0; s < square; ++s) sum[s] += in_chunk[s];
      }
    }
  });
  for (int64_t t = 0; t < many; ++t)
    each_pair(plan, *blocks[t].w, blocks[t].i, blocks[t].j,
              [&](double& value, int64_t i, int64_t j) {
                if (!suspect(value)) return;
                value = 0;
                for (int64_t k = 0; k < split; ++k)
                  value += sums[(t * split + k) * square + i * kTile + j];
              });
}

template <class In, class T, class Parallel>
void sqdist_typed(const Sqdist& q, const Parallel& parallel) {
  const std::vector<Window> windows = windows_of(q);
  if (windows.empty()) return;
  const Rows<In, T> a{static_cast<const In*>(q.a), q.a_row};
  Rows<In, T> b = a;
  if (!q.symmetric) b = {static_cast<const In*>(q.b), q.b_row};
  if (q.listed >= 0) b.index = q.index;
  const Plan plan(q, static_cast<int64_t>(windows.size()), sizeof(T));
  all_pairs<std::is_same_v<T, double> ? Kind::wide : Kind::narrow>(a, b, plan, windows, parallel);
  if constexpr (std::is_same_v<T, float>) again(a, b, plan, windows, parallel);
}

}  // namespace sqdist_detail

// True where both sides are the same rows in the same memory, so that each pair is summed once.
inline bool is_one_matrix(const Sqdist& q) {
  if (q.listed >= 0) return false;
  return q.symmetric || (q.a == q.b && q.a_row == q.b_row && q.m == q.n);
}

// parallel(n, body) calls body(begin, end) on ranges that cover 0..n, on any threads.
template <class Parallel>
void sqdist(Sqdist q, const Parallel& parallel) {
  const bool list = q.listed >= 0;
  const int64_t size = q.m * q.across();
  for (int64_t k = 0; k < size; ++k)
    q.out[k] = list && q.index[k] < 0 ? std::numeric_limits<double>::infinity() : 0;
  if (q.p == 0 || size == 0) return;  // rows without columns may have no address
  const auto sum_pairs = [&](const Sqdist& pairs) {
    with_type(q.dtype, [&](auto in) {
      using In = decltype(in);
      sqdist_detail::sqdist_typed<In, std::conditional_t<sizeof(In) == 8, double, float>>(pairs,
                                                                                          parallel);
    });
  };
  if (list) {
    sum_pairs(q);
    for (int64_t k = 0; k < size && q.symmetric; ++k)
      if (q.index[k] == k / q.listed) q.out[k] = 0;
    return;
  }
  if (!is_one_matrix(q)) {
    if (q.n == 1)  // (a - b)^2 = (b - a)^2
      std::swap(q.a, q.b), std::swap(q.a_row, q.b_row), std::swap(q.m, q.n);
    return sum_pairs(q);
  }
  Sqdist pairs = q;
  pairs.symmetric = true;
  sum_pairs(pairs);
  for (int64_t i = 0; i < q.m; ++i) {
    double* const row = q.out + i * q.n;
    for (int64_t j = 0; j < i; ++j) row[j] = q.out[j * q.n + i];
  }
  if (q.symmetric) return;
  // With two operands the distance of a row from itself is NaN where the row is not finite. A row
  // at a finite distance from another one is finite; the others are compared with themselves.
  for (int64_t i = 0; i < q.m; ++i) {
    double* const row = q.out + i * q.n;
    bool finite = false;
    for (int64_t j = 0; j < q.n; ++j) finite |= j != i && std::isfinite(row[j]);
    if (finite) continue;
    Sqdist itself = q;
    itself.a = itself.b = static_cast<const char*>(q.a) + i * q.a_row * size_of(q.dtype);
    itself.m = itself.n = 1, itself.out = row + i;
    sum_pairs(itself);
  }
}

}  // namespace pflcore::cpu
