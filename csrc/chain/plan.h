// The plan of a program for one number of samples: which lines share a block, where its numbers
// lie, and who stores whose slopes.
#pragma once
#include <vector>

#include "layers.h"

namespace pflcore::cpu::chain {

// What a block does with the slopes of one of its inputs: an addition's are its own ones, and of
// all readers of one output the last one stores them.
enum Slopes : int64_t { kUnwanted, kShared, kStored, kAdded };

// A layer, the lines behind it that it takes, and what is then added to its output.
template <class T, int bytes>
struct Block {
  AnyLayer<T, bytes> layer;
  Weights weights{};
  int64_t inputs = 0, outputs = 0;            // features
  int64_t from = kSamples, other = kNothing;  // the block that it reads, and what it adds
  int64_t act = kNone;                        // of the sum
  bool back = false;                          // whether the input's slopes are wanted
  bool needs = false;                         // whether those of the output are
  Slopes from_slopes = kUnwanted, other_slopes = kUnwanted;
  int64_t slopes_at = 0;          // the block whose slopes lie where the ones of this output do
  T *y = nullptr, *dy = nullptr;  // the output, and its slopes

  // A block of an addition alone.
  bool is_addition() const { return std::holds_alternative<AddLayer<T, bytes>>(layer); }
  // Whether its kernel can add the input's slopes to others.
  bool adds_slopes() const {
    if (is_addition()) return true;
    const auto can = [](const auto& kind) { return kind.adds_slopes; };
    return from != other && std::visit(can, layer);
  }
};

// The blocks of a program for batches, or tiles of them, of one size.
template <class T, int bytes>
struct Plan {
  using Block = chain::Block<T, bytes>;

  std::vector<Block> blocks;
  int64_t batch;                               // samples
  int64_t features;                            // of one
  int64_t classes = 0;                         // numbers of the last output
  int64_t weights = 0;                         // numbers of the private layout
  int64_t most_samples = Layer::most_samples;  // at once
  int64_t aside = 0;           // features whose slopes are made aside, and then added to others
  bool reads_samples = false;  // a layer reads them where they lie, so that no other one does
  bool whole = false;          // a layer needs all samples of a batch at once

  Plan(const ChainProgram& program, int64_t samples) : batch(samples) {
    Lines lines(program, samples, bytes / sizeof(T));
    features = lines.shape.features();
    while (!lines.at_end())
      if (!lines.pass()) add_block(lines);
    const Output& last = lines.input();
    classes = last.shape.features();
    weights = lines.private_size();
    demand(last.shape.is_flat() && weights > 0);
    demand(last.block + 1 == static_cast<int64_t>(blocks.size()));
    plan_slopes();
  }

 private:
  void add_block(Lines& lines) {
    const Output input = lines.input();
    const int64_t number = static_cast<int64_t>(blocks.size());
    Block b{make_layer<AnyLayer<T, bytes>>(lines)};
    b.weights = lines.weights();
    b.inputs = input.shape.features(), b.outputs = lines.shape.features();
    b.from = input.block, b.back = input.wanted;
    b.slopes_at = number;
    bool keeps_output = false;  // its backward pass reads its own output, not a sum
    std::visit(
        [&](const auto& layer) {
          keeps_output = layer.reads_output();
          most_samples = std::min(most_samples, layer.most_samples);
          reads_samples = reads_samples || layer.reads_samples();
          whole = whole || layer.needs_whole_batch();
        },
        b.layer);
    b.needs = b.weights.any() || b.back;
    if (b.is_addition() || (!keeps_output && lines.take(ChainLayer::add))) {
      const Output addend = lines.named();
      demand(addend.shape == lines.shape);
      b.other = addend.block;
      b.act = lines.take_activation();
      b.needs = b.needs || addend.wanted;
    }
    blocks.push_back(std::move(b));
    lines.end_layer(number, blocks.back().needs);
  }

  bool is_wanted(int64_t block) const { return block >= 0 && blocks[block].needs; }

  // Where the slopes of each block lie, and which of its readers stores them: in the backward pass
  // the last one comes first.
  void plan_slopes() {
    std::vector<std::vector<int64_t>> readers(blocks.size());
    for (int64_t i = 0; i < static_cast<int64_t>(blocks.size()); i++)
      for (int64_t input : {blocks[i].from, blocks[i].other})
        if (input >= 0) readers[input].push_back(i);
    std::vector<bool> stored(blocks.size());
    const auto plan = [&](int64_t i, int64_t input, bool shares) {
      if (!is_wanted(input)) return kUnwanted;
      const bool first = !stored[input];
      stored[input] = true;
      if (first && shares) blocks[input].slopes_at = blocks[i].slopes_at;
      return !first ? kAdded : shares ? kShared : kStored;
    };
    for (int64_t i = static_cast<int64_t>(blocks.size()) - 1; i >= 0; i--) {
      Block& b = blocks[i];
      if (!b.is_addition()) {
        b.other_slopes = plan(i, b.other, true);
        b.from_slopes = plan(i, b.from, false);
        if (b.from_slopes == kAdded && !b.adds_slopes()) aside = std::max(aside, b.inputs);
        continue;
      }
      // Both inputs have the slopes of the sum. The later one shares them if it only reads them,
      // and the earlier one if what others add to them comes behind that.
      const int64_t later = std::max(b.from, b.other), sooner = std::min(b.from, b.other);
      const bool reads = is_wanted(later) && readers[later].size() == 1 &&
                         !blocks[later].is_addition() && blocks[later].other == kNothing;
      const bool behind = [&] {
        if (!is_wanted(sooner) || sooner == later) return false;
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

}  // namespace pflcore::cpu::chain
