// One thread's work on a chain: a client's steps, gradient and evaluation. Included once for each
// instruction set.
#pragma once
#include <cmath>
#include <map>
#include <memory>

#include "losses.h"
#include "plan.h"
#include "steps.h"

namespace pflcore::cpu {

namespace chain {

constexpr int64_t kMost = int64_t{1} << 26;  // bytes that a thread keeps for activations and slopes

template <class T, int bytes>
PFL_TARGET void descend(const sgd_detail::Row<T>& row, int64_t c, int64_t end) {
  sgd_detail::row<bytes, T>(row, c, end);
}

// How the n samples of a client, one at least, are cut into the batches of a pass.
struct Cuts {
  int64_t n, size;
  bool merges;    // the last batch takes the single sample behind it, too
  int64_t count;  // batches of a pass

  template <class T>
  Cuts(const ChainTrain<T>& a, int64_t n)
      : n(n),
        size(std::min(a.batch, n)),
        merges(a.merge_single && !a.drop_last && n > size && n % size == 1),
        count(a.drop_last || merges ? n / size : (n + size - 1) / size) {}

  int64_t first(int64_t batch) const { return batch * size; }
  int64_t taken(int64_t batch) const {
    const bool is_merged = merges && batch == count - 1;
    return is_merged ? size + 1 : std::min(size, n - first(batch));
  }
  // Samples of the batch behind this one, also of one that is dropped.
  int64_t next(int64_t batch) const { return std::min(size, n - first(batch) - taken(batch)); }
};

// A thread's memory and its plans for one program, on vectors of `bytes` bytes.
template <class T, int bytes>
class Worker {
 public:
  using Plan = chain::Plan<T, bytes>;
  using Block = chain::Block<T, bytes>;
  static constexpr int64_t lanes = bytes / sizeof(T);

  explicit Worker(const ChainProgram& program) : program_(program), layout_(program, 1) {
    most_ = layout_.most_samples;
    while (most_ > 1 && bytes_of(most_) > kMost) most_ /= 2;
  }
  Worker(const Worker&) = delete;

  struct Lease {  // gives memory back where even a single sample's is too much to keep
    Worker& worker;
    ~Lease() {
      if (worker.arena_.held() <= kMost) return;
      worker.now_ = nullptr;
      worker.arena_ = {};
    }
    Worker* operator->() { return &worker; }
  };

  // This thread's, made anew for another program.
  static Lease mine(const ChainProgram& program) {
    Shelf::mine();  // made first, so that it outlives the worker, which gives its memory back to it
    thread_local std::unique_ptr<Worker> worker;
    if (!worker || !worker->program_.same(program) || !kKeepScratch)
      worker = std::make_unique<Worker>(program);
    return {*worker};
  }

  bool train(const ChainTrain<T>& a, int64_t s) {
    const int64_t n = a.size[s];
    if (n < 0 || n > a.longest) return false;
    if (n == 0) return a.steps[s] == 0;
    const Cuts cuts(a, n);
    if (a.steps[s] > cuts.count * a.passes) return false;
    begin(a.sgd.w + s * a.sgd.w_row);
    batch_.train = true;
    batch_.running = a.statistics + s * program_.b;
    const sgd_detail::Row<T> row = begin_steps(a, s);
    // Gradients of a single tile move the weights as they are made.
    const bool direct = is_plain(a, row) && (layout_.whole || cuts.size <= most_);
    double total = 0;
    bool fine = true;
    for (int64_t k = 0; k < a.steps[s] && fine; k++) {
      const int64_t pass = k / cuts.count, batch = k % cuts.count;
      const int64_t* const place = a.order + (s * a.passes + pass) * a.longest + cuts.first(batch);
      batch_.seed = {};
      if (a.seeds) batch_.seed = static_cast<uint64_t>(a.seeds[s * a.passes + pass]) + batch;
      double loss = 0;
      fine =
          gradient(a, s, place, cuts.taken(batch), cuts.next(batch), {direct, false, row.lr}, loss);
      total += loss;
      if (fine && !direct) take_step(a, row, k + 1);
    }
    write(w_, a.sgd.w + s * a.sgd.w_row, false);
    if (a.grad_sum) write(sum_, a.grad_sum + s * program_.q, true);
    a.loss[s] = total;
    return fine;
  }

