// What the kernels of a chain are made of: tiles of accumulators in registers, sums over lanes,
// transpositions, and the functions of activations.
//
// outer: acc[r][j] += a[k][r] * b[k][j]   scalars times vectors: convolutions forward and to the
// input, linear layers forward, linear gradients dots:  acc[r][j] += a[r] . b[j]         vectors
// times vectors, lanes summed at the end: linear layers to the input, convolutions' gradients
//
// Nothing is unfolded into memory: `outer` takes the address of each vector from a table. Every
// element's sum has one fixed order, whatever the tile around it. Tiles are templates all the way:
// a compiler gives memory to an array that a loop walks through, registers to one that it does not.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "../cpu/isa.h"
#include "../cpu/simd.h"

// Everything here is compiled for one instruction set a file: PFL_CHAIN_TARGET is its attribute. It
// stands on every function and every lambda, for GCC makes poor code of vectors in a function of
// another set even where that is inlined into one that has them.
#if !defined(PFL_CHAIN_TARGET)
#define PFL_CHAIN_TARGET
#endif
#define PFL_KERNEL \
  PFL_CHAIN_TARGET  // what a worker calls: templates over the vectors' size, so that no two files
// have the same one
#define PFL_LAMBDA __attribute__((always_inline)) PFL_CHAIN_TARGET
#define PFL_FN_MEMBER inline __attribute__((always_inline)) PFL_CHAIN_TARGET
#define PFL_FN static PFL_FN_MEMBER
// The statement for i = 0 .. n - 1, written out; and for all of a tile's R x N.
#if defined(__has_builtin) && !defined(PFL_SHUFFLE)
#if __has_builtin(__builtin_shufflevector)
#define PFL_SHUFFLE 1
#endif
#endif
#define PFL_EACH(i, n, ...) each<n>([&](auto i) PFL_LAMBDA { __VA_ARGS__; })
#define PFL_TILE(...) PFL_EACH(r, R, PFL_EACH(j, N, __VA_ARGS__))

