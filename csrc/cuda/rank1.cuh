// y = ((x w_b^T) * lam) w_a^T, a linear layer made of rank-1 factors, batched over clients, and its
// gradients. Knows nothing of torch.
//
// Every product runs through one tiled kernel; a small struct says what its factors are. The
// factors with lam != 0 are listed first, on the device, and only they are computed. The dense
// weight is never built. All sums have a fixed order.
#pragma once
#include "common.cuh"

namespace pflcore::cuda {

// The values that the kernels keep: x w_b^T and grad w_a, [n, b, f] each, and the lists of active
// factors. Entries of inactive factors are never read.
template <class T>
struct Rank1Work {
  T *hidden, *back;
  int *list, *count;  // [n or 1, f] ascending, [n or 1]
};

template <class T>
int64_t rank1_lists(const Rank1<T>& q) {
  return q.lam_batch ? q.n : 1;
}

template <class T>
int64_t rank1_workspace(const Rank1<T>& q) {
  return 2 * q.n * q.b * q.f * static_cast<int64_t>(sizeof(T)) +
         rank1_lists(q) * (q.f + 1) * static_cast<int64_t>(sizeof(int)) + 16;
}

template <class T>
Rank1Work<T> rank1_split(const Rank1<T>& q) {
  Rank1Work<T> work{};
  work.hidden = static_cast<T*>(q.workspace);
  work.back = work.hidden + q.n * q.b * q.f;
  work.list = reinterpret_cast<int*>(work.back + q.n * q.b * q.f);
  work.count = work.list + rank1_lists(q) * q.f;
  return work;
}

// Lists the factors with lam != 0 (or all of them, `every`), one warp per row of lam.
template <class T>
__global__ void __launch_bounds__(32)
    rank1_active(Rank1<T> q, Rank1Work<T> work, int64_t lists, bool every) {
  const int lane = static_cast<int>(threadIdx.x);
  for (int64_t row = blockIdx.x; row < lists; row += gridDim.x) {
    int held = 0;
    for (int64_t first = 0; first < q.f; first += 32) {
      const int64_t f = first + lane;
      const bool active = f < q.f && (every || q.lam[row * q.lam_batch + f] != 0);
      const unsigned all = __ballot_sync(0xffffffffu, active);
      if (active)
        work.list[row * q.f + held + __popc(all & ((1u << lane) - 1))] = static_cast<int>(f);
      held += __popc(all);
    }
    if (lane == 0) work.count[row] = held;
  }
}

// ---- the products: c[r][c] = sum over steps and depth of a * b, for each of `batches` ----
template <class T>
struct Rank1Side {
  Rank1<T> q;
  Rank1Work<T> work;
  const T* grad;
  T* out;
  bool shared;  // clients are summed over: one batch of n steps instead of n batches of one step
  bool scaled;  // hidden holds lam * (x w_b^T) already

