// Convolution with activation and 2x2 pooling in its registers.
//
// Images of a batch lie [channel][row][phase][column / phases][sample], zeros around them: a vector
// holds neighbouring columns of all samples, so that no lane is lost to an image's width, and a tap
// is a shift of the address. With pooling or stride 2 the even and the odd columns lie apart (two
// phases): the four outputs of a window are then four vectors of one tile, and pooling is a
// comparison of registers; the convolution's own output is never stored. Between layers values lie
// plain: [channel][row][column][sample].
#pragma once
#include <vector>

#include "layer.h"

namespace pflcore::cpu::chain {

// Bytes of slopes that leave space in the first-level cache for the rest.
constexpr int64_t kNear = 24 << 10;

struct Conv {
  int64_t c, h, w, o, kh, kw, stride, ph, pw, pool, act;  // `ph`, `pw`: zeros on each side
  // Samples, and outputs of a tile: the weights of a tile's outputs lie side by side.
  int64_t batch, tile;
  bool back;  // true where the input's gradient is wanted
  // True where the four values of a window are kept: their mean has lost what the activation's
  // slope needs.
  bool kept;
  // Phases of the input's columns, and outputs of a window along one axis: 2 where pooled.
  int64_t phases, outs;
  int64_t hq, wq, taps;  // height and width of the result, and weights of one output
  // Sizes in the input, in elements: one phase of a row, a row, a channel. Sizes of an output row:
  // elements, vectors. The columns of one phase of an input row.
  int64_t row, line, plane, lanes, vectors, columns;
  int64_t d_lead, d_row, d_line, d_plane;  // sizes in the slopes, with zeros between their rows
  std::vector<Pair> at;                    // places [taps] in the input
  // Places in the slopes by parity of row and column: [kernel row, kernel column, output].
  std::vector<Pair> back_at[2][2];
  std::vector<int64_t> w_at, w_step;  // [o] the first weight of an output, and the step to its next

