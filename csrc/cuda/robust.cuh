// The mean of each column's numbers without its `removed` least and largest, and that of the `kept`
// numbers nearest to its median: a thread for each column. Knows nothing of torch.
//
// All threads take the comparators of Batcher's odd-even merge sort in the same order, and none
// waits for another. Groups of kGroupRows numbers are sorted in registers while they are read,
// where a comparator takes two instructions. They are merged in shared memory, or of very many rows
// in a workspace. There a thread's column lies beside those of its neighbours, number by number, so
// that a warp's accesses are without conflicts.
#pragma once
#include "common.cuh"

namespace pflcore::cuda {

constexpr int kRobustThreads = 64;
constexpr int kGroupRows = 64;  // that are sorted in registers; a power of two
constexpr int kSumChunk = 16;   // numbers that are summed before they are added to the total

// Blocks of a multiprocessor: its registers hold a group of each thread.
template <class T>
constexpr int column_blocks = std::is_same_v<T, double> ? 4 : 8;

struct RobustPlan {
  int threads;
  int64_t shared;  // bytes, or 0 for columns in the workspace
  unsigned grid;
};

template <class Problem>
RobustPlan robust_plan(const Problem& q) {
  const int64_t column = q.n * (q.dtype == Dtype::f64 ? 8 : 4);
  for (int threads = kRobustThreads; threads >= 32; threads /= 2)
    if (column * threads <= kAlwaysShared)
      return {threads, column * threads, grid_for(ceil_div(q.p, threads))};
  return {kRobustThreads, 0, grid_for(ceil_div(q.p, kRobustThreads), 4 * multiprocessors())};
}

// Bytes of `q.workspace`.
template <class Problem>
int64_t column_workspace(const Problem& q) {
  const RobustPlan plan = robust_plan(q);
  const int64_t columns = static_cast<int64_t>(plan.grid) * plan.threads;
  return plan.shared ? 0 : columns * q.n * (q.dtype == Dtype::f64 ? 8 : 4);
}

// A comparator. NaN makes either number any number.
template <class A>
__device__ __forceinline__ void put_in_order(A& low, A& high) {
  A lesser, larger;
  if constexpr (sizeof(A) == 4) {
    lesser = fminf(low, high), larger = fmaxf(low, high);
  } else {  // fmin would take more instructions, for NaN
    lesser = high < low ? high : low, larger = high < low ? low : high;
  }
  low = lesser, high = larger;
}

// Merges the sorted halves of `kSpan` numbers, taking those that are kStep apart.
template <int kSpan, int kStep, class A>
__device__ __forceinline__ void merge_halves(A* v) {
  if constexpr (2 * kStep < kSpan) {
    merge_halves<kSpan, 2 * kStep>(v);
    merge_halves<kSpan, 2 * kStep>(v + kStep);
#pragma unroll
    for (int i = kStep; i + kStep < kSpan; i += 2 * kStep) put_in_order(v[i], v[i + kStep]);
  } else {
    put_in_order(v[0], v[kStep]);
  }
}

// Sorts kSpan registers, of which those from n on are infinite.
template <int kSpan, class A>
__device__ __forceinline__ void sort_registers(A* v, int n) {
  if constexpr (kSpan > 1) {
    constexpr int kHalf = kSpan / 2;
    sort_registers<kHalf>(v, n);
    if (kSpan >= 8 && n <= kHalf) return;  // for fewer, to ask takes longer than to sort
    sort_registers<kHalf>(v + kHalf, n - kHalf);
    merge_halves<kSpan, 1>(v);
  }
}

// Sorts the next numbers of a column between `from` and `to`, kGroupRows of the n that are left.
// Returns true if one is NaN.
template <class T, class A>
__device__ __forceinline__ bool sort_group(A* to, int64_t step, const T* from, int64_t row, int n) {
  T loaded[kGroupRows];  // all are on their way at a time
#pragma unroll
  for (int i = 0; i < kGroupRows; ++i) loaded[i] = convert<T>(INFINITY);
#pragma unroll
  for (int i = 0; i < kGroupRows; ++i, from += row) {
    if (i == n) break;
    loaded[i] = *from;
  }
  A numbers[kGroupRows];
  bool has_nan = false;
#pragma unroll
  for (int i = 0; i < kGroupRows; ++i) {
    numbers[i] = convert<A>(loaded[i]);
    has_nan = has_nan || numbers[i] != numbers[i];
  }
  sort_registers<kGroupRows>(numbers, n);
#pragma unroll
  for (int i = 0; i < kGroupRows; ++i, to += step) {
    if (i == n) break;
    *to = numbers[i];
  }
  return has_nan;
}

// Merges the sorted groups of n numbers, `step` elements apart.
template <class A>
__device__ __forceinline__ void merge_groups(A* v, int n, int64_t step) {
  for (int p = kGroupRows; p < n; p *= 2)
    for (int k = p; k > 0; k /= 2)
      for (int j = k % p; j < n - k; j += 2 * k)
        for (int i = j; i < j + k && i < n - k; ++i) {
          if ((i ^ (i + k)) >= 2 * p) continue;  // they are not of the same 2 * p
          put_in_order(v[i * step], v[(i + k) * step]);
        }
}

// The mean of a sorted column, whose numbers are `step` elements apart.
template <class A>
__device__ __forceinline__ A mean_of_sorted(const TrimmedMean& q, const A* v, int64_t step) {
  const int last = static_cast<int>(q.n - q.removed);
  A total = 0;
  for (int chunk = static_cast<int>(q.removed); chunk < last; chunk += kSumChunk) {
    A sum = 0;
    for (int i = chunk; i < chunk + kSumChunk && i < last; ++i) sum += v[i * step];
    total += sum;
  }
  return total / static_cast<A>(q.n - 2 * q.removed);
}

// See `take_nearest` in csrc/cpu/robust.h.
template <class A>
__device__ __forceinline__ A mean_of_sorted(const MeanAroundMedian& q, const A* v, int64_t step) {
  const int n = static_cast<int>(q.n), kept = static_cast<int>(q.kept);
  A low = v[(n - 1) / 2 * step], high = v[n / 2 * step];
  const A median = low * A(.5) + high * A(.5);
  if (median != median) return median;
  if (median - median != 0) low = high = median;  // an infinite one
  int first = 0;
  for (; first + kept < n; ++first) {
    const A lost = v[first * step], gained = v[(first + kept) * step];
    if (!(gained <= low || low - lost > gained - high)) break;
  }
  A total = 0, sum = 0;
  for (int i = first; i < first + kept; ++i) {
    if (i % kSumChunk == 0) total += sum, sum = 0;
    sum += v[i * step];
  }
  return (total + sum) / static_cast<A>(q.kept);
}

template <class T, class Problem, bool kShared>
__global__ void __launch_bounds__(kRobustThreads, column_blocks<T>) columns_kernel(Problem q) {
  using A = std::conditional_t<std::is_same_v<T, double>, double, float>;
  PFLCORE_DYNAMIC_SHARED(shared);
  const int64_t step = blockDim.x;
  A* const block = kShared ? reinterpret_cast<A*>(shared)
                           : static_cast<A*>(q.workspace) + blockIdx.x * q.n * step;
  A* const v = block + threadIdx.x;
  const int n = static_cast<int>(q.n);
  for (int64_t column = blockIdx.x * step + threadIdx.x; column < q.p; column += gridDim.x * step) {
    const T* const from = static_cast<const T*>(q.rows) + column;
    bool has_nan = false;
    for (int first = 0; first < n; first += kGroupRows)
      has_nan |= sort_group(v + first * step, step, from + first * q.row, q.row, n - first);
    merge_groups(v, n, step);
    const A mean = has_nan ? static_cast<A>(NAN) : mean_of_sorted(q, v, step);
    static_cast<T*>(q.out)[column] = convert<T>(mean);
  }
}

template <class T, class Problem>
void mean_of_columns_as(const Problem& q, cudaStream_t stream) {
  const RobustPlan plan = robust_plan(q);
  auto* const kernel =
      plan.shared ? &columns_kernel<T, Problem, true> : &columns_kernel<T, Problem, false>;
  PFLCORE_LAUNCH(kernel, plan.grid, plan.threads, plan.shared, stream, q);
}

// A Problem is a TrimmedMean or a MeanAroundMedian.
template <class Problem>
void mean_of_columns(const Problem& q, cudaStream_t stream) {
  if (q.p == 0) return;
  switch (q.dtype) {
    case Dtype::f32:
      return mean_of_columns_as<float>(q, stream);
    case Dtype::f64:
      return mean_of_columns_as<double>(q, stream);
    case Dtype::f16:
      return mean_of_columns_as<__half>(q, stream);
    case Dtype::bf16:
      return mean_of_columns_as<__nv_bfloat16>(q, stream);
  }
}

}  // namespace pflcore::cuda
