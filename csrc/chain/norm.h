// Group norm and layer norm of a chain: the features of a group are normalized sample by sample.
#pragma once
#include "layer.h"

namespace pflcore::cpu::chain {

struct Norm {
  int64_t features, groups, per,
      batch;  // `per`: neighbouring features that share a weight and a bias
  double eps;
  bool affine;
  int64_t group() const { return features / groups; }
};

// total[k] += the sums over features 0 .. n of what add(f, part) adds to part[k]. Few at a time are
// added to the total, so that the error grows little with their number; two by turns, as additions
// to one sum wait for each other.
template <int K, class V, class Add>
PFL_INLINE void sum_features(int64_t n, const Add& add, V (&total)[K]) {
  constexpr int64_t few = 32;
  for (int64_t first = 0; first < n; first += few) {
    const int64_t end = std::min(n, first + few);
    V even[K] = {}, odd[K] = {};
    int64_t f = first;
    for (; f + 2 <= end; f += 2) add(f, even), add(f + 1, odd);
    if (f < end) add(f, even);
    PFL_EACH(k, K, total[k] += even[k] + odd[k]);
  }
}

// stats [groups][2][batch and a vector]: mean and 1 / deviation.
template <class T, int bytes>
PFL_TARGET void norm_forward(const Norm& q, const T* x, const T* weight, const T* bias, T* stats,
                             T* y) {
  using V = Vec<T, bytes>;
  constexpr int64_t lanes = bytes / sizeof(T);
  const int64_t wide = up(q.batch, lanes), n = q.group();
  for (int64_t g = 0; g < q.groups; g++)  // all statistics first: y may reach over a group's end
    tiled<4>(wide / lanes, [&](int64_t first, auto N_) PFL_LAMBDA {
      constexpr int N = N_;
      V mean[N] = {}, square[N] = {};
      const T* const from = x + g * n * q.batch + first * lanes;
      const auto add = [&](int64_t f, V(&part)[N]) PFL_LAMBDA {
        PFL_EACH(j, N, {
          V v;
          load(v, from + f * q.batch + j * lanes);
          part[j] += v;
        });
      };
      sum_features(n, add, mean);
      PFL_EACH(j, N, mean[j] /= static_cast<T>(n));
      const auto add_square = [&](int64_t f, V(&part)[N]) PFL_LAMBDA {
        PFL_EACH(j, N, {
          V v;
          load(v, from + f * q.batch + j * lanes);
          v -= mean[j];
          part[j] += v * v;
        });
      };
      sum_features(n, add_square, square);
      T* const to = stats + g * 2 * wide + first * lanes;
      PFL_EACH(j, N, {
        square[j] = square[j] / static_cast<T>(n) + static_cast<T>(q.eps);
        lane_by_lane(square[j], [](T s) { return T(1) / std::sqrt(s); });
        store(to + j * lanes, mean[j]);
        store(to + wide + j * lanes, square[j]);
      });
    });
  for (int64_t f = 0; f < q.features; f++) {
    const T* const of = stats + f / n * 2 * wide;
    const int64_t own = f / q.per;
    for (int64_t b = 0; b < q.batch; b += lanes) {
      V v, mean, scale;
      load(v, x + f * q.batch + b);
      load(mean, of + b);
      load(scale, of + wide + b);
      v = (v - mean) * scale;
      if (q.affine) v = v * weight[own] + bias[own];
      store(y + f * q.batch + b, v);
    }
  }
}

// dx may be nullptr. weight, bias and their gradients are of one layout.
template <class T, int bytes>
PFL_TARGET void norm_backward(const Norm& q, const T* x, const T* stats, const T* dy,
                              const T* weight, const Into<T>& into, T* dweight, T* dbias, T* dx) {
  using V = Vec<T, bytes>;
  constexpr int64_t lanes = bytes / sizeof(T);
  const int64_t wide = up(q.batch, lanes), n = q.group();
  // Feature f's normalized values and slopes from sample b on; `of` are its group's statistics.
  const auto look = [&](int64_t f, int64_t b, const T* of, V& hat, V& g) PFL_LAMBDA {
    V mean, scale;
    load(hat, x + f * q.batch + b);
    load(mean, of + b);
    load(scale, of + wide + b);
    hat = (hat - mean) * scale;
    load(g, dy + f * q.batch + b);
  };
  for (int64_t f = 0; dx && f < q.features; f += n) {
    const T* const of = stats + f / n * 2 * wide;
    tiled<2>(wide / lanes, [&](int64_t first, auto N_) PFL_LAMBDA {
      constexpr int N = N_;
      V mean[2 * N] = {};  // of the slopes, and of their products with the normalized values
      const auto add = [&](int64_t i, V(&part)[2 * N]) PFL_LAMBDA {
        const T factor = q.affine ? weight[(f + i) / q.per] : T(1);
        PFL_EACH(j, N, {
          V hat, g;
          look(f + i, (first + j) * lanes, of, hat, g);
          if (q.affine) g *= factor;
          part[j] += g;
          part[N + j] += g * hat;
        });
      };
      sum_features(n, add, mean);
      PFL_EACH(j, 2 * N, mean[j] /= static_cast<T>(n));
      for (int64_t i = f; i < f + n; i++) {
        const T factor = q.affine ? weight[i / q.per] : T(1);
        PFL_EACH(j, N, {
          const int64_t b = (first + j) * lanes;
          V hat, g, scale;
          look(i, b, of, hat, g);
          load(scale, of + wide + b);
          if (q.affine) g *= factor;
          g = scale * (g - mean[j] - hat * mean[N + j]);
          store_first(dx + i * q.batch + b, g, q.batch - b);
        });
      }
    });
  }
  for (int64_t f = 0; q.affine && f < q.features; f += q.per) {
    V sums[2] = {};  // of the slopes, and of their products with the normalized values
    const auto add = [&](int64_t i, V(&part)[2]) PFL_LAMBDA {
      const T* const of = stats + (f + i) / n * 2 * wide;
      for (int64_t b = 0; b < q.batch; b += lanes) {
        V hat, g;
        look(f + i, b, of, hat, g);
        hat *= g;
        keep_first<T>(hat, q.batch - b);
        keep_first<T>(g, q.batch - b);
        part[0] += g;
        part[1] += hat;
      }
    };
    sum_features(q.per, add, sums);
    into(dweight[f / q.per], sum_of<T>(sums[1]));
    into(dbias[f / q.per], sum_of<T>(sums[0]));
  }
}

template <class T, int bytes>
struct NormLayer : Layer {
  static constexpr int64_t kind = ChainLayer::norm;
  Norm q;
  T* stats = nullptr;

  explicit NormLayer(Lines& lines) {
    const ChainLayer& l = lines.line();
    q = {lines.shape.features(), l[0], l[1], lines.batch(), l.field[2], l[3] >= 0};
    demand(q.groups > 0 && q.features % q.groups == 0);
    demand(q.per > 0 && q.features % q.per == 0);
    demand((l[4] >= 0) == q.affine);
    const int64_t weights = q.features / q.per;
    if (q.affine) lines.take_weights(weights, weights, weights, l[3], l[4]);
  }
  void lay(Arena& arena) {
    constexpr int64_t lanes = bytes / sizeof(T);
    stats = arena.take<T>(q.groups * 2 * up(q.batch, lanes));
  }
  void forward(const Forward<T>& f) const {
    norm_forward<T, bytes>(q, f.x, f.w, f.bias, stats, f.y);
  }
  void backward(const Backward<T>& b) const {
    norm_backward<T, bytes>(q, b.x, stats, b.dy, b.w, b.into, b.dw, b.db, b.dx);
  }
};

}  // namespace pflcore::cpu::chain
