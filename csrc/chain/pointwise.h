// Layers that go number by number, on plain values [feature][sample]: activations, additions,
// dropout, a scale. Arrays have room for a few vectors behind their end; a vector that reaches
// into the next feature is stored before that one is.
#pragma once
#include "layer.h"

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

template <class T, int bytes>
struct ActLayer : Layer {
  static constexpr int64_t kind = ChainLayer::act;
  int64_t act, n;

  explicit ActLayer(const Lines& lines) : act(lines.line()[0]), n(lines.numbers()) {
    demand(act >= kRelu && act <= kGelu);
  }
  bool reads_output() const { return true; }
  void forward(const Forward<T>& f) const { act_forward<T, bytes>(act, f.x, f.y, n); }
  void backward(const Backward<T>& b) const {
    act_backward<T, bytes>(act, b.x, b.y, b.dy, b.dx, n);
  }
};

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

template <class T, int bytes>
struct LeakyLayer : Layer {
  static constexpr int64_t kind = ChainLayer::leaky;
  T factor;
  int64_t n;

  explicit LeakyLayer(const Lines& lines)
      : factor(static_cast<T>(lines.line().field[0])), n(lines.numbers()) {}
  void forward(const Forward<T>& f) const { leaky_forward<T, bytes>(factor, f.x, f.y, n); }
  void backward(const Backward<T>& b) const {
    leaky_backward<T, bytes>(factor, b.x, b.dy, b.dx, n);
  }
};

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

// An addition that takes place in no other layer's memory. The block adds, as it does behind other
// layers; before that there is nothing to compute.
template <class T, int bytes>
struct AddLayer : Layer {
  static constexpr int64_t kind = ChainLayer::add;

  explicit AddLayer(const Lines&) {}
  void forward(const Forward<T>&) const {}
  void backward(const Backward<T>&) const {}
};

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

template <class T, int bytes>
struct DropoutLayer : Layer {
  static constexpr int64_t kind = ChainLayer::dropout;
  double p;
  int64_t number;  // among the layers that draw
  int64_t features, batch, n;
  T* factor = nullptr;

  explicit DropoutLayer(Lines& lines)
      : p(lines.line().field[0]),
        number(lines.next_random()),
        features(lines.shape.features()),
        batch(lines.batch()),
        n(lines.numbers()) {
    demand(p >= 0 && p <= 1);
  }
  void lay(Arena& arena) { factor = arena.take<T>(n + kSlack); }

  void forward(const Forward<T>& f) const {
    if (!f.batch.seed) {
      std::copy_n(f.x, n, f.y);
      return;
    }
    const int64_t threshold = std::llrint(p * (1 << 24));
    const T scale = p == 1 ? T(0) : static_cast<T>(1 / (1 - p));
    dropout_factors<T, bytes>(*f.batch.seed, number, threshold, scale, features, f.batch.first,
                              batch, factor);
    multiply<T, bytes>(f.x, factor, f.y, n);
  }
  void backward(const Backward<T>& b) const {
    if (b.batch.seed)
      multiply<T, bytes>(b.dy, factor, b.dx, n);
    else
      std::copy_n(b.dy, n, b.dx);
  }
};

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

template <class T, int bytes>
struct ScaleLayer : Layer {
  static constexpr int64_t kind = ChainLayer::scale;
  int64_t features, batch;

  explicit ScaleLayer(Lines& lines) : features(lines.shape.features()), batch(lines.batch()) {
    demand(lines.shape.is_flat());
    lines.take_weights(features, features, features, lines.line()[0], -1);
  }
  void forward(const Forward<T>& f) const {
    scale_features<T, bytes>(features, batch, f.w, f.x, f.y);
  }
  void backward(const Backward<T>& b) const {
    if (b.dx) scale_features<T, bytes>(features, batch, b.w, b.dy, b.dx);
    scale_backward<T, bytes>(features, batch, b.x, b.dy, b.into, b.dw);
  }
};

}  // namespace pflcore::cpu::chain
