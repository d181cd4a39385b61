// What a layer is to a chain. Each kind of line that computes something has a struct NAMELayer,
// which derives from `Layer` and stands beside its kernels; layers.h lists them.
#pragma once
#include <optional>

#include "arena.h"
#include "lines.h"

namespace pflcore::cpu::chain {

// What all layers see of a batch, or of the tile of it that is computed.
template <class T>
struct Batch {
  const T* const* samples = nullptr;  // where each one lies
  int64_t first = 0;                  // the first sample's place in the step's batch
  bool train = false;
  T* running = nullptr;          // a row of statistics, which training moves
  std::optional<uint64_t> seed;  // of dropout's masks; none: nothing is dropped
};

// A forward pass of one layer: from x, by weights and bias, to y.
template <class T>
struct Forward {
  const Batch<T>& batch;
  const T *x, *w, *bias;
  T* y;
};

// A backward pass: from dy, the slopes of y, to those of x and of the weights.
template <class T>
struct Backward {
  const Batch<T>& batch;
  const T *x, *y, *dy, *w;
  Into<T> into;  // what happens to the gradients of the weights
  T *dw, *db;    // their places; db: nullptr where there is no bias
  T* dx;         // nullptr: not wanted
  bool adds;     // whether the slopes of x are added to those in dx
};

// What most kinds have in common; a kind that differs has a member of that name itself. Each has
// also
//   kind                      the number of its lines
//   NAMELayer(Lines&)         makes the sizes, and refuses by `demand` what does not fit
//   forward(Forward) const    computes y
//   backward(Backward) const  stores the slopes of x, and hands on those of the weights
struct Layer {
  static constexpr int64_t most_samples = 128;  // at once; more leave the second-level cache
  static constexpr bool adds_slopes = false;    // whether `backward` knows `Backward::adds`
  bool reads_output() const { return false; }   // whether `backward` reads y
  bool reads_samples() const { return false; }  // where they lie, instead of x
  bool needs_whole_batch() const { return false; }

  // Takes the memory that the layer needs apart from its output and its slopes.
  void lay(Arena&) {}

  // The matrix of a row, of n numbers, into the private layout, and back.
  template <class T>
  void read(const T* row, int64_t n, T* w) const {
    std::copy_n(row, n, w);
  }
  template <class T>
  void write(const T* w, int64_t n, T* row) const {
    std::copy_n(w, n, row);
  }
};

}  // namespace pflcore::cpu::chain
