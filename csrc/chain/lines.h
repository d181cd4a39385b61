// The lines of a program as a plan reads them, one after another: the input of each, who reads its
// output, and which of the lines behind it a layer computes in its own pass.
#pragma once
#include <stdexcept>
#include <vector>

#include "chain.h"
#include "tile.h"

namespace pflcore::cpu::chain {

constexpr int64_t kFar = int64_t{1} << 31;       // above every size
constexpr int64_t kSamples = -1, kNothing = -2;  // in place of the number of a block

constexpr const char* kMisfit =
    "the program's layers do not fit each other, the samples or the rows";
[[noreturn]] inline void refuse(const char* why = kMisfit) { throw std::invalid_argument(why); }
inline void demand(bool fits, const char* why = kMisfit) {
  if (!fits) refuse(why);
}

// The shape of a sample between two layers.
struct Shape {
  int64_t c, h, w;
  int64_t features() const { return c * h * w; }
  bool is_flat() const { return h == 1 && w == 1; }
  bool operator==(const Shape& o) const { return c == o.c && h == o.h && w == o.w; }
};

// What a line takes: the samples, or the output of a block.
struct Output {
  int64_t block = kNothing;
  Shape shape{};
  bool wanted = false;  // whether its slopes are
};

// Where the weights of a layer lie: a matrix, and behind it a vector.
struct Weights {
  int64_t matrix = 0, vector = 0;  // how many numbers they have
  int64_t row_w = -1, row_b = -1;  // their places in a row; -1: none
  int64_t w_at = 0, b_at = 0;      // their places in the private layout
  int64_t span() const { return b_at + vector - w_at; }
  bool any() const { return row_w >= 0; }
  bool has_vector() const { return row_b >= 0; }
};

// The numbers of layers that read the samples and the output of each line. A flatten and a branch
// have the output of another line.
class Readers {
 public:
  explicit Readers(const std::vector<ChainLayer>& layers)
      : owner_(layers.size() + 1), count_(layers.size() + 1) {
    for (size_t i = 0; i < layers.size(); i++) {
      const ChainLayer& l = layers[i];
      const bool names = l.kind == ChainLayer::branch || l.kind == ChainLayer::add;
      demand(!names || (l.field[0] >= -1 && l.field[0] < static_cast<double>(i)));
      const size_t named = names ? owner_[static_cast<size_t>(l.field[0] + 1)] : 0;
      owner_[i + 1] = i + 1;
      if (l.kind == ChainLayer::flatten) owner_[i + 1] = owner_[i];
      if (l.kind == ChainLayer::branch) owner_[i + 1] = named;
      if (owner_[i + 1] != i + 1) continue;
      count_[owner_[i]]++;
      if (names) count_[named]++;
    }
    for (size_t i = 0; i < layers.size(); i++)
      demand(owner_[i] != i || i == owner_.back() || count_[i] > 0);  // else it has no slopes
  }

  int64_t of_samples() const { return count_[0]; }
  int64_t of_line(size_t line) const { return count_[line + 1]; }

 private:
  // Of the samples and each line: whose output it has, counted from 1.
  std::vector<size_t> owner_;
  std::vector<int64_t> count_;
};

// A place among the lines. A layer reads its own line there, sets the shape of its output, and may
// take the lines behind it, which it then computes in its own pass.
class Lines {
 public:
  Shape shape;  // of the output in the making; at first the input's

  // `lanes`: elements of a vector.
  Lines(const ChainProgram& program, int64_t batch, int64_t lanes)
      : shape{program.c, program.h, program.w},
        program_(program),
        readers_(program.layers),
        outputs_(program.layers.size() + 1),
        batch_(batch),
        lanes_(lanes) {
    for (int64_t side : {shape.c, shape.h, shape.w}) demand(side > 0 && side < kFar);
    demand(shape.features() < kFar);
    for (const ChainLayer& l : program.layers)
      for (double f : l.field) demand(f > -2 && f < 1e15);
    input_ = {kSamples, shape, false};
    outputs_[0] = input_;
  }

