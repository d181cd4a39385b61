// y = ((x w_b^T) * lam) w_a^T, a linear layer made of rank-1 factors, batched over clients. Knows nothing of torch.
//
// The factors whose lam is not 0 are gathered once: pointers to their rows of w_b (padded copies where the inputs do not fill whole
// vectors), and their columns of w_a side by side. What is left is two small dense products and their three gradients.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "isa.h"
#include "scratch.h"
#include "simd.h"
#include "small_gemm.h"

namespace pflcore::cpu {

// Batch strides are not looked at where all clients share the input. Factors with lam == 0 are skipped.
template <class T>
struct Rank1 {
  int64_t n, b, i, f, o;                                     // clients, batch, inputs, factors, outputs
  const T* x; int64_t x_batch, x_row; bool x_shared;         // [n, b, i]
  const T* w_a; int64_t w_a_batch, w_a_row; bool w_a_shared;   // [n, o, f]
  const T* lam; int64_t lam_batch; bool lam_shared;          // [n, f]
  const T* w_b; int64_t w_b_batch, w_b_row; bool w_b_shared;   // [n, f, i]
};

// Gradients in the shapes of the inputs, contiguous, nullptr where not wanted; those of shared inputs are summed over the clients.
template <class T>
struct Rank1Grads {
  T *x, *w_a, *lam, *w_b;
};

namespace rank1_detail {

constexpr double kPieceWork = 1e6;   // multiply-adds, some ten microseconds: less is not worth another thread

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
// The same to an odd number of `to`: rows a power of two apart would fall into a few sets of the cache.
inline int64_t round_up_odd(int64_t n, int64_t to) { return ((n + to - 1) / to | 1) * to; }

// One client's inputs, or those of all clients where they share every factor (then their batches are one long batch).
template <class T>
struct Gathered {
  Gathered(const Rank1<T>& q, int64_t client, bool together, bool all_factors, int64_t lanes)
      : rows(together ? q.n * q.b : q.b),
        active(select(q, client, all_factors)),
        inputs(round_up(q.i, lanes)),
        factors(round_up_odd(static_cast<int64_t>(active.size()), lanes)),
        lam(factors),
        w_a(q.o * factors),
        padded((inputs == q.i ? 0 : rows + static_cast<int64_t>(active.size())) * inputs) {
    const int64_t count = static_cast<int64_t>(active.size());
    const T* from_lam = q.lam + (q.lam_shared ? 0 : client * q.lam_batch);
    for (int64_t k = 0; k < factors; k++) lam[k] = k < count ? from_lam[active[k]] : T(0);
    const T* from_a = q.w_a + (q.w_a_shared ? 0 : client * q.w_a_batch);
    for (int64_t j = 0; j < q.o; j++) {
      const T* from = from_a + j * q.w_a_row;
      T* to = w_a.data + j * factors;
      if (count == q.f) std::memcpy(to, from, sizeof(T) * count);
      else
        for (int64_t k = 0; k < count; k++) to[k] = from[active[k]];
      for (int64_t k = count; k < factors; k++) to[k] = 0;
      a_rows.push_back(to);
    }
    T* pad = padded.data;
    const auto row = [&](const T* from) -> const T* {
      if (inputs == q.i) return from;
      std::memcpy(pad, from, sizeof(T) * q.i);
      std::fill(pad + q.i, pad + inputs, T(0));
      return std::exchange(pad, pad + inputs);
    };
    const T* from_b = q.w_b + (q.w_b_shared ? 0 : client * q.w_b_batch);
    for (int64_t k : active) b_rows.push_back(row(from_b + k * q.w_b_row));
    for (int64_t r = 0; r < rows; r++) {
      const int64_t c = together ? r / q.b : client, b = together ? r % q.b : r;
      x_rows.push_back(row(q.x + (q.x_shared ? 0 : c * q.x_batch) + b * q.x_row));
    }
  }

