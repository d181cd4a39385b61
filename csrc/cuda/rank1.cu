#include "rank1.cuh"

#include <tuple>

#include "glue.cuh"

namespace pflcore {
namespace {

// x [n, b, i] or [b, i]; w_a [n, o, f] or [o, f]; lam [n, f] or [f]; w_b [n, f, i] or [f, i]: those without the leading axis are shared.
template <class T>
struct Rank1Inputs {
  Tensor x, w_a, lam, w_b, workspace;
  cuda::Rank1<T> q;
  bool batched;

  Rank1Inputs(const cuda::Call& call, const Tensor& x_in, const Tensor& w_a_in, const Tensor& lam_in, const Tensor& w_b_in)
      : x(rows(x_in)), w_a(rows(w_a_in)), lam(rows(lam_in)), w_b(rows(w_b_in)), q{} {
    call.same(w_a, "w_a"), call.same(lam, "lam"), call.same(w_b, "w_b");
    batched = x.dim() == 3 || w_a.dim() == 3 || lam.dim() == 2 || w_b.dim() == 3;
    q.n = x.dim() == 3 ? x.size(0) : w_a.dim() == 3 ? w_a.size(0) : lam.dim() == 2 ? lam.size(0) : w_b.dim() == 3 ? w_b.size(0) : 1;
    q.b = x.size(x.dim() - 2), q.i = x.size(x.dim() - 1);
    q.o = w_a.size(w_a.dim() - 2), q.f = w_a.size(w_a.dim() - 1);
    const auto check = [&](const Tensor& t, int64_t own, int64_t first, int64_t last, const char* name) {
      const int64_t d = t.dim();
      const bool fits = (d == own || (d == own + 1 && t.size(0) == q.n)) && t.size(d - 1) == last && (own == 1 || t.size(d - 2) == first);
      PFL_CHECK(fits && t.scalar_type() == x.scalar_type(), "rank1_linear: ", name, " does not fit the other inputs");
    };
    check(x, 2, q.b, q.i, "x"), check(w_a, 2, q.o, q.f, "w_a"), check(lam, 1, 1, q.f, "lam"), check(w_b, 2, q.f, q.i, "w_b");
    const auto batch = [](const Tensor& t, int64_t own) { return t.dim() > own ? (t.size(0) > 1 ? t.stride(0) : t.numel()) : 0; };
    const auto row = [](const Tensor& t) { return t.size(t.dim() - 2) > 1 ? t.stride(t.dim() - 2) : t.size(t.dim() - 1); };
    q.x = cuda::data<T>(x), q.x_batch = batch(x, 2), q.x_row = row(x);
    q.w_a = cuda::data<T>(w_a), q.w_a_batch = batch(w_a, 2), q.w_a_row = row(w_a);
    q.lam = cuda::data<T>(lam), q.lam_batch = batch(lam, 1);
    q.w_b = cuda::data<T>(w_b), q.w_b_batch = batch(w_b, 2), q.w_b_row = row(w_b);
    workspace = call.workspace(x, cuda::rank1_workspace(q));
    q.workspace = workspace.mutable_data_ptr();
  }
};

template <class T>
Tensor rank1_typed(const cuda::Call& call, const Tensor& x, const Tensor& w_a, const Tensor& lam, const Tensor& w_b) {
  const Rank1Inputs<T> in(call, x, w_a, lam, w_b);
  const Tensor y = in.batched ? make(x, {in.q.n, in.q.b, in.q.o}) : make(x, {in.q.b, in.q.o});
  cuda::rank1_forward(in.q, cuda::mutable_data<T>(y), call.stream());
  return y;
}

template <class T>
std::tuple<Tensor, Tensor, Tensor, Tensor> rank1_backward_typed(const cuda::Call& call, const Tensor& grad_in, const Tensor& x,
                                                                const Tensor& w_a, const Tensor& lam, const Tensor& w_b, bool need_x,
                                                                bool need_a, bool need_lam, bool need_b) {
  const Rank1Inputs<T> in(call, x, w_a, lam, w_b);
  call.same(grad_in, "grad");
  const Tensor grad = dense_as(grad_in, x.scalar_type());
  PFL_CHECK(grad.numel() == in.q.n * in.q.b * in.q.o, "rank1_linear: the gradient does not fit the result");
  const auto like = [](const Tensor& t, bool need) { return need ? make(t, t.sizes()) : make(t, {0}); };
  const auto to = [](const Tensor& t, bool need) { return need ? cuda::mutable_data<T>(t) : nullptr; };
  const Tensor gx = like(x, need_x), ga = like(w_a, need_a), glam = like(lam, need_lam), gb = like(w_b, need_b);
  const cuda::Rank1Grads<T> grads{cuda::data<T>(grad), to(gx, need_x), x.dim() == 2, to(ga, need_a), w_a.dim() == 2,
                                  to(glam, need_lam), lam.dim() == 1, to(gb, need_b), w_b.dim() == 2};
  cuda::rank1_backward(in.q, grads, call.stream());
  return {gx, ga, glam, gb};
}

// 16-bit inputs are computed in float32 and rounded once at the end.
bool is_half(const Tensor& t) { return t.scalar_type() == ScalarType::Half || t.scalar_type() == ScalarType::BFloat16; }
Tensor as(const Tensor& t, ScalarType dtype) { return converted(t, dtype); }

Tensor rank1_linear_cuda(const Tensor& x, const Tensor& w_a, const Tensor& lam, const Tensor& w_b) {
  const cuda::Call call(x, "rank1_linear");
  const auto f32 = ScalarType::Float;
  if (is_half(x)) return as(rank1_typed<float>(call, as(x, f32), as(w_a, f32), as(lam, f32), as(w_b, f32)), x.scalar_type());
  if (x.scalar_type() == f32) return rank1_typed<float>(call, x, w_a, lam, w_b);
  PFL_CHECK(x.scalar_type() == ScalarType::Double, "rank1_linear: expected a float16, bfloat16, float32 or float64 tensor");
  return rank1_typed<double>(call, x, w_a, lam, w_b);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> rank1_linear_backward_cuda(const Tensor& grad, const Tensor& x, const Tensor& w_a,
                                                                      const Tensor& lam, const Tensor& w_b, bool need_x, bool need_a,
                                                                      bool need_lam, bool need_b) {
  const cuda::Call call(x, "rank1_linear");
  const auto f32 = ScalarType::Float;
  if (is_half(x)) {
    const auto g = rank1_backward_typed<float>(call, as(grad, f32), as(x, f32), as(w_a, f32), as(lam, f32), as(w_b, f32), need_x, need_a,
                                               need_lam, need_b);
    const auto back = [&](const Tensor& t) { return as(t, x.scalar_type()); };
    return {back(std::get<0>(g)), back(std::get<1>(g)), back(std::get<2>(g)), back(std::get<3>(g))};
  }
  if (x.scalar_type() == f32) return rank1_backward_typed<float>(call, grad, x, w_a, lam, w_b, need_x, need_a, need_lam, need_b);
  return rank1_backward_typed<double>(call, grad, x, w_a, lam, w_b, need_x, need_a, need_lam, need_b);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CUDA, m) {
  m.impl("rank1_linear", TORCH_BOX(&rank1_linear_cuda));
  m.impl("rank1_linear_backward", TORCH_BOX(&rank1_linear_backward_cuda));
}

}  // namespace pflcore
