// A maximum over windows of 2x2, in the passes of a norm before it: the normalized image is never
// stored. Of each maximum its place and its normalized value are kept, so that the backward pass
// reads a quarter of the numbers for its sums.
#pragma once
#include "tile.h"

namespace pflcore::cpu::chain {

struct Windows {
  int64_t h, w, batch;  // of a channel's image
  int64_t act;          // an activation below GELU, which as well comes behind the maximum
  int64_t hq() const { return h / 2; }
  int64_t wq() const { return w / 2; }
};

// The largest of each window of a channel, and where it stood: the first of equals, NaN above all.
// normalize(v, b) normalizes numbers of the samples from b on.
template <class T, int bytes, class Normalize>
PFL_INLINE void pool_normalized(const Windows& q, const T* x, const Normalize& normalize, T weight,
                                T bias, uint8_t* winner, T* hat, T* y) {
  using V = Vec<T, bytes>;
  using I = decltype(V{} < V{});
  constexpr int64_t lanes = bytes / sizeof(T);
  const int64_t line = q.w * q.batch;
  int64_t at = 0;
  for (int64_t i = 0; i < q.hq(); i++)
    for (int64_t j = 0; j < q.wq(); j++, at += q.batch)
      for (int64_t b = 0; b < q.batch; b += lanes) {
        const T* const from = x + 2 * i * line + 2 * j * q.batch + b;
        V top, best, v;
        I place{};
        load(best, from);
        normalize(best, b);
        top = best * weight + bias;
        PFL_EACH(e, 3, load(v, from + (e + 1) / 2 * line + (e + 1) % 2 * q.batch); normalize(v, b);
                 const V z = v * weight + bias; const I later = (z > top) | (z != z);
                 top = later ? z : top; best = later ? v : best;
                 place = later ? I{} + (e + 1) : place);
        activate<T, bytes>(q.act, top);
        store(y + at + b, top);
        store(hat + at + b, best);
        const Vec<uint8_t, lanes> narrow = __builtin_convertvector(place, Vec<uint8_t, lanes>);
        __builtin_memcpy(winner + at + b, &narrow, lanes);
      }
}

// A channel's slopes from those behind the maxima: only a window's winner has one. finish(g, at, b)
// makes of them those of the input's numbers from `at` on, which are of the samples from b on. Rows
// and columns that no window has are not left out.
template <class T, int bytes, class Finish>
PFL_INLINE void unpool_slopes(const Windows& q, const T* y, const T* dy, const uint8_t* winner,
                              const Finish& finish, T* dx) {
  using V = Vec<T, bytes>;
  using I = decltype(V{} < V{});
  constexpr int64_t lanes = bytes / sizeof(T);
  for (int64_t i = 0; i < q.h; i++)
    for (int64_t j = 0; j < q.w; j++) {
      const bool covered = i / 2 < q.hq() && j / 2 < q.wq();
      const I element = I{} + static_cast<int>(i % 2 * 2 + j % 2);
      const int64_t to = (i * q.w + j) * q.batch, at = (i / 2 * q.wq() + j / 2) * q.batch;
      for (int64_t b = 0; b < q.batch; b += lanes) {
        V g{}, value;
        if (covered) {
          load(g, dy + at + b);
          load(value, y + at + b);
          slope<T>(q.act, g, value);
          Vec<uint8_t, lanes> narrow;
          __builtin_memcpy(&narrow, winner + at + b, lanes);
          const I place = __builtin_convertvector(narrow, I);
          g = place == element ? g : V{};
        }
        finish(g, to + b, b);
        store(dx + to + b, g);
      }
    }
}

}  // namespace pflcore::cpu::chain
