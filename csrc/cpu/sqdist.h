// out[i][j] = sum over the columns of (a_i - b_j)^2: differences first, float64 totals. Knows nothing of torch.
//
// Columns are walked in blocks that fit the second-level cache with all their rows; a block's pairs are taken 4 x 4 in registers while the
// next block is prefetched. A float32 sum meets at most 16 roundings before it is flushed to float64, so that constant rows, whose errors all
// point one way, keep a relative error below 1e-6 (sqdist_tile.h). A pair whose sum is not finite or below 1e-30 is done again in
// float64.
//
// The order in which a pair is summed depends on the sizes alone: neither on the threads nor on where in the matrix the pair stands.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "isa.h"
#include "scratch.h"
#include "sqdist_tile.h"

namespace pflcore::cpu {
namespace sqdist_detail {

constexpr int64_t kBand = 16;         // rows whose strips stay in the first-level cache
constexpr int64_t kMacro = 128;       // rows of a window on either side
constexpr int64_t kBlockBytes = 160 << 10;  // of a column block: with the next one it stays in the second-level cache
constexpr int64_t kMany = 48;         // rows from which on pages and cache sets run short
constexpr int64_t kSkew = 16;         // elements between packed rows, so that they do not fall into the same cache sets
constexpr double kTiny = 1e-30;       // below it float32 squares may have underflowed

inline int64_t up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// Rows of In, read as rows of T: in place where they are T already, else (and in a last, short block) by a copy padded with zeros.
template <class In, class T>
struct Rows {
  const In* data;
  int64_t row, count;  // elements from one row to the next, number of rows

  // Is a copy needed whatever the speed?
  bool must_copy(int64_t width) const { return !std::is_same_v<In, T> || width % kGroup != 0; }

  // Many rows are read many times: then it pays to copy those that start off the cache lines, or all in the same cache sets.
  bool better_copied(int64_t rows) const {
    const auto at = reinterpret_cast<uintptr_t>(data) % 64, step = static_cast<uintptr_t>(row) * sizeof(In);
    return rows >= kMany && (at != 0 || step % 64 != 0 || step % 4096 == 0);
  }

  // at[i] = row first + i (the last one again beyond the end), columns [c, c + width), padded to whole groups; packed: room for a copy.
  void block(int64_t first, int64_t many, int64_t c, int64_t width, bool copy, T* packed, const T** at) const {
    const int64_t padded = up(width, kGroup);
    for (int64_t i = 0; i < many; ++i) {
      const int64_t r = first + i;
      if (r >= count) {
        at[i] = at[count - 1 - first];
        continue;
      }
      const In* from = data + r * row + c;
      if constexpr (std::is_same_v<In, T>) {
        if (!copy && !must_copy(width)) {
          at[i] = from;
          continue;
        }
      }
      T* to = packed + i * (padded + kSkew);
      if constexpr (std::is_same_v<In, T>) std::memcpy(to, from, sizeof(T) * width);
      else for (int64_t k = 0; k < width; ++k) to[k] = convert<T>(from[k]);
      std::fill(to + width, to + padded, T(0));
      at[i] = to;
    }
  }
};

// Column blocks are numbered; `groups` of them are summed apart (so that threads need not wait for one another) and added up in order.
struct Plan {
  int64_t m, n, p;
  bool symmetric;
  int64_t block;        // columns of a block, whole groups
  int64_t strip;        // columns of a block that all register blocks take before the next ones
  int64_t blocks;
  int64_t groups;       // partial results
  int64_t run;          // blocks of one group between two barriers
  int64_t windows_a, windows_b;
};

// The most rows that a window reads.
inline int64_t rows_of(const Plan& plan) {
  return std::min(plan.m, kMacro) + (plan.symmetric && plan.windows_a == 1 ? 0 : std::min(plan.n, kMacro));
}

inline Plan plan_for(int64_t m, int64_t n, int64_t p, bool symmetric, int64_t size) {
  Plan plan{m, n, p, symmetric, 0, 0, 0, 1, 1, 1, 1};
  plan.windows_a = (m + kMacro - 1) / kMacro, plan.windows_b = (n + kMacro - 1) / kMacro;
  plan.block = std::clamp<int64_t>(kBlockBytes / (rows_of(plan) * size) / kGroup * kGroup, 2 * kGroup, 16 * kGroup);
  // short strips stay in the first-level cache; many rows are more pages than the processor remembers, to be looked up anew for each strip
  plan.strip = rows_of(plan) < kMany ? kGroup : 2 * kGroup;
  plan.blocks = (p + plan.block - 1) / plan.block;
  const int64_t pairs = symmetric ? plan.windows_a * (plan.windows_a + 1) / 2 : plan.windows_a * plan.windows_b;
  // enough pieces for many threads, each of several blocks, partial results of 32 MB at most
  const int64_t room = std::max<int64_t>(1, (32 << 20) / (8 * m * n));
  const int64_t most = std::min(room, std::max<int64_t>(1, 64 / pairs));
  plan.groups = std::clamp<int64_t>(std::max(plan.blocks / 8, std::min<int64_t>(plan.blocks, 16)), 1, most);
  plan.run = (plan.blocks + plan.groups - 1) / plan.groups;
  // with several windows the blocks between two barriers should stay in the last-level cache, where the other windows find them
  if (pairs > 1) plan.run = std::min(plan.run, std::max<int64_t>(1, (8 << 20) / (plan.groups * (m + n) * plan.block * size)));
  return plan;
}

// A window of at most kMacro x kMacro pairs, cut into register blocks whose 16 sums lie together: sums[first + t * 16 + i * 4 + j].
struct Window {
  int64_t i0, j0, mi, nj;   // first row and number of rows on either side
  bool diagonal;
  int64_t first;            // of its sums

