// Group norm and layer norm of a chain: the features of a group are normalized sample by sample.
#pragma once
#include "layer.h"
#include "windows.h"

namespace pflcore::cpu::chain {

struct Norm {
  int64_t features, groups, per;  // `per`: neighbouring features that share a weight and a bias
  int64_t h, w, batch;            // `h`, `w`: of a channel's image
  int64_t act;
  double eps;
  bool affine, pooled;  // `pooled`: each weight's features are an image
  int64_t group() const { return features / groups; }
  Windows windows() const { return {h, w, batch, act}; }
  // The numbers behind it of a weight and of all.
  int64_t per_result() const { return pooled ? (h / 2) * (w / 2) : per; }
  int64_t results() const { return features / per * per_result(); }
};

// A thread's memory of a norm between its passes.
template <class T>
struct NormSpace {
  T* stats;  // [groups][2][batch and a vector]: mean and 1 / deviation
  T* means;  // [2][batch and a vector], of a group: the slopes, and their products with `hat`
  // Of each maximum the element of its window, by number, and the normalized value.
  uint8_t* winner;
  T* hat;
};

// The number of the part that a feature lies in, where parts have `size` features and the features
// ascend: a division for each would take as long as the work on it.
class Part {
 public:
  Part(int64_t size, int64_t first) : size_(size), number_(first / size) {
    end_ = (number_ + 1) * size;
  }
  PFL_INLINE_MEMBER int64_t of(int64_t feature) {
    if (feature == end_) number_++, end_ += size_;
    return number_;
  }

 private:
  int64_t size_, number_, end_;
};

constexpr int64_t kAddedAtOnce = 32;  // features that are summed before they are added to a total

// sum[k] += the sums over features first .. last of what add(f, part) adds to part[k]: by turns to
// two, as additions to one sum wait for each other.
template <int K, class V, class Add>
PFL_INLINE void sum_few(int64_t first, int64_t last, const Add& add, V (&sum)[K]) {
  V even[K] = {}, odd[K] = {};
  int64_t f = first;
  for (; f + 2 <= last; f += 2) add(f, even), add(f + 1, odd);
  if (f < last) add(f, even);
  PFL_EACH(k, K, sum[k] += even[k] + odd[k]);
}

// The same over features 0 .. n. Few at a time are added, so that the error grows little with their
// number.
template <int K, class V, class Add>
PFL_INLINE void sum_features(int64_t n, const Add& add, V (&total)[K]) {
  for (int64_t first = 0; first < n; first += kAddedAtOnce)
    sum_few(first, std::min(n, first + kAddedAtOnce), add, total);
}

// The mean of a group's features in each sample, and 1 / their deviation.
template <class T, int bytes>
PFL_INLINE void norm_stats(const Norm& q, const T* x, T* stats) {
  using V = Vec<T, bytes>;
  constexpr int64_t lanes = bytes / sizeof(T);
  const int64_t wide = up(q.batch, lanes), n = q.group();
  tiled<4>(wide / lanes, [&](int64_t first, auto N_) PFL_LAMBDA {
    constexpr int N = N_;
    V mean[N] = {}, square[N] = {};
    const T* const from = x + first * lanes;
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
    T* const to = stats + first * lanes;
    PFL_EACH(j, N, {
      square[j] = square[j] / static_cast<T>(n) + static_cast<T>(q.eps);
      lane_by_lane(square[j], [](T s) { return T(1) / std::sqrt(s); });
      store(to + j * lanes, mean[j]);
      store(to + wide + j * lanes, square[j]);
    });
  });
}

template <class T, int bytes>
PFL_TARGET void norm_forward(const Norm& q, const T* x, const T* weight, const T* bias,
                             const NormSpace<T>& s, T* y) {
  using V = Vec<T, bytes>;
  constexpr int64_t lanes = bytes / sizeof(T);
  const int64_t wide = up(q.batch, lanes), n = q.group(), result = q.per_result() * q.batch;
  for (int64_t g = 0; g < q.groups; g++) {
    T* const stats = s.stats + g * 2 * wide;
    norm_stats<T, bytes>(q, x + g * n * q.batch, stats);
    const auto normalize = [&](V& v, int64_t b) PFL_LAMBDA {
      V mean, scale;
      load(mean, stats + b);
      load(scale, stats + wide + b);
      v = (v - mean) * scale;
    };
    for (int64_t f = g * n; q.pooled && f < (g + 1) * n; f += q.per) {
      const int64_t own = f / q.per;
      pool_normalized<T, bytes>(q.windows(), x + f * q.batch, normalize,
                                q.affine ? weight[own] : T(1), q.affine ? bias[own] : T(0),
                                s.winner + own * result, s.hat + own * result, y + own * result);
    }
    Part part(q.per, g * n);
    for (int64_t f = g * n; !q.pooled && f < (g + 1) * n; f++) {
      const int64_t own = part.of(f);
      for (int64_t b = 0; b < q.batch; b += lanes) {
        V v;
        load(v, x + f * q.batch + b);
        normalize(v, b);
        if (q.affine) v = v * weight[own] + bias[own];
        activate<T, bytes>(q.act, v);
        store(y + f * q.batch + b, v);
      }
    }
  }
}

// What a backward pass reads.
template <class T, int bytes>
struct NormSlopes {
  using V = Vec<T, bytes>;
  static constexpr int64_t lanes = bytes / sizeof(T);
  const Norm& q;
  const NormSpace<T>& s;
  const T *x, *y, *dy, *weight;
  int64_t wide = up(q.batch, lanes);

