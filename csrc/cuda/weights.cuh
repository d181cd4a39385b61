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

// ---- FedDWA: the k nearest by (distance, index), weighted by 1 / squared distance (Liu et al.
// 2023, Eq. 15 and 8). Not negative doubles have the order of their bits, which every card compares
// fast. NaN is infinitely far.
template <class T>
__device__ __forceinline__ uint64_t distance_bits(T v) {
  double d = distance(v) + 0.0;  // -0 is 0
  if (d != d) d = INFINITY;
  uint64_t bits;
  memcpy(&bits, &d, sizeof bits);
  return bits;
}

__device__ __forceinline__ double distance_of(uint64_t bits) {
  double d;
  memcpy(&d, &bits, sizeof d);
  return d;
}

// A column as the order of neighbours sees it.
struct Neighbour {
  uint64_t bits;
  int64_t index;
};

__device__ __forceinline__ bool is_nearer(const Neighbour& a, const Neighbour& b) {
  return a.bits < b.bits || (a.bits == b.bits && a.index < b.index);
}

// The nearest of all threads' neighbours, in every thread. `scratch` has one for each warp.
__device__ __forceinline__ Neighbour nearest_of_block(Neighbour mine, Neighbour* scratch) {
  for (int step = 16; step > 0; step /= 2) {
    const Neighbour other{__shfl_xor_sync(0xffffffffu, mine.bits, step),
                          __shfl_xor_sync(0xffffffffu, mine.index, step)};
    if (is_nearer(other, mine)) mine = other;
  }
  __syncthreads();  // scratch may still be read from the turn before
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = mine;
  __syncthreads();
  Neighbour best = scratch[0];
  for (int w = 1; w < kWeightsThreads / 32; ++w)
    if (is_nearer(scratch[w], best)) best = scratch[w];
  return best;
}

// Weights of the k distances in `weight`, nearest first, in their place.
__device__ __forceinline__ void weigh_nearest(double* weight, int64_t k, double* scratch) {
  __syncthreads();  // all distances are there
  const double nearest = weight[0];
  __syncthreads();  // all threads have read it before one overwrites it
  double sum = 0;
  for (int64_t i = threadIdx.x; i < k; i += blockDim.x) {
    const double d = weight[i];
    const double raw = nearest == 0 || nearest > DBL_MAX ? (d == nearest ? 1.0 : 0.0) : nearest / d;
    weight[i] = raw;
    sum += raw;
  }
  sum = block_reduce(sum, scratch, Sum());
  for (int64_t i = threadIdx.x; i < k; i += blockDim.x) weight[i] = weight[i] / sum;
}

// For few of many: k turns, each of which takes the nearest that is left. A thread knows the
// nearest of its own columns; the one that has lost it looks for its next.
template <class T>
__global__ void __launch_bounds__(kWeightsThreads) feddwa_few(Feddwa<T> q) {
  __shared__ Neighbour found[kWeightsThreads / 32];
  __shared__ double scratch[kWeightsThreads / 32];
  for (int64_t row = blockIdx.x; row < q.m; row += gridDim.x) {
    const T* const dist = q.sqdist + row * q.row;
    double* const weight = q.weight + row * q.k;
    int64_t* const index = q.index + row * q.k;
    const auto next = [&](const Neighbour& last) {
      Neighbour best{~uint64_t(0), q.n};
      for (int64_t i = threadIdx.x; i < q.n; i += kWeightsThreads) {
        const Neighbour one{distance_bits(dist[i]), i};
        if (is_nearer(last, one) && is_nearer(one, best)) best = one;
      }
      return best;
    };
    Neighbour mine = next({0, -1});
    for (int64_t turn = 0; turn < q.k; ++turn) {
      const Neighbour best = nearest_of_block(mine, found);
      if (best.index % kWeightsThreads != threadIdx.x) continue;
      index[turn] = best.index, weight[turn] = distance_of(best.bits);
      mine = next(best);
    }
    weigh_nearest(weight, q.k, scratch);
  }
}

// For many, or of few: an entry's place is the number of entries before it. n^2 comparisons in
// shared memory, no sort, no iteration that depends on the data.
template <class T>
__global__ void __launch_bounds__(kWeightsThreads) feddwa_kernel(Feddwa<T> q) {
  constexpr int kTile = 1024;
  __shared__ uint64_t tile[kTile];
  __shared__ double scratch[kWeightsThreads / 32];
  for (int64_t row = blockIdx.x; row < q.m; row += gridDim.x) {
    const T* const dist = q.sqdist + row * q.row;
    double* const weight = q.weight + row * q.k;
    int64_t* const index = q.index + row * q.k;
    for (int64_t first = 0; first < q.n; first += blockDim.x) {  // a candidate for each thread
      const int64_t mine = first + threadIdx.x;
      const uint64_t bits = mine < q.n ? distance_bits(dist[mine]) : 0;
      int64_t place = 0;
      for (int64_t start = 0; start < q.n; start += kTile) {
        const int count = static_cast<int>(q.n - start < kTile ? q.n - start : kTile);
        __syncthreads();
        for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x))
          tile[i] = distance_bits(dist[start + i]);
        __syncthreads();
        // an equal one comes before this one where its index is lower
        const int64_t before = mine - start < 0 ? 0 : mine - start < count ? mine - start : count;
        int nearer = 0;
#pragma unroll 2
        for (int i = 0; i < count; ++i) nearer += tile[i] < bits + (i < before);
        place += nearer;
      }
      if (mine < q.n && place < q.k) index[place] = mine, weight[place] = distance_of(bits);
    }
    weigh_nearest(weight, q.k, scratch);
  }
}

// True where k turns over a block cost less than n^2 comparisons: a turn is some 16 times 256
// comparisons, and its latency counts where rows are short or turns are many.
inline bool is_few(int64_t n, int64_t k) {
  return n > 256 && k <= 64 && k <= ceil_div(n, 256) * n / 16;
}

template <class T>
void feddwa_weights(const Feddwa<T>& q, cudaStream_t stream) {
  if (q.m == 0 || q.n == 0 || q.k == 0) return;
  auto* const kernel = is_few(q.n, q.k) ? &feddwa_few<T> : &feddwa_kernel<T>;
  PFLCORE_LAUNCH(kernel, grid_for(q.m), kWeightsThreads, 0, stream, q);
}

}  // namespace pflcore::cuda
