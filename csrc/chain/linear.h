// Linear layers of a chain. Values between layers lie [feature][sample].
//
// The usual form keeps its weights [in][out], so that forward is scalar times vector, and the
// gradient to the input and the step pass over them once. A first layer with few outputs keeps them
// as the row has them, [out][in], and reads the samples where they are.
#pragma once
#include "layer.h"

namespace pflcore::cpu::chain {

struct Linear {
  int64_t in, out, act, batch;
  bool back;     // whether the input's gradient is wanted
  bool narrow;   // a first layer with few outputs
  int64_t high;  // `out` in whole vectors; narrow: `in`

  void plan(int64_t samples, bool wants, int64_t vector) {
    batch = samples, back = wants, high = up(narrow ? in : out, vector);
  }
  int64_t weights() const { return narrow ? out * high : in * high; }
  int64_t by_sample() const { return narrow ? 0 : batch * high; }
};

// Whether the factors of a tile's sums are finite.
template <class T>
struct LinearFactors {
  const Linear& q;
  const T *x, *w, *bias;  // of the tile's first sample and output

  bool operator()(int64_t b, int64_t o) const {
    return std::isfinite(bias[o]) && are_finite(x + b, q.batch, w + o, q.high, q.in);
  }
};

// z by sample, y plain.
template <class T, int bytes>
PFL_TARGET void linear_forward(const Linear& q, const T* x, const T* w, const T* bias, T* z, T* y) {
  using V = Vec<T, bytes>;
  constexpr int64_t lanes = bytes / sizeof(T);
  tiles<Tile<T, bytes>::two, 2>(
      q.batch, q.high / lanes, [&](int64_t b0, auto R_, int64_t v0, auto N_) PFL_LAMBDA {
        constexpr int R = R_, N = N_;
        V acc[R][N];
        PFL_TILE(load(acc[r][j], bias + (v0 + j) * lanes));
        sum_outer<R, N>(acc, q.in, x + b0, 1, q.batch, [&](int64_t i, int j) PFL_LAMBDA {
          return w + i * q.high + (v0 + j) * lanes;
        });
        mark_overflows<T>(acc, LinearFactors<T>{q, x + b0, w + v0 * lanes, bias + v0 * lanes});
        PFL_TILE(if (q.act == kRelu) acc[r][j] = acc[r][j] < 0 ? V{} : acc[r][j];
                 store(z + (b0 + r) * q.high + (v0 + j) * lanes, acc[r][j]));
      });
  for (int64_t i = 0; i < q.batch * q.high && q.act > kRelu; i += lanes) {
    V v;
    load(v, z + i);
    activate<T, bytes>(q.act, v);
    store(z + i, v);
  }
  turn<bytes>(y, q.batch, [&](int64_t b) PFL_LAMBDA { return z + b * q.high; }, q.batch, q.out);
}

// From the gradient dy of what came out: dx where wanted, and the gradients, a few rows of the
// weights after another. `dz` is space like z, zeros behind the outputs.
template <class T, int bytes>
PFL_TARGET void linear_backward(const Linear& q, const T* x, const T* z, const T* dy, const T* w,
                                const Into<T>& into, T* dw, T* db, T* dx, T* dz) {
  using V = Vec<T, bytes>;
  constexpr int64_t lanes = bytes / sizeof(T);
  constexpr int most = Tile<T, bytes>::across, six = Tile<T, bytes>::six;
  turn<bytes>(dz, q.high, [&](int64_t o) PFL_LAMBDA { return dy + o * q.batch; }, q.out, q.batch);
  for (int64_t b = 0; b < q.batch && q.act != kNone; b++)
    for (int64_t o = 0; o < q.high; o += lanes) {
      V g, value;
      load(g, dz + b * q.high + o);
      load(value, z + b * q.high + o);
      slope<T>(q.act, g, value);
      keep_first<T>(g, q.out - o);  // z may be NaN behind the outputs
      store(dz + b * q.high + o, g);
    }
  tiled<six>(q.in, [&](int64_t f, auto R_) PFL_LAMBDA {
    constexpr int R = R_;
    if (dx)
      tiled<most>(q.batch, [&](int64_t b0, auto M_) PFL_LAMBDA {
        constexpr int M = M_;
        V acc[M][R];
        const T *a = dz + b0 * q.high, *b[R];
        T sum[32];
        PFL_EACH(r, R, b[r] = w + (f + r) * q.high);
        clear(acc);
        sum_dots<M, R>(acc, q.high, [&](int r) PFL_LAMBDA { return a + r * q.high; }, b);
        sum_tile<true>(sum, acc);
        for (int r = 0; r < R; r++)
          for (int j = 0; j < M; j++) dx[(f + r) * q.batch + b0 + j] = sum[r * M + j];
      });
    tiled<most>(q.high / lanes, [&](int64_t v0, auto N_) PFL_LAMBDA {
      constexpr int N = N_;
      V acc[R][N];
      clear(acc);
      sum_outer<R, N>(acc, q.batch, x + f * q.batch, q.batch, 1, [&](int64_t i, int j) PFL_LAMBDA {
        return dz + i * q.high + (v0 + j) * lanes;
      });
      PFL_TILE(into.vector(dw + (f + r) * q.high + (v0 + j) * lanes, acc[r][j]));
    });
  });
  for (int64_t o = 0; db && o < q.high; o += lanes) {
    V sum{}, v;
    for (int64_t b = 0; b < q.batch; b++) {
      load(v, dz + b * q.high + o);
      sum += v;
    }
    into.vector(db + o, sum);
  }
}

// ---- a first layer with few outputs: x are the samples, zeros behind their features; y and dy
// plain ----

template <class T, int bytes>
PFL_TARGET void narrow_forward(const Linear& q, const T* const* x, const T* w, const T* bias,
                               T* y) {
  using V = Vec<T, bytes>;
  constexpr int64_t few = 16, lanes = bytes / sizeof(T);
  const T* rows[few];
  for (int64_t o0 = 0; o0 < q.out; o0 += few) {
    const int64_t some = std::min(few, q.out - o0);
    for (int64_t o = 0; o < some; o++) rows[o] = w + (o0 + o) * q.high;
    dots<bytes, T>(some, q.batch, q.high, rows, x, y + o0 * q.batch, q.batch);
  }
  for (int64_t o = 0; o < q.out; o++)
    for (int64_t b = 0; b < q.batch; b++) y[o * q.batch + b] += bias[o];
  V sums[1][1];
  for (int64_t i = 0; i < q.out * q.batch; i += lanes) {
    load(sums[0][0], y + i);
    mark_overflows<T>(sums, [&](int, int lane) {
      const int64_t o = (i + lane) / q.batch, b = (i + lane) % q.batch;
      return o < q.out && std::isfinite(bias[o]) && are_finite(x[b], 1, w + o * q.high, 1, q.in);
    });
    store(y + i, sums[0][0]);
  }
}

template <class T, int bytes>
PFL_TARGET void narrow_backward(const Linear& q, const T* const* x, const T* dy, bool add, T* dw,
                                T* db) {
  constexpr int64_t few = 16;
  T* rows[few];
  for (int64_t o0 = 0; o0 < q.out; o0 += few) {
    const int64_t some = std::min(few, q.out - o0);
    for (int64_t o = 0; o < some; o++) rows[o] = dw + (o0 + o) * q.high;
    outer<bytes, T>(some, q.in, q.batch, dy + o0 * q.batch, q.batch, 1, x, rows, add);
  }
  for (int64_t o = 0; db && o < q.out; o++) {
    T sum = add ? db[o] : T(0);
    for (int64_t b = 0; b < q.batch; b++) sum += dy[o * q.batch + b];
    db[o] = sum;
  }
}

template <class T, int bytes>
struct LinearLayer : Layer {
  static constexpr int64_t kind = ChainLayer::linear;
  static constexpr int64_t lanes = bytes / sizeof(T);
  Linear q;
  T *z = nullptr, *dz = nullptr;  // outputs by sample, and their slopes

