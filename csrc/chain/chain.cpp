#include "chain.h"

#include <string>
#include <tuple>

#include "../glue/sgd.h"
#include "../cpu/glue.h"

namespace pflcore {
namespace {

using cpu::ChainLayer;

cpu::chain::Loss loss_of(const char* op, const std::string& name) {
  using cpu::chain::Loss;
  if (name == "cross_entropy") return Loss::cross_entropy;
  if (name == "squared") return Loss::squared;
  if (name == "half_squared") return Loss::half_squared;
  if (name == "binary_cross_entropy") return Loss::binary_cross_entropy;
  if (name == "linear") return Loss::linear;
  PFL_CHECK(name == "hinge", op,
            ": expected loss cross_entropy, squared, half_squared, hinge, "
            "binary_cross_entropy or linear, got ",
            name);
  return Loss::hinge;
}

const int64_t* whole(const OptionalTensor& t) { return t ? data<int64_t>(*t) : nullptr; }
OptionalTensor whole_numbers(const OptionalTensor& t) {
  OptionalTensor out;
  if (t) out = dense_as(*t, ScalarType::Long);
  return out;
}

// The arguments of all three ops: the program, the samples and their labels; checked, and held for
// as long as the kernel runs.
template <class T_>
struct ChainArgs {
  using T = T_;
  Tensor x, y;
  OptionalTensor relabel;
  cpu::ChainProblem<T> problem{};
  double work = 0;  // operations for a sample and a pass, roughly

