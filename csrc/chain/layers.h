// The small layers of a chain, on plain values [feature][sample], forward and backward:
// activations, pooling, dropout, norms, a scale; the losses. Arrays have room for a few vectors
// behind their end; a vector that reaches into the next feature is stored before that one is.
#pragma once
#include "chain.h"
#include "tile.h"

namespace pflcore::cpu::chain {

// ---- activations ----
template <class T, int bytes>
PFL_TARGET void act_forward(int64_t act, const T* x, T* y, int64_t n) {
  using V = Vec<T, bytes>;
  for (int64_t i = 0; i < n; i += bytes / sizeof(T)) {
    V v;
    load(v, x + i);
    if (act != kGelu) {
      activate<T, bytes>(act, v);
    } else {
      V e = v * T(0.70710678118654752440);
      error_function<T, bytes>(e);
      v = v * T(.5) * (T(1) + e);
    }
    store(y + i, v);
  }
}
template <class T, int bytes>
PFL_TARGET void act_backward(int64_t act, const T* x, const T* y, const T* dy, T* dx, int64_t n) {
  using V = Vec<T, bytes>;
  for (int64_t i = 0; i < n; i += bytes / sizeof(T)) {
    V g, v;
    load(g, dy + i);
    if (act != kGelu) {
      load(v, y + i);
      slope<T>(act, g, v);
    } else {
      load(v, x + i);
      const V square = v * v;
      V e = v * T(0.70710678118654752440), bell = square * T(-.5);
      error_function<T, bytes>(e);
      exponential<T, bytes>(bell);
      bell = square > std::numeric_limits<T>::max() ? V{} : bell;  // it falls faster than v grows
      g *= T(.5) * (T(1) + e) + v * bell * T(0.39894228040143267794);
    }
    store(dx + i, g);
  }
}

// ---- an activation with a factor of its own for what is not above 0; NaN is not ----
template <class T, int bytes>
PFL_TARGET void leaky_forward(T factor, const T* x, T* y, int64_t n) {
  Vec<T, bytes> v;
  for (int64_t i = 0; i < n; i += bytes / sizeof(T)) {
    load(v, x + i);
    v = v > 0 ? v : v * factor;
    store(y + i, v);
  }
}
template <class T, int bytes>
PFL_TARGET void leaky_backward(T factor, const T* x, const T* dy, T* dx, int64_t n) {
  Vec<T, bytes> v, g;
  for (int64_t i = 0; i < n; i += bytes / sizeof(T)) {
    load(v, x + i);
    load(g, dy + i);
    g = v > 0 ? g : g * factor;
    store(dx + i, g);
  }
}

// ---- an addition, and an activation below GELU of the sum; y may be x's own place ----
template <class T, int bytes>
PFL_TARGET void add_forward(int64_t act, const T* x, const T* other, T* y, int64_t n) {
  Vec<T, bytes> v, t;
  for (int64_t i = 0; i < n; i += bytes / sizeof(T)) {
    load(v, x + i);
    load(t, other + i);
    v += t;
    activate<T, bytes>(act, v);
    store(y + i, v);
  }
}
// The slopes of the sum, in the place of those behind the activation.
template <class T, int bytes>
PFL_TARGET void add_backward(int64_t act, const T* y, T* dy, int64_t n) {
  Vec<T, bytes> g, v;
  for (int64_t i = 0; i < n; i += bytes / sizeof(T)) {
    load(g, dy + i);
    load(v, y + i);
    slope<T>(act, g, v);
    store(dy + i, g);
  }
}
template <class T, int bytes>
PFL_TARGET void add_to(T* to, const T* from, int64_t n) {
  Vec<T, bytes> v, t;
  for (int64_t i = 0; i < n; i += bytes / sizeof(T)) {
    load(v, to + i);
    load(t, from + i);
    v += t;
    store(to + i, v);
  }
}

// ---- pooling of any window; `ph`, `pw`: what is above and left of the image, and behind it,
// counts as 0 in a mean and in no maximum ----
struct Pool {
  int64_t c, h, w, mode, kh, kw, sh, sw, ph, pw, batch;
  int64_t ho() const { return (h + 2 * ph - kh) / sh + 1; }
  int64_t wo() const { return (w + 2 * pw - kw) / sw + 1; }
};

// The part of a window that lies inside of the image, in rows and columns.
struct Window {
  int64_t top, bottom, left, right;
  Window(const Pool& q, int64_t place)
      : top(place / q.wo() % q.ho() * q.sh - q.ph), left(place % q.wo() * q.sw - q.pw) {
    bottom = std::min(q.h, top + q.kh), right = std::min(q.w, left + q.kw);
    top = std::max<int64_t>(0, top), left = std::max<int64_t>(0, left);
  }
};

template <class T, int bytes>
PFL_TARGET void pool_forward(const Pool& q, const T* x, T* y) {
  using V = Vec<T, bytes>;
  const int64_t places = q.ho() * q.wo();
  for (int64_t p = 0; p < q.c * places; p++) {
    const Window at(q, p % places);
    const T* const image = x + p / places * q.h * q.w * q.batch;
    for (int64_t b = 0; b < q.batch; b += bytes / sizeof(T)) {
      V top, v;
      load(top, image + (at.top * q.w + at.left) * q.batch + b);
      for (int64_t i = at.top; i < at.bottom; i++)
        for (int64_t j = at.left + (i == at.top); j < at.right; j++) {
          load(v, image + (i * q.w + j) * q.batch + b);
          if (q.mode == kMax)
            top = ((v > top) | (v != v)) ? v : top;
          else
            top += v;
        }
      if (q.mode == kMean) top /= static_cast<T>(q.kh * q.kw);
      store(y + p * q.batch + b, top);
    }
  }
}
// `add`: whether the slopes are added to those in dx.
template <class T, int bytes>
PFL_TARGET void pool_backward(const Pool& q, bool add, const T* x, const T* dy, T* dx) {
  using V = Vec<T, bytes>;
  using I = decltype(V{} < V{});
  const int64_t places = q.ho() * q.wo();
  if (!add) std::fill_n(dx, q.c * q.h * q.w * q.batch, T(0));
  for (int64_t p = 0; p < q.c * places; p++) {
    const Window at(q, p % places);
    const int64_t image = p / places * q.h * q.w * q.batch;
    for (int64_t b = 0; b < q.batch; b += bytes / sizeof(T)) {
      V g, v, top;
      I best{};
      load(g, dy + p * q.batch + b);
      keep_first<T>(g, q.batch - b);
      if (q.mode == kMean) g /= static_cast<T>(q.kh * q.kw);
      load(top, x + image + (at.top * q.w + at.left) * q.batch + b);
      int k = 0;
      for (int64_t i = at.top; i < at.bottom && q.mode == kMax; i++)
        for (int64_t j = at.left; j < at.right; j++, k++) {
          load(v, x + image + (i * q.w + j) * q.batch + b);
          const I later = (v > top) | (v != v);
          top = later ? v : top;
          best = later ? I{} + k : best;
        }
      k = 0;
      for (int64_t i = at.top; i < at.bottom; i++)
        for (int64_t j = at.left; j < at.right; j++, k++) {
          T* const to = dx + image + (i * q.w + j) * q.batch + b;
          load(v, to);
          v += q.mode == kMax ? (best == k ? g : V{}) : g;
          store(to, v);
        }
    }
  }
}

// ---- dropout: the mask of pflcore.nn.Dropout, a hash of the step's seed, the layer and the place
// [sample][feature] ----
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
PFL_INLINE uint64_t mixed(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}
// factor [feature][sample]: 1 / (1 - p) or 0; samples `first` and on of the step's batch.
template <class T, int bytes>
PFL_TARGET void dropout_factors(uint64_t seed, int64_t layer, int64_t threshold, T scale,
                                int64_t features, int64_t first, int64_t batch, T* factor) {
  const uint64_t key = mixed(seed + static_cast<uint64_t>(layer) * kGolden);
  for (int64_t f = 0; f < features; f++)
    for (int64_t b = 0; b < batch; b++) {
      const uint64_t place = static_cast<uint64_t>((first + b) * features + f);
      factor[f * batch + b] =
          static_cast<int64_t>(mixed(key + place * kGolden) >> 40) >= threshold ? scale : T(0);
    }
}
template <class T, int bytes>
PFL_TARGET void multiply(const T* x, const T* factor, T* y, int64_t n) {
  Vec<T, bytes> v, f;
  for (int64_t i = 0; i < n; i += bytes / sizeof(T)) {
    load(v, x + i);
    load(f, factor + i);
    v *= f;
    store(y + i, v);
  }
}

// ---- a factor for each feature: what stands between the two products of a rank-1 factorized
// layer; 0 is 0 whatever it meets ----
template <class T, int bytes>
PFL_TARGET void scale_features(int64_t features, int64_t batch, const T* lam, const T* x, T* y) {
  Vec<T, bytes> v;
  for (int64_t f = 0; f < features; f++)
    for (int64_t b = 0; b < batch; b += bytes / sizeof(T)) {
      load(v, x + f * batch + b);
      if (lam[f] != 0)
        v *= lam[f];
      else
        v = Vec<T, bytes>{};
      store(y + f * batch + b, v);
    }
}
template <class T, int bytes>
PFL_TARGET void scale_backward(int64_t features, int64_t batch, const T* x, const T* dy,
                               const Into<T>& into, T* dlam) {
  Vec<T, bytes> v, g;
  for (int64_t f = 0; f < features; f++) {
    Vec<T, bytes> sum{};
    for (int64_t b = 0; b < batch; b += bytes / sizeof(T)) {
      load(v, x + f * batch + b);
      load(g, dy + f * batch + b);
      v *= g;
      keep_first<T>(v, batch - b);
      sum += v;
    }
    into(dlam[f], sum_of<T>(sum));
  }
}

// ---- group norm and layer norm: the features of a group are normalized sample by sample ----
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

// ---- batch norm: a channel is normalized over its places in all samples of a batch, and what an
// activation below GELU and a maximum over windows of 2x2 do with it is done at once ----
struct BatchNorm {
  int64_t channels, h, w, batch;  // `h`, `w`: of a channel's image
  int64_t act;
  int64_t mean_at, variance_at;  // columns of the running statistics
  double eps, momentum;
  bool affine, frozen, pooled;
  int64_t count() const { return h * w * batch; }  // a channel's numbers lie side by side
  int64_t hq() const { return pooled ? h / 2 : h; }
  int64_t wq() const { return pooled ? w / 2 : w; }
  int64_t result() const { return hq() * wq() * batch; }  // a channel's numbers behind it
};

// A thread's memory of a batch norm between its passes.
template <class T>
struct BatchNormSpace {
  T* stats;  // [channels][2]: mean and 1 / deviation
  // Of each maximum the element of its window, by number, and the normalized value.
  uint8_t* winner;
  T* hat;
};

// The sums of K numbers for each of a channel's n places; look(i, parts) gives those from place i
// on. Four vectors of partial sums do not wait for each other.
template <int K, class T, int bytes, class Look>
PFL_INLINE void channel_sums(int64_t n, const Look& look, T (&total)[K]) {
  using V = Vec<T, bytes>;
  constexpr int64_t lanes = bytes / sizeof(T);
  V sums[4][K] = {}, parts[K];
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes)
    PFL_EACH(j, 4, look(i + j * lanes, parts); PFL_EACH(k, K, sums[j][k] += parts[k]));
  for (; i < n; i += lanes) {
    look(i, parts);
    PFL_EACH(k, K, keep_first<T>(parts[k], n - i); sums[0][k] += parts[k]);
  }
  PFL_EACH(k, K, total[k] = sum_of<T>((sums[0][k] + sums[1][k]) + (sums[2][k] + sums[3][k])));
}