namespace pflcore::cpu::chain {

template <class T, int bytes>
struct Tile {  // rows of the tiles with four, and with two vectors across
  static constexpr int lanes = bytes / sizeof(T);
#ifdef PFL_SMALL_PIECES  // for a sanitizer, which compiles every tile for long
  static constexpr int four = 2, two = 2, six = 2, across = 2;
#else
  static constexpr int four = kRoomy<bytes> ? 6 : 2, two = kRoomy<bytes> ? 12 : 6;
  static constexpr int six = 6;  // rows of a linear gradient's tile, and vectors across
  static constexpr int across = kRoomy<bytes> ? 4 : 2;
#endif
};

inline int64_t up(int64_t n, int64_t m) { return (n + m - 1) / m * m; }
inline int64_t floor_div(int64_t n, int64_t d) { return n < 0 ? -((d - 1 - n) / d) : n / d; }

template <int n>
using Int = std::integral_constant<int, n>;

template <int n, class F>
PFL_FN void each(F&& f) {
  [&]<size_t... i>(std::index_sequence<i...>)
      PFL_LAMBDA { (f(Int<static_cast<int>(i)>{}), ...); }(std::make_index_sequence<n>{});
}
// f(Int<n>) for n in 1 .. most.
template <int most, class F>
PFL_FN void fixed(int64_t n, F&& f) {
  if (n == most) return f(Int<most>{});
  if constexpr (most > 1) fixed<most - 1>(n, f);
}
// f(first, count) over 0 .. n in even tiles of at most `most`.
template <class F>
PFL_FN void split(int64_t n, int64_t most, F&& f) {
  const int64_t tiles = (n + most - 1) / most;
  for (int64_t t = 0; t < tiles; t++) f(n * t / tiles, n * (t + 1) / tiles - n * t / tiles);
}

// Keeps v in a register: GCC would read it from memory again at every use.
template <class V>
PFL_FN void hold(V& v) {
#if PFL_X86
  if constexpr (sizeof(V) == 64)
    asm("" : "+v"(v));
  else
    asm("" : "+x"(v));
#else
  (void)v;
#endif
}

template <class V, class T>
PFL_FN void fill(V& v, T x) {
  v = x - V{};
}
template <class V, class T>
PFL_FN void load(V& v, const T* p) {
  __builtin_memcpy(&v, p, sizeof(V));
}
template <class V, class T>
PFL_FN void store(T* p, const V& v) {
  __builtin_memcpy(p, &v, sizeof(V));
}
template <class T>
PFL_FN void zero(T* p, int64_t n) {
  for (int64_t i = 0; i < n; i++) p[i] = T(0);
}

template <class T>
struct Count {
  static constexpr T of[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
};
// Zero but for the first n lanes.
template <class T, class V>
PFL_FN void keep_first(V& v, int64_t n) {
  V lane;
  load(lane, Count<T>::of);
  v = lane < static_cast<T>(n) ? v : V{};
}
template <class T>
PFL_FN void copy_few(T* to, const T* from, int64_t n) {  // fewer than 16 bytes' worth at the end
  for (int64_t i = 0; i < n; i++) to[i] = from[i];
}
// Copies n elements: whole vectors, the last one over the one before.
template <int bytes, class T>
PFL_FN void copy(T* to, const T* from, int64_t n) {
  constexpr int64_t lanes = bytes / sizeof(T);
  Vec<T, bytes> v;
  if (n >= lanes) {
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) {
      load(v, from + i);
      store(to + i, v);
    }
    if (i == n) return;
    load(v, from + n - lanes);
    store(to + n - lanes, v);
  } else if constexpr (bytes > 16) {
    copy<bytes / 2>(to, from, n);
  } else {
    copy_few(to, from, n);
  }
}
// The first n lanes of v.
template <class T, class V>
PFL_FN void store_first(T* to, const V& v, int64_t n) {
  constexpr int64_t lanes = sizeof(V) / sizeof(T);
  if (n >= lanes) return store(to, v);
  T all[lanes];
  store(all, v);
  if constexpr (sizeof(V) > 16)
    copy<sizeof(V) / 2>(to, static_cast<const T*>(all), n);
  else
    copy_few(to, static_cast<const T*>(all), n);
}

struct Pair {
  int32_t a, b;
};  // where the even and the odd vectors of a tile begin

template <int R, int N, class T, class V>
PFL_FN void outer_at(V (&acc)[R][N], const T* a, int64_t a_step, const Pair* at, int64_t k,
                     const T* b, int64_t step) {
  for (int64_t i = 0; i < k; i++, a += a_step) {
    const T *p = b + at[i].a, *q = b + at[i].b;
    V v[N];
    PFL_EACH(j, N, load(v[j], (j & 1 ? q : p) + (j >> 1) * step); hold(v[j]));
    PFL_EACH(r, R, V s; fill(s, a[r]); PFL_EACH(j, N, acc[r][j] += s * v[j]));
  }
}
// The same on a matrix b: row i begins at i * b_row.
template <int R, int N, class T, class V>
PFL_FN void outer_on(V (&acc)[R][N], const T* a, int64_t a_row, int64_t a_step, int64_t k,
                     const T* b, int64_t b_row) {
  constexpr int64_t lanes = sizeof(V) / sizeof(T);
  for (int64_t i = 0; i < k; i++, a += a_step, b += b_row) {
    V v[N];
    PFL_EACH(j, N, load(v[j], b + j * lanes); hold(v[j]));
    PFL_EACH(r, R, V s; fill(s, a[r * a_row]); PFL_EACH(j, N, acc[r][j] += s * v[j]));
  }
}
template <int R, int N, class T, class V>
PFL_FN void dots_on(V (&acc)[R][N], const T* a, int64_t a_row, const T* const (&b)[N],
                    int64_t vectors) {
  constexpr int64_t lanes = sizeof(V) / sizeof(T);
  for (int64_t i = 0; i < vectors * lanes; i += lanes) {
    V v[R];
    PFL_EACH(r, R, load(v[r], a + r * a_row + i); hold(v[r]));
    PFL_EACH(j, N, V x; load(x, b[j] + i); hold(x); PFL_EACH(r, R, acc[r][j] += v[r] * x));
  }
}
template <int R, int N, class V>
PFL_FN void clear(V (&acc)[R][N]) {
  PFL_TILE(acc[r][j] = V{});
}

// ---- sums of lanes: within blocks of 16 bytes first, where a shuffle is cheapest, then over the
// blocks ----
#ifdef PFL_SHUFFLE
// Within each block of `block` lanes: the lower and the upper halves of a and b, `half` lanes of a
// and of b in turns, added.
template <int block, int half, class V, size_t... lane>
PFL_FN void fold_blocks(V& a, const V& b, std::index_sequence<lane...>) {
  constexpr size_t n = sizeof...(lane), bl = block, h = half;
  const V lo = __builtin_shufflevector(
      a, b,
      (lane / bl * bl + (lane % bl) / (2 * h) * h + lane % h + ((lane % bl) / h % 2 ? n : 0))...);
  const V hi = __builtin_shufflevector(a, b,
                                       (lane / bl * bl + bl / 2 + (lane % bl) / (2 * h) * h +
                                        lane % h + ((lane % bl) / h % 2 ? n : 0))...);
  a = lo + hi;
}
// Blocks of `wide` lanes, neighbours added: a's, then b's.
template <size_t wide, class V, size_t... lane>
PFL_FN void fold_wide(V& a, const V& b, std::index_sequence<lane...>) {
  constexpr size_t n = sizeof...(lane), w = wide;
  const V lo = __builtin_shufflevector(
      a, b, (lane % (n / 2) / w * 2 * w + lane % w + (lane < n / 2 ? 0 : n))...);
  const V hi = __builtin_shufflevector(
      a, b, (lane % (n / 2) / w * 2 * w + lane % w + w + (lane < n / 2 ? 0 : n))...);
  a = lo + hi;
}
#endif

// to[j * R + r] = the sum of acc[r][j]'s lanes; to has room for whole vectors.
template <int R, int N, class T, class V>
PFL_FN void sum_tile(T* to, V (&acc)[R][N]) {
  constexpr int lanes = sizeof(V) / sizeof(T);
#ifdef PFL_SHUFFLE
  using All = std::make_index_sequence<lanes>;
  constexpr int few = 16 / sizeof(T);  // lanes of a block of 16 bytes
  PFL_EACH(
      g, (R * N + lanes - 1) / lanes, V v[lanes];
      PFL_EACH(i, lanes, constexpr int at = g * lanes + i;
               if constexpr (at < R * N) v[i] = acc[at % R][at / R]; else v[i] = V{});
      if constexpr (few == 4) {  // every block: (v0 v1 v2 v3)'s sums of that block
        PFL_EACH(i, lanes / 4, fold_blocks<4, 1>(v[4 * i], v[4 * i + 1], All{});
                 fold_blocks<4, 1>(v[4 * i + 2], v[4 * i + 3], All{});
                 fold_blocks<4, 2>(v[4 * i], v[4 * i + 2], All{}));
      } else {
        PFL_EACH(i, lanes / 2, fold_blocks<2, 1>(v[2 * i], v[2 * i + 1], All{}));
      } if constexpr (lanes / few == 2) fold_wide<few>(v[0], v[few], All{});
      if constexpr (lanes / few == 4) {
        fold_wide<few>(v[0], v[few], All{});
        fold_wide<few>(v[2 * few], v[3 * few], All{});
        fold_wide<few>(v[0], v[2 * few], All{});
      } store(to + g * lanes, v[0]));
#else
  PFL_EACH(j, N,
           PFL_EACH(r, R, T sum = 0; for (int i = 0; i < lanes; i++) sum += acc[r][j][i];
                    to[j * R + r] = sum));
#endif
}
template <class T, class V>
PFL_FN T sum_of(const V& v) {
  T lane[sizeof(V) / sizeof(T)], sum = 0;
  store(lane, v);
  for (T x : lane) sum += x;
  return sum;
}

#ifdef PFL_SHUFFLE
// One stage of a square block's transposition: rows `size` apart swap the blocks of `size` lanes
// beside their diagonal.
template <size_t size, class V, size_t... lane>
PFL_FN void swap_beside(V& a, V& b, std::index_sequence<lane...>) {
  constexpr size_t n = sizeof...(lane);
  const V first = __builtin_shufflevector(a, b, (lane / size % 2 ? lane - size + n : lane)...);
  b = __builtin_shufflevector(a, b, (lane / size % 2 ? lane + n : lane + size)...);
  a = first;
}
template <int size, int lanes, class V>
PFL_FN void transpose_square(V (&v)[lanes]) {
  PFL_EACH(i, lanes,
           if constexpr (i / size % 2 == 0)
               swap_beside<size>(v[i], v[i + size], std::make_index_sequence<lanes>{}));
  if constexpr (size > 1) transpose_square<size / 2>(v);
}
#endif

// to[j * to_row + i] = row(i)[j] for i < rows, j < cols.
template <int bytes, class T, class Row>
PFL_FN void turn(T* to, int64_t to_row, Row&& row, int64_t rows, int64_t cols) {
  constexpr int64_t lanes = bytes / sizeof(T);
  int64_t i = 0;
#ifdef PFL_SHUFFLE
  for (; i + lanes <= rows; i += lanes) {
    int64_t j = 0;
    for (; j + lanes <= cols; j += lanes) {
      Vec<T, bytes> v[lanes];
      PFL_EACH(r, static_cast<int>(lanes), load(v[r], row(i + r) + j));
      transpose_square<lanes / 2>(v);
      PFL_EACH(c, static_cast<int>(lanes), store(to + (j + c) * to_row + i, v[c]));
    }
    for (; j < cols; j++)
      for (int64_t r = i; r < i + lanes; r++) to[j * to_row + r] = row(r)[j];
  }
  if constexpr (bytes > 16) {
    if (i < rows)
      turn<bytes / 2>(
          to + i, to_row, [&](int64_t r) PFL_LAMBDA { return row(i + r); }, rows - i, cols);
    return;
  }
#endif
  for (; i < rows; i++) {
    const T* const from = row(i);
    for (int64_t j = 0; j < cols; j++) to[j * to_row + i] = from[j];
  }
}

// ---- functions: polynomials for float32, the library's for float64 ----
template <class V, class F>
PFL_FN void lane_by_lane(V& v, F f) {
  V out{};  // whole, or gcc takes v for half written
  for (size_t i = 0; i < sizeof(V) / sizeof(v[0]); i++) out[i] = f(v[i]);
  v = out;
}

// e^x; NaN stays, below -87 it is 0 or next to it.
template <class T, int bytes>
PFL_FN void exponential(Vec<T, bytes>& x) {
  if constexpr (sizeof(T) == 8) {
    lane_by_lane(x, [](double y) { return std::exp(y); });
  } else {
    using V = Vec<float, bytes>;
    using I = Vec<int32_t, bytes>;
    V high, low;
    fill(high, 89.f), fill(low, -87.f);
    x = x > high ? high : x;
    x = x < low ? low : x;
    const V n = (x * 1.44269504f + 12582912.f) - 12582912.f;  // the nearest whole number
    const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
    V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.f);
    const I whole = __builtin_convertvector(n == n ? n : V{}, I),
            half = whole / 2;  // 2^n as a product: n may be 128
    const I first = (half + 127) << 23, second = (whole - half + 127) << 23;
    V a, b;
    __builtin_memcpy(&a, &first, sizeof a);
    __builtin_memcpy(&b, &second, sizeof b);
    x = p * a * b;
  }
}