  // `vector`: lanes of a vector. `rows`: outputs of a tile.
  void plan(int64_t samples, bool wants, int64_t vector, int64_t rows) {
    batch = samples, back = wants, tile = rows;
    outs = pool ? 2 : 1, phases = stride * outs, kept = pool == kMean && act > kRelu;
    hq = out_rows() / outs, wq = out_columns() / outs, taps = c * kh * kw;
    columns = (w + 2 * pw + phases - 1) / phases;
    row = up(columns * batch, vector), line = phases * row, plane = (h + 2 * ph) * line;
    lanes = wq * batch, vectors = up(lanes, vector) / vector;
    const int64_t behind = back ? (kw - 1 + phases - 1) / phases : 0;
    d_lead = up(behind * batch, vector),
    d_row = up(back ? std::max(columns, wq + behind) * batch : lanes, vector),
    d_line = outs * d_row;
    d_plane = (back ? hq * outs : outs) * d_line;
    at.clear();
    for (int64_t ch = 0; ch < c; ch++)
      for (int64_t i = 0; i < kh; i++)
        for (int64_t j = 0; j < kw; j++)
          at.push_back(pair(in(ch, i, j), pool ? in(ch, i, j + 1) : in(ch, i, j) + vector));
    for (int64_t pu = 0; back && pu < stride; pu++)
      for (int64_t e = 0; e < phases; e++) {
        auto& t = back_at[pu][e];
        t.clear();
        for (int64_t i = pu; i < kh; i += stride)
          for (int64_t j = e % stride; j < kw; j += stride)
            for (int64_t out = 0; out < o; out++) {
              const int64_t x = (e - j) / stride, phase = (x % outs + outs) % outs;
              const int64_t to =
                  out * d_plane - i / stride * d_line + phase * d_row + (x - phase) / outs * batch;
              t.push_back(pair(to, to + vector));
            }
      }
    w_at.resize(o), w_step.resize(o);
    for (int64_t t = 0, tiles = (o + tile - 1) / tile; t < tiles; t++)  // as `split` cuts them
      for (int64_t o0 = o * t / tiles, end = o * (t + 1) / tiles, r = o0; r < end; r++)
        w_at[r] = o0 * taps + r - o0, w_step[r] = end - o0;
  }
  static Pair pair(int64_t a, int64_t b) {
    return {static_cast<int32_t>(a), static_cast<int32_t>(b)};
  }
  // Rows and columns before pooling, and whether windows leave out the last ones.
  int64_t out_rows() const { return (h + 2 * ph - kh) / stride + 1; }
  int64_t out_columns() const { return (w + 2 * pw - kw) / stride + 1; }
  bool leaves_out() const { return out_rows() != outs * hq || out_columns() != outs * wq; }
  int64_t in(int64_t ch, int64_t y, int64_t x) const {
    return ch * plane + y * line + x % phases * row + x / phases * batch;
  }
  int64_t in_size(int64_t vector) const {
    return c * plane + (kw / phases + 2) * batch + 4 * vector;
  }
  int64_t slope_size(int64_t vector) const { return d_lead + o * d_plane + 8 * vector; }
  int64_t weights() const { return o * taps; }
  int64_t mask_size(int64_t vector) const { return pool ? o * hq * vectors * vector : 0; }
  int64_t kept_size(int64_t vector) const { return kept ? o * hq * vectors * 4 * vector : 0; }
};

// A thread's memory of a convolution between its passes.
template <class T>
struct ConvSpace {
  T *in, *d, *kept, *part, *sums, *turned, *wide;
  // A byte for each pooled output: bit s is set where its slope goes to element s of the window.
  uint8_t* mask;
};

// Plain values into the padded, split layout.
template <class T, int bytes>
PFL_INLINE void conv_import(const Conv& q, const T* x, T* in) {
  for (int64_t ch = 0; ch < q.c; ch++)
    for (int64_t y = 0; y < q.h; y++)
      for (int64_t i = 0; i < q.w; i++, x += q.batch)
        copy<bytes>(in + q.in(ch, y + q.ph, i + q.pw), x, q.batch);
}

// The pooled value of a window z0 z1 / z2 z3 and the bits of where its slope goes: a maximum's to
// the first of equals, NaN wins. Where the four have to be kept there is no value yet.
template <class T, int bytes>
PFL_INLINE void window(const Conv& q, Vec<T, bytes> (&z)[4], Vec<T, bytes>& top, uint8_t* mask,
                       T* kept) {
  using I = decltype(z[0] < z[1]);
  constexpr int lanes = bytes / sizeof(T);
  I bits;
  if (q.pool == kMax) {
    top = z[0];
    bits = I{} + 1;
    PFL_EACH(s, 3, const I later = (z[s + 1] > top) | (z[s + 1] != z[s + 1]);
             top = later ? z[s + 1] : top; bits = later ? I{} + (2 << s) : bits);
    if (q.act == kRelu) top = top < 0 ? Vec<T, bytes>{} : top;
  } else if (q.kept) {
    PFL_EACH(s, 4, store(kept + s * lanes, z[s]));
    return;
  } else {
    bits = I{};
    PFL_EACH(
        s, 4, if (q.act == kRelu) {
          bits |= z[s] <= 0 ? I{} : I{} + (1 << s);
          z[s] = z[s] < 0 ? Vec<T, bytes>{} : z[s];
        } else bits |= I{} + (1 << s));
    top = (((z[0] + z[1]) + z[2]) + z[3]) * T(.25);
  }
  const Vec<uint8_t, lanes> few = __builtin_convertvector(bits, Vec<uint8_t, lanes>);
  __builtin_memcpy(mask, &few, lanes);
}

// The sum of the squares of n numbers, in whole vectors.
template <class T, int bytes>
PFL_INLINE T sum_of_squares(const T* x, int64_t n) {
  using V = Vec<T, bytes>;
  constexpr int64_t lanes = bytes / sizeof(T);
  V sums[4] = {}, v;
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes)
    PFL_EACH(k, 4, load(v, x + i + k * lanes); sums[k] += v * v);
  for (; i < n; i += lanes) {
    load(v, x + i);
    keep_first<T>(v, n - i);
    sums[0] += v * v;
  }
  return sum_of<T>((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Can a sum overflow? |x . w| is at most |x| |w|; a number that is not finite makes it possible.
template <class T, int bytes>
PFL_INLINE bool may_overflow(const Conv& q, const ConvSpace<T>& s, const T* w, const T* bias) {
  const T most =
      sum_of_squares<T, bytes>(s.in, q.c * q.plane) * sum_of_squares<T, bytes>(w, q.weights()) +
      sum_of_squares<T, bytes>(bias, q.o);
  return !std::isfinite(most);
}

// Whether the factors of a tile's sums are finite.
template <class T>
struct ConvFactors {
  const Conv& q;
  int64_t rows, lanes, step;  // outputs of the tile, and between two vectors of a kind
  const T *w, *bias, *x;      // the tile's weights and biases, and its input at the first tap

  bool operator()(int64_t r, int64_t i) const {
    const int64_t j = i / lanes;
    const T* const from = x + (j >> 1) * step + i % lanes;
    for (int64_t k = 0; k < q.taps; k++)
      if (!are_finite(w + k * rows + r, 1, from + (j & 1 ? q.at[k].b : q.at[k].a), 1, 1))
        return false;
    return std::isfinite(bias[r]);
  }
};

// `checks`: whether sums that overflow are looked for.
template <class T, int bytes>
PFL_INLINE void conv_row(const Conv& q, const ConvSpace<T>& s, bool checks, const T* w,
                         const T* bias, T* y, int64_t yq) {
  using V = Vec<T, bytes>;
  constexpr int64_t lanes = bytes / sizeof(T);
  constexpr int four = Tile<T, bytes>::four;
  tiled<four>(q.o, [&](int64_t o0, auto R_) PFL_LAMBDA {
    constexpr int R = R_;
    const T *base = s.in + q.phases * yq * q.line, *wt = w + o0 * q.taps;
    T* to = y + (o0 * q.hq + yq) * q.lanes;
    if (q.pool) {
      for (int64_t v = 0; v < q.vectors; v++) {
        constexpr int N = 4;
        V acc[R][N];
        PFL_TILE(acc[r][j] = bias[o0 + r] - V{});
        outer_at<R, N>(acc, wt, R, q.at.data(), q.taps, base + v * lanes, q.line);
        if (checks) [[unlikely]]
          mark_overflows<T>(acc,
                            ConvFactors<T>{q, R, lanes, q.line, wt, bias + o0, base + v * lanes});
        V top[R][1] = {};
        PFL_EACH(r, R, const int64_t at = ((o0 + r) * q.hq + yq) * q.vectors + v; window<T, bytes>(
                     q, acc[r], top[r][0], s.mask + at * lanes, s.kept + at * 4 * lanes));
        store_tile(to + v * lanes, q.hq * q.lanes, top, q.lanes - v * lanes);
      }
    } else {
      tiled<4>(q.vectors, [&](int64_t v0, auto N_) PFL_LAMBDA {
        constexpr int N = N_;
        V acc[R][N];
        PFL_TILE(acc[r][j] = bias[o0 + r] - V{});
        outer_at<R, N>(acc, wt, R, q.at.data(), q.taps, base + v0 * lanes, 2 * lanes);
        if (checks) [[unlikely]]
          mark_overflows<T>(
              acc, ConvFactors<T>{q, R, lanes, 2 * lanes, wt, bias + o0, base + v0 * lanes});
        PFL_TILE(if (q.act == kRelu) acc[r][j] = acc[r][j] < 0 ? V{} : acc[r][j]);
        store_tile(to + v0 * lanes, q.hq * q.lanes, acc, q.lanes - v0 * lanes);
      });
    }
  });
}

template <class T, int bytes>
PFL_TARGET void conv_forward(const Conv& q, const ConvSpace<T>& s, const T* x, const T* w,
                             const T* bias, T* y) {
  using V = Vec<T, bytes>;
  constexpr int64_t lanes = bytes / sizeof(T);
  conv_import<T, bytes>(q, x, s.in);
  const bool checks = may_overflow<T, bytes>(q, s, w, bias);
  for (int64_t yq = 0; yq < q.hq; yq++) {
    conv_row<T, bytes>(q, s, checks, w, bias, y, yq);
    for (int64_t o = 0; o < q.o && q.act > kRelu;
         o++)  // what takes more than a comparison: not in the tiles, each of which would have its
               // code
      for (int64_t v = 0; v < q.vectors; v++) {
        T* const to = y + (o * q.hq + yq) * q.lanes + v * lanes;
        V value{}, z;
        if (!q.kept) {
          load(value, to);
          activate<T, bytes>(q.act, value);
        } else {
          for (int64_t e = 0; e < 4; e++) {
            T* const kept = s.kept + (((o * q.hq + yq) * q.vectors + v) * 4 + e) * lanes;
            load(z, kept);
            activate<T, bytes>(q.act, z);
            store(kept, z);
            value += z;
          }
          value *= T(.25);
        }
        store_first(to, value, q.lanes - v * lanes);
      }
  }
}

// The slopes of output rows y0 .. y1 before pooling and activation, from the gradient dy of what
// came out; the biases' [o][lanes] are added to.
template <class T, int bytes, bool pooled>
PFL_INLINE void conv_slopes(const Conv& q, const ConvSpace<T>& s, const T* y, const T* dy,
                            int64_t y0, int64_t y1) {
  using V = Vec<T, bytes>;
  using I = decltype(V{} < V{});
  constexpr int lanes = bytes / sizeof(T);
  for (int64_t o = 0; o < q.o; o++) {
    V sum;
    load(sum, s.sums + o * lanes);
    for (int64_t yq = y0; yq < y1; yq++) {
      const int64_t from = (o * q.hq + yq) * q.lanes, at = (o * q.hq + yq) * q.vectors;
      T* to = s.d + q.d_lead + o * q.d_plane + (yq - y0) * q.outs * q.d_line;
      for (int64_t v = 0; v < q.vectors; v++) {
        V g, value;
        load(g, dy + from + v * lanes);
        load(value, y + from + v * lanes);
        if (q.pool != kMean) slope<T>(q.act, g, value);
        keep_first<T>(g, q.lanes - v * lanes);  // what lies behind is the next row's
        if constexpr (pooled) {
          if (q.pool == kMean) g *= T(.25);
          if (q.kept) {
            PFL_EACH(e, 4, V part = g; load(value, s.kept + ((at + v) * 4 + e) * lanes);
                     slope<T>(q.act, part, value); keep_first<T>(part, q.lanes - v * lanes);
                     store(to + e * q.d_row + v * lanes, part); sum += part);
            continue;
          }
          Vec<uint8_t, lanes> few;
          __builtin_memcpy(&few, s.mask + (at + v) * lanes, lanes);
          const I bits = __builtin_convertvector(few, I);
          PFL_EACH(e, 4, const V part = (bits & (1 << e)) != 0 ? g : V{};
                   store(to + e * q.d_row + v * lanes, part); sum += part);
        } else {
          store(to + v * lanes, g);
          sum += g;
        }
      }
    }
    store(s.sums + o * lanes, sum);
  }
}

// The gradient of the weights, once the slopes of all rows were seen: rows y0 .. y1 now; `part`
// keeps the sums in the making. In pieces whose slopes stay in the first-level cache while all taps
// go over them.
template <class T, int bytes>
PFL_INLINE void conv_update(const Conv& q, const ConvSpace<T>& s, int64_t y0, int64_t y1,
                            const Into<T>& into, T* w) {
  using V = Vec<T, bytes>;
  constexpr int64_t lanes = bytes / sizeof(T);
  constexpr int four = Tile<T, bytes>::four;
  const int64_t windows = q.outs * q.outs,
                most = std::max<int64_t>(1, kNear / (four * windows * bytes));
  const int64_t wide = std::min(q.vectors, most),
                some_rows = std::max<int64_t>(1, most / q.vectors);
  tiled<four>(q.o, [&](int64_t o0, auto R_) PFL_LAMBDA {
    constexpr int R = R_;
    T* const mine = s.part + (q.back ? 0 : o0 * q.taps * lanes);
    for (int64_t y = y0; y < y1; y += some_rows)
      split(q.vectors, wide, [&](int64_t v0, int64_t vectors) PFL_LAMBDA {
        const int64_t below = std::min(y1, y + some_rows);
        const bool begin = y == 0 && v0 == 0, end = below == q.hq && v0 + vectors == q.vectors;
        tiled<4>(q.taps, [&](int64_t k0, auto N_) PFL_LAMBDA {
          constexpr int N = N_;
          V acc[R][N];
          T* const kept = mine + k0 * R * lanes;
          if (begin)
            clear(acc);
          else
            PFL_TILE(load(acc[r][j], kept + (r * N + j) * lanes));
          for (int64_t yq = y; yq < below; yq++)
            for (int64_t e = 0; e < windows; e++) {
              const T *d = s.d + q.d_lead + o0 * q.d_plane + (yq - y0) * q.outs * q.d_line +
                           e * q.d_row + v0 * lanes,
                      *x[N];
              PFL_EACH(j, N,
                       x[j] = s.in + (q.phases * yq + e / 2) * q.line +
                              (e % 2 ? q.at[k0 + j].b : q.at[k0 + j].a) + v0 * lanes);
              sum_dots<R, N>(
                  acc, vectors * lanes, [&](int r) PFL_LAMBDA { return d + r * q.d_plane; }, x);
            }
          if (end) {
            V sums[up(R * N, lanes)]{};
            T sum[up(R * N, lanes)], *to = w + o0 * q.taps + k0 * R;
            PFL_TILE(sums[j * R + r] = acc[r][j]);
            sum_lanes<T>(sum, sums, R * N);
            for (int i = 0; i < R * N; i++) into(to[i], sum[i]);
          } else {
            PFL_TILE(store(kept + (r * N + j) * lanes, acc[r][j]));
          }
        });
      });
  });
}

// One phase of row y of the input's slopes, for its channels first .. second, from rows `stride`
// apart.
template <class T, int bytes>
[[gnu::noinline]] PFL_TARGET void conv_put_back(const Conv& q, const T* from, int64_t stride,
                                                std::pair<int64_t, int64_t> channels, int64_t y,
                                                int64_t phase, bool add, T* dx) {
  constexpr int64_t lanes = bytes / sizeof(T);
  for (int64_t c = channels.first; c < channels.second; c++, from += stride)
    for (int64_t i = 0; i < q.columns; i++) {
      const int64_t x = q.phases * i + phase - q.pw;
      if (x < 0 || x >= q.w) continue;
      T* const to = dx + ((c * q.h + y) * q.w + x) * q.batch;
      const T* const slopes = from + i * q.batch;
      if (!add) copy<bytes>(to, slopes, q.batch);
      for (int64_t b = 0; add && b < q.batch; b += lanes) {
        Vec<T, bytes> old, v;
        load(old, to + b);
        load(v, slopes + b);
        v += old;
        store_first(to + b, v, q.batch - b);
      }
    }
}

// The gradient of the input, plain. `turned` [o * taps] holds the weights by input channel, `wide`
// a row of a tile of them. Taps that meet only zeros above, below or at the side of the slopes are
// left out, tile by tile. `add`: whether the gradient is added to what dx holds.
template <class T, int bytes>
PFL_INLINE void conv_back(const Conv& q, const ConvSpace<T>& s, const T* w, bool add, T* dx) {
  using V = Vec<T, bytes>;
  constexpr int64_t lanes = bytes / sizeof(T);
  constexpr int two = Tile<T, bytes>::two;
  T* t = s.turned;
  const T* packs[2][2];
  for (int64_t pu = 0; pu < q.stride; pu++)
    for (int64_t pe = 0; pe < q.stride; pe++) {
      packs[pu][pe] = t;
      split(q.c, two, [&](int64_t c0, int64_t rows) PFL_LAMBDA {
        for (int64_t i = pu; i < q.kh; i += q.stride)
          for (int64_t j = pe; j < q.kw; j += q.stride)
            for (int64_t o = 0; o < q.o; o++)
              for (int64_t r = 0; r < rows; r++)
                *t++ = w[q.w_at[o] + (((c0 + r) * q.kh + i) * q.kw + j) * q.w_step[o]];
      });
    }
  const int64_t vectors = up(q.columns * q.batch, lanes) / lanes;
  for (int64_t y = 0; y < q.h; y++) {
    const int64_t u = y + q.ph, pu = u % q.stride, uy = u / q.stride,
                  rows_k = (q.kh - pu + q.stride - 1) / q.stride;
    const int64_t low = std::max<int64_t>(0, uy - q.hq * q.outs + 1),
                  high = std::min(rows_k, uy + 1);
    for (int64_t e = 0; e < q.phases; e++) {
      const int64_t pe = e % q.stride, columns_k = (q.kw - pe + q.stride - 1) / q.stride;
      const auto shift = [&](int64_t j)
                             PFL_LAMBDA { return floor_div((e - pe) / q.stride - j, q.outs); };
      tiled<two>(q.c, [&](int64_t c0, auto R_) PFL_LAMBDA {
        constexpr int R = R_;
        tiled<2>(vectors, [&](int64_t v0, auto N_) PFL_LAMBDA {
          constexpr int N = N_;
          const int64_t left = v0 * lanes / q.batch,
                        right = std::min(q.columns - 1, ((v0 + N) * lanes - 1) / q.batch);
          int64_t j0 = 0, j1 = columns_k;
          while (j0 < j1 && left + shift(j0) >= q.wq) j0++;
          while (j0 < j1 && right + shift(j1 - 1) < 0) j1--;
          V acc[R][N];
          clear(acc);
          for (int64_t i = low; i < high; i++) {
            const int64_t k = (i * columns_k + j0) * q.o;
            outer_at<R, N>(acc, packs[pu][pe] + c0 * rows_k * columns_k * q.o + k * R, R,
                           q.back_at[pu][e].data() + k, (j1 - j0) * q.o,
                           s.d + q.d_lead + uy * q.d_line + v0 * lanes, 0);
          }
          PFL_TILE(store(s.wide + (r * vectors + v0 + j) * lanes, acc[r][j]));
        });
        conv_put_back<T, bytes>(q, s.wide, vectors * lanes, {c0, c0 + R}, y, e, add, dx);
      });
    }
  }
}

// `conv_update` multiplies 0 with what its last vector holds behind a row, and leaves out what
// windows do: the last one of an odd number of rows or columns. Where the input is finite, neither
// changes a sum. True where it must be `conv_update_exactly`.
template <class T, int bytes>
PFL_INLINE bool needs_exact_update(const Conv& q, const ConvSpace<T>& s) {
  constexpr int64_t lanes = bytes / sizeof(T);
  const bool is_whole = q.vectors * lanes == q.lanes && !q.leaves_out();
  return !is_whole && !std::isfinite(sum_of_squares<T, bytes>(s.in, q.c * q.plane));
}

// The sums of `conv_update`, one after another. What windows leave out has slopes 0, and 0 times a
// number that is not finite is NaN.
template <class T>
[[gnu::noinline]] PFL_TARGET void conv_update_exactly(const Conv& q, const ConvSpace<T>& s,
                                                      int64_t y0, int64_t y1, const Into<T>& into,
                                                      T* w) {
  const bool begin = y0 == 0, end = y1 == q.hq;
  for (int64_t o = 0; o < q.o; o++)
    for (int64_t k = 0; k < q.taps; k++) {
      const int64_t ch = k / (q.kh * q.kw), i = k / q.kw % q.kh, j = k % q.kw;
      T sum = begin ? T(0) : s.part[o * q.taps + k];
      const auto add = [&](int64_t y, int64_t x, const T* slope) {
        const T* const from = s.in + q.in(ch, y * q.stride + i, x * q.stride + j);
        for (int64_t b = 0; b < q.batch; b++) sum += from[b] * (slope ? slope[b] : T(0));
      };
      for (int64_t y = q.outs * y0; y < q.outs * y1; y++)
        for (int64_t x = 0; x < q.outs * q.wq; x++)
          add(y, x,
              s.d + q.d_lead + o * q.d_plane + (y - q.outs * y0) * q.d_line + x % q.outs * q.d_row +
                  x / q.outs * q.batch);
      for (int64_t y = 0; end && y < q.out_rows(); y++)
        for (int64_t x = y < q.outs * q.hq ? q.outs * q.wq : 0; x < q.out_columns(); x++)
          add(y, x, nullptr);
      if (end)
        into(w[q.w_at[o] + k * q.w_step[o]], sum);
      else
        s.part[o * q.taps + k] = sum;
    }
}

// dx may be nullptr; into: what happens to the gradients, whose places are dw and db (db may be
// nullptr). `add`: whether those of the input are added to dx.
template <class T, int bytes>
PFL_TARGET void conv_backward(const Conv& q, const ConvSpace<T>& s, const T* y, const T* dy,
                              const T* w, const Into<T>& into, T* dw, T* db, bool add, T* dx) {
  using V = Vec<T, bytes>;
  constexpr int64_t lanes = bytes / sizeof(T);
  const bool exact = needs_exact_update<T, bytes>(q, s);
  std::fill_n(s.sums, q.o * lanes, T(0));
  for (int64_t y0 = 0, some = q.back ? q.hq : 1; y0 < q.hq;
       y0 += some) {  // the first layer's, row by row: its slopes stay near
    if (q.pool)
      conv_slopes<T, bytes, true>(q, s, y, dy, y0, y0 + some);
    else
      conv_slopes<T, bytes, false>(q, s, y, dy, y0, y0 + some);
    if (q.back) conv_back<T, bytes>(q, s, w, add, dx);
    if (exact) [[unlikely]]
      conv_update_exactly<T>(q, s, y0, y0 + some, into, dw);
    else
      conv_update<T, bytes>(q, s, y0, y0 + some, into, dw);
  }
  for (int64_t o = 0; db && o < q.o; o++) {
    V sum;
    load(sum, s.sums + o * lanes);
    into(db[o], sum_of<T>(sum));
  }
}

template <class T, int bytes>
struct ConvLayer : Layer {
  static constexpr int64_t kind = ChainLayer::conv;
  static constexpr int64_t most_samples = 32;
  static constexpr bool adds_slopes = true;
  static constexpr int64_t lanes = bytes / sizeof(T);
  Conv q;
  ConvSpace<T> space{};

  explicit ConvLayer(Lines& lines) {
    const ChainLayer& l = lines.line();
    const auto [c, h, w] = lines.shape;
    q.c = c, q.h = h, q.w = w, q.o = l[0];
    q.kh = l[1], q.kw = l[2], q.stride = l[3], q.ph = l[4], q.pw = l[5];
    demand(q.o > 0 && q.kh > 0 && q.kw > 0 && (q.stride == 1 || q.stride == 2));
    demand(q.ph >= 0 && q.ph < kFar && q.kh <= h + 2 * q.ph);
    demand(q.pw >= 0 && q.pw < kFar && q.kw <= w + 2 * q.pw);
    take_next(lines);
    q.plan(lines.batch(), lines.input().wanted, lanes, Tile<T, bytes>::four);
    demand(static_cast<double>(q.o) * static_cast<double>(q.d_plane) < kFar);
    demand(static_cast<double>(q.c) * static_cast<double>(q.plane) < kFar);
    lines.take_weights(q.weights(), q.o, q.weights(), l[6], l[7]);
    lines.shape = {q.o, q.hq, q.wq};
  }
  bool reads_output() const { return q.act != kNone || q.pool != kNoPool; }

  void lay(Arena& arena) {
    const int64_t outputs = q.back ? std::min(q.o, q.tile) : q.o;  // whose sums are in the making
    const int64_t row = Tile<T, bytes>::two * up(q.columns * q.batch, lanes) + kSlack;
    space.in = arena.take_zeros<T>(q.in_size(lanes));
    space.d = arena.take_zeros<T>(q.slope_size(lanes));
    space.part = arena.take<T>(outputs * q.taps * lanes);
    space.turned = arena.take<T>(q.back ? q.weights() : 0);
    space.wide = arena.take<T>(q.back ? row : 0);
    space.sums = arena.take<T>(q.o * lanes);
    space.mask = arena.take<uint8_t>(q.mask_size(lanes));
    space.kept = arena.take<T>(q.kept_size(lanes));
  }

  void forward(const Forward<T>& f) const {
    conv_forward<T, bytes>(q, space, f.x, f.w, f.bias, f.y);
  }
  void backward(const Backward<T>& b) const {
    conv_backward<T, bytes>(q, space, b.y, b.dy, b.w, b.into, b.dw, b.db, b.adds, b.dx);
  }

  // Rows lie [output][tap]; here the weights of a tile's outputs lie side by side.
  void read(const T* row, int64_t, T* w) const {
    for (int64_t o = 0; o < q.o; o++)
      for (int64_t k = 0; k < q.taps; k++) w[q.w_at[o] + k * q.w_step[o]] = row[o * q.taps + k];
  }
  void write(const T* w, int64_t, T* row) const {
    for (int64_t o = 0; o < q.o; o++)
      for (int64_t k = 0; k < q.taps; k++) row[o * q.taps + k] = w[q.w_at[o] + k * q.w_step[o]];
  }

 private:
  // The activation and the pooling behind it, in either order for a maximum: all of them rise.
  void take_next(Lines& lines) {
    q.pool = kNoPool;
    q.act = lines.take_activation();
    const bool has_window = q.h + 2 * q.ph > q.kh && q.w + 2 * q.pw > q.kw;
    if (q.stride != 1 || !has_window) return;
    for (int64_t mode : {kMax, kMean})
      if (q.pool == kNoPool && lines.take_windows(mode)) q.pool = mode;
    if (q.pool == kMax && q.act == kNone) q.act = lines.take_activation();
  }
};

}  // namespace pflcore::cpu::chain