// The largest of each window of 2x2 of a channel's normalized values, and where it stood: the first
// of equals, NaN above all.
template <class T, int bytes>
PFL_INLINE void batch_norm_windows(const BatchNorm& q, const T* x, T mean, T scale, T weight,
                                   T bias, uint8_t* winner, T* hat, T* y) {
  using V = Vec<T, bytes>;
  using I = decltype(V{} < V{});
  constexpr int64_t lanes = bytes / sizeof(T);
  const int64_t wq = q.wq(), line = q.w * q.batch, windows = q.hq() * wq;
  for (int64_t k = 0; k < windows; k++)
    for (int64_t b = 0; b < q.batch; b += lanes) {
      const T* const from = x + k / wq * 2 * line + k % wq * 2 * q.batch + b;
      V top, best, v;
      I place{};
      load(best, from);
      best = (best - mean) * scale;
      top = best * weight + bias;
      PFL_EACH(e, 3, load(v, from + (e + 1) / 2 * line + (e + 1) % 2 * q.batch);
               v = (v - mean) * scale; const V z = v * weight + bias;
               const I later = (z > top) | (z != z); top = later ? z : top; best = later ? v : best;
               place = later ? I{} + (e + 1) : place);
      activate<T, bytes>(q.act, top);
      const int64_t at = k * q.batch + b;
      store(y + at, top);
      store(hat + at, best);
      const Vec<uint8_t, lanes> few = __builtin_convertvector(place, Vec<uint8_t, lanes>);
      __builtin_memcpy(winner + at, &few, lanes);
    }
}

