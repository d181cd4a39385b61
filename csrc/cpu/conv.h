// 2-D convolution of small images with few channels, stride 1, forward and backward: where a library's blocked layouts cost more than they
// save. Knows nothing of torch.
//
// Nothing is unfolded. Images lie in rows of their padded width `wp`, and outputs are computed for every start in that row, so that shifting
// the window by (i, j) is adding i * wp + j to a pointer: the "unfolded" matrix is a list of pointers into the image, and all three products
// are those of small_gemm.h. The columns at a row's end where the window would wrap around are computed and dropped.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "isa.h"
#include "scratch.h"
#include "small_gemm.h"

namespace pflcore::cpu {

template <class T>
struct Conv {
  int64_t n, c, h, w;              // images and their size
  int64_t o, kh, kw, pad_h, pad_w; // outputs, the kernel, zeros around the image
  const T *x, *weight, *bias;      // [n, c, h, w], [o, c, kh, kw], [o] or nullptr

  int64_t hp() const { return h + 2 * pad_h; }
  int64_t wp() const { return w + 2 * pad_w; }
  int64_t ho() const { return hp() - kh + 1; }
  int64_t wo() const { return wp() - kw + 1; }
  int64_t taps() const { return kh * kw; }
};

template <class T>
struct ConvGrads {
  T *x, *weight, *bias;            // those not wanted are nullptr
};

namespace conv_detail {

constexpr int64_t kImages = 4;     // of a piece: its gradients are added up before they meet the others'

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// One padded image [c, hp * wp] with zeros enough behind it for whole vectors, the window's pointers into it, and a row of ones behind them:
// what a bias sees.
template <class Gemm, class T>
struct Image {
  const Conv<T>& q;
  const int64_t plane = q.hp() * q.wp(), wide = round_up((q.ho() - 1) * q.wp() + q.wo(), Gemm::lanes);
  Scratch<T> data, ones;
  Scratch<const T*> at;            // [c * taps + 1] where each channel's window begins, shifted by each tap

  explicit Image(const Conv<T>& conv)
      : q(conv), data(conv.c * conv.hp() * conv.wp() + Gemm::lanes), ones(wide), at(conv.c * conv.taps() + 1) {
    std::fill(data.data, data.data + q.c * plane + Gemm::lanes, T(0));
    std::fill(ones.data, ones.data + wide, T(1));
    int64_t k = 0;
    for (int64_t c = 0; c < q.c; c++)
      for (int64_t i = 0; i < q.kh; i++)
        for (int64_t j = 0; j < q.kw; j++, k++) at[k] = data.data + c * plane + i * q.wp() + j;
    at[k] = ones.data;
  }
  void read(int64_t image) {
    const T* from = q.x + image * q.c * q.h * q.w;
    for (int64_t c = 0; c < q.c; c++)
      for (int64_t y = 0; y < q.h; y++, from += q.w) std::copy(from, from + q.w, data.data + c * plane + (y + q.pad_h) * q.wp() + q.pad_w);
  }
};

// The gradient of one image's outputs [o, front + hp * wp] in rows as wide as the image's, zero where no output is.
template <class Gemm, class T>
struct Slope {
  const Conv<T>& q;
  const int64_t front = (q.kh - 1) * q.wp() + q.kw - 1, row = round_up(front + q.hp() * q.wp(), Gemm::lanes) + Gemm::lanes;
  Scratch<T> data;
  Scratch<const T*> at;            // [o] first output

