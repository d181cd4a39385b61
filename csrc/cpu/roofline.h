// What this machine can do at most: reading memory, writing it past the caches, and multiplying in
// registers. Kernels are held against it.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "isa.h"
#include "scratch.h"
#include "simd.h"

namespace pflcore::cpu {

struct Limits {
  double read;     // bytes a second, every byte read once
  double write;    // bytes a second, whole lines past the caches
  double fma;      // float32 operations a second, 2 for each multiply-add
  double sub_fma;  // the same for a subtraction and a multiply-add, 3 operations: the distance's
                   // own mix
};

namespace roofline_detail {

constexpr int kChains =
    12;  // independent sums: more than latency times units, fewer than registers

template <int bytes>
PFL_INLINE void read(const float* p, int64_t n, float* sink) {
  using V = Vec<float, bytes>;
  constexpr int64_t lanes = bytes / 4;
  V sum[8] = {};
  for (int64_t i = 0; i + 8 * lanes <= n; i += 8 * lanes) PFL_UNROLL
  for (int j = 0; j < 8; j++) {
    V v;
    load(v, p + i + j * lanes);
    sum[j] += v;
  }
  for (int j = 1; j < 8; j++) sum[0] += sum[j];
  store(sink, sum[0]);
}

template <int bytes>
PFL_INLINE void write(float* p, int64_t n) {
  constexpr int64_t lanes = bytes / 4;
  const Vec<float, bytes> one = 1.0f - Vec<float, bytes>{};
  for (int64_t i = 0; i + lanes <= n; i += lanes) stream(p + i, one);
  fence();
}

// `memory`: room for kChains + 1 vectors.
template <int bytes, bool subtract>
PFL_INLINE void multiply(int64_t rounds, float* memory) {
  using V = Vec<float, bytes>;
  constexpr int64_t lanes = bytes / 4;
  V sum[kChains] = {};
  for (int64_t k = 0; k < (kChains + 1) * lanes; k++) memory[k] = 0.25f;
  for (int64_t i = 0; i < rounds; i++) {
    const float* now = memory;
    asm volatile(""
                 : "+r"(now));  // for all the compiler knows it is elsewhere: no term is that of
                                // the round before
    V a;
    load(a, now + kChains * lanes);
    PFL_UNROLL
    for (int j = 0; j < kChains; j++) {
      V b;
      load(b, now + j * lanes);  // a part of the arithmetic instruction
      if constexpr (subtract) {
        const V d = a - b;
        sum[j] += d * d;
      } else {
        sum[j] += a * b;
      }
    }
  }
  for (int j = 1; j < kChains; j++) sum[0] += sum[j];
  store(memory, sum[0]);
}

#define PFL_LIMITS(NAME, BYTES, TARGET)                                                    \
  struct NAME {                                                                            \
    static constexpr double lanes = BYTES / 4;                                             \
    TARGET static void read(const float* p, int64_t n, float* sink) {                      \
      roofline_detail::read<BYTES>(p, n, sink);                                            \
    }                                                                                      \
    TARGET static void write(float* p, int64_t n) { roofline_detail::write<BYTES>(p, n); } \
    TARGET static void fma(int64_t rounds, float* memory) {                                \
      multiply<BYTES, false>(rounds, memory);                                              \
    }                                                                                      \
    TARGET static void sub_fma(int64_t rounds, float* memory) {                            \
      multiply<BYTES, true>(rounds, memory);                                               \
    }                                                                                      \
  };
PFL_LIMITS(Plain, 16, )
#if PFL_X86
PFL_LIMITS(Avx2, 32, PFL_AVX2)
PFL_LIMITS(Avx512, 64, PFL_AVX512)
#endif
#undef PFL_LIMITS

// Seconds of the fastest of some runs of body(thread) on `threads` threads.
template <class Body>
double fastest(int threads, const Body& body) {
  double best = 1e30;
  for (int run = 0; run < 7; run++) {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::thread> others;
    for (int t = 1; t < threads; t++) others.emplace_back([&body, t] { body(t); });
    body(0);
    for (std::thread& t : others) t.join();
    best = std::min(
        best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return best;
}

template <class Path>
Limits measure(int threads, int64_t bytes, int64_t rounds) {
  const int64_t part = bytes / 4 / threads / 1024 * 1024;  // elements of one thread, whole pages
  const Scratch<float> memory(part * threads);
  const Scratch<float> sinks(threads * 1024);
  touch_fresh(memory.data, static_cast<size_t>(part * threads) * 4,
              [](int64_t n, const auto& body) { body(0, n); });
  Limits out{};
  out.write = 4.0 * part * threads /
              fastest(threads, [&](int t) { Path::write(memory.data + t * part, part); });
  out.read = 4.0 * part * threads / fastest(threads, [&](int t) {
               Path::read(memory.data + t * part, part, sinks.data + t * 1024);
             });
  const double terms = Path::lanes * kChains * rounds * threads;
  out.fma = 2 * terms / fastest(threads, [&](int t) { Path::fma(rounds, sinks.data + t * 1024); });
  out.sub_fma =
      3 * terms / fastest(threads, [&](int t) { Path::sub_fma(rounds, sinks.data + t * 1024); });
  return out;
}

}  // namespace roofline_detail

// Measured with `threads` threads over `bytes` of memory, which should be many times the caches, on
// the chosen instruction set.
inline Limits limits(int threads, int64_t bytes, int64_t rounds = 2'000'000) {
  namespace d = roofline_detail;
#if PFL_X86
  if (isa() == Isa::avx512) return d::measure<d::Avx512>(threads, bytes, rounds);
  if (isa() == Isa::avx2) return d::measure<d::Avx2>(threads, bytes, rounds);
#endif
  return d::measure<d::Plain>(threads, bytes, rounds);
}

}  // namespace pflcore::cpu