  bool grad(const ChainGrad<T>& a, int64_t s) {
    const int64_t n = a.size[s];
    if (n < 0 || n > a.longest) return false;
    std::fill_n(a.grad + s * program_.q, program_.q, T(0));
    a.loss[s] = 0;
    if (n == 0) return true;
    begin(a.w + s * a.w_row);
    batch_.seed = {};
    if (a.seeds) batch_.seed = static_cast<uint64_t>(a.seeds[s]);
    batch_.train = a.train;
    batch_.running = a.statistics + s * program_.b;
    if (!gradient(a, s, a.order + s * a.longest, n, 0, {}, a.loss[s])) return false;
    write(g_, a.grad + s * program_.q, false);
    return true;
  }

  // Evaluates the samples first to last of the list. All are of client s, or of any client where
  // there is one model for all.
  bool evaluate(const ChainEval<T>& a, int64_t s, int64_t first, int64_t last) {
    if (first >= last) return true;
    demand_targets(a);
    read(w_, a.w + s * a.w_row);
    batch_.seed = {};
    const T* const statistics = a.statistics + s * a.statistics_row;
    statistics_.assign(statistics, statistics + program_.b);
    batch_.train = false;
    batch_.running = statistics_.data();
    int64_t owner = s;
    for (int64_t at = first; at < last;) {
      int64_t some = most_;
      if (now_ && now_->batch == last - at) some = last - at;  // as in the step before
      while (some > last - at) some /= 2;                      // few sizes, so few plans
      Plan& plan = use(some);
      if (a.scores && a.classes != plan.classes) return false;
      for (int64_t i = 0; i < some; i++) {
        while (a.one_model && at + i >= a.begin[owner + 1]) owner++;
        if (!find(a, owner, a.order + at + i, i, last - at - i)) return false;
      }
      gather();
      batch_.first = 0;
      forward();
      const T* score = plan.blocks.back().y;
      losses<T, bytes>(a.loss_kind, plan.classes, some, T(0), score, target_.data(), loss_.data(),
                       a.right + at, nullptr);
      for (int64_t i = 0; i < some; i++) a.loss[at + i] = loss_[i];
      for (int64_t c = 0; a.scores && c < plan.classes; c++)
        for (int64_t i = 0; i < some; i++)
          a.scores[(at + i) * plan.classes + c] = score[c * some + i];
      at += some;
    }
    return true;
  }

 private:
  int64_t bytes_of(int64_t batch) {
    Plan plan(program_, batch);
    now_ = &plan;
    arena_.begin();
    lay();
    now_ = nullptr;
    return arena_.used();
  }

  // Makes the plan of `batch` samples the one that the memory is laid out for.
  Plan& use(int64_t batch) {
    if (now_ && now_->batch == batch) return *now_;
    auto& plan = plans_[batch];
    if (!plan) plan = std::make_unique<Plan>(program_, batch);
    now_ = plan.get();
    arena_.begin();
    lay();  // the first time to count
    arena_.grow();
    lay();
    return *now_;
  }

  void lay() {
    Plan& plan = *now_;
    const auto plain = [&](int64_t features) {
      return arena_.template take<T>(features * plan.batch + kSlack);
    };
    const bool turns = !plan.reads_samples;
    samples_ =
        turns ? nullptr : arena_.template take_zeros<T>(plan.batch * up(plan.features, lanes));
    x_ = turns ? plain(plan.features) : nullptr;
    for (size_t i = 0; i < plan.blocks.size(); i++) {
      Block& b = plan.blocks[i];
      std::visit([&](auto& layer) { layer.lay(arena_); }, b.layer);
      b.y = plain(b.outputs);
      if (b.slopes_at == static_cast<int64_t>(i)) b.dy = plain(b.outputs);
    }
    for (size_t i = plan.blocks.size(); i-- > 0;) {
      Block& b = plan.blocks[i];
      b.dy = plan.blocks[b.slopes_at].dy;
    }
    aside_ = plan.aside ? plain(plan.aside) : nullptr;
    at_.resize(plan.batch);
    batch_.samples = at_.data();
    target_.resize(plan.classes * plan.batch + kSlack);
    loss_.resize(plan.batch + kSlack);
  }

