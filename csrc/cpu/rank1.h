// y = ((x w_b^T) * lam) w_a^T, a linear layer made of rank-1 factors, batched over clients. Knows
// nothing of torch.
//
// The factors whose lam is not 0 are gathered once, as pointers to their rows of w_b and of w_a
// transposed. What is left is two small dense products, and their gradients, over those rows alone.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "../inputs.h"
#include "isa.h"
#include "scratch.h"
#include "simd.h"
#include "small_gemm.h"

namespace pflcore::cpu {

namespace rank1_detail {

#ifdef PFL_SMALL_PIECES  // tests: all paths at small sizes
constexpr double kPieceWork = 1e3, kAloneWork = 2e3;
#else
constexpr double kPieceWork = 1e6;  // multiply-adds of a piece: some ten microseconds
constexpr double kAloneWork = 4e6;  // less is not worth another thread
#endif

// n up to an odd number of `to`: rows a power of two apart would fall into a few sets of the cache.
inline int64_t round_up_odd(int64_t n, int64_t to) { return ((n + to - 1) / to | 1) * to; }

template <class T, class P>
std::vector<T*> row_pointers(P data, int64_t rows, int64_t stride) {
  std::vector<T*> out(rows);
  for (int64_t r = 0; r < rows; r++) out[r] = data + r * stride;
  return out;
}

// small_gemm.h on the instruction set that runs.
template <class T>
void dots(int64_t rows, int64_t cols, int64_t k, const T* const* a, const T* const* b, T* c,
          int64_t c_row) {
  on_isa([&](auto bytes) PFL_LAMBDA { cpu::dots<bytes>(rows, cols, k, a, b, c, c_row); });
}
template <class T>
void outer(int64_t rows, int64_t width, int64_t k, const T* a, int64_t a_row, int64_t a_step,
           const T* const* b, T* const* c, bool add) {
  on_isa([&](auto bytes)
             PFL_LAMBDA { cpu::outer<bytes>(rows, width, k, a, a_row, a_step, b, c, add); });
}
// to[j, i] = from[i, j] for rows x cols of `from`.
template <class T>
void transpose(T* to, int64_t to_row, const T* from, int64_t from_row, int64_t rows, int64_t cols) {
  on_isa([&](auto bytes) PFL_LAMBDA {
    turn<bytes>(to, to_row, [&](int64_t r) PFL_LAMBDA { return from + r * from_row; }, rows, cols);
  });
}

// Rows whose length is a whole number of vectors: the rows themselves, or copies padded with 0.
template <class T>
struct Padded {
  Padded(int64_t rows, int64_t width, int64_t lanes)
      : width(width), padded(up(width, lanes)), copies(padded == width ? 0 : rows * padded) {
    row.reserve(rows);
  }
  void add(const T* from) {
    if (padded != width) {
      T* const to = copies.data + row.size() * padded;
      std::copy(from, from + width, to);
      std::fill(to + width, to + padded, T(0));
      from = to;
    }
    row.push_back(from);
  }
  int64_t width, padded;
  Scratch<T> copies;
  std::vector<const T*> row;
};

// One client's inputs, or those of all clients where they share every factor (then their batches
// are one long batch).
template <class T>
struct Gathered {
  Gathered(const Rank1<T>& q, int64_t client, bool together, bool all_factors)
      : rows(together ? q.n * q.b : q.b),
        active(select(q, client, all_factors)),
        count(static_cast<int64_t>(active.size())),
        stride(round_up_odd(count, lanes_of<T>())),
        outputs(up(q.o, lanes_of<T>())),
        x(rows, q.i, lanes_of<T>()),
        w_b(count, q.i, lanes_of<T>()),
        transposed(q.f * outputs),
        lam(stride),
        zeros(all_factors ? w_b.padded : 0) {
    const T* const lam_row = q.lam + (q.lam_shared ? 0 : client * q.lam_batch);
    const T* const from_a = q.w_a + (q.w_a_shared ? 0 : client * q.w_a_batch);
    const T* const from_b = q.w_b + (q.w_b_shared ? 0 : client * q.w_b_batch);
    transpose(transposed.data, outputs, from_a, q.w_a_row, q.o, q.f);
    for (int64_t k = 0; k < stride; k++) lam[k] = k < count ? lam_row[active[k]] : T(0);
    for (int64_t k : active) {
      T* const a = transposed.data + k * outputs;
      std::fill(a + q.o, a + outputs, T(0));
      w_a.push_back(a);
      w_b.add(from_b + k * q.w_b_row);
      counted_w_b.push_back(lam_row[k] != 0 ? w_b.row.back() : zeros.data);
    }
    std::fill_n(zeros.data, all_factors ? w_b.padded : 0, T(0));
    for (int64_t r = 0; r < rows; r++) {
      const int64_t c = together ? r / q.b : client, b = together ? r % q.b : r;
      x.add(q.x + (q.x_shared ? 0 : c * q.x_batch) + b * q.x_row);
    }
  }