  const T* stats(int64_t group) const { return s.stats + group * 2 * wide; }

  // The slopes behind the normalized values of a result from sample b on, and these; mean and scale
  // are its group's.
  PFL_INLINE_MEMBER void look(int64_t result, int64_t b, const V& mean, const V& scale, V& hat,
                              V& g) const {
    const int64_t at = result * q.batch + b;
    load(g, dy + at);
    if (q.act != kNone) {
      V value;
      load(value, y + at);
      slope<T>(q.act, g, value);
    }
    if (q.pooled) return load(hat, s.hat + at);
    load(hat, x + at);
    hat = (hat - mean) * scale;
  }

  // The means of a group, over the features of each sample, into `s.means`. All samples of few
  // results come before the next results, as they lie side by side.
  PFL_INLINE_MEMBER void take_means(int64_t group) const {
    const int64_t per = q.per_result(), results = q.results() / q.groups;
    const int64_t begin = group * results, end = begin + results;
    std::fill_n(s.means, 2 * wide, T(0));
    for (int64_t few = begin; few < end; few += kAddedAtOnce)
      tiled<2>(wide / lanes, [&](int64_t first, auto N_) PFL_LAMBDA {
        constexpr int N = N_;
        V mean[N], scale[N], sums[2 * N];
        const T* const of = stats(group) + first * lanes;
        T* const to = s.means + first * lanes;
        PFL_EACH(j, N, load(mean[j], of + j * lanes); load(scale[j], of + wide + j * lanes);
                 load(sums[j], to + j * lanes); load(sums[N + j], to + wide + j * lanes));
        Part part(per, few);
        const auto add = [&](int64_t r, V(&sum)[2 * N]) PFL_LAMBDA {
          const T factor = q.affine ? weight[part.of(r)] : T(1);
          PFL_EACH(j, N, {
            V hat, g;
            look(r, (first + j) * lanes, mean[j], scale[j], hat, g);
            if (q.affine) g *= factor;
            sum[j] += g;
            sum[N + j] += g * hat;
          });
        };
        sum_few(few, std::min(end, few + kAddedAtOnce), add, sums);
        PFL_EACH(j, N, store(to + j * lanes, sums[j]); store(to + wide + j * lanes, sums[N + j]));
      });
    for (int64_t b = 0; b < 2 * wide; b++) s.means[b] /= static_cast<T>(q.group());
  }

  // A group's slopes dx, by its means.
  PFL_INLINE_MEMBER void pass_on(int64_t group, T* dx) const {
    const int64_t n = q.group(), begin = group * n, per = q.per_result();
    const T *const of = stats(group), *const means = s.means;
    // Makes those of the input's numbers from `at` on of those behind the normalized values.
    const auto finish = [&](V& g, T factor, int64_t at, int64_t b) PFL_LAMBDA {
      V hat, mean, scale, mean_of_g, mean_of_products;
      load(hat, x + at);
      load(mean, of + b);
      load(scale, of + wide + b);
      load(mean_of_g, means + b);
      load(mean_of_products, means + wide + b);
      hat = (hat - mean) * scale;
      if (q.affine) g *= factor;
      hold(g);  // or the product might be rounded in one loop and fused in another
      g = scale * (g - mean_of_g - hat * mean_of_products);
    };
    for (int64_t f = begin; q.pooled && f < begin + n; f += q.per) {
      const int64_t own = f / q.per, from = own * per * q.batch, to = f * q.batch;
      const T factor = q.affine ? weight[own] : T(1);
      unpool_slopes<T, bytes>(
          q.windows(), y + from, dy + from, s.winner + from,
          [&](V& g, int64_t i, int64_t b) PFL_LAMBDA { finish(g, factor, to + i, b); }, dx + to);
    }
    Part part(q.per, begin);
    for (int64_t f = begin; !q.pooled && f < begin + n; f++) {
      const T factor = q.affine ? weight[part.of(f)] : T(1);
      for (int64_t b = 0; b < q.batch; b += lanes) {
        const int64_t at = f * q.batch + b;
        V g, value;
        load(g, dy + at);
        if (q.act != kNone) {
          load(value, y + at);
          slope<T>(q.act, g, value);
        }
        finish(g, factor, at, b);
        store(dx + at, g);
      }
    }
  }

