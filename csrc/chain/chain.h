// Whole local training, gradients and evaluation of models that are a chain of layers, many clients
// in one call. A client is always one thread's work, and all that it needs (row, activations,
// gradients) stays in its core's caches. Its weights are turned into the kernels' own layout once,
// and back at the end. Results depend neither on the threads nor on the other clients of the call.
// The code knows nothing of torch. To add a kind of layer: ../README.md.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "../cpu/sgd.h"

namespace pflcore::cpu {

namespace chain {
// `linear` is the sum of the scores, each times its own target. Its targets are the slopes of a
// loss that autograd knows, so that a chain may be a part of a larger model.
enum class Loss : int64_t {
  cross_entropy,
  squared,
  half_squared,
  hinge,
  binary_cross_entropy,
  linear
};
}  // namespace chain

// ---- the program: layers with their shapes and their weights' places in a row ----
//
// A layer is a line of nine numbers: its kind, and its fields by their number. `encode_layer` in
// pflcore/ops/_chain_program.py writes them, and KINDS there has the order of `Kind`. A weight is
// the number of its first column in a row; a bias of -1 is none. Fields that a kind does not have
// are 0.
//
//   kind        0        1             2            3         4         5         6        7
//   linear      outputs  weight        bias
//   conv        outputs  kernel height kernel width stride    pad above pad left  weight   bias
//   pool        1 max,   window height window width step down step      pad above pad left
//               2 mean                                        across
//   act         1 ReLU, 2 tanh, 3 sigmoid, 4 GELU
//   flatten
//   dropout     p
//   norm        groups   features per  eps          weight    bias
//                        weight
//   scale       factors
//   leaky       factor below 0
//   batch_norm  features eps           weight       bias      running   running   momentum 1 frozen
//               per                                           mean      variance
//               channel
//   branch      line
//   add         line
// A layer takes the output of the line before it, a branch that of the earlier line that it names,
// and an addition both; lines count from 0, and -1 are the samples. The running statistics are
// columns of a row of statistics. Frozen ones never change, and normalize in training, too.
struct ChainLayer {
  enum Kind : int64_t {
    linear,
    conv,
    pool,
    act,
    flatten,
    dropout,
    norm,
    scale,
    leaky,
    batch_norm,
    branch,
    add
  };
  int64_t kind;
  double field[8];
  int64_t operator[](int i) const { return static_cast<int64_t>(field[i]); }
};

struct ChainProgram {
  std::vector<ChainLayer> layers;
  int64_t c, h, w;  // of one input
  int64_t q;        // a row's length
  int64_t b;        // the length of a row of statistics
  bool same(const ChainProgram& o) const {
    return c == o.c && h == o.h && w == o.w && q == o.q && b == o.b &&
           layers.size() == o.layers.size() &&
           std::memcmp(layers.data(), o.layers.data(), layers.size() * sizeof(ChainLayer)) == 0;
  }
};

// Samples of a pool, and what the clients call their labels.
template <class T>
struct ChainData {
  const T* x;
  int64_t x_row, pool;
  const int64_t* label;  // [pool] classes, or
  const T* value;        // [pool, values] numbers
  const int64_t* relabel;
  int64_t names;   // relabel [s, names]: a label as a client knows it; nullptr: as it is
  int64_t values;  // numbers of a sample: one, and for the linear loss one for each score
};

// The part that training, gradients and evaluation have in common.
template <class T>
struct ChainProblem {
  ChainProgram program;
  chain::Loss loss_kind;
  ChainData<T> data;
};

// Rates of AdamW; without `on` the steps are those of SGD.
struct AdamW {
  bool on;
  double mean_beta, square_beta, eps;
};

template <class T>
struct ChainTrain : ChainProblem<T> {
  Sgd<T> sgd;  // the terms of a step; its gradient, its buffer and AdamW's means are made here
  const int64_t* order;
  int64_t passes, longest;      // [s, passes, longest] places in the pool
  const int64_t *size, *steps;  // [s] samples of each client, steps it takes
  int64_t batch;
  bool drop_last;
  const int64_t* seeds;  // [s, passes], for dropout; nullptr: no dropout
  bool merge_single;     // a last batch of one sample joins the one before it
  double clip;           // the largest norm of a gradient; infinite: any
  AdamW adamw;
  T* grad_sum;    // [s, q], added to; nullptr: not asked for
  T* statistics;  // [s, b], moved by every batch
  double* loss;   // [s] sum of the batches' mean losses
};

template <class T>
struct ChainGrad : ChainProblem<T> {
  const T* w;
  int64_t s, w_row;
  const int64_t* order;
  int64_t longest;       // [s, longest]
  const int64_t* size;   // [s]
  const int64_t* seeds;  // [s]; nullptr: nothing is dropped
  bool train;            // false: evaluation mode, in which no statistics move
  T* grad;               // [s, q]
  T* statistics;         // [s, b]
  double* loss;          // [s] mean losses
};

template <class T>
struct ChainEval : ChainProblem<T> {
  const T* w;
  int64_t s, w_row;
  const T* statistics;
  int64_t statistics_row;
  bool one_model;                // all rows are one, and so are their statistics
  const int64_t *order, *begin;  // [n] places, client after client; [s + 1] where each one's begin
  double* loss;                  // [n]
  uint8_t* right;                // [n]
  T* scores;
  int64_t classes;  // [n, classes]; nullptr: not asked for
};

// One client's training, gradient and evaluation on vectors of `bytes` bytes. worker.h defines
// them. plain.cpp, avx2.cpp and avx512.cpp compile them, a file for each instruction set: that
// takes long, and files compile at the same time.
template <class T, int bytes>
struct ChainRun {
  static bool train(const ChainTrain<T>& a, int64_t s);
  static bool grad(const ChainGrad<T>& a, int64_t s);
  static bool evaluate(const ChainEval<T>& a, int64_t s, int64_t first,
                       int64_t last);  // samples of the list, all of client s, or from s on
};

// `f(ChainRun<...>{})` of the instruction set that runs; float64 has no form of its own for
// AVX-512.
template <class T, class F>
void chain_on_isa(const F& f) {
#if PFL_X86
  if constexpr (sizeof(T) == 4)
    if (isa() == Isa::avx512) return f(ChainRun<T, 64>{});
  if (isa() != Isa::plain) return f(ChainRun<T, 32>{});
#endif
  f(ChainRun<T, 16>{});
}

// Calls one(run, i) for i < n on any threads; returns false where one of the calls does.
template <class T, class Parallel, class One>
bool chain_all(int64_t n, const Parallel& parallel, const One& one) {
  std::atomic<bool> fine{true};
  chain_on_isa<T>([&](auto run) {
    parallel(n, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++)
        if (!one(run, i)) fine = false;
    });
  });
  return fine;
}

