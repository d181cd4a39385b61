// Parts of the kernels of a chain: the sizes of tiles, where a convolution's vectors lie, and the
// functions of activations.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "../cpu/small_gemm.h"

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

inline int64_t floor_div(int64_t n, int64_t d) { return n < 0 ? -((d - 1 - n) / d) : n / d; }

// Zero but for the first n lanes.
template <class T>
constexpr T kCount[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
template <class T, class V>
PFL_INLINE void keep_first(V& v, int64_t n) {
  V lane;
  load(lane, kCount<T>);
  v = lane < static_cast<T>(n) ? v : V{};
}

// The places where the even and the odd vectors of a tile begin.
struct Pair {
  int32_t a, b;
};

// sum_outer where b's vectors begin as a table says: each i has a place for the even and one for
// the odd vectors, `step` between two of a kind.
template <int R, int N, class T, class V>
PFL_INLINE void outer_at(V (&acc)[R][N], const T* a, int64_t a_step, const Pair* at, int64_t k,
                         const T* b, int64_t step) {
  sum_outer<R, N>(acc, k, a, 1, a_step, [&](int64_t i, int j) PFL_LAMBDA {
    return b + (j & 1 ? at[i].b : at[i].a) + (j >> 1) * step;
  });
}
template <class T, class V>
PFL_INLINE T sum_of(const V& v) {
  T lane[sizeof(V) / sizeof(T)], sum = 0;
  store(lane, v);
  for (T x : lane) sum += x;
  return sum;
}

// ---- overflows: a sum of finite products that leaves the range of T is NaN. A fused product has
// no range of its own, so that the first infinity would hide all later ones of the other sign: the
// sum would have a sign that means nothing, and a rectifier might take it for a 0 ----

// Are the factors of n products finite? Steps lead from one to the next.
template <class T>
bool are_finite(const T* a, int64_t a_step, const T* b, int64_t b_step, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    if (!std::isfinite(a[i * a_step]) || !std::isfinite(b[i * b_step])) return false;
  return true;
}
// The sums [rows, n], of which `finite(r, i)` says whether their factors are finite.
template <class T, class Finite>
[[gnu::noinline, gnu::cold]] void mark_infinities(T* sums, int64_t rows, int64_t n,
                                                  const Finite& finite) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < n; i++)
      if (std::isinf(sums[r * n + i]) && finite(r, i))
        sums[r * n + i] = std::numeric_limits<T>::quiet_NaN();
}
// Those of a tile: row r, and place i counted over its N vectors.
template <class T, int R, int N, class V, class Finite>
PFL_INLINE void mark_overflows(V (&acc)[R][N], const Finite& finite) {
  constexpr int lanes = sizeof(V) / sizeof(T);
  V odd[N] = {};
  PFL_TILE(odd[j] += acc[r][j] * T(0));  // 0, or NaN where a sum is not finite
  V all = odd[0];
  PFL_EACH(j, N - 1, all += odd[j + 1]);
  if (!any(all != all)) [[likely]]
    return;
  T sums[R][N * lanes];
  PFL_TILE(store(sums[r] + j * lanes, acc[r][j]));
  mark_infinities<T>(sums[0], R, N * lanes, finite);
  PFL_TILE(load(acc[r][j], sums[r] + j * lanes));
}

// ---- what a tile leaves behind ----

// The first n columns of a tile, all where it has no more, into rows `stride` apart.
template <class T, int R, int N, class V>
PFL_INLINE void store_tile(T* to, int64_t stride, const V (&acc)[R][N], int64_t n) {
  constexpr int64_t lanes = sizeof(V) / sizeof(T), width = N * lanes;
  if (n >= width) {
    PFL_TILE(store(to + r * stride + j * lanes, acc[r][j]));
    return;
  }
  T some[R][width];
  PFL_TILE(store(some[r] + j * lanes, acc[r][j]));
  for (int r = 0; r < R; r++) copy<sizeof(V)>(to + r * stride, some[r], n);
}

// to[i] = the sum of v[i]'s lanes, for n vectors; both have space for whole groups of as many as
// there are lanes.
template <class T, class V>
[[gnu::noinline]] PFL_TARGET void sum_lanes(T* to, V* v, int64_t n) {
  constexpr int64_t lanes = sizeof(V) / sizeof(T);
  for (int64_t i = 0; i < n; i += lanes) {
    V group[lanes];
    PFL_EACH(k, lanes, group[k] = v[i + k]);
    fold_all<T, true>(group);
    store(to + i, group[0]);
  }
}

