// One thread's work on a chain: the plan of a batch (which layers share a kernel, where everything
// lies), and a client's steps. Included once for each instruction set.
#pragma once
#include <cstddef>
#include <limits>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>

#include "chain.h"
#include "conv.h"
#include "layers.h"
#include "linear.h"
#include "steps.h"
#include "../cpu/scratch.h"

namespace pflcore::cpu {

namespace chain {

constexpr int64_t kSlack = 64;  // elements behind an array that vectors may reach into
constexpr int64_t kFar = int64_t{1} << 31;
constexpr int64_t kMost = int64_t{1} << 26;  // bytes that a thread keeps for activations and slopes

constexpr int64_t kSamples = -1, kNothing = -2;  // in place of the number of a block

// What a block does with the slopes of one of its inputs: an addition's are its own ones, and of
// all readers of one output the last one stores them.
enum Slopes : int64_t { kUnwanted, kShared, kStored, kAdded };

// A layer of the program with its sizes, or a layer and what follows it in the same kernel.
struct Block {
  int64_t kind, act;
  int64_t c, h, w;  // of the input
  int64_t features() const { return c * h * w; }
  int64_t row_w = -1, row_b = -1;  // in a row; -1: none
  int64_t w_at = 0, b_at = 0;      // in the private layout
  int64_t outs = 0, random = 0;    // numbers of its bias; its number among the random layers
  double p = 0, factor = 0;
  int64_t from = kSamples, other = kNothing;  // the input, and what is added to the result
  int64_t sums = 0;                           // features of that sum
  bool back = false;                          // whether the input's gradient is wanted
  bool needs = false;                         // whether the slopes of the output are wanted
  Slopes from_slopes = kUnwanted, other_slopes = kUnwanted;
  int64_t slopes_at = 0;      // the block whose slopes lie where the ones of this output do
  bool adds_itself() const {  // whether its kernel can add the input's slopes to others
    const bool can = kind == ChainLayer::conv || kind == ChainLayer::pool;
    return kind == ChainLayer::add || (can && from != other);
  }
  Conv conv{};
  Linear linear{};
  Pool pool{};
  Norm norm{};
  BatchNorm batch_norm{};
  bool reads_output() const {  // whether the backward pass does
    return kind == ChainLayer::act || kind == ChainLayer::add || conv.act != kNone ||
           conv.pool != kNoPool || batch_norm.act != kNone || batch_norm.pooled;
  }
};

inline void demand(bool fits) {
  if (!fits)
    throw std::invalid_argument(
        "the program's layers do not fit each other, the samples or the rows");
}

// The blocks of a program for one size of batch: layers, with what follows taken into their
// registers.
struct Plan {
  std::vector<Block> blocks;
  int64_t features, classes, batch, weights = 0;  // `weights`: of the private layout
  bool narrow = false, has_conv = false;
  bool whole = false;  // a layer needs all samples of a batch at once
  int64_t aside = 0;   // features whose slopes are made aside, and then added to others