// `running`: a row of statistics, which a batch moves in training.
template <class T, int bytes>
PFL_TARGET void batch_norm_forward(const BatchNorm& q, bool train, const T* x, const T* weight,
                                   const T* bias, T* running, const BatchNormSpace<T>& s, T* y) {
  using V = Vec<T, bytes>;
  constexpr int64_t lanes = bytes / sizeof(T);
  const int64_t n = q.count();
  for (int64_t c = 0; c < q.channels; c++) {
    const T* const from = x + c * n;
    T* const to = y + c * q.result();
    T mean[1], variance[1];
    if (train) {
      channel_sums<1, T, bytes>(
          n, [&](int64_t i, V(&part)[1]) PFL_LAMBDA { load(part[0], from + i); }, mean);
      mean[0] /= static_cast<T>(n);
      channel_sums<1, T, bytes>(
          n,
          [&](int64_t i, V(&part)[1]) PFL_LAMBDA {
            load(part[0], from + i);
            part[0] -= mean[0];
            part[0] *= part[0];
          },
          variance);
      const T share = static_cast<T>(q.momentum);
      T &old_mean = running[q.mean_at + c], &old = running[q.variance_at + c];
      old_mean += share * (mean[0] - old_mean);
      old += share * (variance[0] / static_cast<T>(n - 1) - old);
      variance[0] /= static_cast<T>(n);
    } else {
      mean[0] = running[q.mean_at + c], variance[0] = running[q.variance_at + c];
    }
    const T scale = T(1) / std::sqrt(variance[0] + static_cast<T>(q.eps));
    s.stats[2 * c] = mean[0], s.stats[2 * c + 1] = scale;
    const T own_weight = q.affine ? weight[c] : T(1), offset = q.affine ? bias[c] : T(0);
    if (q.pooled) {
      batch_norm_windows<T, bytes>(q, from, mean[0], scale, own_weight, offset,
                                   s.winner + c * q.result(), s.hat + c * q.result(), to);
      continue;
    }
    const T factor = scale * own_weight;
    for (int64_t i = 0; i < n; i += lanes) {
      V v;
      load(v, from + i);
      v = (v - mean[0]) * factor + offset;
      activate<T, bytes>(q.act, v);
      store(to + i, v);
    }
  }
}