// ---- functions: polynomials for float32, the library's for float64 ----
template <class V, class F>
PFL_INLINE void lane_by_lane(V& v, F f) {
  V out{};  // whole, or gcc takes v for half written
  for (size_t i = 0; i < sizeof(V) / sizeof(v[0]); i++) out[i] = f(v[i]);
  v = out;
}

template <class T, int bytes>
PFL_INLINE void square_root(Vec<T, bytes>& v) {
#if PFL_X86 && !defined(__clang__)  // gcc has no name for it that fits every vector
  if constexpr (sizeof(T) == 4 && bytes > 16)
    asm("vsqrtps %1, %0" : "=v"(v) : "v"(v));
  else if constexpr (sizeof(T) == 4)
    asm("sqrtps %1, %0" : "=x"(v) : "x"(v));
  else if constexpr (bytes > 16)
    asm("vsqrtpd %1, %0" : "=v"(v) : "v"(v));
  else
    asm("sqrtpd %1, %0" : "=x"(v) : "x"(v));
#else
  lane_by_lane(v, [](T x) { return std::sqrt(x); });
#endif
}

// e^x; NaN stays, below -87 it is 0 or next to it.
template <class T, int bytes>
PFL_INLINE void exponential(Vec<T, bytes>& x) {
  if constexpr (sizeof(T) == 8) {
    lane_by_lane(x, [](double y) { return std::exp(y); });
  } else {
    using V = Vec<float, bytes>;
    using I = Vec<int32_t, bytes>;
    const V high = 89.f - V{}, low = -87.f - V{};
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

// The order of ACTIVATIONS in pflcore/ops/_chain_program.py, behind kNone.
enum Act : int64_t { kNone, kRelu, kTanh, kSigmoid, kGelu };

// Of pooling, by the number in a program's line.
enum Mode : int64_t { kNoPool, kMax, kMean };

// erf(x); in float32 x times a polynomial in x^2 up to 1, 1 - e^polynomial beyond; both were fitted
// at Chebyshev's points, to 9e-8.
constexpr float kErfIn[8] = {-9.673598122e-06f, 1.126826304e-04f,  -8.484398882e-04f,
                             5.221053664e-03f,  -2.686543844e-02f, 1.128378263e-01f,
                             -3.761263848e-01f, 1.128379167e+00f};
constexpr float kErfOut[8] = {-1.528736788e-05f, 3.513664741e-04f,  -3.676343995e-03f,
                              2.353182582e-02f,  -1.053154674e-01f, -6.365681748e-01f,
                              -1.127628386e+00f, -2.850916178e-04f};
template <class T, int bytes>
PFL_INLINE void error_function(Vec<T, bytes>& x) {
  if constexpr (sizeof(T) == 8) {
    lane_by_lane(x, [](double y) { return std::erf(y); });
  } else {
    using V = Vec<float, bytes>;
    const V t = x < 0 ? -x : x, s = x * x, u = t > 4.f ? V{} + 4.f : t;
    V in = kErfIn[0] - V{}, out = kErfOut[0] - V{};
    for (int i = 1; i < 8; i++) {
      in = in * s + kErfIn[i];
      out = out * u + kErfOut[i];
    }
    exponential<float, bytes>(out);
    out = 1.f - out;
    out = x < 0 ? -out : out;
    x = t > 1.f ? out : x * in;
  }
}

template <class T, int bytes>
PFL_INLINE void activate(int64_t act, Vec<T, bytes>& z) {
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
PFL_INLINE void slope(int64_t act, V& g, const V& y) {
  if (act == kRelu)
    g = y <= 0 ? V{} : g;  // NaN lets it through, as in torch
  else if (act == kTanh)
    g *= T(1) - y * y;
  else if (act == kSigmoid)
    g *= y * (T(1) - y);
}

// The use of a gradient: it moves the weights, or it is stored, or added to what is stored.
template <class T>
struct Into {
  bool step, add;
  T lr;
  PFL_INLINE_MEMBER void operator()(T& to, T g) const {
    to = step ? to - lr * g : add ? to + g : g;
  }
  template <class V>
  PFL_INLINE_MEMBER void vector(T* to, V& g) const {
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