  Plan(const ChainProgram& program, int64_t samples, int64_t vector, int64_t tile)
      : features(program.c * program.h * program.w), batch(samples) {
    int64_t c = program.c, h = program.h, w = program.w, random = 0;
    const auto& layers = program.layers;
    const Readers readers(layers);
    // The outputs of the samples and of all lines: their block and their shape.
    struct Output {
      int64_t block = kNothing, c = 0, h = 0, w = 0;
    };
    std::vector<Output> outputs(layers.size() + 1);
    int64_t from = kSamples;  // the block whose output the next layer takes
    outputs[0] = {from, c, h, w};
    const auto earlier = [&](size_t line, double named) {
      demand(named >= -1 && named < static_cast<double>(line));
      const Output& output = outputs[static_cast<size_t>(named + 1)];
      demand(output.block != kNothing);
      return output;
    };
    demand(c > 0 && h > 0 && w > 0 && c < kFar && h < kFar && w < kFar && features < kFar);
    const auto inside = [&](int64_t at, int64_t n) {
      demand(at >= 0 && n > 0 && n <= program.q && at <= program.q - n);
    };
    const auto take = [&](Block& b, int64_t matrix, int64_t numbers, int64_t private_matrix,
                          int64_t row_w, int64_t row_b) {
      inside(row_w, matrix);
      if (row_b >= 0) inside(row_b, numbers);
      b.row_w = row_w, b.row_b = row_b, b.outs = numbers, b.w_at = weights,
      b.b_at = weights + up(private_matrix, vector);
      weights = b.b_at + up(numbers, vector);
    };
    bool weighted = false;  // a block has weights
    for (size_t i = 0; i < layers.size(); i++) {
      const ChainLayer& l = layers[i];
      // What several layers read is stored, so that nothing is done with it at once.
      const auto next = [&](size_t ahead, int64_t kind) {
        return i + ahead < layers.size() && layers[i + ahead].kind == kind && readers.one(i);
      };
      const auto fusable = [&] { return next(1, ChainLayer::act) && layers[i + 1][0] < kGelu; };
      const auto halves = [&] {
        if (!next(1, ChainLayer::pool)) return false;
        const ChainLayer& p = layers[i + 1];
        return p[1] == 2 && p[2] == 2 && p[3] == 2 && p[4] == 2 && p[5] == 0 && p[6] == 0;
      };
      Block b{};
      b.kind = l.kind, b.c = c, b.h = h, b.w = w, b.from = from;
      b.back = wanted(from), b.slopes_at = static_cast<int64_t>(blocks.size());
      for (double f : l.field) demand(f > -2 && f < 1e15);
      switch (l.kind) {
        case ChainLayer::flatten:
          c = c * h * w, h = w = 1;
          outputs[i + 1] = {from, c, h, w};
          continue;
        case ChainLayer::branch: {
          const Output output = earlier(i, l.field[0]);
          from = output.block, c = output.c, h = output.h, w = output.w;
          outputs[i + 1] = output;
          continue;
        }
        case ChainLayer::linear: {
          Linear& q = b.linear;
          q.in = b.features(), q.out = l[0], q.act = kNone;
          demand(h == 1 && w == 1 && q.out > 0 && q.out < kFar);
          q.narrow = from == kSamples && readers.of_samples() == 1 && q.out <= vector;
          if (!q.narrow && fusable()) q.act = layers[++i][0];
          q.plan(batch, b.back, vector);
          take(b, q.in * q.out, q.out, q.weights(), l[1], l[2]);
          narrow = narrow || q.narrow;
          c = q.out;
          break;
        }
        case ChainLayer::conv: {
          Conv& q = b.conv;
          q.c = c, q.h = h, q.w = w, q.o = l[0], q.kh = l[1], q.kw = l[2], q.stride = l[3],
          q.ph = l[4], q.pw = l[5];
          demand(q.o > 0 && q.kh > 0 && q.kw > 0 && (q.stride == 1 || q.stride == 2) && q.ph >= 0 &&
                 q.pw >= 0 && q.ph < kFar && q.pw < kFar);
          demand(h + 2 * q.ph >= q.kh && w + 2 * q.pw >= q.kw);
          q.pool = kNoPool, q.act = kNone;
          const bool windows =
              q.stride == 1 && h + 2 * q.ph > q.kh && w + 2 * q.pw > q.kw;  // room for one of 2x2
          if (fusable()) q.act = layers[++i][0];
          if (windows && halves()) q.pool = layers[++i][0];
          if (q.pool == kMax && q.act == kNone && fusable()) q.act = layers[++i][0];
          q.plan(batch, b.back, vector, tile);
          demand(static_cast<double>(q.o) * static_cast<double>(q.d_plane) < kFar &&
                 static_cast<double>(q.c) * static_cast<double>(q.plane) < kFar);
          take(b, q.weights(), q.o, q.weights(), l[6], l[7]);
          has_conv = true;
          c = q.o, h = q.hq, w = q.wq;
          break;
        }
        case ChainLayer::pool: {
          b.pool = {c, h, w, l[0], l[1], l[2], l[3], l[4], l[5], l[6], batch};
          const Pool& q = b.pool;
          demand((q.mode == kMax || q.mode == kMean) && q.kh > 0 && q.kw > 0 && q.sh > 0 &&
                 q.sw > 0 && q.ph >= 0 && q.pw >= 0 && q.ph <= q.kh / 2 && q.pw <= q.kw / 2 &&
                 q.kh <= h + 2 * q.ph && q.kw <= w + 2 * q.pw);
          h = q.ho(), w = q.wo();
          break;
        }
        case ChainLayer::act:
          b.act = l[0];
          demand(b.act >= kRelu && b.act <= kGelu);
          break;
        case ChainLayer::dropout:
          b.p = l.field[0], b.random = random++;
          demand(b.p >= 0 && b.p <= 1);
          break;
        case ChainLayer::norm:
          b.norm = {b.features(), l[0], l[1], batch, l.field[2], l[3] >= 0};
          demand(l[0] > 0 && l[1] > 0 && b.norm.features % l[0] == 0 &&
                 b.norm.features % l[1] == 0 && (l[3] >= 0) == (l[4] >= 0));
          if (b.norm.affine)
            take(b, b.norm.features / l[1], b.norm.features / l[1], b.norm.features / l[1], l[3],
                 l[4]);
          break;
        case ChainLayer::scale:
          demand(h == 1 && w == 1);
          take(b, c, c, c, l[0], -1);
          break;
        case ChainLayer::leaky:
          b.factor = l.field[0];
          break;
        case ChainLayer::batch_norm: {
          BatchNorm& q = b.batch_norm;
          demand(l[0] > 0 && b.features() % l[0] == 0 && (l[2] >= 0) == (l[3] >= 0));
          const bool is_image = l[0] == h * w;
          q.channels = b.features() / l[0], q.h = is_image ? h : l[0], q.w = is_image ? w : 1;
          q.batch = batch, q.act = kNone, q.mean_at = l[4], q.variance_at = l[5];
          q.eps = l.field[1], q.momentum = l.field[6], q.affine = l[2] >= 0, q.frozen = l[7] != 0;
          for (int64_t at : {q.mean_at, q.variance_at})
            demand(at >= 0 && q.channels <= program.b && at <= program.b - q.channels);
          if (q.affine) take(b, q.channels, q.channels, q.channels, l[2], l[3]);
          if (fusable()) q.act = layers[++i][0];
          q.pooled = is_image && h > 1 && w > 1 && halves() && layers[i + 1][0] == kMax;
          if (q.pooled) h = q.hq(), w = q.wq(), i++;
          if (q.pooled && q.act == kNone && fusable()) q.act = layers[++i][0];
          whole = whole || !q.frozen;
          break;
        }
        case ChainLayer::add:
          break;
        default:
          demand(false);
      }
      if (!b.reads_output() && next(1, ChainLayer::add)) i++;
      if (layers[i].kind == ChainLayer::add) {
        const Output addend = earlier(i, layers[i].field[0]);
        demand(addend.c == c && addend.h == h && addend.w == w);
        b.other = addend.block, b.sums = c * h * w, b.act = kNone;
        if (fusable()) b.act = layers[++i][0];
      }
      weighted = weighted || b.row_w >= 0;
      b.needs = b.row_w >= 0 || b.back || wanted(b.other);
      from = static_cast<int64_t>(blocks.size());
      blocks.push_back(b);
      outputs[i + 1] = {from, c, h, w};
    }
    classes = c;
    demand(h == 1 && w == 1 && !blocks.empty() && weighted);
    demand(from + 1 == static_cast<int64_t>(blocks.size()));
    plan_slopes();
  }

