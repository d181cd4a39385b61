// 2x2 pooling with stride 2 over planes, forward and backward: what half of LeNet's forward pass is spent on when it is done one
// window at a time. Same results as torch's max_pool2d and avg_pool2d, bit for bit; the gradient of a maximum goes to the first one.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "isa.h"

namespace pflcore::cpu {

struct Pool {
  int64_t planes, height, width;  // of the input; rows and columns beyond an even number belong to no window
};

namespace pool {

// Whether a window's maximum moves on to `x`: the first of equals stays, NaN wins, as in torch.
template <class T>
inline __attribute__((always_inline)) bool later(T x, T most) {
  return (x > most) | (x != x);
}

template <class T>
inline __attribute__((always_inline)) T larger(T x, T most) {
  return later(x, most) ? x : most;
}

template <bool average, class T>
inline __attribute__((always_inline)) void forward(const Pool& p, const T* x, T* y, int64_t begin, int64_t end) {
  const int64_t h = p.height / 2, w = p.width / 2;
  for (int64_t plane = begin; plane < end; ++plane)
    for (int64_t i = 0; i < h; ++i) {
      const T* top = x + plane * p.height * p.width + 2 * i * p.width;
      const T* low = top + p.width;
      T* out = y + (plane * h + i) * w;
      for (int64_t j = 0; j < w; ++j) {
        const T a = top[2 * j], b = top[2 * j + 1], c = low[2 * j], d = low[2 * j + 1];
        out[j] = average ? (((a + b) + c) + d) / T(4) : larger(d, larger(c, larger(b, a)));
      }
    }
}

template <class To, class From>
inline __attribute__((always_inline)) To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <bool average, class T>
inline __attribute__((always_inline)) void backward(const Pool& p, const T* x, const T* grad, T* gx, int64_t begin, int64_t end) {
  const int64_t h = p.height / 2, w = p.width / 2;
  for (int64_t plane = begin; plane < end; ++plane) {
    T* base = gx + plane * p.height * p.width;
    for (int64_t i = 0; i < h; ++i) {
      const T* g = grad + (plane * h + i) * w;
      T *top = base + 2 * i * p.width, *low = top + p.width;
      if constexpr (average) {
        for (int64_t j = 0; j < w; ++j) {
          const T part = g[j] / T(4);
          top[2 * j] = part, top[2 * j + 1] = part, low[2 * j] = part, low[2 * j + 1] = part;
        }
      } else {
        using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
        const auto all_if = [](bool yes) { return yes ? ~Bits(0) : Bits(0); };
        const T* xt = x + plane * p.height * p.width + 2 * i * p.width;
        const T* xl = xt + p.width;
        for (int64_t at = 0; at < w; at += 64) {  // the four parts apart, so that the selections become vector code
          const int64_t n = w - at < 64 ? w - at : 64;
          T ga[64], gb[64], gc[64], gd[64];
          for (int64_t j = 0; j < n; ++j) {
            const T a = xt[2 * (at + j)], b = xt[2 * (at + j) + 1], c = xl[2 * (at + j)], d = xl[2 * (at + j) + 1];
            const T ab = larger(b, a), abc = larger(c, ab);
            const Bits v = same_bits<Bits>(g[at + j]);
            const Bits is_b = all_if(later(b, a)), is_c = all_if(later(c, ab)), is_d = all_if(later(d, abc));
            gd[j] = same_bits<T>(v & is_d);
            gc[j] = same_bits<T>(v & ~is_d & is_c);
            gb[j] = same_bits<T>(v & ~is_d & ~is_c & is_b);
            ga[j] = same_bits<T>(v & ~is_d & ~is_c & ~is_b);
          }
          for (int64_t j = 0; j < n; ++j) {
            top[2 * (at + j)] = ga[j], top[2 * (at + j) + 1] = gb[j];
            low[2 * (at + j)] = gc[j], low[2 * (at + j) + 1] = gd[j];
          }
        }
      }
      if (p.width % 2) top[p.width - 1] = low[p.width - 1] = 0;
    }
    if (p.height % 2)
      for (int64_t j = 0; j < p.width; ++j) base[(p.height - 1) * p.width + j] = 0;
  }
}

#define PFL_POOL(TARGET, NAME)                                                                                            \
  template <bool average, class T>                                                                                        \
  TARGET void forward_##NAME(const Pool& p, const T* x, T* y, int64_t begin, int64_t end) {                               \
    forward<average>(p, x, y, begin, end);                                                                                \
  }                                                                                                                       \
  template <bool average, class T>                                                                                        \
  TARGET void backward_##NAME(const Pool& p, const T* x, const T* grad, T* gx, int64_t begin, int64_t end) {              \
    backward<average>(p, x, grad, gx, begin, end);                                                                        \
  }
PFL_POOL(, plain)
#if PFL_X86
PFL_POOL(PFL_AVX2, avx2)
PFL_POOL(PFL_AVX512, avx512)
#endif
#undef PFL_POOL

}  // namespace pool

// y [planes, height / 2, width / 2] from x [planes, height, width].
template <bool average, class T, class Parallel>
void pool_forward(const Pool& p, const T* x, T* y, const Parallel& parallel) {
  auto run = pool::forward_plain<average, T>;
#if PFL_X86
  if (isa() == Isa::avx2) run = pool::forward_avx2<average, T>;
  if (isa() == Isa::avx512) run = pool::forward_avx512<average, T>;
#endif
  parallel(p.planes, [&](int64_t begin, int64_t end) { run(p, x, y, begin, end); });
}

// gx like x, all of it written; x itself is read for a maximum only.
template <bool average, class T, class Parallel>
void pool_backward(const Pool& p, const T* x, const T* grad, T* gx, const Parallel& parallel) {
  auto run = pool::backward_plain<average, T>;
#if PFL_X86
  if (isa() == Isa::avx2) run = pool::backward_avx2<average, T>;
  if (isa() == Isa::avx512) run = pool::backward_avx512<average, T>;
#endif
  parallel(p.planes, [&](int64_t begin, int64_t end) { run(p, x, grad, gx, begin, end); });
}

}  // namespace pflcore::cpu
