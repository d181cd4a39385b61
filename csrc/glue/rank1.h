// The ops "rank1_linear" and its backward pass, tensors checked: a Device has `forward(problem,
// like, y)` and `backward(problem, like, grad, out)`.
#pragma once
#include <tuple>

#include "common.h"

namespace pflcore {

// x [n, b, i] or [b, i]; w_a [n, o, f] or [o, f]; lam [n, f] or [f]; w_b [n, f, i] or [f, i]: those
// without the leading axis are shared.
template <class T>
struct Rank1Inputs {
  Tensor x, w_a, lam, w_b;
  Rank1<T> q;
  bool batched;

  template <class Device>
  Rank1Inputs(const Device& device, const Tensor& x_in, const Tensor& w_a_in, const Tensor& lam_in,
              const Tensor& w_b_in)
      : x(rows(x_in)), w_a(rows(w_a_in)), lam(rows(lam_in)), w_b(rows(w_b_in)), q{} {
    device.same(w_a, "w_a"), device.same(lam, "lam"), device.same(w_b, "w_b");
    batched = x.dim() == 3 || w_a.dim() == 3 || lam.dim() == 2 || w_b.dim() == 3;
    q.n = x.dim() == 3     ? x.size(0)
          : w_a.dim() == 3 ? w_a.size(0)
          : lam.dim() == 2 ? lam.size(0)
          : w_b.dim() == 3 ? w_b.size(0)
                           : 1;
    q.b = x.size(x.dim() - 2), q.i = x.size(x.dim() - 1);
    q.o = w_a.size(w_a.dim() - 2), q.f = w_a.size(w_a.dim() - 1);
    const auto check = [&](const Tensor& t, int64_t own, int64_t first, int64_t last,
                           const char* name) {
      const int64_t d = t.dim();
      const bool fits = (d == own || (d == own + 1 && t.size(0) == q.n)) && t.size(d - 1) == last &&
                        (own == 1 || t.size(d - 2) == first);
      PFL_CHECK(fits && t.scalar_type() == x.scalar_type(), "rank1_linear: ", name,
                " does not fit the other inputs");
    };
    check(x, 2, q.b, q.i, "x"), check(w_a, 2, q.o, q.f, "w_a"), check(lam, 1, 1, q.f, "lam"),
        check(w_b, 2, q.f, q.i, "w_b");
    const auto batch = [](const Tensor& t, int64_t own) {
      return t.dim() > own ? (t.size(0) > 1 ? t.stride(0) : t.numel()) : 0;
    };
    const auto row = [](const Tensor& t) {
      return t.size(t.dim() - 2) > 1 ? t.stride(t.dim() - 2) : t.size(t.dim() - 1);
    };
    q.x = data<T>(x), q.x_batch = batch(x, 2), q.x_row = row(x), q.x_shared = x.dim() == 2;
    q.w_a = data<T>(w_a), q.w_a_batch = batch(w_a, 2), q.w_a_row = row(w_a),
    q.w_a_shared = w_a.dim() == 2;
    q.lam = data<T>(lam), q.lam_batch = batch(lam, 1), q.lam_shared = lam.dim() == 1;
    q.w_b = data<T>(w_b), q.w_b_batch = batch(w_b, 2), q.w_b_row = row(w_b),
    q.w_b_shared = w_b.dim() == 2;
  }
};

// Calls `run(zero, as)` with a zero of the type that is computed in, float32 for 16-bit inputs, and
// `as`, which brings a tensor there.
template <class Run>
auto rank1_typed(ScalarType dtype, const Run& run) {
  if (dtype == ScalarType::Half || dtype == ScalarType::BFloat16)
    return run(float{}, [](const Tensor& t) { return converted(t, ScalarType::Float); });
  const auto same = [](const Tensor& t) { return t; };
  if (dtype == ScalarType::Float) return run(float{}, same);
  PFL_CHECK(dtype == ScalarType::Double,
            "rank1_linear: expected a float16, bfloat16, float32 or float64 tensor");
  return run(double{}, same);
}

template <class Device>
Tensor rank1_linear(const Tensor& x, const Tensor& w_a, const Tensor& lam, const Tensor& w_b) {
  const Device device(x, "rank1_linear");
  return rank1_typed(x.scalar_type(), [&](auto zero, const auto& as) {
    const Rank1Inputs<decltype(zero)> in(device, as(x), as(w_a), as(lam), as(w_b));
    const Tensor y =
        in.batched ? make(in.x, {in.q.n, in.q.b, in.q.o}) : make(in.x, {in.q.b, in.q.o});
    device.forward(in.q, in.x, mutable_data<decltype(zero)>(y));
    return converted(y, x.scalar_type());
  });
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor> rank1_linear_backward(
    const Tensor& grad_in, const Tensor& x, const Tensor& w_a, const Tensor& lam, const Tensor& w_b,
    bool need_x, bool need_a, bool need_lam, bool need_b) {
  const Device device(x, "rank1_linear");
  device.same(grad_in, "grad");
  return rank1_typed(x.scalar_type(), [&](auto zero, const auto& as) {
    using T = decltype(zero);
    const Rank1Inputs<T> in(device, as(x), as(w_a), as(lam), as(w_b));
    const Tensor grad = dense_as(grad_in, in.x.scalar_type());
    PFL_CHECK(grad.numel() == in.q.n * in.q.b * in.q.o,
              "rank1_linear: the gradient does not fit the result");
    const auto like = [](const Tensor& t, bool need) {
      return need ? make(t, t.sizes()) : make(t, {0});
    };
    const Tensor gx = like(in.x, need_x), ga = like(in.w_a, need_a), glam = like(in.lam, need_lam),
                 gb = like(in.w_b, need_b);
    const auto to = [](const Tensor& t, bool need) { return need ? mutable_data<T>(t) : nullptr; };
    device.backward(
        in.q, in.x, data<T>(grad),
        Rank1Grads<T>{to(gx, need_x), to(ga, need_a), to(glam, need_lam), to(gb, need_b)});
    const auto back = [&](const Tensor& t) { return converted(t, x.scalar_type()); };
    return std::tuple(back(gx), back(ga), back(glam), back(gb));
  });
}

}  // namespace pflcore