 private:
  // The numbers of layers that read the samples and the output of each line. A flatten and a branch
  // have the output of another line.
  struct Readers {
    std::vector<size_t> owner;  // of the samples and each line: whose output it has, counted from 1
    std::vector<int64_t> count;

    explicit Readers(const std::vector<ChainLayer>& layers)
        : owner(layers.size() + 1), count(layers.size() + 1) {
      for (size_t i = 0; i < layers.size(); i++) {
        const ChainLayer& l = layers[i];
        const bool names = l.kind == ChainLayer::branch || l.kind == ChainLayer::add;
        demand(!names || (l.field[0] >= -1 && l.field[0] < static_cast<double>(i)));
        const size_t named = names ? owner[static_cast<size_t>(l.field[0] + 1)] : 0;
        owner[i + 1] = l.kind == ChainLayer::flatten  ? owner[i]
                       : l.kind == ChainLayer::branch ? named
                                                      : i + 1;
        if (owner[i + 1] != i + 1) continue;
        count[owner[i]]++;
        if (names) count[named]++;
      }
      for (size_t i = 0; i < layers.size(); i++)
        demand(owner[i] != i || i == owner.back() || count[i] > 0);  // else it has no slopes
    }
    bool one(size_t line) const { return count[line + 1] == 1; }
    int64_t of_samples() const { return count[0]; }
  };

  bool wanted(int64_t block) const { return block >= 0 && blocks[block].needs; }