  __device__ int64_t batches() const { return shared ? 1 : q.n; }
  __device__ int64_t steps() const { return shared ? q.n : 1; }
  __device__ int64_t client(int64_t z, int64_t step) const { return shared ? step : z; }
  __device__ int64_t list_row(int64_t n) const { return q.lam_batch ? n : 0; }
  __device__ int64_t active(int64_t n) const { return work.count[list_row(n)]; }
  __device__ int64_t factor(int64_t n, int64_t i) const { return work.list[list_row(n) * q.f + i]; }
  __device__ T lam(int64_t n, int64_t f) const { return q.lam[n * q.lam_batch + f]; }
  __device__ T x(int64_t n, int64_t b, int64_t i) const {
    return q.x[n * q.x_batch + b * q.x_row + i];
  }
  __device__ T w_a(int64_t n, int64_t o, int64_t f) const {
    return q.w_a[n * q.w_a_batch + o * q.w_a_row + f];
  }
  __device__ T w_b(int64_t n, int64_t f, int64_t i) const {
    return q.w_b[n * q.w_b_batch + f * q.w_b_row + i];
  }
  __device__ int64_t at(int64_t n, int64_t b, int64_t f) const { return (n * q.b + b) * q.f + f; }
  __device__ T times_lam(const T* from, int64_t n, int64_t b, int64_t f) const {
    const T l = lam(n, f);
    return l != 0 ? from[at(n, b, f)] * l : T(0);
  }
  __device__ T grad_at(int64_t n, int64_t b, int64_t o) const {
    return grad[(n * q.b + b) * q.o + o];
  }
};

template <class T>
struct HiddenProduct : Rank1Side<T> {  // hidden[b, f] = x[b, i] w_b[f, i]
  static constexpr bool a_along_depth = true, b_along_depth = true;
  __device__ int64_t rows() const { return this->q.b; }
  __device__ int64_t cols(int64_t z) const { return this->active(z); }
  __device__ int64_t depth(int64_t) const { return this->q.i; }
  __device__ T a(int64_t n, int64_t b, int64_t i) const { return this->x(n, b, i); }
  __device__ T b(int64_t n, int64_t i, int64_t k) const {
    return this->w_b(n, this->factor(n, k), i);
  }
  __device__ void store(int64_t z, int64_t b, int64_t k, T v) const {
    const int64_t f = this->factor(z, k);
    this->work.hidden[this->at(z, b, f)] = this->scaled ? v * this->lam(z, f) : v;
  }
};

template <class T>
struct OutProduct : Rank1Side<T> {  // y[b, o] = hidden[b, f] w_a[o, f]
  static constexpr bool a_along_depth = true, b_along_depth = true;
  __device__ int64_t rows() const { return this->q.b; }
  __device__ int64_t cols(int64_t) const { return this->q.o; }
  __device__ int64_t depth(int64_t n) const { return this->active(n); }
  __device__ T a(int64_t n, int64_t b, int64_t k) const {
    return this->work.hidden[this->at(n, b, this->factor(n, k))];
  }
  __device__ T b(int64_t n, int64_t k, int64_t o) const {
    return this->w_a(n, o, this->factor(n, k));
  }
  __device__ void store(int64_t z, int64_t b, int64_t o, T v) const {
    this->out[(z * this->q.b + b) * this->q.o + o] = v;
  }
};

template <class T>
struct BackProduct : Rank1Side<T> {  // back[b, f] = grad[b, o] w_a[o, f]
  static constexpr bool a_along_depth = true, b_along_depth = false;
  __device__ int64_t rows() const { return this->q.b; }
  __device__ int64_t cols(int64_t z) const { return this->active(z); }
  __device__ int64_t depth(int64_t) const { return this->q.o; }
  __device__ T a(int64_t n, int64_t b, int64_t o) const { return this->grad_at(n, b, o); }
  __device__ T b(int64_t n, int64_t o, int64_t k) const {
    return this->w_a(n, o, this->factor(n, k));
  }
  __device__ void store(int64_t z, int64_t b, int64_t k, T v) const {
    this->work.back[this->at(z, b, this->factor(z, k))] = v;
  }
};

template <class T>
struct GradXProduct : Rank1Side<T> {  // gx[b, i] = (lam back)[b, f] w_b[f, i]
  static constexpr bool a_along_depth = true, b_along_depth = false;
  __device__ int64_t rows() const { return this->q.b; }
  __device__ int64_t cols(int64_t) const { return this->q.i; }
  __device__ int64_t depth(int64_t n) const { return this->active(n); }
  __device__ T a(int64_t n, int64_t b, int64_t k) const {
    return this->times_lam(this->work.back, n, b, this->factor(n, k));
  }
  __device__ T b(int64_t n, int64_t k, int64_t i) const {
    const int64_t f = this->factor(n, k);
    return this->lam(n, f) != 0 ? this->w_b(n, f, i) : T(0);
  }
  __device__ void store(int64_t z, int64_t b, int64_t i, T v) const {
    this->out[(z * this->q.b + b) * this->q.i + i] = v;
  }
};

template <class T>
struct GradAProduct : Rank1Side<T> {  // ga[o, f] = grad[b, o] (lam hidden)[b, f]
  static constexpr bool a_along_depth = false, b_along_depth = false;
  __device__ int64_t rows() const { return this->q.o; }
  __device__ int64_t cols(int64_t) const { return this->q.f; }
  __device__ int64_t depth(int64_t) const { return this->q.b; }
  __device__ T a(int64_t n, int64_t b, int64_t o) const { return this->grad_at(n, b, o); }
  __device__ T b(int64_t n, int64_t b, int64_t f) const {
    return this->times_lam(this->work.hidden, n, b, f);
  }
  __device__ void store(int64_t z, int64_t o, int64_t f, T v) const {
    this->out[(z * this->q.o + o) * this->q.f + f] = v;
  }
};

template <class T>
struct GradBProduct : Rank1Side<T> {  // gb[f, i] = (lam back)[b, f] x[b, i]
  static constexpr bool a_along_depth = false, b_along_depth = false;
  __device__ int64_t rows() const { return this->q.f; }
  __device__ int64_t cols(int64_t) const { return this->q.i; }
  __device__ int64_t depth(int64_t) const { return this->q.b; }
  __device__ T a(int64_t n, int64_t b, int64_t f) const {
    return this->times_lam(this->work.back, n, b, f);
  }
  __device__ T b(int64_t n, int64_t b, int64_t i) const { return this->x(n, b, i); }
  __device__ void store(int64_t z, int64_t f, int64_t i, T v) const {
    this->out[(z * this->q.f + f) * this->q.i + i] = v;
  }
};

constexpr int kRank1Rows = 32, kRank1Cols = 64, kRank1Depth = 16, kRank1Threads = 128;
#ifdef PFLCORE_CUDA_ON_CPU  // tests: a block takes several clients
constexpr int64_t kRank1Grid = 2;
#else
constexpr int64_t kRank1Grid = 65535;  // clients side by side
#endif

// A tile of 32 x 64 results per block, 4 x 4 per thread. a is asked as (client, row, depth) where
// it lies along the depth, else as (client, depth, row); b always as (client, depth, column).
template <class T, class Product>
__global__ void __launch_bounds__(kRank1Threads) rank1_product(Product p) {
  __shared__ __align__(16) T tile_a[kRank1Depth][kRank1Rows + 4];
  __shared__ __align__(16) T tile_b[kRank1Depth][kRank1Cols + 4];
  const int thread = static_cast<int>(threadIdx.x), row4 = thread / 16 * 4, col4 = thread % 16 * 4;
  const int64_t c0 = static_cast<int64_t>(blockIdx.x) * kRank1Cols;
  for (int64_t z = blockIdx.z; z < p.batches(); z += gridDim.z) {
    const int64_t rows = p.rows(), cols = p.cols(z);
    if (c0 >= cols) continue;
    for (int64_t r0 = static_cast<int64_t>(blockIdx.y) * kRank1Rows; r0 < rows;
         r0 += static_cast<int64_t>(gridDim.y) * kRank1Rows) {
      T sum[4][4] = {};
      for (int64_t step = 0; step < p.steps(); ++step) {
        const int64_t n = p.client(z, step), depth = p.depth(n);
        for (int64_t k0 = 0; k0 < depth; k0 += kRank1Depth) {
          __syncthreads();  // the tiles before these have been used
          for (int e = thread; e < kRank1Depth * kRank1Rows; e += kRank1Threads) {
            const int k = Product::a_along_depth ? e % kRank1Depth : e / kRank1Rows;
            const int r = Product::a_along_depth ? e / kRank1Depth : e % kRank1Rows;
            const bool inside = k0 + k < depth && r0 + r < rows;
            tile_a[k][r] = !inside                  ? T(0)
                           : Product::a_along_depth ? p.a(n, r0 + r, k0 + k)
                                                    : p.a(n, k0 + k, r0 + r);
          }
          for (int e = thread; e < kRank1Depth * kRank1Cols; e += kRank1Threads) {
            const int k = Product::b_along_depth ? e % kRank1Depth : e / kRank1Cols;
            const int c = Product::b_along_depth ? e / kRank1Depth : e % kRank1Cols;
            tile_b[k][c] = k0 + k < depth && c0 + c < cols ? p.b(n, k0 + k, c0 + c) : T(0);
          }
          __syncthreads();
#pragma unroll
          for (int k = 0; k < kRank1Depth; ++k) {
            T a[4], b[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = tile_a[k][row4 + i], b[i] = tile_b[k][col4 + i];
#pragma unroll
            for (int r = 0; r < 4; ++r)
#pragma unroll
              for (int c = 0; c < 4; ++c) sum[r][c] += a[r] * b[c];
          }
        }
      }
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          if (r0 + row4 + r < rows && c0 + col4 + c < cols)
            p.store(z, r0 + row4 + r, c0 + col4 + c, sum[r][c]);
    }
  }
}

// glam[f] = sum over the batch of hidden * back; 32 factors and 8 runs over the batch per block.
template <class T>
__global__ void __launch_bounds__(256) rank1_grad_lam(Rank1Side<T> p) {
  __shared__ T sums[8][33];
  const int64_t f = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  for (int64_t z = blockIdx.y; z < p.batches(); z += gridDim.y) {
    const int64_t rows = p.steps() * p.q.b, first = z * p.q.b;
    T sum = 0;
    if (f < p.q.f)
      for (int64_t r = threadIdx.y; r < rows; r += 8)
        sum += p.work.hidden[(first + r) * p.q.f + f] * p.work.back[(first + r) * p.q.f + f];
    __syncthreads();
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && f < p.q.f) {
      for (int y = 1; y < 8; ++y) sum += sums[y][threadIdx.x];
      p.out[z * p.q.f + f] = sum;
    }
  }
}

template <template <class> class Product, class T>
void rank1_run(const Rank1Side<T>& side, int64_t rows, int64_t cols, cudaStream_t stream) {
  const int64_t batches = side.shared ? 1 : side.q.n;
  if (rows == 0 || cols == 0 || batches == 0) return;
  Product<T> p;
  static_cast<Rank1Side<T>&>(p) = side;
  const dim3 grid(static_cast<unsigned>(ceil_div(cols, kRank1Cols)),
                  grid_for(ceil_div(rows, kRank1Rows), 65535), grid_for(batches, kRank1Grid));
  auto* const kernel = &rank1_product<T, Product<T>>;
  PFLCORE_LAUNCH(kernel, grid, kRank1Threads, 0, stream, p);
}

template <class T>
void rank1_list(const Rank1<T>& q, bool every, cudaStream_t stream) {
  const int64_t lists = rank1_lists(q);
  if (lists == 0) return;
  auto* const kernel = &rank1_active<T>;
  PFLCORE_LAUNCH(kernel, grid_for(lists), 32, 0, stream, q, rank1_split(q), lists, every);
}

// y [n, b, o], contiguous.
template <class T>
void rank1_forward(const Rank1<T>& q, T* y, cudaStream_t stream) {
  Rank1Side<T> side{q, rank1_split(q), nullptr, y, false, true};
  rank1_list(q, false, stream);
  rank1_run<HiddenProduct>(side, q.b, q.f, stream);
  rank1_run<OutProduct>(side, q.b, q.o, stream);
}

template <class T>
void rank1_backward(const Rank1<T>& q, const T* grad, const Rank1Grads<T>& g, cudaStream_t stream) {
  const auto side = [&](T* out, bool shared) {
    return Rank1Side<T>{q, rank1_split(q), grad, out, shared, false};
  };
  rank1_list(q, g.lam != nullptr, stream);  // the gradient in lam needs every factor
  if (g.w_a || g.lam) rank1_run<HiddenProduct>(side(nullptr, false), q.b, q.f, stream);
  if (g.x || g.w_b || g.lam) rank1_run<BackProduct>(side(nullptr, false), q.b, q.f, stream);
  if (g.x) rank1_run<GradXProduct>(side(g.x, q.x_shared), q.b, q.i, stream);
  if (g.w_a) rank1_run<GradAProduct>(side(g.w_a, q.w_a_shared), q.o, q.f, stream);
  if (g.w_b) rank1_run<GradBProduct>(side(g.w_b, q.w_b_shared), q.f, q.i, stream);
  const int64_t batches = q.lam_shared ? 1 : q.n;
  if (g.lam && q.f > 0 && batches > 0) {
    auto* const kernel = &rank1_grad_lam<T>;
    const dim3 grid(static_cast<unsigned>(ceil_div(q.f, 32)), grid_for(batches, kRank1Grid));
    PFLCORE_LAUNCH(kernel, grid, dim3(32, 8), 0, stream, side(g.lam, q.lam_shared));
  }
}

}  // namespace pflcore::cuda