  explicit LinearLayer(Lines& lines) {
    const ChainLayer& l = lines.line();
    q.in = lines.shape.features(), q.out = l[0];
    demand(lines.shape.is_flat() && q.out > 0 && q.out < kFar);
    q.narrow = lines.reads_samples_alone() && q.out <= lanes;
    q.act = q.narrow ? kNone : lines.take_activation();
    q.plan(lines.batch(), lines.input().wanted, lanes);
    lines.take_weights(q.in * q.out, q.out, q.weights(), l[1], l[2]);
    lines.shape.c = q.out;
  }
  bool reads_samples() const { return q.narrow; }

  void lay(Arena& arena) {
    z = arena.take<T>(q.by_sample());
    dz = arena.take_zeros<T>(q.by_sample());
  }

  void forward(const Forward<T>& f) const {
    if (q.narrow)
      narrow_forward<T, bytes>(q, f.batch.samples, f.w, f.bias, f.y);
    else
      linear_forward<T, bytes>(q, f.x, f.w, f.bias, z, f.y);
  }
  void backward(const Backward<T>& b) const {
    if (q.narrow)
      narrow_backward<T, bytes>(q, b.batch.samples, b.dy, b.into.add, b.dw, b.db);
    else
      linear_backward<T, bytes>(q, b.x, z, b.dy, b.w, b.into, b.dw, b.db, b.dx, dz);
  }

  // Rows lie [out][in]; here every output's or input's weights are whole vectors, zeros behind.
  PFL_TARGET void read(const T* row, int64_t, T* w) const {
    const auto from = [&](int64_t o) PFL_LAMBDA { return row + o * q.in; };
    if (!q.narrow) return turn<bytes>(w, q.high, from, q.out, q.in);
    for (int64_t o = 0; o < q.out; o++) copy<bytes>(w + o * q.high, from(o), q.in);
  }
  PFL_TARGET void write(const T* w, int64_t, T* row) const {
    const auto from = [&](int64_t i) PFL_LAMBDA { return w + i * q.high; };
    if (!q.narrow) return turn<bytes>(row, q.in, from, q.in, q.out);
    for (int64_t o = 0; o < q.out; o++) std::copy_n(from(o), q.in, row + o * q.in);
  }
};

}  // namespace pflcore::cpu::chain
