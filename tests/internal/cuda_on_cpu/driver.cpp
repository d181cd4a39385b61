// The CUDA kernels of csrc/cuda, compiled by a plain C++ compiler, behind C functions for ctypes. Returns 0, or 1 with the reason in last_error().
#define PFLCORE_CUDA_ON_CPU
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include "aggregate.cuh"
#include "rank1.cuh"
#include "sgd.cuh"
#include "sqdist.cuh"
#include "weights.cuh"

namespace pc = pflcore::cuda;

namespace {

std::string failure;

// A workspace of exactly the size that was asked for, full of NaN, with a guard behind it: a kernel must neither read what it did not write
// nor write past the end.
struct Workspace {
  static constexpr size_t guard = 64;
  size_t size;
  std::vector<double> memory;
  explicit Workspace(int64_t bytes) : size(static_cast<size_t>(bytes)), memory((size + guard) / 8 + 1) {
    std::memset(memory.data(), 0xff, memory.size() * 8);
  }
  void* data() { return memory.data(); }
  void check() const {
    const unsigned char* const from = reinterpret_cast<const unsigned char*>(memory.data());
    for (size_t i = size; i < memory.size() * 8; ++i)
      if (from[i] != 0xff) throw std::runtime_error("written past the end of the workspace");
  }
};

// A kernel that leaves its buffers runs into a fence (below); the call then fails instead of the process.
sigjmp_buf way_out;
void trapped(int) { siglongjmp(way_out, 1); }

struct Trap {
  struct sigaction action {}, before[2];
  stack_t stack{}, stack_before;
  std::vector<char> memory = std::vector<char>(64 * 1024);
  Trap() {
    stack.ss_sp = memory.data(), stack.ss_size = memory.size();
    sigaltstack(&stack, &stack_before);
    action.sa_handler = trapped, action.sa_flags = SA_ONSTACK;
    sigaction(SIGSEGV, &action, &before[0]), sigaction(SIGBUS, &action, &before[1]);
  }
  ~Trap() { sigaction(SIGSEGV, &before[0], nullptr), sigaction(SIGBUS, &before[1], nullptr), sigaltstack(&stack_before, nullptr); }
};

template <class Body>
int guarded(const Body& body) {
  const Trap trap;
  if (sigsetjmp(way_out, 1)) {
    failure = "read or written outside of its buffers";
    return 1;
  }
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    failure = error.what();
    return 1;
  }
}

template <class T>
struct Rank1Call {
  int64_t n, b, i, f, o;
  const T *x, *w_a, *lam, *w_b;
  int64_t x_batch, w_a_batch, lam_batch, w_b_batch;
  const int64_t* shared = nullptr;  // of x, w_a, lam, w_b, where gradients are wanted

  pflcore::Rank1<T> q(void* workspace) const {
    const auto is = [this](int k) { return shared && shared[k] != 0; };
    return {n, b, i, f, o, x, x_batch, i, is(0), w_a, w_a_batch, f, is(1), lam, lam_batch, is(2), w_b, w_b_batch, i, is(3), workspace};
  }
};

}  // namespace

