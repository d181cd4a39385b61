// Distances of 16 to 20 rows of float32: all pairs in one block, differences first.
//
// The rows are 4 groups of 5. Warps 0 to 5 own the 25 pairs of two groups each, warps 6 and 7 the
// 10 + 10 pairs within two groups. A lane takes 4 neighbouring columns of each stage and is flushed
// to float64 after 3 stages: 12 squares, a rounding each. The difference counts twice, so that a
// pair's error stays below (12 + 2) 2^-24 = 8.4e-7 for every input.
#pragma once
#include "sqdist_plan.cuh"

namespace pflcore::cuda {

__device__ __forceinline__ void sqdist_few_add(float& sum, const Pack<float>& x,
                                               const Pack<float>& y) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float d = x.v[c] - y.v[c];
    sum += d * d;
  }
}

constexpr int kFewStage = kFewRows * kFewChunk;  // floats

// Adds a stage to the sums of a warp's pairs: within two groups, or those of a row of one with a
// row of the other.
template <bool kWithin>
__device__ __forceinline__ void sqdist_few_pairs(float (&sum)[25], const float* now, int group_a,
                                                 int group_b) {
  const auto load = [&](int group, int r) { return load16(now + (group * 5 + r) * kFewChunk); };
  Pack<float> x[5];
#pragma unroll
  for (int r = 0; r < 5; ++r) x[r] = load(group_a, r);
  if constexpr (kWithin) {
    int pair = 0;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      if (part == 1) {
#pragma unroll
        for (int r = 0; r < 5; ++r) x[r] = load(group_b, r);
      }
#pragma unroll
      for (int r = 0; r < 5; ++r)
#pragma unroll
        for (int s = r + 1; s < 5; ++s) sqdist_few_add(sum[pair++], x[r], x[s]);
    }
  } else {
#pragma unroll
    for (int s = 0; s < 5; ++s) {
      const Pack<float> y = load(group_b, s);
#pragma unroll
      for (int r = 0; r < 5; ++r) sqdist_few_add(sum[r * 5 + s], x[r], y);
    }
  }
}

// Writes a warp's pairs; `rows` is the number of rows, those past it are dropped.
template <bool kWithin>
__device__ __forceinline__ void sqdist_few_write(const double (&total)[25], int group_a,
                                                 int group_b, int rows, double* partial) {
  int pair = 0;
#pragma unroll
  for (int part = 0; part < (kWithin ? 2 : 1); ++part)
#pragma unroll
    for (int r = 0; r < 5; ++r)
#pragma unroll
      for (int s = kWithin ? r + 1 : 0; s < 5; ++s) {
        double value = total[pair++];
#pragma unroll
        for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
        const int i = (part == 1 ? group_b : group_a) * 5 + r,
                  j = (kWithin && part == 0 ? group_a : group_b) * 5 + s;
        if (threadIdx.x % 32 == 0 && i < rows && j < rows) partial[i * rows + j] = value;
      }
}

// One block: one piece of the columns -> partial[split][i][j], i < j.
PFLCORE_PLAIN_KERNEL void __launch_bounds__(kSqdistThreads, 2)
    sqdist_few(const float* __restrict__ a, int64_t a_row, SqdistPlan plan, int* flags,
               double* partial) {
  PFLCORE_DYNAMIC_SHARED(shared);
  sqdist_idle(flags, kFirst);
  float* const stages = reinterpret_cast<float*>(shared);
  const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5, lane = thread & 31,
            rows = static_cast<int>(plan.m);
  const bool within = warp >= 6;
  const int group_a = within     ? 2 * (warp - 6)
                      : warp < 3 ? 0
                      : warp < 5 ? 1
                                 : 2,
            group_b = within     ? group_a + 1
                      : warp < 3 ? warp + 1
                      : warp < 5 ? warp - 1
                                 : 3;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * plan.first.columns;
  const int64_t end = begin + plan.first.columns < plan.p ? begin + plan.first.columns : plan.p;
  const int chunks = static_cast<int>((end - begin + kFewChunk - 1) / kFewChunk);
  const auto stage = [&](int k) {
    if (k < chunks)
      sqdist_copy_rows<kFewChunk>(plan.a_bytes, stages + k % kFewStages * kFewStage, kFewChunk, a,
                                  a_row, rows, begin + static_cast<int64_t>(k) * kFewChunk, end);
    copy_commit();
  };

  for (int e = rows * kFewChunk + thread; e < kFewStage; e += kSqdistThreads)  // no such rows
    for (int k = 0; k < kFewStages; ++k) stages[k * kFewStage + e] = 0;
  double total[25] = {};
  float sum[25] = {};
  for (int k = 0; k < kFewFlush; ++k) stage(k);
  for (int k = 0; k < chunks; k += kFewFlush) {
    copy_wait<0>();
    // These stages are there for all threads, and no thread still reads the next ones.
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < kFewFlush; ++i) stage(k + kFewFlush + i);
#pragma unroll
    for (int i = 0; i < kFewFlush; ++i) {
      if (k + i >= chunks) break;
      const float* const now = stages + (k + i) % kFewStages * kFewStage + 4 * lane;
      if (within)
        sqdist_few_pairs<true>(sum, now, group_a, group_b);
      else
        sqdist_few_pairs<false>(sum, now, group_a, group_b);
    }
#pragma unroll
    for (int e = 0; e < 25; ++e) {
      total[e] += static_cast<double>(sum[e]);
      sum[e] = 0;
    }
  }
  double* const to = partial + static_cast<int64_t>(blockIdx.x) * plan.pairs;
  if (within)
    sqdist_few_write<true>(total, group_a, group_b, rows, to);
  else
    sqdist_few_write<false>(total, group_a, group_b, rows, to);
}

inline void sqdist_few_launch(const Sqdist& q, const SqdistPlan& plan, const SqdistRoom& room,
                              cudaStream_t stream) {
  auto* const kernel = &sqdist_few;
  allow_shared(reinterpret_cast<const void*>(kernel), kFewShared);
  PFLCORE_LAUNCH(kernel, static_cast<unsigned>(plan.first.count), kSqdistThreads, kFewShared,
                 stream, static_cast<const float*>(q.a), q.a_row, plan, room.flags, room.partial);
}

}  // namespace pflcore::cuda