  static std::vector<int64_t> select(const Rank1<T>& q, int64_t client, bool all_factors) {
    std::vector<int64_t> out;
    const T* lam = q.lam + (q.lam_shared ? 0 : client * q.lam_batch);
    for (int64_t k = 0; k < q.f; k++)
      if (all_factors || lam[k] != 0) out.push_back(k);
    return out;
  }

  int64_t rows;                 // of x and y
  std::vector<int64_t> active;  // the factors that count
  int64_t count, stride;        // how many, and the row stride of what has one column for each
  int64_t outputs;              // padded to whole vectors
  Padded<T> x, w_b;             // rows of the batch, rows of the active factors
  Scratch<T> transposed;        // [f, outputs]: w_a^T
  std::vector<const T*> w_a;    // its rows of the active factors
  Scratch<T> lam;               // [stride], 0 after the last factor
  Scratch<T> zeros;             // a row of w_b
  std::vector<const T*> counted_w_b;  // w_b's rows, zeros where a factor is off
};

// rows * lam, column by column. A factor that is off gives 0 whatever it holds.
template <class T>
void scale(T* rows, int64_t n, const Gathered<T>& in) {
  on_isa([&](auto bytes) PFL_LAMBDA {
    for (int64_t r = 0; r < n; r++)
      for (int64_t k = 0; k < in.stride; k += bytes / sizeof(T)) {
        T* const to = rows + r * in.stride + k;
        Vec<T, bytes> v, s;
        load(v, to);
        load(s, in.lam.data + k);
        v = s != 0 ? v * s : Vec<T, bytes>{};
        store(to, v);
      }
  });
}

template <class T>
void forward_rows(const Rank1<T>& q, const Gathered<T>& in, T* y, int64_t begin, int64_t end) {
  const int64_t rows = end - begin;
  Scratch<T> hidden(rows * in.stride);
  dots(rows, in.count, in.x.padded, in.x.row.data() + begin, in.w_b.row.data(), hidden.data,
       in.stride);
  scale(hidden.data, rows, in);
  outer(rows, q.o, in.count, hidden.data, in.stride, 1, in.w_a.data(),
        row_pointers<T>(y + begin * q.o, rows, q.o).data(), false);
}

// The values that the second half of the backward pass needs of the first: [rows, stride] each.
template <class T>
struct Between {
  Between(const Rank1<T>& q, const Gathered<T>& in, const T* grad_rows, bool want_lam)
      : grad(in.rows, q.o, lanes_of<T>()),
        scaled(in.rows * in.stride),
        back(in.rows * in.stride),
        dot(want_lam ? in.rows * in.stride : 0) {
    for (int64_t r = 0; r < in.rows; r++) grad.add(grad_rows + r * q.o);
  }
  Padded<T> grad;
  Scratch<T> scaled;  // hidden * lam
  Scratch<T> back;    // (grad w_a) * lam
  Scratch<T> dot;     // hidden * (grad w_a)
};

template <class T>
void backward_rows(const Rank1<T>& q, const Gathered<T>& in, const Rank1Grads<T>& out,
                   const Between<T>& mid, bool add_x, int64_t begin, int64_t end) {
  const int64_t at = begin * in.stride, rows = end - begin;
  T *const scaled = mid.scaled.data + at, *const back = mid.back.data + at;
  if (out.w_a || out.lam)
    dots(rows, in.count, in.x.padded, in.x.row.data() + begin, in.w_b.row.data(), scaled,
         in.stride);
  dots(rows, in.count, in.outputs, mid.grad.row.data() + begin, in.w_a.data(), back, in.stride);
  if (out.lam)
    for (int64_t r = 0; r < rows; r++)
      for (int64_t k = r * in.stride; k < r * in.stride + in.count; k++)
        mid.dot[at + k] = scaled[k] * back[k];
  if (out.w_a) scale(scaled, rows, in);
  scale(back, rows, in);
  if (out.x)
    outer(rows, q.i, in.count, back, in.stride, 1, in.counted_w_b.data(),
          row_pointers<T>(out.x + begin * q.i, rows, q.i).data(), add_x);
}

struct Add {  // which gradients are added to what is there
  bool w_a, lam, w_b;
};

// The gradients of w_a, w_b and lam for the factors' share part .. part + 1 of `parts`: some active
// ones, and those off before them.
template <class T>
void backward_factors(const Rank1<T>& q, const Gathered<T>& in, const Rank1Grads<T>& out,
                      const Between<T>& mid, Add add, int64_t part, int64_t parts) {
  const int64_t begin = in.count * part / parts, end = in.count * (part + 1) / parts;
  const int64_t first = begin > 0 ? in.active[begin - 1] + 1 : 0,
                last = part + 1 == parts ? q.f
                       : end > 0         ? in.active[end - 1] + 1
                                         : 0;
  // The rows [last - first, width] of a gradient: products where a factor is on, 0 elsewhere. The
  // products of an active one that is off go to waste: 0 times infinity is NaN.
  const auto fill = [&](T* grad, int64_t width, const T* columns, const T* const* rows, bool keep) {
    std::vector<T*> to;
    Scratch<T> waste(width);
    for (int64_t f = first, k = begin; f < last; f++) {
      T* const row = grad + (f - first) * width;
      const bool active = k < end && in.active[k] == f, on = active && in.lam[k] != 0;
      if (active) to.push_back(on ? row : waste.data), k++;
      if (!on && !keep) std::fill(row, row + width, T(0));
    }
    outer(end - begin, width, in.rows, columns + begin, 1, in.stride, rows, to.data(), keep);
  };
  if (out.w_b) fill(out.w_b + first * q.i, q.i, mid.back.data, in.x.row.data(), add.w_b);
  if (out.w_a && last > first) {
    Scratch<T> rows((last - first) * q.o);
    fill(rows.data, q.o, mid.scaled.data, mid.grad.row.data(), false);
    if (add.w_a) {
      for (int64_t j = 0; j < q.o; j++)
        for (int64_t f = first; f < last; f++) out.w_a[j * q.f + f] += rows[(f - first) * q.o + j];
    } else {
      transpose(out.w_a + first, q.f, rows.data, q.o, last - first, q.o);
    }
  }
  if (out.lam)
    for (int64_t f = first; f < last;
         f++) {  // every factor is gathered where this gradient is wanted
      T sum = add.lam ? out.lam[f] : T(0);
      for (int64_t r = 0; r < in.rows; r++) sum += mid.dot[r * in.stride + f];
      out.lam[f] = sum;
    }
}

inline int64_t pieces(double work, int64_t most) {
  return work < kAloneWork
             ? 1
             : std::max<int64_t>(1, std::min(most, static_cast<int64_t>(work / kPieceWork)));
}

template <class T, class Parallel>
void forward(const Rank1<T>& q, T* y, const Parallel& parallel) {
  if (q.n == 1 || (q.w_a_shared && q.lam_shared && q.w_b_shared)) {  // one long batch
    const Gathered<T> in(q, 0, true, false);
    const int64_t parts =
        pieces(static_cast<double>(in.rows) * in.count * (q.i + q.o), (in.rows + 3) / 4);
    parallel(parts, [&, parts](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; part++)
        forward_rows(q, in, y, in.rows * part / parts, in.rows * (part + 1) / parts);
    });
    return;
  }
  const int64_t parts = pieces(static_cast<double>(q.n) * q.b * q.f * (q.i + q.o), q.n);
  parallel(parts, [&, parts](int64_t begin, int64_t end) {
    for (int64_t c = q.n * begin / parts; c < q.n * end / parts; c++)
      forward_rows(q, Gathered<T>(q, c, false, false), y + c * q.b * q.o, 0, q.b);
  });
}

template <class T, class Parallel>
void backward(const Rank1<T>& q, const T* grad, const Rank1Grads<T>& out,
              const Parallel& parallel) {
  const bool want_lam = out.lam != nullptr;
  if (q.n == 1 ||
      (q.w_a_shared && q.lam_shared && q.w_b_shared && !(q.x_shared && out.x))) {  // one long batch
    const Gathered<T> in(q, 0, true, want_lam);
    const Between<T> mid(q, in, grad, want_lam);
    const double work = 2.0 * in.rows * in.count * (q.i + q.o);
    const int64_t row_parts = pieces(work, (in.rows + 3) / 4), factor_parts = pieces(work, 64);
    parallel(row_parts, [&, row_parts](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; part++)
        backward_rows(q, in, out, mid, false, in.rows * part / row_parts,
                      in.rows * (part + 1) / row_parts);
    });
    parallel(factor_parts, [&, factor_parts](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; part++)
        backward_factors(q, in, out, mid, Add{}, part, factor_parts);
    });
    return;
  }
  // Client by client. Gradients of shared inputs are added up in the clients' order, so these runs
  // have one piece.
  const bool sums = (q.x_shared && out.x) || (q.w_a_shared && out.w_a) ||
                    (q.lam_shared && want_lam) || (q.w_b_shared && out.w_b);
  const int64_t parts = sums ? 1 : pieces(4.0 * q.n * q.b * q.f * (q.i + q.o), q.n);
  parallel(parts, [&, parts](int64_t begin, int64_t end) {
    for (int64_t c = q.n * begin / parts; c < q.n * end / parts; c++) {
      const auto at = [c](T* p, bool shared, int64_t size) {
        return p && !shared ? p + c * size : p;
      };
      const Rank1Grads<T> own{at(out.x, q.x_shared, q.b * q.i),
                              at(out.w_a, q.w_a_shared, q.o * q.f), at(out.lam, q.lam_shared, q.f),
                              at(out.w_b, q.w_b_shared, q.f * q.i)};
      const Gathered<T> in(q, c, false, want_lam);
      const Between<T> mid(q, in, grad + c * q.b * q.o, want_lam);
      backward_rows(q, in, own, mid, q.x_shared && c > 0, 0, q.b);
      backward_factors(q, in, own, mid,
                       Add{q.w_a_shared && c > 0, q.lam_shared && c > 0, q.w_b_shared && c > 0}, 0,
                       1);
    }
  });
}

}  // namespace rank1_detail

// y [n, b, o], contiguous.
template <class T, class Parallel>
void rank1_forward(const Rank1<T>& q, T* y, const Parallel& parallel) {
  if (q.n == 0 || q.b == 0 || q.o == 0) return;
  rank1_detail::forward(q, y, parallel);
}

// grad [n, b, o], contiguous.
template <class T, class Parallel>
void rank1_backward(const Rank1<T>& q, const T* grad, const Rank1Grads<T>& out,
                    const Parallel& parallel) {
  if (q.n == 0) {  // no client adds to the gradients of shared inputs
    const auto zero = [](T* p, bool shared, int64_t size) {
      if (p && shared) std::fill(p, p + size, T(0));
    };
    zero(out.x, q.x_shared, q.b * q.i), zero(out.w_a, q.w_a_shared, q.o * q.f);
    return zero(out.lam, q.lam_shared, q.f), zero(out.w_b, q.w_b_shared, q.f * q.i);
  }
  rank1_detail::backward(q, grad, out, parallel);
}

}  // namespace pflcore::cpu
