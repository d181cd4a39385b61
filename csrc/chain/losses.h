// The losses of a chain, with what is right and their slopes.
#pragma once
#include "chain.h"
#include "tile.h"

namespace pflcore::cpu::chain {

// scores [classes][batch] with targets [batch] (of the linear loss [classes][batch]) -> each
// sample's loss [batch], whether it is right [batch] (by its scores alone: infinite ones have an
// order, and with a NaN nothing is right; the linear loss knows no right), and the slopes of the
// losses times `share` [classes][batch], which may be the scores' own place; loss, right and slope
// may be nullptr.
template <class T, int bytes>
PFL_TARGET void losses(Loss kind, int64_t classes, int64_t batch, T share, const T* score,
                       const T* target, T* loss, uint8_t* right, T* slope) {
  using V = Vec<T, bytes>;
  using I = decltype(V{} < V{});
  constexpr int64_t lanes = bytes / sizeof(T);
  for (int64_t b = 0; b < batch; b += lanes) {
    const int64_t some = std::min(lanes, batch - b);
    V value, s;
    I hit;
    T aim[lanes] = {};
    for (int64_t i = 0; i < some; i++) aim[i] = target[b + i];
    V y;
    load(y, aim);
    if (kind == Loss::cross_entropy) {
      V top, total{}, own{};
      I best{};
      load(top, score + b);
      for (int c = 1; c < classes; c++) {
        load(s, score + c * batch + b);
        const I later =
            (s > top) | ((s != s) & (top == top));  // the first of equals, NaN above all
        top = later ? s : top;
        best = later ? I{} + c : best;
      }
      for (int64_t c = 0; c < classes; c++) {
        load(s, score + c * batch + b);
        own = y == static_cast<T>(c) ? s : own;
        s -= top;
        exponential<T, bytes>(s);
        total += s;
      }
      hit = (best == __builtin_convertvector(y, I)) & (top == top);  // top is NaN where one is
      value = total;
      lane_by_lane(value, [](T t) { return std::log(t); });
      value += top - own;
      const V part = share / total;
      for (int64_t c = 0; slope && c < classes; c++) {
        load(s, score + c * batch + b);
        s -= top;
        exponential<T, bytes>(s);
        s *= part;
        s -= y == static_cast<T>(c) ? V{} + share : V{};
        store_first(slope + c * batch + b, s, some);
      }
    } else if (kind == Loss::linear) {
      value = V{}, hit = I{};
      for (int64_t c = 0; c < classes; c++) {
        load(s, score + c * batch + b);
        load(y, target + c * batch + b);
        value += s * y;
        if (slope) store_first(slope + c * batch + b, share * y, some);
      }
    } else {
      load(s, score + b);
      const V sign = y > 0 ? V{} + T(1) : V{} - T(1);
      hit = ((s > 0) == (y > 0)) & (s == s);
      V g;
      if (kind == Loss::hinge) {
        const V margin = T(1) - sign * s;
        value = margin < 0 ? V{} : margin;
        g = margin <= 0 ? V{} : -sign * share;          // as relu: none on the very edge
      } else if (kind == Loss::binary_cross_entropy) {  // log(1 + e^s) - y s, without overflow
        V e = s < 0 ? s : -s, soft;
        exponential<T, bytes>(e);
        soft = e;
        lane_by_lane(soft, [](T t) { return std::log1p(t); });
        value = (s < 0 ? V{} : s) + soft - y * s;
        g = share * ((s < 0 ? e : e - e + T(1)) / (T(1) + e) - y);
      } else {
        const T factor = kind == Loss::squared ? T(1) : T(.5);
        const V gap = s - y;
        value = factor * gap * gap;
        g = 2 * factor * share * gap;
      }
      if (slope) store_first(slope + b, g, some);
    }
    if (loss) store_first(loss + b, value, some);
    for (int64_t i = 0; right && i < some; i++) right[b + i] = hit[i] != 0;
  }
}

}  // namespace pflcore::cpu::chain