  explicit Slope(const Conv<T>& conv) : q(conv), data(conv.o * row), at(conv.o) {
    std::fill(data.data, data.data + q.o * row, T(0));
    for (int64_t o = 0; o < q.o; o++) at[o] = data.data + o * row + front;
  }
  void read(const T* grad, int64_t image) {
    const T* from = grad + image * q.o * q.ho() * q.wo();
    for (int64_t o = 0; o < q.o; o++)
      for (int64_t y = 0; y < q.ho(); y++, from += q.wo()) std::copy(from, from + q.wo(), data.data + o * row + front + y * q.wp());
  }
};

template <class Gemm, class T, class Parallel>
void forward(const Conv<T>& q, T* out, const Parallel& parallel) {
  const int64_t k = q.c * q.taps(), ho = q.ho(), wo = q.wo();
  parallel((q.n + kImages - 1) / kImages, [&](int64_t begin, int64_t end) {
    Image<Gemm, T> image(q);
    Scratch<T> wide(q.o * image.wide);
    Scratch<T*> rows(q.o);
    for (int64_t o = 0; o < q.o; o++) rows[o] = wide.data + o * image.wide;
    for (int64_t i = begin * kImages; i < std::min(q.n, end * kImages); i++) {
      image.read(i);
      Gemm::outer(q.o, image.wide, k, q.weight, k, 1, image.at.data, rows.data, false);
      T* to = out + i * q.o * ho * wo;
      for (int64_t o = 0; o < q.o; o++) {
        const T bias = q.bias ? q.bias[o] : T(0);
        for (int64_t y = 0; y < ho; y++, to += wo)
          for (int64_t x = 0; x < wo; x++) to[x] = rows[o][y * q.wp() + x] + bias;
      }
    }
  });
}

template <class Gemm, class T, class Parallel>
void backward(const Conv<T>& q, const T* grad, const ConvGrads<T>& out, const Parallel& parallel) {
  const int64_t k = q.c * q.taps(), parts = (q.n + kImages - 1) / kImages, plane = q.hp() * q.wp();
  Scratch<T> turned(out.x ? q.c * q.o * q.taps() : 0);   // [c, o, taps]
  if (out.x)
    for (int64_t c = 0; c < q.c; c++)
      for (int64_t o = 0; o < q.o; o++) std::copy_n(q.weight + (o * q.c + c) * q.taps(), q.taps(), turned.data + (c * q.o + o) * q.taps());
  const bool sum = out.weight || out.bias;
  std::vector<T> partial(static_cast<size_t>(sum ? parts * q.o * (k + 1) : 0), T(0));   // of the weights and, last in each row, of the bias
  parallel(parts, [&](int64_t begin, int64_t end) {
    Image<Gemm, T> image(q);
    Slope<Gemm, T> slope(q);
    Scratch<T> product(q.o * (k + 1)), back(out.x ? q.c * round_up(plane, Gemm::lanes) : 0);
    Scratch<const T*> taps(q.o * q.taps());
    Scratch<T*> rows(q.c);
    for (int64_t o = 0, t = 0; o < q.o; o++)
      for (int64_t i = 0; i < q.kh; i++)
        for (int64_t j = 0; j < q.kw; j++, t++) taps[t] = slope.at[o] - i * q.wp() - j;
    for (int64_t c = 0; c < q.c; c++) rows[c] = back.data + c * round_up(plane, Gemm::lanes);
    for (int64_t part = begin; part < end; part++)
      for (int64_t i = part * kImages; i < std::min(q.n, (part + 1) * kImages); i++) {
        slope.read(grad, i);
        if (sum) {
          image.read(i);
          Gemm::dots(q.o, k + 1, image.wide, slope.at.data, image.at.data, product.data, k + 1);
          T* to = partial.data() + part * q.o * (k + 1);
          for (int64_t e = 0; e < q.o * (k + 1); e++) to[e] += product[e];
        }
        if (!out.x) continue;
        Gemm::outer(q.c, round_up(plane, Gemm::lanes), q.o * q.taps(), turned.data, q.o * q.taps(), 1, taps.data, rows.data, false);
        T* to = out.x + i * q.c * q.h * q.w;
        for (int64_t c = 0; c < q.c; c++)
          for (int64_t y = 0; y < q.h; y++, to += q.w) std::copy_n(rows[c] + (y + q.pad_h) * q.wp() + q.pad_w, q.w, to);
      }
  });
  for (int64_t part = 1; sum && part < parts; part++)
    for (int64_t e = 0; e < q.o * (k + 1); e++) partial[e] += partial[part * q.o * (k + 1) + e];
  for (int64_t o = 0; o < q.o; o++) {
    const T* from = partial.data() + o * (k + 1);
    if (out.weight) parts > 0 ? std::copy_n(from, k, out.weight + o * k) : std::fill_n(out.weight + o * k, k, T(0));
    if (out.bias) out.bias[o] = parts > 0 ? from[k] : T(0);
  }
}

}  // namespace conv_detail

// out [n, o, ho, wo], contiguous; at least one window must fit the padded image.
template <class T, class Parallel>
void conv_forward(const Conv<T>& q, T* out, const Parallel& parallel) {
  namespace d = conv_detail;
#if PFL_X86
  if (isa() == Isa::avx512) return d::forward<SmallGemmAvx512<T>>(q, out, parallel);
  if (isa() == Isa::avx2) return d::forward<SmallGemmAvx2<T>>(q, out, parallel);
#endif
  d::forward<SmallGemmPlain<T>>(q, out, parallel);
}

// grad [n, o, ho, wo], contiguous.
template <class T, class Parallel>
void conv_backward(const Conv<T>& q, const T* grad, const ConvGrads<T>& out, const Parallel& parallel) {
  namespace d = conv_detail;
#if PFL_X86
  if (isa() == Isa::avx512) return d::backward<SmallGemmAvx512<T>>(q, grad, out, parallel);
  if (isa() == Isa::avx2) return d::backward<SmallGemmAvx2<T>>(q, grad, out, parallel);
#endif
  d::backward<SmallGemmPlain<T>>(q, grad, out, parallel);
}

}  // namespace pflcore::cpu