  // A label names a score for cross entropy; else a sample has a number for each score.
  void demand_targets(const ChainProblem<T>& a) const {
    demand(a.loss_kind == Loss::cross_entropy || a.data.values == layout_.classes,
           a.loss_kind == Loss::linear ? kMisfit : "the loss needs a model with one output");
  }

  // Sample i of a batch, with its label; false where it is not there. `left`: places behind this
  // one that will be seen.
  bool find(const ChainProblem<T>& a, int64_t s, const int64_t* place, int64_t i, int64_t left) {
    const ChainData<T>& data = a.data;
    const int64_t p = place[0];
    if (p < 0 || p >= data.pool) return false;
    if (left > kAhead) {  // shuffled: no prefetcher can guess it
      const char* ahead = reinterpret_cast<const char*>(data.x + place[kAhead] * data.x_row);
      for (int64_t byte = 0; byte < std::min<int64_t>(layout_.features * sizeof(T), 256);
           byte += 64)
        __builtin_prefetch(ahead + byte);
    }
    if (data.label) {
      int64_t y = data.label[p];
      if (data.relabel) {
        if (y < 0 || y >= data.names) return false;
        y = data.relabel[s * data.names + y];
      }
      if (a.loss_kind == Loss::cross_entropy && (y < 0 || y >= layout_.classes)) return false;
      target_[i] = static_cast<T>(y);
    } else {
      for (int64_t k = 0; k < data.values; k++)
        target_[k * now_->batch + i] = data.value[p * data.values + k];
    }
    at_[i] = data.x + p * data.x_row;
    return true;
  }
  static constexpr int64_t kAhead = 16;

  PFL_TARGET void gather() {
    const int64_t f = layout_.features;
    if (!layout_.reads_samples) {
      const int64_t n = now_->batch;
      return turn<bytes>(x_, n, [&](int64_t i) PFL_LAMBDA { return at_[i]; }, n, f);
    }
    if (f % lanes == 0) return;  // read where they are
    for (int64_t i = 0; i < now_->batch; i++) {
      T* const to = samples_ + i * up(f, lanes);
      copy<bytes>(to, at_[i], f);
      at_[i] = to;
    }
  }

  // The gradient of the batch's mean loss, into g_ or, a step, the weights; `ahead`: places behind
  // the batch that come next.
  bool gradient(const ChainProblem<T>& a, int64_t s, const int64_t* place, int64_t count,
                int64_t ahead, Into<T> into, double& loss) {
    demand_targets(a);
    const bool whole = layout_.whole && batch_.train;
    const int64_t tiles = whole ? 1 : (count + most_ - 1) / most_,
                  tile = (count + tiles - 1) / tiles;
    for (int64_t first = 0; first < count; first += tile) {
      const int64_t some = std::min(tile, count - first);
      Plan& plan = use(some);
      for (int64_t i = 0; i < some; i++)
        if (!find(a, s, place + first + i, i,
                  count - first - i + (layout_.reads_samples ? std::max<int64_t>(ahead, 0) : 0)))
          return false;
      gather();
      if (!layout_.reads_samples)
        fetch(a.data, place + first + some, std::min(some, count - first - some + ahead));
      batch_.first = first;
      forward();
      T* const slope = plan.blocks.back().dy;
      losses<T, bytes>(a.loss_kind, plan.classes, some, T(1) / static_cast<T>(count),
                       plan.blocks.back().y, target_.data(), loss_.data(), nullptr, slope);
      T sum = 0;
      for (int64_t i = 0; i < some; i++) sum += loss_[i];
      loss += static_cast<double>(sum) / static_cast<double>(count);
      into.add = first > 0;
      backward(into, into.step ? w_.data() : g_.data());
    }
    return true;
  }
  void fetch(const ChainData<T>& data, const int64_t* place, int64_t count) const {
    for (int64_t i = 0; i < count; i++) {
      if (place[i] < 0 || place[i] >= data.pool) continue;
      const char* from = reinterpret_cast<const char*>(data.x + place[i] * data.x_row);
      for (int64_t byte = 0; byte < static_cast<int64_t>(layout_.features * sizeof(T)); byte += 64)
        __builtin_prefetch(from + byte, 0, 2);
    }
  }

  const T* output(int64_t block) const {
    if (block == kSamples) return x_;
    return block >= 0 ? now_->blocks[block].y : nullptr;
  }