  static std::vector<int64_t> select(const Rank1<T>& q, int64_t client, bool all_factors) {
    std::vector<int64_t> out;
    const T* lam = q.lam + (q.lam_shared ? 0 : client * q.lam_batch);
    for (int64_t k = 0; k < q.f; k++)
      if (all_factors || lam[k] != 0) out.push_back(k);
    return out;
  }

  int64_t rows;                       // of x and y
  std::vector<int64_t> active;        // the factors that count
  int64_t inputs, factors;            // lengths padded to whole vectors
  Scratch<T> lam, w_a, padded;        // [factors], [o, factors], and padded copies of x and w_b where needed
  std::vector<const T*> x_rows, b_rows, a_rows;
};

template <class P, class T>
std::vector<P> row_pointers(P data, int64_t rows, T stride) {
  std::vector<P> out(rows);
  for (int64_t r = 0; r < rows; r++) out[r] = data + r * stride;
  return out;
}

// hidden[r, k] = x_r . w_b_k for rows begin .. end, zero where factors are padding.
template <class Gemm, class T>
void hidden_rows(const Gathered<T>& in, T* hidden, int64_t begin, int64_t end) {
  const int64_t count = static_cast<int64_t>(in.active.size());
  Gemm::dots(end - begin, count, in.inputs, in.x_rows.data() + begin, in.b_rows.data(), hidden, in.factors);
  for (int64_t r = 0; r < end - begin; r++) std::fill(hidden + r * in.factors + count, hidden + (r + 1) * in.factors, T(0));
}

template <class Gemm, class T>
void scale_rows(const Gathered<T>& in, T* rows, int64_t count) {
  for (int64_t r = 0; r < count; r++) Gemm::scale(rows + r * in.factors, rows + r * in.factors, in.lam.data, in.factors);
}

template <class Gemm, class T>
void forward_rows(const Rank1<T>& q, const Gathered<T>& in, T* y, int64_t begin, int64_t end) {
  Scratch<T> hidden((end - begin) * in.factors);
  hidden_rows<Gemm>(in, hidden.data, begin, end);
  scale_rows<Gemm>(in, hidden.data, end - begin);
  const auto rows = row_pointers<const T*>(hidden.data, end - begin, in.factors);
  Gemm::dots(end - begin, q.o, in.factors, rows.data(), in.a_rows.data(), y + begin * q.o, q.o);
}

// What the second half of the backward pass needs of the first: [rows, factors] each.
template <class T>
struct Between {
  explicit Between(const Gathered<T>& in, bool want_lam)
      : scaled(in.rows * in.factors), back(in.rows * in.factors), dot(want_lam ? in.rows * in.factors : 0) {}
  Scratch<T> scaled;   // hidden * lam
  Scratch<T> back;     // (grad w_a) * lam
  Scratch<T> dot;      // hidden * (grad w_a)
};

template <class Gemm, class T>
void backward_rows(const Rank1<T>& q, const Gathered<T>& in, const T* grad, const Rank1Grads<T>& out, const Between<T>& mid, bool add_x,
                   int64_t begin, int64_t end) {
  const int64_t at = begin * in.factors, rows = end - begin, count = static_cast<int64_t>(in.active.size());
  T *const scaled = mid.scaled.data + at, *const back = mid.back.data + at;
  if (out.w_a || out.lam) hidden_rows<Gemm>(in, scaled, begin, end);
  Gemm::outer(rows, in.factors, q.o, grad + begin * q.o, q.o, 1, in.a_rows.data(), row_pointers(back, rows, in.factors).data(), false);
  if (out.lam) {
    T* const dot = mid.dot.data + at;
    for (int64_t k = 0; k < rows * in.factors; k++) dot[k] = scaled[k] * back[k];
  }
  if (out.w_a) scale_rows<Gemm>(in, scaled, rows);
  scale_rows<Gemm>(in, back, rows);
  if (out.x) Gemm::outer(rows, q.i, count, back, in.factors, 1, in.b_rows.data(), row_pointers(out.x + begin * q.i, rows, q.i).data(), add_x);
}

// The share part .. part + 1 of `parts` of the gradients of w_a, w_b and lam; `add` says for each whether it is added to what is there.
struct Add {
  bool w_a, lam, w_b;
};
template <class Gemm, class T>
void backward_factors(const Rank1<T>& q, const Gathered<T>& in, const T* grad, const Rank1Grads<T>& out, const Between<T>& mid, Add add,
                      int64_t part, int64_t parts) {
  const int64_t count = static_cast<int64_t>(in.active.size());
  if (out.w_b) {
    const int64_t begin = count * part / parts, end = count * (part + 1) / parts;
    std::vector<T*> to;
    for (int64_t k = begin; k < end; k++) to.push_back(out.w_b + in.active[k] * q.i);
    Gemm::outer(end - begin, q.i, in.rows, mid.back.data + begin, 1, in.factors, in.x_rows.data(), to.data(), add.w_b);
    if (!add.w_b) {   // the rows of factors that are off: each gap belongs to the part that has the active row behind it
      const int64_t last = part + 1 == parts ? q.f : end > 0 ? in.active[end - 1] + 1 : 0;
      int64_t next = begin > 0 ? in.active[begin - 1] + 1 : 0, k = begin;
      for (; next < last; next++) {
        if (k < end && in.active[k] == next) k++;
        else std::fill(out.w_b + next * q.i, out.w_b + (next + 1) * q.i, T(0));
      }
    }
  }
  if (out.w_a) {
    const auto rows = row_pointers<const T*>(mid.scaled.data, in.rows, in.factors);
    const int64_t begin = q.o * part / parts, size = q.o * (part + 1) / parts - begin;
    T* const to = out.w_a + begin * q.f;
    if (count == q.f) {
      Gemm::outer(size, q.f, in.rows, grad + begin, 1, q.o, rows.data(), row_pointers(to, size, q.f).data(), add.w_a);
    } else {
      Scratch<T> dense(size * in.factors);
      Gemm::outer(size, in.factors, in.rows, grad + begin, 1, q.o, rows.data(), row_pointers(dense.data, size, in.factors).data(), false);
      if (!add.w_a) std::fill(to, to + size * q.f, T(0));
      for (int64_t j = 0; j < size; j++)
        for (int64_t k = 0; k < count; k++) to[j * q.f + in.active[k]] += dense[j * in.factors + k];
    }
  }
  if (out.lam && part == 0)
    for (int64_t k = 0; k < q.f; k++) {   // every factor is gathered where this gradient is wanted
      T sum = add.lam ? out.lam[k] : T(0);
      for (int64_t r = 0; r < in.rows; r++) sum += mid.dot[r * in.factors + k];
      out.lam[k] = sum;
    }
}

inline int64_t pieces(double work, int64_t most) { return std::max<int64_t>(1, std::min(most, static_cast<int64_t>(work / kPieceWork))); }

template <class Gemm, class T, class Parallel>
void forward(const Rank1<T>& q, T* y, const Parallel& parallel) {
  const bool together = q.n == 1 || (q.w_a_shared && q.lam_shared && q.w_b_shared);
  if (!together) {
    const double work = static_cast<double>(q.n) * q.b * q.f * (q.i + q.o);
    const int64_t parts = pieces(work, q.n);
    parallel(parts, [&, parts](int64_t begin, int64_t end) {
      for (int64_t c = q.n * begin / parts; c < q.n * end / parts; c++) {
        const Gathered<T> in(q, c, false, false, Gemm::lanes);
        forward_rows<Gemm>(q, in, y + c * q.b * q.o, 0, q.b);
      }
    });
    return;
  }
  const Gathered<T> in(q, 0, true, false, Gemm::lanes);
  const double work = static_cast<double>(in.rows) * in.active.size() * (q.i + q.o);
  const int64_t parts = pieces(work, (in.rows + 3) / 4);
  parallel(parts, [&, parts](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; part++) forward_rows<Gemm>(q, in, y, in.rows * part / parts, in.rows * (part + 1) / parts);
  });
}

template <class Gemm, class T, class Parallel>
void backward(const Rank1<T>& q, const T* grad, const Rank1Grads<T>& out, const Parallel& parallel) {
  const bool want_lam = out.lam != nullptr;
  if (q.n == 1 || (q.w_a_shared && q.lam_shared && q.w_b_shared && !(q.x_shared && out.x))) {   // one long batch
    const Gathered<T> in(q, 0, true, want_lam, Gemm::lanes);
    const Between<T> mid(in, want_lam);
    const double work = 2.0 * in.rows * in.active.size() * (q.i + q.o);
    const int64_t row_parts = pieces(work, (in.rows + 3) / 4), factor_parts = pieces(work, 64);
    parallel(row_parts, [&, row_parts](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; part++)
        backward_rows<Gemm>(q, in, grad, out, mid, false, in.rows * part / row_parts, in.rows * (part + 1) / row_parts);
    });
    parallel(factor_parts, [&, factor_parts](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; part++) backward_factors<Gemm>(q, in, grad, out, mid, Add{}, part, factor_parts);
    });
    return;
  }
  // Client by client. Gradients of shared inputs are added up in the clients' order, so these runs have one piece.
  const bool sums = (q.x_shared && out.x) || (q.w_a_shared && out.w_a) || (q.lam_shared && out.lam) || (q.w_b_shared && out.w_b);
  const double work = 4.0 * q.n * q.b * q.f * (q.i + q.o);
  const int64_t parts = sums ? 1 : pieces(work, q.n);
  parallel(parts, [&, parts](int64_t begin, int64_t end) {
    for (int64_t c = q.n * begin / parts; c < q.n * end / parts; c++) {
      const auto at = [c](T* p, bool shared, int64_t size) { return p && !shared ? p + c * size : p; };
      const Rank1Grads<T> own{at(out.x, q.x_shared, q.b * q.i), at(out.w_a, q.w_a_shared, q.o * q.f), at(out.lam, q.lam_shared, q.f),
                              at(out.w_b, q.w_b_shared, q.f * q.i)};
      const Gathered<T> in(q, c, false, want_lam, Gemm::lanes);
      const Between<T> mid(in, want_lam);
      const T* g = grad + c * q.b * q.o;
      backward_rows<Gemm>(q, in, g, own, mid, q.x_shared && c > 0, 0, q.b);
      backward_factors<Gemm>(q, in, g, own, mid, Add{q.w_a_shared && c > 0, q.lam_shared && c > 0, q.w_b_shared && c > 0}, 0, 1);
    }
  });
}

}  // namespace rank1_detail

// y [n, b, o], contiguous.
template <class T, class Parallel>
void rank1_forward(const Rank1<T>& q, T* y, const Parallel& parallel) {
  namespace d = rank1_detail;
  if (q.n == 0 || q.b == 0 || q.o == 0) return;
#if PFL_X86
  if (isa() == Isa::avx512) return d::forward<SmallGemmAvx512<T>>(q, y, parallel);
  if (isa() == Isa::avx2) return d::forward<SmallGemmAvx2<T>>(q, y, parallel);
#endif
  d::forward<SmallGemmPlain<T>>(q, y, parallel);
}

// grad [n, b, o], contiguous.
template <class T, class Parallel>
void rank1_backward(const Rank1<T>& q, const T* grad, const Rank1Grads<T>& out, const Parallel& parallel) {
  namespace d = rank1_detail;
#if PFL_X86
  if (isa() == Isa::avx512) return d::backward<SmallGemmAvx512<T>>(q, grad, out, parallel);
  if (isa() == Isa::avx2) return d::backward<SmallGemmAvx2<T>>(q, grad, out, parallel);
#endif
  d::backward<SmallGemmPlain<T>>(q, grad, out, parallel);
}

}  // namespace pflcore::cpu
