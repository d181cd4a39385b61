// The limits of this machine: reading memory, writing it past the caches, and multiplying in
// registers. Kernels are compared with them.
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

// `memory` has space for kChains + 1 vectors.
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

}  // namespace roofline_detail

// Measured with `threads` threads over `bytes` of memory, which should be many times the caches, on
// the chosen instruction set.
inline Limits limits(int threads, int64_t bytes, int64_t rounds = 2'000'000) {
  namespace d = roofline_detail;
  const int64_t part = bytes / 4 / threads / 1024 * 1024;  // elements of one thread, whole pages
  const Scratch<float> memory(part * threads);
  const Scratch<float> sinks(threads * 1024);
  touch_fresh(memory.data, static_cast<size_t>(part * threads) * 4,
              [](int64_t n, const auto& body) { body(0, n); });
  // `amount` of work of each thread, a second
  const auto rate = [threads](double amount, const auto& body) {
    return amount * threads / d::fastest(threads, [&body](int t) {
             on_isa([&](auto wide) PFL_LAMBDA { body(wide, t); });
           });
  };
  const double terms = static_cast<double>(lanes_of<float>() * d::kChains * rounds);
  Limits out{};
  out.write = rate(4.0 * part, [&](auto wide, int t)
                                   PFL_LAMBDA { d::write<wide>(memory.data + t * part, part); });
  out.read = rate(4.0 * part, [&](auto wide, int t) PFL_LAMBDA {
    d::read<wide>(memory.data + t * part, part, sinks.data + t * 1024);
  });
  out.fma = rate(2 * terms, [&](auto wide, int t) PFL_LAMBDA {
    d::multiply<wide, false>(rounds, sinks.data + t * 1024);
  });
  out.sub_fma = rate(3 * terms, [&](auto wide, int t) PFL_LAMBDA {
    d::multiply<wide, true>(rounds, sinks.data + t * 1024);
  });
  return out;
}

}  // namespace pflcore::cpu