// The slopes dx of a channel from those behind the maxima: factor * (slope - shift - hat * pull), or
// without `train` factor * slope. Only a window's winner has a slope; rows and columns that no
// window has are not left out.
template <class T, int bytes>
PFL_INLINE void batch_norm_unpool(const BatchNorm& q, bool train, const T* x, const T* y,
                                  const T* dy, const uint8_t* winner, T mean, T factor, T shift,
                                  T pull, T* dx) {
  using V = Vec<T, bytes>;
  using I = decltype(V{} < V{});
  constexpr int64_t lanes = bytes / sizeof(T);
  const int64_t hq = q.hq(), wq = q.wq();
  for (int64_t i = 0; i < q.h; i++)
    for (int64_t j = 0; j < q.w; j++) {
      const bool covered = i / 2 < hq && j / 2 < wq;
      const I element = I{} + static_cast<int>(i % 2 * 2 + j % 2);
      const int64_t to = (i * q.w + j) * q.batch, at = (i / 2 * wq + j / 2) * q.batch;
      for (int64_t b = 0; b < q.batch; b += lanes) {
        V v{}, g{}, value;
        if (train) {
          load(v, x + to + b);
          v = (v - mean) * pull + shift;
        }
        if (covered) {
          load(g, dy + at + b);
          load(value, y + at + b);
          slope<T>(q.act, g, value);
          Vec<uint8_t, lanes> few;
          __builtin_memcpy(&few, winner + at + b, lanes);
          const I place = __builtin_convertvector(few, I);
          g = place == element ? g : V{};
        }
        v = (g - v) * factor;
        store(dx + to + b, v);
      }
    }
}

