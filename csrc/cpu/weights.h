// The two rules that turn distances into mixing weights, in float64. Knows nothing of torch.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace pflcore::cpu {

// One row of WAFFLE's CalcWeights (Beaussart et al. 2021, Algorithm 1) in its division-safe form:
// `dist` are distances from the target. A distance that is not finite is an absent client; the
// target's own entry is ignored. Scratch-free, three passes over the row.
inline void waffle_row(const double* dist, int64_t n, int64_t target, double omega, double psi,
                       bool uniform_ties, double* weight) {
  constexpr double inf = std::numeric_limits<double>::infinity();
  double high = 0, low = inf;
  int64_t present = 1;
  for (int64_t i = 0; i < n; ++i) {
    if (i == target || !std::isfinite(dist[i])) continue;
    const double d = std::max(dist[i], 0.0);
    high = std::max(high, d), low = std::min(low, d), ++present;
  }
  if (present == 1 || psi == 0) {
    for (int64_t i = 0; i < n; ++i) weight[i] = i == target;
    return;
  }
  const double gap = high - low;
  const bool zero = high == 0, tied = gap <= 1e-12 * high;
  const bool alike = zero || (tied && uniform_ties);
  const double s = tied ? 1 - omega : low / high * (1 - omega);
  const double scale = omega <= 1 ? 1 / (1 + s) : 1;
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    double raw = psi;
    if (i != target) {
      const double t = tied ? 0 : (std::max(dist[i], 0.0) - low) / gap;
      raw = !std::isfinite(dist[i]) ? 0 : alike ? psi : std::max(psi - (t + s) * scale, 0.0);
    }
    weight[i] = raw, sum += raw;
  }
  for (int64_t i = 0; i < n; ++i) weight[i] /= sum;
}

template <class Parallel>
void waffle_weights(const double* dist, int64_t rows, int64_t n, const int64_t* target,
                    int64_t target_step, double omega, double psi, bool uniform_ties,
                    double* weight, const Parallel& parallel) {
  constexpr int64_t chunk = 16;
  parallel((rows + chunk - 1) / chunk, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin * chunk; r < std::min(rows, end * chunk); ++r)
      waffle_row(dist + r * n, n, target[r * target_step], omega, psi, uniform_ties,
                 weight + r * n);
  });
}

// One row of FedDWA's weights (Liu et al. 2023, Eq. 15 and 8): the k nearest of n by (distance,
// index), 1 / squared distance, sum 1. NaN counts as infinitely far, a negative distance as zero.
// `order` is scratch of n.
template <class T>
void feddwa_row(const T* sqdist, int64_t n, int64_t k, int64_t* order, double* weight,
                int64_t* index) {
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

// `k` is at most n. Rows of `sqdist` lie `row` elements apart.
template <class T, class Parallel>
void feddwa_weights(const T* sqdist, int64_t row, int64_t m, int64_t n, int64_t k, double* weight,
                    int64_t* index, const Parallel& parallel) {
  constexpr int64_t chunk = 16;
  parallel((m + chunk - 1) / chunk, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> order(k > 32 ? n : 0);
    for (int64_t r = begin * chunk; r < std::min(m, end * chunk); ++r)
      feddwa_row(sqdist + r * row, n, k, order.data(), weight + r * k, index + r * k);
  });
}

}  // namespace pflcore::cpu