  int64_t down() const { return (mi + kTile - 1) / kTile; }
  int64_t across() const { return (nj + kTile - 1) / kTile; }
  int64_t tiles() const { return diagonal ? down() * (down() + 1) / 2 : down() * across(); }

  // The register blocks, band by band of rows, in a band column by column: the band stays in the first-level cache, and the pages of the
  // columns' rows are looked up once for all its blocks.
  template <class Body>
  void each(const Body& body) const {
    int64_t t = 0;
    for (int64_t i0 = 0; i0 < mi; i0 += kBand)
      for (int64_t j = diagonal ? i0 : 0; j < nj; j += kTile)
        for (int64_t i = i0; i < std::min(diagonal ? std::min(mi, j + kTile) : mi, i0 + kBand); i += kTile) body(t++, i, j);
  }
};

inline std::vector<Window> windows_of(const Plan& plan) {
  std::vector<Window> out;
  int64_t first = 0;
  for (int64_t i0 = 0; i0 < plan.m; i0 += kMacro)
    for (int64_t j0 = plan.symmetric ? i0 : 0; j0 < plan.n; j0 += kMacro) {
      const Window w{i0, j0, std::min(kMacro, plan.m - i0), std::min(kMacro, plan.n - j0), plan.symmetric && i0 == j0, first};
      first += w.tiles() * kTile * kTile;
      out.push_back(w);
    }
  return out;
}

// Fetches the rows' next block from memory while this one is worked on: some cache lines of a row before each register block, for bursts would
// hold up the loads. The hint is for all caches: one for the second level alone is often dropped.
struct Ahead {
  static constexpr int64_t kPiece = 512;  // bytes
  const char* row[2 * kMacro];  // first byte of each row's next block
  int64_t rows = 0, bytes = 0;  // of a row
  int64_t r = 0, at = 0;        // the next one

  int64_t pieces() const { return rows * ((bytes + kPiece - 1) / kPiece); }
  void fetch(int64_t pieces) {
    for (; pieces > 0 && r < rows; --pieces) {
      const char* from = row[r] + at;
      PFL_UNROLL
      for (int64_t k = 0; k < kPiece; k += 64) __builtin_prefetch(from + k);
      at += kPiece;
      if (at >= bytes) at = 0, ++r;
    }
  }
};

template <class In, class T>
struct Worker {
  const Rows<In, T>& a;
  const Rows<In, T>& b;
  const Plan& plan;
  TileFunction<T> four, one, triangle;
  std::unique_ptr<Scratch<T>> room = {};  // of the copies, made when first needed
  const T* at_a[kMacro] = {};
  const T* at_b[kMacro] = {};

