// The two rules that turn distances into mixing weights, in float64, one block per row. Knows
// nothing of torch.
#pragma once
#include "common.cuh"

namespace pflcore::cuda {

constexpr int kWeightsThreads = 256;

// One value of a row as both rules read it: below zero counts as zero.
template <class T>
__device__ __forceinline__ double distance(T v) {
  const double d = static_cast<double>(v);
  return d < 0 ? 0 : d;
}

// WAFFLE's CalcWeights (Beaussart et al. 2021, Algorithm 1) in its division-safe form. A target
// outside [0, n) makes a row of NaN.
template <class Row>
__global__ void __launch_bounds__(kWeightsThreads) waffle_kernel(Row q) {
  __shared__ double scratch[kWeightsThreads / 32];
  for (int64_t row = blockIdx.x; row < q.rows; row += gridDim.x) {
    const double* const dist = q.dist + row * q.n;
    double* const weight = q.weight + row * q.n;
    const int64_t target = q.target[row * q.target_step];
    if (target < 0 || target >= q.n) {
      for (int64_t i = threadIdx.x; i < q.n; i += blockDim.x) weight[i] = NAN;
      continue;
    }
    double high = 0, low = INFINITY, others = 0;
    for (int64_t i = threadIdx.x; i < q.n; i += blockDim.x) {
      if (i == target || !(fabs(dist[i]) <= DBL_MAX)) continue;
      const double d = distance(dist[i]);
      high = d > high ? d : high, low = d < low ? d : low, others += 1;
    }
    high = block_reduce(high, scratch, Max());
    low = block_reduce(low, scratch, Min());
    others = block_reduce(others, scratch, Sum());
    const bool alone = others == 0 || q.psi == 0;
    const double gap = high - low;
    const bool tied = gap <= 1e-12 * high, alike = high == 0 || (tied && q.uniform_ties);
    const double s = (tied ? 1.0 : low / high) * (1 - q.omega);
    double sum = 0;
    for (int64_t i = threadIdx.x; i < q.n; i += blockDim.x) {
      double raw = i == target ? 1 : 0;
      if (!alone) {
        const double t = tied ? 0.0 : (distance(dist[i]) - low) / gap;
        const double ratio = alike ? 0.0 : q.omega <= 1 ? (t + s) / (1 + s) : t + s;
        raw = i == target                                     ? q.psi
              : !(fabs(dist[i]) <= DBL_MAX) || ratio >= q.psi ? 0
                                                              : q.psi - ratio;
      }
      weight[i] = raw;
      sum += raw;
    }
    sum = block_reduce(sum, scratch, Sum());
    for (int64_t i = threadIdx.x; i < q.n; i += blockDim.x) weight[i] = weight[i] / sum;
  }
}

inline void waffle_weights(const Waffle& q, cudaStream_t stream) {
  if (q.rows == 0 || q.n == 0) return;
  auto* const kernel = &waffle_kernel<Waffle>;
  PFLCORE_LAUNCH(kernel, grid_for(q.rows), kWeightsThreads, 0, stream, q);
}

// The k nearest by (distance, index), weighted by 1 / squared distance (FedDWA, Liu et al. 2023,
// Eq. 15 and 8). An entry's place is the number of entries before it: n^2 comparisons in shared
// memory, no sort, no iteration that depends on the data.
template <class T>
__global__ void __launch_bounds__(kWeightsThreads) feddwa_kernel(Feddwa<T> q) {
  constexpr int kTile = 1024;
  __shared__ double tile[kTile];
  __shared__ double scratch[kWeightsThreads / 32];
  const auto far = [](T v) {
    const double d = distance(v);
    return d != d ? static_cast<double>(INFINITY) : d;
  };
  for (int64_t row = blockIdx.x; row < q.m; row += gridDim.x) {
    const T* const dist = q.sqdist + row * q.row;
    double* const weight = q.weight + row * q.k;
    int64_t* const index = q.index + row * q.k;
    for (int64_t first = 0; first < q.n; first += blockDim.x) {  // a candidate for each thread
      const int64_t mine = first + threadIdx.x;
      const double d = mine < q.n ? far(dist[mine]) : 0;
      int64_t place = 0;
      for (int64_t start = 0; start < q.n; start += kTile) {
        const int count = static_cast<int>(q.n - start < kTile ? q.n - start : kTile);
        __syncthreads();
        for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x))
          tile[i] = far(dist[start + i]);
        __syncthreads();
        for (int i = 0; i < count; ++i) place += tile[i] < d || (tile[i] == d && start + i < mine);
      }
      if (mine < q.n && place < q.k) index[place] = mine, weight[place] = d;
    }
    __syncthreads();
    const double nearest = weight[0];
    __syncthreads();  // everybody has read it before anybody overwrites it
    double sum = 0;
    for (int64_t i = threadIdx.x; i < q.k; i += blockDim.x) {
      const double d = weight[i];
      const double raw =
          nearest == 0 || nearest > DBL_MAX ? (d == nearest ? 1.0 : 0.0) : nearest / d;
      weight[i] = raw;
      sum += raw;
    }
    sum = block_reduce(sum, scratch, Sum());
    for (int64_t i = threadIdx.x; i < q.k; i += blockDim.x) weight[i] = weight[i] / sum;
  }
}

template <class T>
void feddwa_weights(const Feddwa<T>& q, cudaStream_t stream) {
  if (q.m == 0 || q.n == 0 || q.k == 0) return;
  auto* const kernel = &feddwa_kernel<T>;
  PFLCORE_LAUNCH(kernel, grid_for(q.m), kWeightsThreads, 0, stream, q);
}

}  // namespace pflcore::cuda