  // Where the slopes of each block lie, and which of its readers stores them: in the backward pass
  // the last one comes first.
  void plan_slopes() {
    std::vector<std::vector<int64_t>> readers(blocks.size());
    for (int64_t i = 0; i < static_cast<int64_t>(blocks.size()); i++)
      for (int64_t input : {blocks[i].from, blocks[i].other})
        if (input >= 0) readers[input].push_back(i);
    std::vector<bool> stored(blocks.size());
    const auto plan = [&](int64_t i, int64_t input, bool shares) {
      if (!wanted(input)) return kUnwanted;
      const bool first = !stored[input];
      stored[input] = true;
      if (first && shares) blocks[input].slopes_at = blocks[i].slopes_at;
      return !first ? kAdded : shares ? kShared : kStored;
    };
    for (int64_t i = static_cast<int64_t>(blocks.size()) - 1; i >= 0; i--) {
      Block& b = blocks[i];
      if (b.kind != ChainLayer::add) {
        b.other_slopes = plan(i, b.other, true);
        b.from_slopes = plan(i, b.from, false);
        if (b.from_slopes == kAdded && !b.adds_itself()) aside = std::max(aside, b.features());
        continue;
      }
      // Both inputs have the slopes of the sum. The later one shares them if it only reads them,
      // and the earlier one if what others add to them comes behind that.
      const int64_t later = std::max(b.from, b.other), sooner = std::min(b.from, b.other);
      const bool reads = wanted(later) && readers[later].size() == 1 &&
                         blocks[later].kind != ChainLayer::add && blocks[later].other == kNothing;
      const bool behind = [&] {
        if (!wanted(sooner) || sooner == later) return false;
        const auto& all = readers[sooner];
        return !reads || all.size() == 1 || all[all.size() - 2] < later;
      }();
      const Slopes of_later = plan(i, later, reads);
      const Slopes of_sooner = plan(i, sooner, behind);
      b.from_slopes = b.from == later ? of_later : of_sooner;
      b.other_slopes = b.from == later ? of_sooner : of_later;
    }
  }
};

template <class T>
struct Aligned {  // memory that begins at a cache line
  using value_type = T;
  Aligned() = default;
  template <class U>
  Aligned(const Aligned<U>&) {}
  T* allocate(size_t n) {
    return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(64)));
  }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
  bool operator==(const Aligned&) const { return true; }
};
template <class T>
using Numbers = std::vector<T, Aligned<T>>;

template <class T>
struct Space {                         // of one block
  T *y, *dy, *d, *z, *factor, *stats;  // `d`: slopes or dz
  ConvSpace<T> conv;
  BatchNormSpace<T> batch_norm;
};

template <class T, int bytes>
PFL_TARGET void descend(const sgd_detail::Row<T>& row, int64_t c, int64_t end) {
  sgd_detail::row<bytes, T>(row, c, end);
}

// A thread's memory and its plans for one program, on vectors of `bytes` bytes.
template <class T, int bytes>
class Worker {
 public:
  static constexpr int64_t lanes = bytes / sizeof(T);

  explicit Worker(const ChainProgram& program) : program_(program), layout_(plan_of(program, 1)) {
    for (most_ = layout_.has_conv ? 32 : 128; most_ > 1 && bytes_of(most_) > kMost;)
      most_ /= 2;  // more leave the second-level cache
  }
  Worker(const Worker&) = delete;