extern "C" {

// Whole pages, at least `bytes`, with a forbidden page behind them; `size` gets their length.
void* fenced(int64_t bytes, int64_t* size) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  *size = (bytes + page - 1) / page * page;
  char* const from = static_cast<char*>(mmap(nullptr, static_cast<size_t>(*size + page), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (from == MAP_FAILED || mprotect(from + *size, static_cast<size_t>(page), PROT_NONE)) return nullptr;
  return from;
}
void unfence(void* from, int64_t size) { munmap(from, static_cast<size_t>(size + sysconf(_SC_PAGESIZE))); }

const char* last_error() { return failure.c_str(); }
void set_order(int64_t seed) { cuda_on_cpu::device().seed = static_cast<unsigned>(seed); }
void set_shared(int64_t most) { cuda_on_cpu::device().shared_most = most; }
int64_t launches() { return cuda_on_cpu::device().launches; }

int sqdist(int64_t dtype, const void* a, int64_t a_row, int64_t m, int64_t symmetric, const void* b, int64_t b_row, int64_t n, int64_t p,
           double* out, int64_t most, const int64_t* index, int64_t listed) {
  return guarded([&] {
    pflcore::Sqdist q{static_cast<pflcore::Dtype>(dtype), a, a_row, m, symmetric != 0, b, b_row, n, p, out, nullptr, index, listed};
    Workspace workspace(most ? pc::sqdist_workspace(q, most) : pc::sqdist_workspace(q));
    q.workspace = workspace.data();
    most ? pc::sqdist(q, nullptr, most) : pc::sqdist(q, nullptr);
    workspace.check();
  });
}

// The plan for these sizes: lanes, threads, stages, chunk, splits.
void sqdist_plan(int64_t dtype, int64_t m, int64_t n, int64_t p, int64_t symmetric, int64_t* plan) {
  const double here = 0;
  pflcore::Sqdist q{static_cast<pflcore::Dtype>(dtype), &here, p, m, symmetric != 0, &here, p, n, p, nullptr, nullptr};
  const pc::SqdistPlan got = pc::sqdist_plan(q);
  plan[0] = 1 << got.lanes_log2, plan[1] = got.threads, plan[2] = got.stages, plan[3] = got.chunk, plan[4] = got.splits;
}

int waffle(const double* dist, int64_t rows, int64_t n, const int64_t* target, int64_t target_step, double omega, double psi, int64_t uniform_ties,
           double* weight) {
  return guarded([&] { pc::waffle_weights({dist, rows, n, target, target_step, omega, psi, uniform_ties != 0, weight}, nullptr); });
}

int feddwa(int64_t is_double, const void* sqdist, int64_t row, int64_t m, int64_t n, int64_t k, double* weight, int64_t* index) {
  return guarded([&] {
    if (is_double) pc::feddwa_weights<double>({static_cast<const double*>(sqdist), row, m, n, k, weight, index}, nullptr);
    else pc::feddwa_weights<float>({static_cast<const float*>(sqdist), row, m, n, k, weight, index}, nullptr);
  });
}

int aggregate(int64_t in, int64_t out_dtype, int64_t wide, int64_t n, int64_t p, int64_t m, int64_t k, const void* updates, int64_t updates_row,
              const double* weight, int64_t sparse, const int64_t* index, const void* base, int64_t base_row, double lr, void* out, int64_t out_row) {
  return guarded([&] {
    pc::aggregate({static_cast<pflcore::Dtype>(in), static_cast<pflcore::Dtype>(out_dtype), wide != 0, n, p, m, k, updates, updates_row, weight, sparse != 0, index,
                   base, base_row, lr, out, out_row},
                  nullptr);
  });
}

#define RANK1(name, T)                                                                                                                             \
  int rank1_##name(const int64_t* sizes, const T* x, const T* w_a, const T* lam, const T* w_b, T* y) {                                             \
    return guarded([&] {                                                                                                                           \
      const Rank1Call<T> call{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], x, w_a, lam, w_b, sizes[5], sizes[6], sizes[7], sizes[8]};         \
      Workspace workspace(pc::rank1_workspace(call.q(nullptr)));                                                                                   \
      pc::rank1_forward(call.q(workspace.data()), y, nullptr);                                                                                     \
      workspace.check();                                                                                                                           \
    });                                                                                                                                            \
  }                                                                                                                                                \
  int rank1_backward_##name(const int64_t* sizes, const int64_t* shared, const T* grad, const T* x, const T* w_a, const T* lam, const T* w_b,      \
                            T* gx, T* ga, T* glam, T* gb) {                                                                                        \
    return guarded([&] {                                                                                                                           \
      const Rank1Call<T> call{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], x, w_a, lam, w_b, sizes[5], sizes[6], sizes[7], sizes[8], shared}; \
      Workspace workspace(pc::rank1_workspace(call.q(nullptr)));                                                                                   \
      const pflcore::Rank1Grads<T> grads{gx, ga, glam, gb};                                                                                        \
      pc::rank1_backward(call.q(workspace.data()), grad, grads, nullptr);                                                                          \
      workspace.check();                                                                                                                           \
    });                                                                                                                                            \
  }
RANK1(float, float)
RANK1(double, double)

#define SGD(name, T)                                                                                                                          \
  int sgd_##name(int64_t s, int64_t q, T* w, int64_t w_row, const T* grad, int64_t grad_row, double lr, const T* shift, int64_t shift_row,     \
                 const T* mask, int64_t mask_row, double mu, const double* mu_rows, const T* anchor, int64_t anchor_row, double momentum,      \
                 T* buffer, int64_t buffer_row, double weight_decay) {                                                                         \
    return guarded([&] {                                                                                                                       \
      pc::sgd_step<T>({s, q, w, w_row, grad, grad_row, lr, shift, shift_row, mask, mask_row, mu, mu_rows, anchor, anchor_row, momentum,        \
                       buffer, buffer_row, weight_decay},                                                                                      \
                      nullptr);                                                                                                                \
    });                                                                                                                                        \
  }
SGD(float, float)
SGD(double, double)

// What the harness must catch: a kernel that forgets a barrier (its result depends on the order), one whose threads part at a barrier, one that
// reads shared memory it never wrote, one that uses a copy it did not wait for, one that reads past its input.
int broken(int64_t which, double* out) {
  return guarded([&] {
    auto* const kernel = +[](int fault, double* to) {
      PFLCORE_DYNAMIC_SHARED(shared);
      float* const mine = reinterpret_cast<float*>(shared);
      const int t = static_cast<int>(threadIdx.x);
      static float source[4] = {1, 2, 3, 4};
      if (fault == 0) mine[t] = static_cast<float>(t);
      if (fault == 0) to[t] = mine[63 - t];
      if (fault == 1 && t < 16) __syncthreads();
      if (fault == 1 && t >= 16) __syncwarp();
      if (fault == 2) to[t] = mine[t];
      if (fault == 3 && t == 0) pc::copy_async<16>(mine, source, 16), pc::copy_commit();
      if (fault == 3) __syncthreads();
      if (fault == 3) to[t] = mine[t % 4];
      if (fault == 4) pc::load16(mine + 1);
      if (fault == 5 && t == 0) mine[64] = 0;
      if (fault == 6 && t == 63) to[t] = to[t + 1];
    };
    PFLCORE_LAUNCH(kernel, 1, 64, 64 * sizeof(float), nullptr, static_cast<int>(which), out);
  });
}

}  // extern "C"