enum Act : int64_t { kNone, kRelu, kTanh, kSigmoid, kGelu };

// erf(x) in float32: x times a polynomial in x^2 up to 1, 1 - e^polynomial beyond; both were fitted
// at Chebyshev's points, to 9e-8.
template <class T>
struct Erf {
  static constexpr T in[8] = {-9.673598122e-06f, 1.126826304e-04f,  -8.484398882e-04f,
                              5.221053664e-03f,  -2.686543844e-02f, 1.128378263e-01f,
                              -3.761263848e-01f, 1.128379167e+00f};
  static constexpr T out[8] = {-1.528736788e-05f, 3.513664741e-04f,  -3.676343995e-03f,
                               2.353182582e-02f,  -1.053154674e-01f, -6.365681748e-01f,
                               -1.127628386e+00f, -2.850916178e-04f};
};
template <int bytes>
PFL_FN void error_function(Vec<float, bytes>& x) {
  using V = Vec<float, bytes>;
  const V t = x < 0 ? -x : x, s = x * x;
  V in, out;
  fill(in, Erf<float>::in[0]), fill(out, Erf<float>::out[0]);
  for (int i = 1; i < 8; i++) in = in * s + Erf<float>::in[i];
  const V u = t > 4.f ? V{} + 4.f : t;
  for (int i = 1; i < 8; i++) out = out * u + Erf<float>::out[i];
  exponential<float, bytes>(out);
  out = 1.f - out;
  out = x < 0 ? -out : out;
  x = t > 1.f ? out : x * in;
}

