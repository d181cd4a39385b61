// Pooling of a chain, on plain values [channel][row][column][sample].
#pragma once
#include "layer.h"

namespace pflcore::cpu::chain {

// Pooling of any window. `ph`, `pw`: what is above and left of the image, and behind it, counts as
// 0 in a mean and in no maximum.
struct Pool {
  int64_t c, h, w, mode, kh, kw, sh, sw, ph, pw, batch;
  int64_t ho() const { return (h + 2 * ph - kh) / sh + 1; }
  int64_t wo() const { return (w + 2 * pw - kw) / sw + 1; }
};

// The part of a window that lies inside of the image, in rows and columns.
struct Window {
  int64_t top, bottom, left, right;
  Window(const Pool& q, int64_t place)
      : top(place / q.wo() % q.ho() * q.sh - q.ph), left(place % q.wo() * q.sw - q.pw) {
    bottom = std::min(q.h, top + q.kh), right = std::min(q.w, left + q.kw);
    top = std::max<int64_t>(0, top), left = std::max<int64_t>(0, left);
  }
};

template <class T, int bytes>
PFL_TARGET void pool_forward(const Pool& q, const T* x, T* y) {
  using V = Vec<T, bytes>;
  const int64_t places = q.ho() * q.wo();
  for (int64_t p = 0; p < q.c * places; p++) {
    const Window at(q, p % places);
    const T* const image = x + p / places * q.h * q.w * q.batch;
    for (int64_t b = 0; b < q.batch; b += bytes / sizeof(T)) {
      V top, v;
      load(top, image + (at.top * q.w + at.left) * q.batch + b);
      for (int64_t i = at.top; i < at.bottom; i++)
        for (int64_t j = at.left + (i == at.top); j < at.right; j++) {
          load(v, image + (i * q.w + j) * q.batch + b);
          if (q.mode == kMax)
            top = ((v > top) | (v != v)) ? v : top;
          else
            top += v;
        }
      if (q.mode == kMean) top /= static_cast<T>(q.kh * q.kw);
      store(y + p * q.batch + b, top);
    }
  }
}
// `add`: whether the slopes are added to those in dx.
template <class T, int bytes>
PFL_TARGET void pool_backward(const Pool& q, bool add, const T* x, const T* dy, T* dx) {
  using V = Vec<T, bytes>;
  using I = decltype(V{} < V{});
  const int64_t places = q.ho() * q.wo();
  if (!add) std::fill_n(dx, q.c * q.h * q.w * q.batch, T(0));
  for (int64_t p = 0; p < q.c * places; p++) {
    const Window at(q, p % places);
    const int64_t image = p / places * q.h * q.w * q.batch;
    for (int64_t b = 0; b < q.batch; b += bytes / sizeof(T)) {
      V g, v, top;
      I best{};
      load(g, dy + p * q.batch + b);
      keep_first<T>(g, q.batch - b);
      if (q.mode == kMean) g /= static_cast<T>(q.kh * q.kw);
      load(top, x + image + (at.top * q.w + at.left) * q.batch + b);
      int k = 0;
      for (int64_t i = at.top; i < at.bottom && q.mode == kMax; i++)
        for (int64_t j = at.left; j < at.right; j++, k++) {
          load(v, x + image + (i * q.w + j) * q.batch + b);
          const I later = (v > top) | (v != v);
          top = later ? v : top;
          best = later ? I{} + k : best;
        }
      k = 0;
      for (int64_t i = at.top; i < at.bottom; i++)
        for (int64_t j = at.left; j < at.right; j++, k++) {
          T* const to = dx + image + (i * q.w + j) * q.batch + b;
          load(v, to);
          v += q.mode == kMax ? (best == k ? g : V{}) : g;
          store(to, v);
        }
    }
  }
}

template <class T, int bytes>
struct PoolLayer : Layer {
  static constexpr int64_t kind = ChainLayer::pool;
  static constexpr bool adds_slopes = true;
  Pool q;

  explicit PoolLayer(Lines& lines) {
    const ChainLayer& l = lines.line();
    const auto [c, h, w] = lines.shape;
    q = {c, h, w, l[0], l[1], l[2], l[3], l[4], l[5], l[6], lines.batch()};
    demand(q.mode == kMax || q.mode == kMean);
    for (int64_t size : {q.kh, q.kw, q.sh, q.sw}) demand(size > 0);
    demand(q.ph >= 0 && q.ph <= q.kh / 2 && q.kh <= h + 2 * q.ph);
    demand(q.pw >= 0 && q.pw <= q.kw / 2 && q.kw <= w + 2 * q.pw);
    lines.shape = {c, q.ho(), q.wo()};
  }
  void forward(const Forward<T>& f) const { pool_forward<T, bytes>(q, f.x, f.y); }
  void backward(const Backward<T>& b) const { pool_backward<T, bytes>(q, b.adds, b.x, b.dy, b.dx); }
};

}  // namespace pflcore::cpu::chain