  // The slopes of the weights and biases.
  PFL_INLINE_MEMBER void learn(const Into<T>& into, T* dweight, T* dbias) const {
    const int64_t per = q.per_result();
    Part part(q.results() / q.groups, 0);  // the group of a result
    for (int64_t first = 0; first < q.results(); first += per) {
      V sums[2] = {};  // of the slopes, and of their products with the normalized values
      const auto add = [&](int64_t i, V(&sum)[2]) PFL_LAMBDA {
        const T* const of = stats(part.of(first + i));
        for (int64_t b = 0; b < q.batch; b += lanes) {
          V hat, g, mean, scale;
          load(mean, of + b);
          load(scale, of + wide + b);
          look(first + i, b, mean, scale, hat, g);
          hat *= g;
          keep_first<T>(hat, q.batch - b);
          keep_first<T>(g, q.batch - b);
          sum[0] += g;
          sum[1] += hat;
        }
      };
      sum_features(per, add, sums);
      into(dweight[first / per], sum_of<T>(sums[1]));
      into(dbias[first / per], sum_of<T>(sums[0]));
    }
  }
};

// dx may be nullptr. weight, bias and their gradients are of one layout.
template <class T, int bytes>
PFL_TARGET void norm_backward(const Norm& q, const T* x, const T* y, const NormSpace<T>& s,
                              const T* dy, const T* weight, const Into<T>& into, T* dweight,
                              T* dbias, T* dx) {
  const NormSlopes<T, bytes> slopes{q, s, x, y, dy, weight};
  for (int64_t group = 0; dx && group < q.groups; group++) {
    slopes.take_means(group);
    slopes.pass_on(group, dx);
  }
  if (q.affine) slopes.learn(into, dweight, dbias);
}

template <class T, int bytes>
struct NormLayer : Layer {
  static constexpr int64_t kind = ChainLayer::norm;
  Norm q{};
  NormSpace<T> space{};

  explicit NormLayer(Lines& lines) {
    const ChainLayer& l = lines.line();
    const auto [c, h, w] = lines.shape;
    q.features = lines.shape.features(), q.groups = l[0], q.per = l[1];
    q.h = h, q.w = w, q.batch = lines.batch();
    q.eps = l.field[2], q.affine = l[3] >= 0;
    demand(q.groups > 0 && q.features % q.groups == 0);
    demand(q.per > 0 && q.features % q.per == 0);
    demand((l[4] >= 0) == q.affine);
    const int64_t weights = q.features / q.per;
    if (q.affine) lines.take_weights(weights, weights, weights, l[3], l[4]);
    q.act = lines.take_activation();
    const bool whole_images = q.per == h * w && q.group() % q.per == 0;
    q.pooled = whole_images && h > 1 && w > 1 && lines.take_windows(kMax);
    // An activation that rises may as well come behind the maximum.
    if (q.pooled && q.act == kNone) q.act = lines.take_activation();
    if (q.pooled) lines.shape = {c, h / 2, w / 2};
  }
  bool reads_output() const { return q.act != kNone; }
  void lay(Arena& arena) {
    const int64_t wide = up(q.batch, bytes / sizeof(T));
    const int64_t winners = q.pooled ? q.results() * q.batch + kSlack : 0;
    space.stats = arena.take<T>(q.groups * 2 * wide);
    space.means = arena.take<T>(2 * wide);
    space.winner = arena.take<uint8_t>(winners);
    space.hat = arena.take<T>(winners);
  }
  void forward(const Forward<T>& f) const {
    norm_forward<T, bytes>(q, f.x, f.w, f.bias, space, f.y);
  }
  void backward(const Backward<T>& b) const {
    norm_backward<T, bytes>(q, b.x, b.y, space, b.dy, b.w, b.into, b.dw, b.db, b.dx);
  }
};

}  // namespace pflcore::cpu::chain