  void forward() {
    for (const Block& b : now_->blocks) {
      const T* const x = output(b.from);
      const T* const w = w_.data() + b.weights.w_at;
      const T* const bias = w_.data() + b.weights.b_at;
      const Forward<T> pass{batch_, x, w, bias, b.y};
      std::visit([&](const auto& layer) { layer.forward(pass); }, b.layer);
      if (b.other == kNothing) continue;
      const T* const result = b.is_addition() ? x : b.y;
      add_forward<T, bytes>(b.act, result, output(b.other), b.y, b.outputs * now_->batch);
    }
  }

  void backward(const Into<T>& into, T* to) {
    for (size_t i = now_->blocks.size(); i-- > 0;) {
      const Block& b = now_->blocks[i];
      if (!b.needs) continue;  // neither it nor what is before it has weights
      const int64_t sums = b.outputs * now_->batch;
      // The slopes of the sum, in the place of those behind its activation.
      if (b.other != kNothing && b.act != kNone) add_backward<T, bytes>(b.act, b.y, b.dy, sums);
      if (b.is_addition())
        pass_on(b.from_slopes, b.from, b.dy, sums);
      else if (b.back || b.weights.any())
        backward(b, into, to);
      pass_on(b.other_slopes, b.other, b.dy, sums);
      if (makes_aside(b)) add_to<T, bytes>(slopes(b.from), aside_, b.inputs * now_->batch);
    }
  }

  // The slopes of a layer's input and of its weights.
  void backward(const Block& b, const Into<T>& into, T* to) {
    T* const dw = to + b.weights.w_at;
    T* const db = b.weights.has_vector() ? to + b.weights.b_at : nullptr;
    T* const dx = !b.back ? nullptr : makes_aside(b) ? aside_ : slopes(b.from);
    const bool adds = b.from_slopes == kAdded && b.adds_slopes();
    const T* const w = w_.data() + b.weights.w_at;
    const Backward<T> pass{batch_, output(b.from), b.y, b.dy, w, into, dw, db, dx, adds};
    std::visit([&](const auto& layer) { layer.backward(pass); }, b.layer);
  }

  T* slopes(int64_t block) const { return now_->blocks[block].dy; }

  // Whether the slopes of the input are made aside, and then added to others.
  static bool makes_aside(const Block& b) { return b.from_slopes == kAdded && !b.adds_slopes(); }

  // The slopes of one of a block's inputs, which are those of its sum.
  void pass_on(Slopes use, int64_t input, const T* dy, int64_t n) {
    if (use == kStored) std::copy_n(dy, n, slopes(input));
    if (use == kAdded) add_to<T, bytes>(slopes(input), dy, n);
  }

  // The factor that shortens the gradient to this norm, as torch.nn.utils.clip_grad_norm_ has it; 1
  // where it is no longer. NaN stays.
  T clip_factor(double norm) const {
    double sum = 0;
    for (const Block& b : layout_.blocks)
      sum += square_sum<T, bytes>(g_.data() + b.weights.w_at, b.weights.span());
    const double factor = norm / (std::sqrt(sum) + 1e-6);
    return factor >= 1 ? T(1) : static_cast<T>(factor);
  }

  // The terms of client s's steps in the private layout, and zeros where its steps begin sums.
  sgd_detail::Row<T> begin_steps(const ChainTrain<T>& a, int64_t s) {
    const Sgd<T>& g = a.sgd;
    const auto own = [&](Numbers<T>& to, const T* from, int64_t row) -> const T* {
      if (!from) return nullptr;
      read(to, from + s * row);
      return to.data();
    };
    sgd_detail::Row<T> row{w_.data(),
                           g_.data(),
                           own(shift_, g.shift, g.shift_row),
                           own(mask_, g.mask, g.mask_row),
                           own(anchor_, g.anchor, g.anchor_row),
                           nullptr,
                           static_cast<T>(g.lr),
                           static_cast<T>(g.mu_rows ? g.mu_rows[s] : g.mu),
                           static_cast<T>(g.momentum),
                           static_cast<T>(g.weight_decay)};
    if (g.momentum != 0) velocity_.assign(layout_.weights, T(0)), row.buffer = velocity_.data();
    if (a.grad_sum) sum_.assign(layout_.weights, T(0));
    if (a.adamw.on) mean_.assign(layout_.weights, T(0)), square_.assign(layout_.weights, T(0));
    return row;
  }