// dx may be nullptr. Without `train` the statistics were constants.
template <class T, int bytes>
PFL_TARGET void batch_norm_backward(const BatchNorm& q, bool train, const T* x, const T* y,
                                    const BatchNormSpace<T>& s, const T* dy, const T* weight,
                                    const Into<T>& into, T* dweight, T* dbias, T* dx) {
  using V = Vec<T, bytes>;
  constexpr int64_t lanes = bytes / sizeof(T);
  const int64_t n = q.count(), m = q.result();
  for (int64_t c = 0; c < q.channels; c++) {
    const T mean = s.stats[2 * c], scale = s.stats[2 * c + 1];
    // The slopes behind the normalized values, and these.
    const auto look = [&](int64_t i, V& g, V& hat) PFL_LAMBDA {
      V value;
      load(g, dy + c * m + i);
      load(value, y + c * m + i);
      slope<T>(q.act, g, value);
      if (q.pooled) return load(hat, s.hat + c * m + i);
      load(hat, x + c * n + i);
      hat = (hat - mean) * scale;
    };
    T sums[2];  // of the slopes, and of their products with the normalized values
    channel_sums<2, T, bytes>(
        m,
        [&](int64_t i, V(&parts)[2]) PFL_LAMBDA {
          look(i, parts[0], parts[1]);
          parts[1] *= parts[0];
        },
        sums);
    if (dx) {
      const T factor = q.affine ? scale * weight[c] : scale;
      const T shift = sums[0] / static_cast<T>(n), pull = sums[1] / static_cast<T>(n);
      T* const to = dx + c * n;
      if (q.pooled)
        batch_norm_unpool<T, bytes>(q, train, x + c * n, y + c * m, dy + c * m, s.winner + c * m,
                                    mean, factor, shift, pull * scale, to);
      for (int64_t i = 0; !q.pooled && i < n; i += lanes) {
        V g, hat;
        look(i, g, hat);
        if (train) g = g - shift - hat * pull;
        g *= factor;
        store(to + i, g);
      }
    }
    if (q.affine && q.pooled && !train) {
      // A slope of 0 times what is not finite is NaN, also where no maximum came from. (In training
      // it is in the channel's mean.)
      T nothing[1];
      channel_sums<1, T, bytes>(
          n,
          [&](int64_t i, V(&part)[1]) PFL_LAMBDA {
            load(part[0], x + c * n + i);
            part[0] *= T(0);
          },
          nothing);
      sums[1] += nothing[0];
    }
    if (q.affine) into(dweight[c], sums[1]), into(dbias[c], sums[0]);
  }
}