  bool at_end() const { return at_ == program_.layers.size(); }
  const ChainLayer& line() const { return program_.layers[at_]; }
  const Output& input() const { return input_; }
  int64_t batch() const { return batch_; }                       // samples
  int64_t numbers() const { return shape.features() * batch_; }  // of all samples
  bool reads_samples_alone() const {
    return input_.block == kSamples && readers_.of_samples() == 1;
  }

  // Takes the next line if it is of this kind and alone reads what is made here: what several
  // layers read is stored, so that nothing is done with it at once.
  bool take(ChainLayer::Kind kind) {
    if (!is_next(kind)) return false;
    at_++;
    return true;
  }

  // The activation that is taken: the next line's, if it needs no more than its own value for its
  // slope, else kNone.
  int64_t take_activation() {
    if (!is_next(ChainLayer::act)) return kNone;
    const int64_t act = next()[0];
    if (act < kRelu || act >= kGelu) return kNone;
    at_++;
    return act;
  }

  // Takes the next line if it pools windows of 2x2 side by side; `mode`: by maximum or mean.
  bool take_windows(int64_t mode) {
    if (!is_next(ChainLayer::pool)) return false;
    const ChainLayer& pool = next();
    for (int side : {1, 2, 3, 4})
      if (pool[side] != 2) return false;
    if (pool[0] != mode || pool[5] != 0 || pool[6] != 0) return false;
    at_++;
    return true;
  }

  // The place of a layer's weights, whose matrix takes `room` numbers in the private layout.
  // `row_w`, `row_b`: their columns in a row; a `row_b` of -1 is none.
  void take_weights(int64_t matrix, int64_t vector, int64_t room, int64_t row_w, int64_t row_b) {
    demand_columns(program_.q, row_w, matrix);
    if (row_b >= 0) demand_columns(program_.q, row_b, vector);
    const int64_t w_at = private_size_, b_at = w_at + up(room, lanes_);
    weights_ = {matrix, vector, row_w, row_b, w_at, b_at};
    private_size_ = b_at + up(vector, lanes_);
  }
  // Refuses columns of a row of statistics that are not there.
  void demand_statistics(int64_t at, int64_t n) const { demand_columns(program_.b, at, n); }
  const Weights& weights() const { return weights_; }     // of the layer that is read
  int64_t private_size() const { return private_size_; }  // of all layers so far

  int64_t next_random() { return randoms_++; }  // numbers of layers that draw

  // The earlier output that a branch or an addition names.
  Output named() const {
    const double line = this->line().field[0];
    demand(line >= -1 && line < static_cast<double>(at_));
    const Output& output = outputs_[static_cast<size_t>(line + 1)];
    demand(output.block != kNothing);
    return output;
  }

  // Passes over a line that is no layer, as it has another line's output; false if it is one.
  bool pass() {
    if (line().kind == ChainLayer::flatten)
      go_on({input_.block, {shape.features(), 1, 1}, input_.wanted});
    else if (line().kind == ChainLayer::branch)
      go_on(named());
    else
      return false;
    return true;
  }
  // Ends a layer, whose output is that block's.
  void end_layer(int64_t block, bool wanted) { go_on({block, shape, wanted}); }

 private:
  const ChainLayer& next() const { return program_.layers[at_ + 1]; }
  bool is_next(ChainLayer::Kind kind) const {
    if (at_ + 1 == program_.layers.size()) return false;
    return next().kind == kind && readers_.of_line(at_) == 1;
  }

  static void demand_columns(int64_t length, int64_t at, int64_t n) {
    demand(at >= 0 && n > 0 && n <= length && at <= length - n);
  }

  void go_on(const Output& output) {
    input_ = output;
    shape = output.shape;
    weights_ = {};
    outputs_[++at_] = output;
  }

  const ChainProgram& program_;
  Readers readers_;
  std::vector<Output> outputs_;  // of the samples and all lines
  Output input_;
  Weights weights_;
  size_t at_ = 0;
  int64_t batch_, lanes_;
  int64_t private_size_ = 0, randoms_ = 0;
};

}  // namespace pflcore::cpu::chain