  ChainArgs(const char* op, const Tensor& w, const Tensor& program_in, const std::string& loss_name,
            int64_t c, int64_t h, int64_t width, const Tensor& x_in, const Tensor& y_in,
            const OptionalTensor& relabel_in, const OptionalTensor& statistics)
      : x(dense(x_in)), y(dense(y_in)), relabel(whole_numbers(relabel_in)) {
    const cpu::chain::Loss loss = problem.loss_kind = loss_of(op, loss_name);
    cpu::ChainProgram& program = problem.program;
    PFL_CHECK(w.dim() == 2 && (w.size(1) <= 1 || w.stride(1) == 1), op,
              ": expected w [S, Q] with contiguous rows");
    const Tensor table = dense_as(program_in, ScalarType::Double);
    PFL_CHECK(table.dim() == 2 && table.size(1) == 9, op, ": expected a program [layers, 9]");
    const double* from = pflcore::data<double>(table);
    program.layers.resize(table.size(0));
    for (ChainLayer& l : program.layers) {
      l.kind = static_cast<int64_t>(*from++);
      for (double& f : l.field) f = *from++;
    }
    program.c = c, program.h = h, program.w = width, program.q = w.size(1);
    if (statistics) {
      PFL_CHECK(statistics->dim() == 2 && statistics->size(0) == w.size(0) &&
                    (statistics->size(1) <= 1 || statistics->stride(1) == 1) &&
                    statistics->scalar_type() == w.scalar_type(),
                op, ": expected statistics [S, b] of w's dtype, with contiguous rows");
      program.b = statistics->size(1);
    }
    PFL_CHECK(c > 0 && h > 0 && width > 0 && x.dim() >= 1, op,
              ": expected samples of at least one feature");
    const int64_t n = x.size(0), features = c * h * width;
    PFL_CHECK(x.numel() == n * features && x.scalar_type() == w.scalar_type(), op,
              ": expected x [n, C, H, W] of w's dtype");
    const bool linear = loss == cpu::chain::Loss::linear;
    PFL_CHECK(y.dim() == (linear ? 2 : 1) && y.size(0) == n, op,
              ": expected one label for each sample, or a number for each of its scores");
    const bool labels = y.scalar_type() == ScalarType::Long;
    PFL_CHECK(labels || (y.scalar_type() == w.scalar_type() && !relabel), op,
              ": expected y of int64 or of w's dtype");
    PFL_CHECK(!relabel || (relabel->dim() == 2 && relabel->size(0) == w.size(0)), op,
              ": expected relabel [S, C]");
    double image = static_cast<double>(h * width);
    struct Line {
      int64_t c;
      double image;
    };
    std::vector<Line> lines{{c, image}};  // the samples, and the output of each line
    for (const ChainLayer& l : program.layers) {
      if (l.kind == ChainLayer::linear) work += 2.0 * static_cast<double>(w.size(1)) / 4;
      if (l.kind == ChainLayer::conv)
        work += 2.0 * static_cast<double>(l[0] * l[1] * l[2] * c) * image, c = l[0], image /= 2;
      if (l.kind == ChainLayer::branch) {
        PFL_CHECK(l.field[0] >= -1 && l.field[0] + 1 < static_cast<double>(lines.size()), op,
                  ": expected a branch at an earlier line");
        const Line& line = lines[static_cast<size_t>(l.field[0] + 1)];
        c = line.c, image = line.image;
      }
      lines.push_back({c, image});
    }
    PFL_CHECK(loss != cpu::chain::Loss::cross_entropy || labels, op,
              ": expected int64 labels for cross entropy");
    PFL_CHECK(!linear || !labels, op, ": expected numbers, not labels, for the linear loss");
    problem.data = {pflcore::data<T>(x),
                    features,
                    n,
                    labels ? whole(y) : nullptr,
                    labels ? nullptr : pflcore::data<T>(y),
                    whole(relabel),
                    relabel ? relabel->size(1) : 0,
                    linear ? y.size(1) : 1};
  }
};

// f(ChainArgs of w's type).
template <class F, class... Args>
auto typed(const char* op, const Tensor& w, const F& f, const Args&... args) {
  return float_or_double(op, w,
                         [&](auto zero) { return f(ChainArgs<decltype(zero)>(op, w, args...)); });
}

constexpr const char* kRange =
    ": a label or a place in the pool is out of range, or a client takes more steps than it has "
    "batches";

Tensor chain_train_cpu(const Tensor& w, const Tensor& program, const std::string& loss_name,
                       int64_t c, int64_t h, int64_t width, const Tensor& x, const Tensor& y,
                       const OptionalTensor& relabel, const Tensor& order_in, const Tensor& size_in,
                       const Tensor& steps_in, int64_t batch, bool drop_last,
                       const OptionalTensor& seeds_in, double lr, const OptionalTensor& shift,
                       const OptionalTensor& mask, double mu, const OptionalTensor& mu_rows,
                       const OptionalTensor& anchor, double momentum, double weight_decay,
                       double clip, const OptionalTensor& adamw, const OptionalTensor& grad_sum,
                       const OptionalTensor& statistics, bool merge_single) {
  constexpr const char* op = "chain_train_";
  const auto run = [&](const auto& args) {
    using T = typename std::decay_t<decltype(args)>::T;
    const int64_t s = w.size(0), q = w.size(1);
    const Tensor order = dense_as(order_in, ScalarType::Long),
                 size = dense_as(size_in, ScalarType::Long),
                 steps = dense_as(steps_in, ScalarType::Long);
    const OptionalTensor seeds = whole_numbers(seeds_in);
    PFL_CHECK(order.dim() == 3 && order.size(0) == s, op, ": expected order [S, passes, n]");
    PFL_CHECK(size.numel() == s && steps.numel() == s, op,
              ": expected a size and a number of steps for each client");
    PFL_CHECK(batch >= 1, op, ": expected a batch size of at least 1");
    PFL_CHECK(!seeds || seeds->numel() == s * order.size(1), op, ": expected seeds [S, passes]");
    const SgdArgs<T> sgd(OnCpu(w, op), op, w, lr, shift, mask, mu, mu_rows, anchor, momentum,
                         weight_decay);
    cpu::ChainTrain<T> a{args.problem};
    a.sgd = sgd.step;
    a.order = whole(order), a.passes = order.size(1), a.longest = order.size(2);
    a.size = whole(size), a.steps = whole(steps), a.batch = batch, a.drop_last = drop_last,
    a.seeds = whole(seeds), a.merge_single = merge_single, a.clip = clip;
    if (adamw) {
      PFL_CHECK(adamw->numel() == 3, op, ": expected two betas and eps of AdamW");
      const Tensor rates = dense_as(*adamw, ScalarType::Double);
      const double* const rate = data<double>(rates);
      a.adamw = {true, rate[0], rate[1], rate[2]};
    }
    if (grad_sum) {
      PFL_CHECK(grad_sum->is_contiguous() && grad_sum->numel() == s * q &&
                    grad_sum->scalar_type() == w.scalar_type(),
                op, ": expected a contiguous grad_sum of w's shape and dtype");
      a.grad_sum = mutable_data<T>(*grad_sum);
    }
    if (statistics) {
      PFL_CHECK(statistics->is_contiguous(), op, ": expected contiguous statistics");
      a.statistics = mutable_data<T>(*statistics);
    }
    Tensor loss = make(w, {s}, ScalarType::Double);
    a.loss = mutable_data<double>(loss);
    torch::stable::zero_(loss);
    PFL_CHECK(
        cpu::chain_train(a, TorchParallel{3 * args.work * static_cast<double>(order.numel())}), op,
        kRange);
    return loss;
  };
  return typed(op, w, run, program, loss_name, c, h, width, x, y, relabel, statistics);
}

std::tuple<Tensor, Tensor, Tensor> chain_grad_cpu(const Tensor& w, const Tensor& program,
                                                  const std::string& loss_name, int64_t c,
                                                  int64_t h, int64_t width, const Tensor& x,
                                                  const Tensor& y, const OptionalTensor& relabel,
                                                  const Tensor& order_in, const Tensor& size_in,
                                                  const OptionalTensor& seeds_in,
                                                  const OptionalTensor& statistics, bool train) {
  constexpr const char* op = "chain_grad";
  const auto run = [&](const auto& args) -> std::tuple<Tensor, Tensor, Tensor> {
    using T = typename std::decay_t<decltype(args)>::T;
    const int64_t s = w.size(0);
    const Tensor order = dense_as(order_in, ScalarType::Long),
                 size = dense_as(size_in, ScalarType::Long);
    const OptionalTensor seeds = whole_numbers(seeds_in);
    PFL_CHECK(order.dim() == 2 && order.size(0) == s && size.numel() == s, op,
              ": expected order [S, n] and a size for each client");
    PFL_CHECK(!seeds || seeds->numel() == s, op, ": expected seeds [S]");
    const int64_t b = args.problem.program.b;
    Tensor grad = make(w, {s, w.size(1)}), loss = make(w, {s}, ScalarType::Double),
           moved = make(w, {s, b});
    for (int64_t i = 0; b && i < s; i++)
      std::copy_n(data<T>(*statistics) + i * row_stride(*statistics), b,
                  mutable_data<T>(moved) + i * b);
    cpu::ChainGrad<T> a{args.problem};
    a.w = data<T>(w), a.s = s, a.w_row = row_stride(w);
    a.order = whole(order), a.longest = order.size(1), a.size = whole(size), a.seeds = whole(seeds);
    a.train = train, a.grad = mutable_data<T>(grad), a.statistics = mutable_data<T>(moved),
    a.loss = mutable_data<double>(loss);
    PFL_CHECK(cpu::chain_grad(a, TorchParallel{3 * args.work * static_cast<double>(order.numel())}),
              op, kRange);
    return {grad, loss, moved};
  };
  return typed(op, w, run, program, loss_name, c, h, width, x, y, relabel, statistics);
}

std::tuple<Tensor, Tensor, Tensor> chain_eval_cpu(const Tensor& w, const Tensor& program,
                                                  const std::string& loss_name, int64_t c,
                                                  int64_t h, int64_t width, const Tensor& x,
                                                  const Tensor& y, const OptionalTensor& relabel,
                                                  const Tensor& order_in, const Tensor& begin_in,
                                                  int64_t classes,
                                                  const OptionalTensor& statistics) {
  constexpr const char* op = "chain_eval";
  const auto run = [&](const auto& args) -> std::tuple<Tensor, Tensor, Tensor> {
    using T = typename std::decay_t<decltype(args)>::T;
    const Tensor order = dense_as(order_in, ScalarType::Long),
                 begin = dense_as(begin_in, ScalarType::Long);
    const int64_t s = w.size(0), n = order.numel();
    PFL_CHECK(order.dim() == 1 && begin.numel() == s + 1, op,
              ": expected order [n] and begin [S + 1]");
    const int64_t* const starts = whole(begin);
    for (int64_t i = 0; i <= s; i++)
      PFL_CHECK(i == s ? starts[i] == n : starts[i] <= starts[i + 1] && starts[0] == 0, op,
                ": expected begin to rise from 0 to the number of places");
    PFL_CHECK(classes >= 0, op, ": expected no negative number of classes");
    Tensor loss = make(w, {n}, ScalarType::Double), right = make(w, {n}, ScalarType::Bool),
           scores = make(w, {classes ? n : 0, classes});
    cpu::ChainEval<T> a{args.problem};
    a.w = data<T>(w), a.s = s;
    a.w_row = s > 1 ? w.stride(0) : w.size(1);
    if (statistics)
      a.statistics = data<T>(*statistics), a.statistics_row = s > 1 ? statistics->stride(0) : 0;
    a.one_model = a.w_row == 0 && a.statistics_row == 0;
    a.order = whole(order), a.begin = whole(begin);
    a.classes = classes;
    a.loss = mutable_data<double>(loss), a.right = mutable_data<uint8_t>(right);
    a.scores = classes ? mutable_data<T>(scores) : nullptr;
    PFL_CHECK(cpu::chain_eval(a, TorchParallel{args.work * static_cast<double>(n)}), op, kRange);
    return {loss, right, scores};
  };
  return typed(op, w, run, program, loss_name, c, h, width, x, y, relabel, statistics);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pflcore, CPU, m) {
  m.impl("chain_train_", TORCH_BOX(&chain_train_cpu));
  m.impl("chain_grad", TORCH_BOX(&chain_grad_cpu));
  m.impl("chain_eval", TORCH_BOX(&chain_eval_cpu));
}

}  // namespace pflcore
