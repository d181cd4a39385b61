// Batch norm of a chain: a channel is normalized over its places in all samples of a batch, and
// what an activation below GELU and a maximum over windows of 2x2 do with it is done at once.
#pragma once
#include "layer.h"
#include "windows.h"

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
  Windows windows() const { return {h, w, batch, act}; }
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
      const auto normalize = [&](V& v, int64_t) PFL_LAMBDA { v = (v - mean[0]) * scale; };
      pool_normalized<T, bytes>(q.windows(), from, normalize, own_weight, offset,
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
      // factor * (slope - shift - hat * pull), or without `train` factor * slope.
      const T pull_of_x = pull * scale;
      const auto finish = [&](V& g, int64_t i, int64_t) PFL_LAMBDA {
        V v{};
        if (train) {
          load(v, x + c * n + i);
          v = (v - mean) * pull_of_x + shift;
        }
        g = (g - v) * factor;
      };
      if (q.pooled)
        unpool_slopes<T, bytes>(q.windows(), y + c * m, dy + c * m, s.winner + c * m, finish, to);
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