  // Adds the pairs of a window over one column block; fetches the next block meanwhile where there is `another`.
  void operator()(const Window& w, int64_t block, bool another, double* sums) {
    const int64_t c = block * plan.block, width = std::min(plan.block, plan.p - c), columns = up(width, kGroup);
    const int64_t rows = w.mi + (w.diagonal ? 0 : w.nj);
    const bool copy_a = a.better_copied(rows), copy_b = b.better_copied(rows);
    if (!room && (copy_a || copy_b || a.must_copy(width))) room = std::make_unique<Scratch<T>>(rows_of(plan) * (plan.block + kSkew));
    T* const packed = room ? room->data : nullptr;
    a.block(w.i0, w.mi == 1 && !w.diagonal ? 1 : up(w.mi, kTile), c, width, copy_a, packed, at_a);
    if (!w.diagonal) b.block(w.j0, up(w.nj, kTile), c, width, copy_b, packed + w.mi * (plan.block + kSkew), at_b);
    const T* const* right = w.diagonal ? at_a : at_b;

    Ahead ahead;
    if (another && plan.p - c >= 2 * plan.block) {
      const auto add = [&](const Rows<In, T>& rows, int64_t first, int64_t many) {
        const In* from = rows.data + first * rows.row + c + plan.block;
        for (int64_t i = 0; i < many; ++i) ahead.row[ahead.rows++] = reinterpret_cast<const char*>(from + i * rows.row);
      };
      add(a, w.i0, w.mi);
      if (!w.diagonal) add(b, w.j0, w.nj);
      ahead.bytes = plan.block * static_cast<int64_t>(sizeof(In));
    }
    const int64_t turns = w.tiles() * (up(columns, plan.strip) / plan.strip), pieces = (ahead.pieces() + turns - 1) / turns;
    for (int64_t from = 0; from < columns; from += plan.strip)
      w.each([&](int64_t t, int64_t i, int64_t j) {
        ahead.fetch(pieces);
        const TileArgs<T> args{at_a + i, right + j, from, std::min(columns, from + plan.strip), sums + w.first + t * kTile * kTile};
        (w.diagonal && i == j ? triangle : w.mi == 1 ? one : four)(args);
      });
  }
};

template <Kind kind, class In, class T, class Parallel>
void all_pairs(const Rows<In, T>& a, const Rows<In, T>& b, const Plan& plan, double* out, const Parallel& parallel) {
  const std::vector<Window> windows = windows_of(plan);
  const int64_t pairs = static_cast<int64_t>(windows.size()), per_wave = plan.groups * plan.run;
  const int64_t size = windows.back().first + windows.back().tiles() * kTile * kTile;
  std::vector<double> sums(size * plan.groups);
  const TileFunction<T> four = tile_for<kind, kTile, T>(isa()), one = tile_for<kind, 1, T>(isa());
  const TileFunction<T> triangle = tile_for<kind == Kind::wide ? Kind::wide : Kind::triangle, kTile, T>(isa());
  for (int64_t wave = 0; wave < plan.blocks; wave += per_wave)
    parallel(plan.groups * pairs, [&](int64_t begin, int64_t end) {
      Worker<In, T> work{a, b, plan, four, one, triangle};
      for (int64_t piece = begin; piece < end; ++piece) {
        const int64_t group = piece / pairs, first = wave + group * plan.run, last = std::min(plan.blocks, first + plan.run);
        for (int64_t block = first; block < last; ++block) work(windows[piece % pairs], block, block + 1 < last, sums.data() + group * size);
      }
    });
  for (int64_t g = 1; g < plan.groups; ++g)
    for (int64_t k = 0; k < size; ++k) sums[k] += sums[g * size + k];
  for (const Window& w : windows)
    w.each([&](int64_t t, int64_t ti, int64_t tj) {
      for (int64_t i = ti; i < std::min(w.mi, ti + kTile); ++i)
        for (int64_t j = tj; j < std::min(w.nj, tj + kTile); ++j)
          out[(w.i0 + i) * plan.n + w.j0 + j] = sums[w.first + (t * kTile + i - ti) * kTile + j - tj];
    });
}

inline bool suspect(double value) { return !(value >= kTiny && value <= 1.7976931348623157e308); }

// Does the suspect pairs again in float64, register block by register block; the other pairs keep their value.
template <class In, class Parallel>
void again(const Rows<In, float>& a, const Rows<In, float>& b, const Plan& plan, double* out, const Parallel& parallel) {
  struct Block { int64_t i, j; };
  std::vector<Block> blocks;
  for (int64_t i0 = 0; i0 < plan.m; i0 += kTile)
    for (int64_t j0 = plan.symmetric ? i0 : 0; j0 < plan.n; j0 += kTile) {
      bool bad = false;
      for (int64_t i = i0; i < std::min(plan.m, i0 + kTile); ++i)
        for (int64_t j = j0; j < std::min(plan.n, j0 + kTile); ++j) bad |= suspect(out[i * plan.n + j]) && !(plan.symmetric && i >= j);
      if (bad) blocks.push_back({i0, j0});
    }
  if (blocks.empty()) return;
  constexpr int64_t parts = 16, square = kTile * kTile;
  const int64_t many = static_cast<int64_t>(blocks.size()), split = many < 64 ? parts : 1;  // how the work is cut, not how it is summed
  const int64_t part = (plan.blocks + parts - 1) / parts;
  std::vector<double> sums(many * split * square);
  const TileFunction<float> wide = tile_for<Kind::wide, kTile, float>(isa());
  parallel(many * split, [&](int64_t begin, int64_t end) {
    Scratch<float> packed(2 * kTile * (plan.block + kSkew));
    const float *at_a[kTile], *at_b[kTile];
    for (int64_t piece = begin; piece < end; ++piece) {
      const Block at = blocks[piece / split];
      double* sum = sums.data() + piece * square;
      for (int64_t k = split == 1 ? 0 : piece % split; k < (split == 1 ? parts : piece % split + 1); ++k) {
        double in_part[square] = {};
        for (int64_t block = k * part; block < std::min(plan.blocks, (k + 1) * part); ++block) {
          const int64_t c = block * plan.block, width = std::min(plan.block, plan.p - c);
          a.block(at.i, kTile, c, width, false, packed.data, at_a);
          b.block(at.j, kTile, c, width, false, packed.data + kTile * (plan.block + kSkew), at_b);
          wide({at_a, at_b, 0, up(width, kGroup), in_part});
        }
        for (int64_t s = 0; s < square; ++s) sum[s] += in_part[s];
      }
    }
  });
  for (int64_t t = 0; t < many; ++t)
    for (int64_t i = 0; i < std::min(kTile, plan.m - blocks[t].i); ++i)
      for (int64_t j = 0; j < std::min(kTile, plan.n - blocks[t].j); ++j) {
        double& value = out[(blocks[t].i + i) * plan.n + blocks[t].j + j];
        if (!suspect(value)) continue;
        value = 0;
        for (int64_t k = 0; k < split; ++k) value += sums[(t * split + k) * square + i * kTile + j];
      }
}

template <class In, class T, class Parallel>
void sqdist_typed(const In* a, int64_t a_row, int64_t m, const In* b, int64_t b_row, int64_t n, int64_t p, double* out,
                  const Parallel& parallel) {
  if (m == 0 || n == 0) return;
  const bool symmetric = b == nullptr;
  if (symmetric && m == 1) return void(*out = 0);
  if (!symmetric && n == 1 && m > 1) return sqdist_typed<In, T>(b, b_row, n, a, a_row, m, p, out, parallel);  // (a - b)^2 = (b - a)^2
  const Rows<In, T> rows_a{a, a_row, m}, rows_b{symmetric ? a : b, symmetric ? a_row : b_row, n};
  const Plan plan = plan_for(m, n, p, symmetric, sizeof(T));
  if constexpr (std::is_same_v<T, double>) {
    all_pairs<Kind::wide>(rows_a, rows_b, plan, out, parallel);
  } else {
    all_pairs<Kind::narrow>(rows_a, rows_b, plan, out, parallel);
    again(rows_a, rows_b, plan, out, parallel);
  }
  if (symmetric)
    for (int64_t i = 0; i < m; ++i) {
      out[i * n + i] = 0;
      for (int64_t j = i + 1; j < n; ++j) out[j * n + i] = out[i * n + j];
    }
}

}  // namespace sqdist_detail

// out [m, n] <- sum((a_i - b_j)^2). a [m, p], b [n, p], rows a_row and b_row elements apart; b == nullptr: b is a, n == m, and the
// diagonal is exactly 0.
template <class Parallel>
void sqdist(Dtype dtype, const void* a, int64_t a_row, int64_t m, const void* b, int64_t b_row, int64_t n, int64_t p, double* out,
            const Parallel& parallel) {
  if (p == 0) return void(std::fill(out, out + m * n, 0.0));  // rows without columns may have no address
  const auto run = [&](auto in, auto as) {
    using In = decltype(in);
    sqdist_detail::sqdist_typed<In, decltype(as)>(static_cast<const In*>(a), a_row, m, static_cast<const In*>(b), b_row, n, p, out, parallel);
  };
  switch (dtype) {
    case Dtype::f32: return run(float{}, float{});
    case Dtype::f64: return run(double{}, double{});
    case Dtype::f16: return run(Half{}, float{});
    case Dtype::bf16: return run(BFloat16{}, float{});
  }
}

}  // namespace pflcore::cpu