// Each returns false where a place or a label is out of range, or a client takes more steps than it
// has batches. Rows are then undefined.
template <class T, class Parallel>
bool chain_train(const ChainTrain<T>& a, const Parallel& parallel) {
  return chain_all<T>(a.sgd.s, parallel, [&](auto run, int64_t s) { return run.train(a, s); });
}
template <class T, class Parallel>
bool chain_grad(const ChainGrad<T>& a, const Parallel& parallel) {
  return chain_all<T>(a.s, parallel, [&](auto run, int64_t s) { return run.grad(a, s); });
}
template <class T, class Parallel>
bool chain_eval(const ChainEval<T>& a, const Parallel& parallel) {
  struct Part {
    int64_t s, first, last;
  };
  constexpr int64_t most = 512;  // samples of a part
  std::vector<Part> parts;
  for (int64_t s = 0; s < (a.one_model ? 1 : a.s); s++) {
    const int64_t end = a.begin[a.one_model ? a.s : s + 1];
    int64_t owner = s;
    for (int64_t at = a.begin[s]; at < end; at += most) {
      while (a.one_model && owner + 1 < a.s && at >= a.begin[owner + 1]) owner++;
      parts.push_back({owner, at, std::min(end, at + most)});
    }
  }
  return chain_all<T>(static_cast<int64_t>(parts.size()), parallel, [&](auto run, int64_t i) {
    return run.evaluate(a, parts[i].s, parts[i].first, parts[i].last);
  });
}

}  // namespace pflcore::cpu