// ---- losses ----
// scores [classes][batch] with targets [batch] -> each sample's loss [batch], whether it is right
// [batch] (by its scores alone: infinite ones have an order, and with a NaN nothing is right), and
// the slopes of the losses times `share` [classes][batch], which may be the scores' own place;
// loss, right and slope may be nullptr.
template <class T, int bytes>
PFL_TARGET void losses(Loss kind, int64_t classes, int64_t batch, T share, const T* score,
                       const T* target, T* loss, uint8_t* right, T* slope) {
  using V = Vec<T, bytes>;
  using I = decltype(V{} < V{});
  constexpr int64_t lanes = bytes / sizeof(T);
  for (int64_t b = 0; b < batch; b += lanes) {
    const int64_t some = std::min(lanes, batch - b);
    V value, s;
    I hit;
    T aim[lanes] = {};
    for (int64_t i = 0; i < some; i++) aim[i] = target[b + i];
    V y;
    load(y, aim);
    if (kind == Loss::cross_entropy) {
      V top, total{}, own{};
      I best{};
      load(top, score + b);
      for (int c = 1; c < classes; c++) {
        load(s, score + c * batch + b);
        const I later =
            (s > top) | ((s != s) & (top == top));  // the first of equals, NaN above all
        top = later ? s : top;
        best = later ? I{} + c : best;
      }
      for (int64_t c = 0; c < classes; c++) {
        load(s, score + c * batch + b);
        own = y == static_cast<T>(c) ? s : own;
        s -= top;
        exponential<T, bytes>(s);
        total += s;
      }
      hit = (best == __builtin_convertvector(y, I)) & (top == top);  // top is NaN where one is
      value = total;
      lane_by_lane(value, [](T t) { return std::log(t); });
      value += top - own;
      const V part = share / total;
      for (int64_t c = 0; slope && c < classes; c++) {
        load(s, score + c * batch + b);
        s -= top;
        exponential<T, bytes>(s);
        s *= part;
        s -= y == static_cast<T>(c) ? V{} + share : V{};
        store_first(slope + c * batch + b, s, some);
      }
    } else {
      load(s, score + b);
      const V sign = y > 0 ? V{} + T(1) : V{} - T(1);
      hit = ((s > 0) == (y > 0)) & (s == s);
      V g;
      if (kind == Loss::hinge) {
        const V margin = T(1) - sign * s;
        value = margin < 0 ? V{} : margin;
        g = margin <= 0 ? V{} : -sign * share;          // as relu: none on the very edge
      } else if (kind == Loss::binary_cross_entropy) {  // log(1 + e^s) - y s, without overflow
        V e = s < 0 ? s : -s, soft;
        exponential<T, bytes>(e);
        soft = e;
        lane_by_lane(soft, [](T t) { return std::log1p(t); });
        value = (s < 0 ? V{} : s) + soft - y * s;
        g = share * ((s < 0 ? e : e - e + T(1)) / (T(1) + e) - y);
      } else {
        const T factor = kind == Loss::squared ? T(1) : T(.5);
        const V gap = s - y;
        value = factor * gap * gap;
        g = 2 * factor * share * gap;
      }
      if (slope) store_first(slope + b, g, some);
    }
    if (loss) store_first(loss + b, value, some);
    for (int64_t i = 0; right && i < some; i++) right[b + i] = hit[i] != 0;
  }
}

}  // namespace pflcore::cpu::chain
