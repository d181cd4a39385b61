// What a step does with a minibatch's gradient, beside SGD (../cpu/sgd.h): clipping, and AdamW.
// Rows are in the private layout, whose length is a multiple of a vector's.
#pragma once
#include <cmath>
#include <limits>

#include "../cpu/sgd.h"
#include "tile.h"

namespace pflcore::cpu::chain {

// Elements of a row that pass through all parts of a step before the next ones do, so that each
// part finds them in the first-level cache.
constexpr int64_t kStrip = 2048;

// The sum of n squares in float64. Four vectors of partial sums do not wait for each other.
template <class T, int bytes>
PFL_TARGET double square_sum(const T* x, int64_t n) {
  using D = Vec<double, bytes>;
  constexpr int64_t lanes = bytes / sizeof(double);
  D sums[4] = {};
  const auto add = [](D& sum, const T* from) PFL_LAMBDA {
    Vec<T, lanes * sizeof(T)> v;
    load(v, from);
    const D d = __builtin_convertvector(v, D);
    sum += d * d;
  };
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) PFL_EACH(k, 4, add(sums[k], x + i + k * lanes));
  double total = sum_of<double>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < n; i++) total += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return total;
}

template <class T, int bytes>
PFL_TARGET void shrink(T* x, int64_t n, T factor) {
  using V = Vec<T, bytes>;
  for (int64_t i = 0; i < n; i += bytes / sizeof(T)) {
    V v;
    load(v, x + i);
    v *= factor;
    store(x + i, v);
  }
}

// A client's means of the gradient and of its square, and the rates of AdamW.
template <class T>
struct Moments {
  T *mean, *square;
  T mean_beta, square_beta, eps;
  T mean_share, square_share;  // 1 - beta^k at step k: what the zeros at the start leave of a mean

  // The moments at step k, from 1 on. An eps that T cannot hold becomes its smallest number, so
  // that the zeros between the weights stay zeros.
  Moments(T* means, T* squares, const AdamW& a, int64_t k)
      : mean(means),
        square(squares),
        mean_beta(static_cast<T>(a.mean_beta)),
        square_beta(static_cast<T>(a.square_beta)),
        eps(std::max(static_cast<T>(a.eps), std::numeric_limits<T>::min())),
        mean_share(static_cast<T>(1 - std::pow(a.mean_beta, static_cast<double>(k)))),
        square_share(static_cast<T>(1 - std::pow(a.square_beta, static_cast<double>(k)))) {}
};

// Elements c to end of a step of AdamW (Loshchilov and Hutter 2019): the terms of `a` are those of
// SGD, and its decay is taken from the weights, past the means.
template <class T, int bytes>
PFL_TARGET void adamw(const sgd_detail::Row<T>& a, const Moments<T>& m, int64_t c, int64_t end) {
  using V = Vec<T, bytes>;
  const T mean_rest = 1 - m.mean_beta, square_rest = 1 - m.square_beta;
  const T rate = a.lr / m.mean_share, root_share = 1 / std::sqrt(m.square_share),
          decay = a.lr * a.decay;
  for (; c < end; c += bytes / sizeof(T)) {
    V w, d, t, mean, square;
    load(w, a.w + c);
    load(d, a.grad + c);
    if (a.shift) {
      load(t, a.shift + c);
      d += t;
    }
    if (a.anchor) {
      load(t, a.anchor + c);
      d += a.mu * (w - t);
    }
    load(mean, m.mean + c);
    load(square, m.square + c);
    mean = m.mean_beta * mean + mean_rest * d;
    square = m.square_beta * square + square_rest * (d * d);
    store(m.mean + c, mean);
    store(m.square + c, square);
    square_root<T, bytes>(square);
    d = rate * mean / (square * root_share + m.eps) + decay * w;
    if (a.mask) {
      load(t, a.mask + c);
      d *= t;
    }
    w -= d;
    store(a.w + c, w);
  }
}

}  // namespace pflcore::cpu::chain
