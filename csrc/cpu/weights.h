// The two rules that turn distances into mixing weights, in float64. Knows nothing of torch.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "../inputs.h"

namespace pflcore::cpu {

// One row of WAFFLE's CalcWeights (Beaussart et al. 2021, Algorithm 1) in its division-safe form:
// `dist` are distances from the target. A distance that is not finite is an absent client; the
// target's own entry is ignored. Scratch-free, three passes over the row.
inline void waffle_row(const Waffle& q, int64_t row) {
  const int64_t n = q.n, target = q.target[row * q.target_step];
  const double* const dist = q.dist + row * n;
  double* const weight = q.weight + row * n;
  constexpr double inf = std::numeric_limits<double>::infinity();
  double high = 0, low = inf;
  int64_t present = 1;
  for (int64_t i = 0; i < n; ++i) {
    if (i == target || !std::isfinite(dist[i])) continue;
    const double d = std::max(dist[i], 0.0);
    high = std::max(high, d), low = std::min(low, d), ++present;
  }
  if (present == 1 || q.psi == 0) {
    for (int64_t i = 0; i < n; ++i) weight[i] = i == target;
    return;
  }
  const double gap = high - low;
  const bool tied = gap <= 1e-12 * high, alike = high == 0 || (tied && q.uniform_ties);
  const double s = tied ? 1 - q.omega : low / high * (1 - q.omega);
  const double scale = q.omega <= 1 ? 1 / (1 + s) : 1;
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    double raw = q.psi;
    if (i != target) {
      const double t = tied ? 0 : (std::max(dist[i], 0.0) - low) / gap;
      raw = !std::isfinite(dist[i]) ? 0 : alike ? q.psi : std::max(q.psi - (t + s) * scale, 0.0);
    }
    weight[i] = raw, sum += raw;
  }
  for (int64_t i = 0; i < n; ++i) weight[i] /= sum;
}

constexpr int64_t kRows = 16;  // of a piece

template <class Parallel>
void waffle_weights(const Waffle& q, const Parallel& parallel) {
  parallel((q.rows + kRows - 1) / kRows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin * kRows; r < std::min(q.rows, end * kRows); ++r) waffle_row(q, r);
  });
}

// One row of FedDWA's weights (Liu et al. 2023, Eq. 15 and 8): the k nearest of n by (distance,
// index), 1 / squared distance, sum 1. NaN counts as infinitely far, a negative distance as zero.
// `order` is scratch of n.
template <class T>
void feddwa_row(const Feddwa<T>& q, int64_t row, int64_t* order) {
  const int64_t n = q.n, k = q.k;
  const T* const sqdist = q.sqdist + row * q.row;
  double* const weight = q.weight + row * k;
  int64_t* const index = q.index + row * k;
  constexpr double inf = std::numeric_limits<double>::infinity();
  const auto at = [&](int64_t j) {
    const double d = static_cast<double>(sqdist[j]);
    return std::isnan(d) ? inf : std::max(d, 0.0);
  };
  const auto nearer = [&](int64_t i, int64_t j) {
    const double a = at(i), b = at(j);
    return a < b || (a == b && i < j);
  };
  if (k <= 32) {  // a sorted list of the k nearest so far: candidates arrive in index order, so a
                  // tie never displaces
    double value[32];
    int64_t held = 0;
    for (int64_t j = 0; j < n; ++j) {
      const double d = at(j);
      if (held == k && !(d < value[k - 1])) continue;
      int64_t to = held < k ? held++ : k - 1;
      for (; to > 0 && d < value[to - 1]; --to)
        value[to] = value[to - 1], index[to] = index[to - 1];
      value[to] = d, index[to] = j;
    }
  } else {
    for (int64_t j = 0; j < n; ++j) order[j] = j;
    if (k < n) std::nth_element(order, order + k, order + n, nearer);
    std::sort(order, order + k, nearer);
    std::copy(order, order + k, index);
  }
  const double nearest = at(index[0]);
  double sum = 0;
  for (int64_t j = 0; j < k; ++j) {
    const double d = at(index[j]);
    weight[j] = nearest == 0 || nearest == inf ? d == nearest : nearest / d;
    sum += weight[j];
  }
  for (int64_t j = 0; j < k; ++j) weight[j] /= sum;
}

template <class T, class Parallel>
void feddwa_weights(const Feddwa<T>& q, const Parallel& parallel) {
  parallel((q.m + kRows - 1) / kRows, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> order(q.k > 32 ? q.n : 0);
    for (int64_t r = begin * kRows; r < std::min(q.m, end * kRows); ++r)
      feddwa_row(q, r, order.data());
  });
}

}  // namespace pflcore::cpu
