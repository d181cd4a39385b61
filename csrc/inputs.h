// The structs that kernels take, on either device: sizes, pointers and strides.
//
// Comments in brackets are shapes. A row stride counts elements; the columns of a row are
// contiguous where nothing else is written. A pointer that may be missing is nullptr. The file
// knows nothing of torch. Tests fill a struct from a list of words of 8 bytes, so a field fills 8
// bytes, padding counted, or two fields share them.
#pragma once
#include <cstdint>

namespace pflcore {

enum class Dtype { f32, f64, f16, bf16 };

// One SGD step:
//   d = grad + shift + mu * (w - anchor) + weight_decay * w
//   buffer = momentum * buffer + d
//   w -= lr * mask * buffer
template <class T>
struct Sgd {
  int64_t s, q;  // rows, and columns of a row
  T* w;          // [s, q], changed
  int64_t w_row;
  const T* grad;  // [s, q]
  int64_t grad_row;
  double lr;
  const T* shift;  // [s, q], or nullptr
  int64_t shift_row;
  const T* mask;  // [s, q], or nullptr; row stride 0: one mask for all rows
  int64_t mask_row;
  double mu;
  const double* mu_rows;  // [s], in place of mu, or nullptr
  const T* anchor;        // [s, q], or nullptr
  int64_t anchor_row;
  double momentum;
  T* buffer;  // [s, q], changed; nullptr without momentum
  int64_t buffer_row;
  double weight_decay;
};

// out[i][j] = sum over the columns of (a_i - b_j)^2
struct Sqdist {
  Dtype dtype;    // of a and b
  const void* a;  // [m, p]
  int64_t a_row;
  int64_t m;
  // True where b is a: then n = m, the diagonal is exactly zero, and b is not looked at. No pointer
  // can tell, as an empty matrix may have none.
  bool symmetric;
  const void* b;  // [n, p]
  int64_t b_row;
  int64_t n, p;
  double* out;  // [m, n] contiguous, or [m, listed]
  // On a GPU: sqdist_workspace(q) bytes, 8-byte aligned; may be nullptr where that is 0.
  void* workspace;
  // [m, listed] contiguous: only the pairs (i, index[i, l]). A negative number gives infinity.
  const int64_t* index = nullptr;
  int64_t listed = -1;  // negative: all pairs. No pointer can tell, as an empty list may have none.

  int64_t across() const { return listed < 0 ? n : listed; }  // columns of the result
};

// WAFFLE's weights of rows of distances
struct Waffle {
  // [rows, n] contiguous: distances, not squared, from the target. One that is not finite is an
  // absent client.
  const double* dist;
  int64_t rows, n;
  const int64_t* target;  // [rows], or one number for all
  int64_t target_step;    // 1, or 0
  double omega, psi;
  bool uniform_ties;
  double* weight;  // [rows, n] contiguous
};

// FedDWA's weights of the k nearest
template <class T>
struct Feddwa {
  const T* sqdist;  // [m, n]: NaN counts as infinitely far, a negative distance as zero
  int64_t row;      // row stride of sqdist
  int64_t m, n, k;  // 1 <= k <= n
  double* weight;   // [m, k] contiguous
  int64_t* index;   // [m, k] contiguous, nearest first
};

// out = base + lr * (weight @ updates)
struct Aggregate {
  Dtype in;              // of updates
  Dtype out_dtype;       // of base and out
  bool wide;             // true for sums in float64, as always where `in` is float64
  int64_t n, p, m, k;    // k == n where dense
  const void* updates;   // [n, p]
  int64_t updates_row;   // 0 repeats one row
  const double* weight;  // [m, k] contiguous
  bool sparse;           // by index: an update whose weights are all 0 is not read
  const int64_t* index;  // [m, k] contiguous, in [0, n)
  const void* base;      // [m, p], or nullptr
  int64_t base_row;      // 0: one base for all results
  double lr;
  void* out;  // [m, p]; may be `base` itself
  int64_t out_row;
};

// out = the mean of each column's numbers without its `removed` least and largest
struct TrimmedMean {
  Dtype dtype;       // of rows and out
  int64_t n, p;      // 2 * removed < n
  int64_t removed;   // of either end
  const void* rows;  // [n, p]
  int64_t row;
  void* out;  // [p]
  // On a GPU: column_workspace(q) bytes, 16-byte aligned; may be nullptr where that is 0.
  void* workspace = nullptr;
};

// out = the mean of the `kept` numbers of each column that are nearest to its median
struct MeanAroundMedian {
  Dtype dtype;       // of rows and out
  int64_t n, p;      // 0 < kept <= n
  int64_t kept;      // of equally near numbers the lesser one
  const void* rows;  // [n, p]
  int64_t row;
  void* out;  // [p]
  // On a GPU: column_workspace(q) bytes, as above.
  void* workspace = nullptr;
};

// y = ((x w_b^T) * lam) w_a^T. The batch stride of an input that all clients share is 0.
template <class T>
struct Rank1 {
  int64_t n, b, i, f, o;  // clients, batch, inputs, factors, outputs
  const T* x;             // [n, b, i]
  int64_t x_batch, x_row;
  bool x_shared;
  const T* w_a;  // [n, o, f]
  int64_t w_a_batch, w_a_row;
  bool w_a_shared;
  const T* lam;  // [n, f]
  int64_t lam_batch;
  bool lam_shared;
  const T* w_b;  // [n, f, i]
  int64_t w_b_batch, w_b_row;
  bool w_b_shared;
  void* workspace = nullptr;  // on a GPU: rank1_workspace(q) bytes, 16-byte aligned
};

// Gradients in the shapes of the inputs, contiguous, nullptr where not wanted. Those of shared
// inputs are summed over the clients.
template <class T>
struct Rank1Grads {
  T *x, *w_a, *lam, *w_b;
};

}  // namespace pflcore
