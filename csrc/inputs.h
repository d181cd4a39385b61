// What the kernels are given, on either device: sizes, pointers and strides. Knows nothing of
// torch.
#pragma once
#include <cstdint>

namespace pflcore {

enum class Dtype { f32, f64, f16, bf16 };

// d = grad + shift + mu * (w - anchor); d += weight_decay * w; buffer = momentum * buffer + d; w -=
// lr * mask * buffer
template <class T>
struct Sgd {
  int64_t s, q;  // rows and their length
  T* w;
  int64_t w_row;  // row strides in elements
  const T* grad;
  int64_t grad_row;
  double lr;
  const T* shift;
  int64_t shift_row;  // nullptr: none
  const T* mask;
  int64_t mask_row;  // nullptr: none; row stride 0: one mask for all rows
  double mu;
  const double* mu_rows;  // mu_rows [s], where given, replaces mu
  const T* anchor;
  int64_t anchor_row;  // nullptr: none
  double momentum;
  T* buffer;
  int64_t buffer_row;  // nullptr: no momentum
  double weight_decay;
};

// out[i][j] = sum over the columns of (a_i - b_j)^2
struct Sqdist {
  Dtype dtype;
  const void* a;  // [m, p]
  int64_t a_row;  // row strides in elements; the columns are contiguous
  int64_t m;
  bool symmetric;  // b = a, n = m, the diagonal is exactly zero; b is not looked at. (No pointer
                   // says so: an empty matrix may have none)
  const void* b;   // [n, p]
  int64_t b_row;
  int64_t n, p;
  double* out;      // [m, n] contiguous, or [m, listed]
  void* workspace;  // on a GPU: sqdist_workspace(q) bytes, 8-byte aligned; may be nullptr where
                    // that is 0
  const int64_t* index =
      nullptr;  // [m, listed] contiguous: only the pairs (i, index[i, l]); negative: infinity
  int64_t listed = -1;  // negative: all pairs (no pointer says so: an empty list may have none)

  int64_t across() const { return listed < 0 ? n : listed; }  // columns of the result
};

// WAFFLE's weights of rows of distances
struct Waffle {
  const double* dist;  // [rows, n] contiguous: distances (not squared) from the target; one that is
                       // not finite is an absent client
  int64_t rows, n;
  const int64_t* target;  // [rows], or one for all
  int64_t target_step;    // 1, or 0
  double omega, psi;
  bool uniform_ties;
  double* weight;  // [rows, n] contiguous
};

// FedDWA's weights of the k nearest
template <class T>
struct Feddwa {
  const T* sqdist;  // [m, n]: NaN counts as infinitely far, a negative distance as zero
  int64_t row;      // row stride in elements
  int64_t m, n, k;  // 1 <= k <= n
  double* weight;   // [m, k] contiguous
  int64_t* index;   // [m, k] contiguous, nearest first
};

// out = base + lr * (weight @ updates)
struct Aggregate {
  Dtype in;              // of updates
  Dtype out_dtype;       // of base and out
  bool wide;             // accumulate in float64 (always where `in` is float64)
  int64_t n, p, m, k;    // k == n where dense
  const void* updates;   // [n, p]
  int64_t updates_row;   // row strides in elements; 0 repeats one row
  const double* weight;  // [m, k] contiguous
  bool sparse;           // by index: an update whose weights are all 0 is then never read
  const int64_t* index;  // [m, k] contiguous, in [0, n)
  const void* base;      // [m, p], or nullptr
  int64_t base_row;      // 0: one base for all
  double lr;
  void* out;  // [m, p]; may be `base` itself
  int64_t out_row;
};

// y = ((x w_b^T) * lam) w_a^T. The batch stride of an input that all clients share is 0.
template <class T>
struct Rank1 {
  int64_t n, b, i, f, o;  // clients, batch, inputs, factors, outputs
  const T* x;
  int64_t x_batch, x_row;
  bool x_shared;  // [n, b, i]
  const T* w_a;
  int64_t w_a_batch, w_a_row;
  bool w_a_shared;  // [n, o, f]
  const T* lam;
  int64_t lam_batch;
  bool lam_shared;  // [n, f]
  const T* w_b;
  int64_t w_b_batch, w_b_row;
  bool w_b_shared;            // [n, f, i]
  void* workspace = nullptr;  // on a GPU: rank1_workspace(q) bytes, 16-byte aligned
};

// Gradients in the shapes of the inputs, contiguous, nullptr where not wanted; those of shared
// inputs are summed over the clients.
template <class T>
struct Rank1Grads {
  T *x, *w_a, *lam, *w_b;
};

}  // namespace pflcore