  // Whether a step is w - lr gradient and nothing else.
  bool is_plain(const ChainTrain<T>& a, const sgd_detail::Row<T>& row) const {
    return !(row.shift || row.mask || row.anchor || row.buffer || row.decay != 0 ||
             std::isfinite(a.clip) || a.adamw.on || a.grad_sum || layout_.reads_samples);
  }

  // Step k, from 1 on, by the gradient in g_.
  void take_step(const ChainTrain<T>& a, const sgd_detail::Row<T>& row, int64_t k) {
    const T gradient_decay = a.adamw.on ? T(0) : row.decay;  // AdamW's is no part of a gradient
    const T factor = std::isfinite(a.clip) ? clip_factor(a.clip) : T(1);
    const Moments<T> moments(mean_.data(), square_.data(), a.adamw, k);
    for (int64_t c = 0; c < layout_.weights; c += kStrip) {
      const int64_t end = std::min(layout_.weights, c + kStrip);
      if (factor != 1) shrink<T, bytes>(g_.data() + c, end - c, factor);
      for (int64_t i = c; a.grad_sum && i < end; i++) sum_[i] += g_[i] + gradient_decay * w_[i];
      if (a.adamw.on)
        chain::adamw<T, bytes>(row, moments, c, end);
      else
        descend<T, bytes>(row, c, end);
    }
  }

  void begin(const T* row) {
    read(w_, row);
    g_.assign(layout_.weights, T(0));
  }

  // A row into the private layout, in which every matrix and vector is whole vectors, zeros behind.
  void read(Numbers<T>& to, const T* row) {
    to.assign(layout_.weights, T(0));  // the places between, too: another client's may be NaN
    for (const Block& b : layout_.blocks) {
      const Weights& at = b.weights;
      T* const w = to.data() + at.w_at;
      if (at.any())
        std::visit([&](const auto& layer) { layer.read(row + at.row_w, at.matrix, w); }, b.layer);
      if (at.has_vector()) std::copy_n(row + at.row_b, at.vector, to.data() + at.b_at);
    }
  }
  void write(const Numbers<T>& from, T* row, bool add) {
    if (add) spare_.assign(program_.q, T(0));
    T* const to = add ? spare_.data() : row;
    for (const Block& b : layout_.blocks) {
      const Weights& at = b.weights;
      const T* const w = from.data() + at.w_at;
      if (at.any())
        std::visit([&](const auto& layer) { layer.write(w, at.matrix, to + at.row_w); }, b.layer);
      if (at.has_vector()) std::copy_n(from.data() + at.b_at, at.vector, to + at.row_b);
    }
    for (int64_t i = 0; add && i < program_.q; i++) row[i] += spare_[i];
  }

  ChainProgram program_;
  Plan layout_;  // whose blocks say where the weights lie; every plan's do
  std::map<int64_t, std::unique_ptr<Plan>> plans_;
  Plan* now_ = nullptr;
  int64_t most_ = 1;  // samples at once
  Arena arena_;
  T *x_ = nullptr, *samples_ = nullptr;
  T* aside_ = nullptr;        // slopes that are then added to others
  std::vector<const T*> at_;  // where each sample lies
  Batch<T> batch_;
  Numbers<T> target_, loss_, w_, g_, shift_, mask_, anchor_, velocity_, mean_, square_, sum_,
      spare_;
  Numbers<T> statistics_;
};

}  // namespace chain

template <class T, int bytes>
bool ChainRun<T, bytes>::train(const ChainTrain<T>& a, int64_t s) {
  return chain::Worker<T, bytes>::mine(a.program)->train(a, s);
}
template <class T, int bytes>
bool ChainRun<T, bytes>::grad(const ChainGrad<T>& a, int64_t s) {
  return chain::Worker<T, bytes>::mine(a.program)->grad(a, s);
}
template <class T, int bytes>
bool ChainRun<T, bytes>::evaluate(const ChainEval<T>& a, int64_t s, int64_t first, int64_t last) {
  return chain::Worker<T, bytes>::mine(a.program)->evaluate(a, s, first, last);
}

}  // namespace pflcore::cpu