template <class T, int bytes>
PFL_FN void activate(int64_t act, Vec<T, bytes>& z) {
  using V = Vec<T, bytes>;
  if (act == kRelu) {
    z = z < 0 ? V{} : z;  // NaN stays
  } else if (act == kTanh) {
    if constexpr (sizeof(T) == 8) {
      lane_by_lane(z, [](double y) { return std::tanh(y); });
    } else {
      const V s = z * z;
      V p = s * -5.70498872745e-3f +
            2.06390887954e-2f;  // near 0, where the formula below would cancel
      p = p * s + -5.37397155531e-2f;
      p = p * s + 1.33314422036e-1f;
      p = p * s + -3.33332819422e-1f;
      V e = z + z;
      exponential<T, bytes>(e);
      const V far = 1.f - 2.f / (e + 1.f);
      z = s < 0.390625f ? z + z * (s * p) : far;
    }
  } else if (act == kSigmoid) {
    V e = -z;
    exponential<T, bytes>(e);
    z = T(1) / (T(1) + e);
  }
}
// g times the activation's slope where its value is y.
template <class T, class V>
PFL_FN void slope(int64_t act, V& g, const V& y) {
  if (act == kRelu)
    g = y <= 0 ? V{} : g;  // NaN lets it through, as in torch
  else if (act == kTanh)
    g *= T(1) - y * y;
  else if (act == kSigmoid)
    g *= y * (T(1) - y);
}

// What happens to a gradient: it moves the weights, or it is kept, or added to what is kept.
template <class T>
struct Into {
  bool step, add;
  T lr;
  PFL_FN_MEMBER void operator()(T& to, T g) const { to = step ? to - lr * g : add ? to + g : g; }
  template <class V>
  PFL_FN_MEMBER void vector(T* to, V& g) const {
    V old;
    if (step || add) {
      load(old, to);
      if (step)
        g = old - lr * g;
      else
        g = old + g;
    }
    store(to, g);
  }
};

}  // namespace pflcore::cpu::chain