  struct Lease {  // gives memory back where even a single sample's is too much to keep
    Worker& worker;
    ~Lease() {
      if (worker.arena_.held > kMost) worker.now_ = nullptr, worker.arena_ = {};
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
    const Sgd<T>& g = a.sgd;
    const int64_t n = a.size[s], size = std::min(a.batch, n), q = program_.q;
    if (n < 0 || n > a.longest) return false;
    if (n == 0) return a.steps[s] == 0;
    const bool merges = a.merge_single && !a.drop_last && n > size && n % size == 1;
    const int64_t cuts = a.drop_last || merges ? n / size : (n + size - 1) / size;
    if (a.steps[s] > cuts * a.passes) return false;
    begin(g.w + s * g.w_row);
    train_ = true, running_ = a.statistics + s * program_.b;
    const auto own = [&](Numbers<T>& to, const T* from, int64_t row) -> const T* {
      if (!from) return nullptr;
      read(to, from + s * row);
      return to.data();
    };
    sgd_detail::Row<T> row{w_.data(),
                           nullptr,
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
    const T gradient_decay = a.adamw.on ? T(0) : row.decay;  // AdamW's is no part of a gradient
    const bool clipped = a.clip < std::numeric_limits<double>::infinity();
    const bool plain = !(row.shift || row.mask || row.anchor || row.buffer || row.decay != 0 ||
                         clipped || a.adamw.on || a.grad_sum || layout_.narrow);
    // Gradients of a single tile move the weights as they are made.
    const bool direct = plain && (layout_.whole || size <= most_);
    double total = 0;
    bool fine = true;
    for (int64_t k = 0; k < a.steps[s] && fine; k++) {
      const int64_t pass = k / cuts, first = k % cuts * size;
      const bool last = merges && k % cuts == cuts - 1;
      const int64_t count = last ? size + 1 : std::min(size, n - first);
      const int64_t* const place = a.order + (s * a.passes + pass) * a.longest + first;
      seed_ = {};
      if (a.seeds) seed_ = static_cast<uint64_t>(a.seeds[s * a.passes + pass]) + k % cuts;
      double loss = 0;
      fine = gradient(a, s, place, count, std::min(size, n - first - count),
                      {direct, false, row.lr}, loss);
      total += loss;
      if (direct || !fine) continue;
      const T factor = clipped ? clip_factor(a.clip) : T(1);
      const Moments<T> moments(mean_.data(), square_.data(), a.adamw, k + 1);
      row.grad = g_.data();
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
    write(w_, g.w + s * g.w_row, false);
    if (a.grad_sum) write(sum_, a.grad_sum + s * q, true);
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
    seed_ = {};
    if (a.seeds) seed_ = static_cast<uint64_t>(a.seeds[s]);
    train_ = a.train, running_ = a.statistics + s * program_.b;
    if (!gradient(a, s, a.order + s * a.longest, n, 0, {}, a.loss[s])) return false;
    write(g_, a.grad + s * program_.q, false);
    return true;
  }

  // Evaluates the samples first to last of the list. All are of client s, or of any client where
  // there is one model for all.
  bool evaluate(const ChainEval<T>& a, int64_t s, int64_t first, int64_t last) {
    if (first >= last) return true;
    read(w_, a.w + s * a.w_row);
    seed_ = {};
    const T* const statistics = a.statistics + s * a.statistics_row;
    statistics_.assign(statistics, statistics + program_.b);
    train_ = false, running_ = statistics_.data();
    int64_t owner = s;
    for (int64_t at = first; at < last;) {
      int64_t some = most_;
      while (some > last - at) some /= 2;  // few sizes, so few plans
      Plan& plan = use(some);
      if (a.scores && a.classes != plan.classes) return false;
      for (int64_t i = 0; i < some; i++) {
        while (a.one_model && at + i >= a.begin[owner + 1]) owner++;
        if (!find(a, owner, a.order + at + i, i, last - at - i)) return false;
      }
      gather();
      forward(0);
      const T* score = space_.back().y;
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
  static Plan plan_of(const ChainProgram& program, int64_t batch) {
    return Plan(program, batch, lanes, Tile<T, bytes>::four);
  }

  int64_t bytes_of(int64_t batch) {
    Plan plan = plan_of(program_, batch);
    now_ = &plan;
    arena_.begin();
    lay();
    now_ = nullptr;
    return arena_.used;
  }

  // Makes the plan of `batch` samples the one that the memory is laid out for.
  Plan& use(int64_t batch) {
    if (now_ && now_->batch == batch) return *now_;
    auto& plan = plans_[batch];
    if (!plan) plan = std::make_unique<Plan>(plan_of(program_, batch));
    now_ = plan.get();
    arena_.begin();
    lay();  // the first time to count
    arena_.grow();
    lay();
    return *now_;
  }

  struct Arena {  // one block of memory, every array at a cache line
    std::unique_ptr<Scratch<std::byte>> memory;
    int64_t used = 0, held = 0;
    std::vector<std::unique_ptr<Scratch<std::byte>>>
        apart;  // where a sanitizer watches: every array by itself
    void begin() { used = 0, counting = true; }
    void grow() {
      apart.clear();
      if (kKeepScratch && used > held) {
        held = used;
        memory.reset();
        memory = std::make_unique<Scratch<std::byte>>(held);
        std::memset(memory->data, 0,
                    held);  // nothing that vectors may reach into is ever undefined
      }
      used = 0, counting = false;
    }
    template <class U>
    U* take(int64_t n, bool zero = false) {
      if (!kKeepScratch && !counting) {
        apart.push_back(std::make_unique<Scratch<std::byte>>(n * sizeof(U)));
        std::memset(apart.back()->data, 0, n * sizeof(U));
        return reinterpret_cast<U*>(apart.back()->data);
      }
      U* p = counting ? nullptr : reinterpret_cast<U*>(memory->data + used);
      if (zero && !counting) std::fill_n(p, n, U(0));
      used += up(n * sizeof(U), 64) + 64;  // neighbours do not begin in one set of the cache
      return p;
    }
    bool counting = true;
  };

  void lay() {
    const Plan& plan = *now_;
    const int64_t batch = plan.batch;
    const auto room = [this](int64_t n, bool zero = false) {
      return arena_.template take<T>(n, zero);
    };
    const auto plain = [&](int64_t numbers) { return room(numbers * batch + kSlack); };
    space_.assign(plan.blocks.size(), {});
    samples_ = plan.narrow ? room(batch * up(plan.features, lanes), true) : nullptr;
    x_ = plan.narrow ? nullptr : plain(plan.features);
    for (size_t i = 0; i < plan.blocks.size(); i++) {
      const Block& b = plan.blocks[i];
      Space<T>& s = space_[i];
      const Conv& q = b.conv;
      int64_t outs = b.features();
      if (b.kind == ChainLayer::conv) {
        s.conv.in = room(q.in_size(lanes), true), s.conv.d = room(q.slope_size(lanes), true);
        s.conv.part = room((q.back ? std::min(q.o, q.tile) : q.o) * q.taps * lanes);
        s.conv.turned = room(q.back ? q.weights() : 0);
        s.conv.wide =
            room(q.back ? Tile<T, bytes>::two * up(q.columns * batch, lanes) + kSlack : 0);
        s.conv.sums = room(q.o * lanes);
        s.conv.mask = arena_.template take<uint8_t>(q.mask_size(lanes)),
        s.conv.kept = room(q.kept_size(lanes));
        outs = q.o * q.hq * q.wq;
      } else if (b.kind == ChainLayer::linear) {
        s.z = room(b.linear.by_sample()), s.d = room(b.linear.by_sample(), true);
        outs = b.linear.out;
      } else if (b.kind == ChainLayer::pool) {
        outs = b.c * b.pool.ho() * b.pool.wo();
      } else if (b.kind == ChainLayer::dropout) {
        s.factor = plain(outs);
      } else if (b.kind == ChainLayer::norm) {
        s.stats = room(b.norm.groups * 2 * up(batch, lanes));
      } else if (b.kind == ChainLayer::batch_norm) {
        const BatchNorm& n = b.batch_norm;
        outs = n.channels * n.hq() * n.wq();
        s.batch_norm.stats = room(2 * n.channels);
        s.batch_norm.winner = arena_.template take<uint8_t>(n.pooled ? outs * batch + kSlack : 0);
        s.batch_norm.hat = n.pooled ? plain(outs) : nullptr;
      }
      s.y = plain(outs);
      if (b.slopes_at == static_cast<int64_t>(i)) s.dy = plain(outs);
    }
    for (size_t i = plan.blocks.size(); i-- > 0;)
      space_[i].dy = space_[plan.blocks[i].slopes_at].dy;
    aside_ = plan.aside ? plain(plan.aside) : nullptr;
    at_.resize(batch), target_.resize(batch + kSlack), loss_.resize(batch + kSlack);
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
      target_[i] = data.value[p];
    }
    at_[i] = data.x + p * data.x_row;
    return true;
  }
  static constexpr int64_t kAhead = 16;

  PFL_TARGET void gather() {
    const int64_t f = layout_.features;
    if (!layout_.narrow) {
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
    const bool whole = layout_.whole && train_;
    const int64_t tiles = whole ? 1 : (count + most_ - 1) / most_,
                  tile = (count + tiles - 1) / tiles;
    for (int64_t first = 0; first < count; first += tile) {
      const int64_t some = std::min(tile, count - first);
      Plan& plan = use(some);
      for (int64_t i = 0; i < some; i++)
        if (!find(a, s, place + first + i, i,
                  count - first - i + (layout_.narrow ? std::max<int64_t>(ahead, 0) : 0)))
          return false;
      gather();
      if (!layout_.narrow)
        fetch(a.data, place + first + some, std::min(some, count - first - some + ahead));
      forward(first);
      T* const slope = space_.back().dy;
      losses<T, bytes>(a.loss_kind, plan.classes, some, T(1) / static_cast<T>(count),
                       space_.back().y, target_.data(), loss_.data(), nullptr, slope);
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
    return block >= 0 ? space_[block].y : block == kSamples ? x_ : nullptr;
  }

  void forward(int64_t first) {
    const Plan& plan = *now_;
    for (size_t i = 0; i < plan.blocks.size(); i++) {
      const Block& b = plan.blocks[i];
      Space<T>& s = space_[i];
      const T* const x = output(b.from);
      const T *w = w_.data() + b.w_at, *bias = w_.data() + b.b_at;
      const int64_t n = b.features() * plan.batch;
      switch (b.kind) {
        case ChainLayer::linear:
          if (b.linear.narrow)
            narrow_forward<T, bytes>(b.linear, at_.data(), w, bias, s.y);
          else
            linear_forward<T, bytes>(b.linear, x, w, bias, s.z, s.y);
          break;
        case ChainLayer::conv:
          conv_forward<T, bytes>(b.conv, s.conv, x, w, bias, s.y);
          break;
        case ChainLayer::pool:
          pool_forward<T, bytes>(b.pool, x, s.y);
          break;
        case ChainLayer::act:
          act_forward<T, bytes>(b.act, x, s.y, n);
          break;
        case ChainLayer::dropout:
          if (!seed_) {
            std::copy_n(x, n, s.y);
            break;
          }
          dropout_factors<T, bytes>(*seed_, b.random, std::llrint(b.p * (1 << 24)),
                                    b.p == 1 ? T(0) : static_cast<T>(1 / (1 - b.p)), b.features(),
                                    first, plan.batch, s.factor);
          multiply<T, bytes>(x, s.factor, s.y, n);
          break;
        case ChainLayer::norm:
          norm_forward<T, bytes>(b.norm, x, w, bias, s.stats, s.y);
          break;
        case ChainLayer::leaky:
          leaky_forward<T, bytes>(static_cast<T>(b.factor), x, s.y, n);
          break;
        case ChainLayer::batch_norm:
          batch_norm_forward<T, bytes>(b.batch_norm, train_ && !b.batch_norm.frozen, x, w, bias,
                                       running_, s.batch_norm, s.y);
          break;
        case ChainLayer::add:
          break;
        default:
          scale_features<T, bytes>(b.features(), plan.batch, w, x, s.y);
          break;
      }
      if (b.other != kNothing) {
        const T* const result = b.kind == ChainLayer::add ? x : s.y;
        add_forward<T, bytes>(b.act, result, output(b.other), s.y, b.sums * plan.batch);
      }
    }
  }

  // The slopes of one of a block's inputs, which are those of its sum.
  void pass_on(Slopes slopes, int64_t input, const T* dy, int64_t n) {
    if (slopes == kStored) std::copy_n(dy, n, space_[input].dy);
    if (slopes == kAdded) add_to<T, bytes>(space_[input].dy, dy, n);
  }

  void backward(const Into<T>& into, T* to) {
    const Plan& plan = *now_;
    for (size_t i = plan.blocks.size(); i-- > 0;) {
      const Block& b = plan.blocks[i];
      Space<T>& s = space_[i];
      if (!b.needs) continue;  // neither it nor what is before it has weights
      const T *const x = output(b.from), *const w = w_.data() + b.w_at;
      T* const inputs = b.back ? space_[b.from].dy : nullptr;
      const bool adds = b.from_slopes == kAdded && b.adds_itself();
      T* const dx = b.from_slopes == kAdded && !adds ? aside_ : inputs;
      T *const dw = to + b.w_at, *const db = b.row_b >= 0 ? to + b.b_at : nullptr;
      const int64_t n = b.features() * plan.batch, sums = b.sums * plan.batch;
      // The slopes of the sum, in the place of those behind its activation.
      if (b.other != kNothing && b.act != kNone) add_backward<T, bytes>(b.act, s.y, s.dy, sums);
      switch (b.kind) {
        case ChainLayer::linear:
          if (b.linear.narrow)
            narrow_backward<T, bytes>(b.linear, at_.data(), s.dy, into.add, dw, db);
          else
            linear_backward<T, bytes>(b.linear, x, s.z, s.dy, w, into, dw, db, dx, s.d);
          break;
        case ChainLayer::conv:
          conv_backward<T, bytes>(b.conv, s.conv, s.y, s.dy, w, into, dw, db, adds, dx);
          break;
        case ChainLayer::pool:
          pool_backward<T, bytes>(b.pool, adds, x, s.dy, dx);
          break;
        case ChainLayer::act:
          act_backward<T, bytes>(b.act, x, s.y, s.dy, dx, n);
          break;
        case ChainLayer::dropout:
          if (seed_)
            multiply<T, bytes>(s.dy, s.factor, dx, n);
          else
            std::copy_n(s.dy, n, dx);
          break;
        case ChainLayer::norm:
          norm_backward<T, bytes>(b.norm, x, s.stats, s.dy, w, into, dw, db, dx);
          break;
        case ChainLayer::leaky:
          leaky_backward<T, bytes>(static_cast<T>(b.factor), x, s.dy, dx, n);
          break;
        case ChainLayer::batch_norm:
          batch_norm_backward<T, bytes>(b.batch_norm, train_ && !b.batch_norm.frozen, x, s.y,
                                        s.batch_norm, s.dy, w, into, dw, db, dx);
          break;
        case ChainLayer::add:
          pass_on(b.from_slopes, b.from, s.dy, n);
          break;
        default:
          if (dx) scale_features<T, bytes>(b.features(), plan.batch, w, s.dy, dx);
          scale_backward<T, bytes>(b.features(), plan.batch, x, s.dy, into, dw);
          break;
      }
      pass_on(b.other_slopes, b.other, s.dy, sums);
      if (dx && dx != inputs) add_to<T, bytes>(inputs, dx, n);
    }
  }

  // The factor that shortens the gradient to this norm, as torch.nn.utils.clip_grad_norm_ has it; 1
  // where it is no longer. NaN stays.
  T clip_factor(double norm) const {
    double sum = 0;
    for (const Block& b : layout_.blocks)
      if (b.row_w >= 0) sum += square_sum<T, bytes>(g_.data() + b.w_at, b.b_at + b.outs - b.w_at);
    const double factor = norm / (std::sqrt(sum) + 1e-6);
    return factor >= 1 ? T(1) : static_cast<T>(factor);
  }

  void begin(const T* row) {
    read(w_, row);
    g_.assign(layout_.weights, T(0));
  }

  // A row into the private layout: convolutions by tile, linear layers [in][out], every row of
  // whole vectors with zeros behind.
  PFL_TARGET void read(Numbers<T>& to, const T* row) {
    to.assign(layout_.weights, T(0));  // the places between, too: another client's may be NaN
    for (const Block& b : layout_.blocks) {
      if (b.row_w < 0) continue;
      const T* const from = row + b.row_w;
      T* const mine = to.data() + b.w_at;
      const Conv& q = b.conv;
      const Linear& l = b.linear;
      if (b.kind == ChainLayer::conv) {
        for (int64_t o = 0; o < q.o; o++)
          for (int64_t k = 0; k < q.taps; k++)
            mine[q.w_at[o] + k * q.w_step[o]] = from[o * q.taps + k];
      } else if (b.kind == ChainLayer::linear && l.narrow) {
        for (int64_t o = 0; o < l.out; o++) copy<bytes>(mine + o * l.high, from + o * l.in, l.in);
      } else if (b.kind == ChainLayer::linear) {
        turn<bytes>(
            mine, l.high, [&](int64_t o) PFL_LAMBDA { return from + o * l.in; }, l.out, l.in);
      } else {
        std::copy_n(from, b.outs, mine);
      }
      if (b.row_b >= 0) std::copy_n(row + b.row_b, b.outs, to.data() + b.b_at);
    }
  }
  PFL_TARGET void write(const Numbers<T>& from, T* row, bool add) {
    if (add) spare_.assign(program_.q, T(0));
    T* const to = add ? spare_.data() : row;
    for (const Block& b : layout_.blocks) {
      if (b.row_w < 0) continue;
      T* const theirs = to + b.row_w;
      const T* const mine = from.data() + b.w_at;
      const Conv& q = b.conv;
      const Linear& l = b.linear;
      if (b.kind == ChainLayer::conv) {
        for (int64_t o = 0; o < q.o; o++)
          for (int64_t k = 0; k < q.taps; k++)
            theirs[o * q.taps + k] = mine[q.w_at[o] + k * q.w_step[o]];
      } else if (b.kind == ChainLayer::linear && l.narrow) {
        for (int64_t o = 0; o < l.out; o++) std::copy_n(mine + o * l.high, l.in, theirs + o * l.in);
      } else if (b.kind == ChainLayer::linear) {
        turn<bytes>(
            theirs, l.in, [&](int64_t i) PFL_LAMBDA { return mine + i * l.high; }, l.in, l.out);
      } else {
        std::copy_n(mine, b.outs, theirs);
      }
      if (b.row_b >= 0) std::copy_n(from.data() + b.b_at, b.outs, to + b.row_b);
    }
    for (int64_t i = 0; add && i < program_.q; i++) row[i] += spare_[i];
  }

  ChainProgram program_;
  Plan layout_;  // whose blocks say where the weights lie; every plan's do
  std::map<int64_t, std::unique_ptr<Plan>> plans_;
  Plan* now_ = nullptr;
  int64_t most_ = 1;  // samples at once
  Arena arena_;
  std::vector<Space<T>> space_;
  T *x_ = nullptr, *samples_ = nullptr;
  T* aside_ = nullptr;  // slopes that are then added to others
  std::vector<const T*> at_;
  Numbers<T> target_, loss_, w_, g_, shift_, mask_, anchor_, velocity_, mean_, square_, sum_,
      spare_;
  Numbers<T> statistics_;
  T* running_ = nullptr;  // a row of statistics
  bool train_ = false;
  std::optional<uint64_t> seed_;  // of dropout's masks; none: nothing is dropped
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
