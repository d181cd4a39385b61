// Batch norm of a chain: a channel is normalized over its places in all samples of a batch, and
// what an activation below GELU and a maximum over windows of 2x2 do with it is done at once.
#pragma once
#include "layer.h"

namespace pflcore::cpu::chain {

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

// The slopes dx of a channel from those behind the maxima: factor * (slope - shift - hat * pull),
// or without `train` factor * slope. Only a window's winner has a slope; rows and columns that no
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

template <class T, int bytes>
struct BatchNormLayer : Layer {
  static constexpr int64_t kind = ChainLayer::batch_norm;
  BatchNorm q;
  BatchNormSpace<T> space{};

  explicit BatchNormLayer(Lines& lines) {
    const ChainLayer& l = lines.line();
    const auto [c, h, w] = lines.shape;
    const int64_t features = lines.shape.features(), per = l[0];  // features of a channel
    demand(per > 0 && features % per == 0);
    const bool is_image = per == h * w;
    q.channels = features / per, q.batch = lines.batch();
    q.h = is_image ? h : per, q.w = is_image ? w : 1;
    q.eps = l.field[1], q.momentum = l.field[6], q.frozen = l[7] != 0;
    q.mean_at = l[4], q.variance_at = l[5];
    lines.demand_statistics(q.mean_at, q.channels);
    lines.demand_statistics(q.variance_at, q.channels);
    q.affine = l[2] >= 0;
    demand((l[3] >= 0) == q.affine);
    if (q.affine) lines.take_weights(q.channels, q.channels, q.channels, l[2], l[3]);
    q.act = lines.take_activation();
    q.pooled = is_image && h > 1 && w > 1 && lines.take_windows(kMax);
    // An activation that rises may as well come behind the maximum.
    if (q.pooled && q.act == kNone) q.act = lines.take_activation();
    if (q.pooled) lines.shape = {c, q.hq(), q.wq()};
  }
  bool reads_output() const { return q.act != kNone || q.pooled; }
  bool needs_whole_batch() const { return !q.frozen; }

  void lay(Arena& arena) {
    const int64_t winners = q.pooled ? q.channels * q.result() + kSlack : 0;
    space.stats = arena.take<T>(2 * q.channels);
    space.winner = arena.take<uint8_t>(winners);
    space.hat = q.pooled ? arena.take<T>(winners) : nullptr;
  }

  // Whether the statistics are those of the batch.
  bool trains(const Batch<T>& batch) const { return batch.train && !q.frozen; }
  void forward(const Forward<T>& f) const {
    batch_norm_forward<T, bytes>(q, trains(f.batch), f.x, f.w, f.bias, f.batch.running, space, f.y);
  }
  void backward(const Backward<T>& b) const {
    batch_norm_backward<T, bytes>(q, trains(b.batch), b.x, b.y, space, b.dy, b.w, b.into, b.dw,
                                  b.db, b.dx);
  }
};

}  // namespace pflcore::cpu::chain
