// The CUDA kernels of csrc/cuda, compiled by a plain C++ compiler, behind C functions for ctypes.
// A function returns 0, or 1 with the reason in last_error().
#define PFLCORE_CUDA_ON_CPU
#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include "aggregate.cuh"
#include "rank1.cuh"
#include "robust.cuh"
#include "sgd.cuh"
#include "sqdist.cuh"
#include "weights.cuh"

namespace pc = pflcore::cuda;

extern "C" {

// At least `bytes` in whole pages, with a forbidden page behind them. `size` gets their length.
void* fenced(int64_t bytes, int64_t* size) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  *size = (bytes + page - 1) / page * page;
  char* const from =
      static_cast<char*>(mmap(nullptr, static_cast<size_t>(*size + page), PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (from == MAP_FAILED || mprotect(from + *size, static_cast<size_t>(page), PROT_NONE))
    return nullptr;
  return from;
}
void unfence(void* from, int64_t size) {
  munmap(from, static_cast<size_t>(size + sysconf(_SC_PAGESIZE)));
}

}  // extern "C"

namespace {

std::string failure;

// A workspace of exactly the requested size, full of NaN, with a forbidden page behind it. A kernel
// must neither read values that it did not write, nor write past the end.
struct Workspace {
  int64_t bytes, size;
  void* const from;
  explicit Workspace(int64_t wanted) : bytes(wanted), from(fenced(wanted, &size)) {
    std::memset(from, 0xff, static_cast<size_t>(size));
  }
  ~Workspace() { unfence(from, size); }
  void* data() { return static_cast<char*>(from) + (size - bytes) / 16 * 16; }
};

// A kernel that leaves its buffers runs into a forbidden page. Then the call fails, and the process
// goes on.
sigjmp_buf way_out;
void trapped(int) { siglongjmp(way_out, 1); }

struct Trap {
  struct sigaction action{}, before[2];
  stack_t stack{}, stack_before;
  std::vector<char> memory = std::vector<char>(64 * 1024);
  Trap() {
    stack.ss_sp = memory.data(), stack.ss_size = memory.size();
    sigaltstack(&stack, &stack_before);
    action.sa_handler = trapped, action.sa_flags = SA_ONSTACK;
    sigaction(SIGSEGV, &action, &before[0]), sigaction(SIGBUS, &action, &before[1]);
  }
  ~Trap() {
    sigaction(SIGSEGV, &before[0], nullptr), sigaction(SIGBUS, &before[1], nullptr),
        sigaltstack(&stack_before, nullptr);
  }
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

// A problem of csrc/inputs.h from its fields, 8 bytes each.
template <class Problem>
Problem from(const void* fields) {
  Problem q;
  std::memcpy(&q, fields, sizeof q);
  return q;
}

int64_t gram_worth = pc::kGramWorth;
pc::SqdistCard card() {
  pc::SqdistCard on = pc::sqdist_card();
  on.worth = gram_worth;
  return on;
}

template <class T>
void rank1(const void* fields, T* y, const T* grad, T* const* grads) {
  auto q = from<pflcore::Rank1<T>>(fields);
  Workspace workspace(pc::rank1_workspace(q));
  q.workspace = workspace.data();
  if (y)
    pc::rank1_forward(q, y, nullptr);
  else
    pc::rank1_backward(q, grad, {grads[0], grads[1], grads[2], grads[3]}, nullptr);
}

// A TrimmedMean or a MeanAroundMedian.
template <class Problem>
int column_means(const void* fields) {
  return guarded([&] {
    auto q = from<Problem>(fields);
    Workspace workspace(pc::column_workspace(q));
    q.workspace = workspace.data();
    pc::mean_of_columns(q, nullptr);
  });
}

}  // namespace

extern "C" {

const char* last_error() { return failure.c_str(); }

const char* architecture_names(const char* list) {
  static std::string names;
  return (names = pc::architecture_names(list)).c_str();
}

// The mangled names of all kernels that have run, one in a line.
const char* launched() {
  static std::string names;
  names.clear();
  for (void* const kernel : cuda_on_cpu::device().launched) {
    Dl_info found;
    if (dladdr(kernel, &found) && found.dli_sname) names += std::string(found.dli_sname) + "\n";
  }
  return names.c_str();
}
void set_order(int64_t seed) { cuda_on_cpu::device().seed = static_cast<unsigned>(seed); }
void set_shared(int64_t most) { cuda_on_cpu::device().shared_most = most; }
void set_copies(int64_t copies) { cuda_on_cpu::device().copies = copies != 0; }

// The compute capability of the card, 90 for 9.0, and the pairs * columns from which a Gram matrix
// is worth its launches.
void set_card(int64_t generation, int64_t worth) {
  cuda_on_cpu::device().generation = static_cast<int>(generation);
  gram_worth = worth;
}

int sqdist(const void* fields, int64_t most) {
  return guarded([&] {
    auto q = from<pflcore::Sqdist>(fields);
    const pc::SqdistCard on = card();
    Workspace workspace(most ? pc::sqdist_workspace(q, on, most) : pc::sqdist_workspace(q, on));
    q.workspace = workspace.data();
    most ? pc::sqdist(q, on, nullptr, most) : pc::sqdist(q, on, nullptr);
  });
}

// The plan for these sizes on this card: lanes, threads, stages, splits, columns of a stage; the
// path (windows, few, gram), and its first turn's splits and columns of a block.
int sqdist_plan(const void* fields, int64_t* plan) {
  return guarded([&] {
    const pc::SqdistPlan got = pc::sqdist_plan(from<pflcore::Sqdist>(fields), card());
    const int64_t all[] = {1 << got.lanes_log2, got.threads,      got.stages,
                           got.splits,          got.chunk,        static_cast<int64_t>(got.path),
                           got.first.count,     got.first.columns};
    std::copy(all, all + 8, plan);
  });
}

int waffle(const void* fields) {
  return guarded([&] { pc::waffle_weights(from<pflcore::Waffle>(fields), nullptr); });
}
int aggregate(const void* fields) {
  return guarded([&] { pc::aggregate(from<pflcore::Aggregate>(fields), nullptr); });
}

// The plan for these sizes on such a card: the way, threads, results of a block, blocks that make
// all results, columns of a tile, rows of weights, rows of a buffer, bytes of shared memory, tiles
// and blocks.
int aggregate_plan(const void* fields, const int64_t* card, int64_t* plan) {
  return guarded([&] {
    const auto q = from<pflcore::Aggregate>(fields);
    pc::AggregatePlan got = pc::aggregate_plan(q, {card[0], card[1], card[2], card[3] != 0});
    pc::set_columns(got, 0, q.p);
    const int64_t all[] = {static_cast<int64_t>(got.way),
                           got.threads,
                           got.results,
                           got.blocks_m,
                           got.tile_cols,
                           got.chunk,
                           got.buffer_rows,
                           got.shared,
                           got.tiles,
                           got.grid};
    std::copy(all, all + 10, plan);
  });
}
int trimmed_mean(const void* fields) { return column_means<pflcore::TrimmedMean>(fields); }
int mean_around_median(const void* fields) {
  return column_means<pflcore::MeanAroundMedian>(fields);
}
int feddwa(const void* fields, int64_t wide) {
  return guarded([&] {
    wide ? pc::feddwa_weights(from<pflcore::Feddwa<double>>(fields), nullptr)
         : pc::feddwa_weights(from<pflcore::Feddwa<float>>(fields), nullptr);
  });
}
int sgd(const void* fields, int64_t wide) {
  return guarded([&] {
    wide ? pc::sgd_step(from<pflcore::Sgd<double>>(fields), nullptr)
         : pc::sgd_step(from<pflcore::Sgd<float>>(fields), nullptr);
  });
}
// Runs the forward pass if `y` is given, else the backward pass.
int rank1(const void* fields, int64_t wide, void* y, const void* grad, void* gx, void* ga,
          void* glam, void* gb) {
  return guarded([&] {
    void* const grads[] = {gx, ga, glam, gb};
    wide ? rank1(fields, static_cast<double*>(y), static_cast<const double*>(grad),
                 reinterpret_cast<double* const*>(grads))
         : rank1(fields, static_cast<float*>(y), static_cast<const float*>(grad),
                 reinterpret_cast<float* const*>(grads));
  });
}

// Kernels with faults that the harness must catch. One forgets a barrier, so that its result
// depends on the order of the threads. In another one, not all threads reach a barrier. Others read
// shared memory that they never wrote, use a copy before it arrives, or read past their input. The
// rest stores or copies to the wrong kind of memory.
int broken(int64_t which, double* out) {
  return guarded([&] {
    auto* const kernel = +[](int fault, double* to) {
      PFLCORE_DYNAMIC_SHARED(shared);
      __shared__ __align__(16) float fixed[4];
      alignas(16) float own[4];
      float* const mine = reinterpret_cast<float*>(shared);
      const int t = static_cast<int>(threadIdx.x);
      const pc::Pack<float> pack{};
      if (fault == 0) mine[t] = static_cast<float>(t);
      if (fault == 0) to[t] = mine[63 - t];
      if (fault == 1 && t < 16) __syncthreads();
      if (fault == 1 && t >= 16) __syncwarp();
      if (fault == 2) to[t] = mine[t];
      if (fault == 3 && t == 0) pc::copy_async<16>(mine, to, 16), pc::copy_commit();
      if (fault == 3) __syncthreads();
      if (fault == 3) to[t] = mine[t % 4];
      if (fault == 4) pc::load16(mine + 1);
      if (fault == 5 && t == 0) mine[64] = 0;
      if (fault == 6 && t == 63) to[t] = to[t + 1];
      if (fault == 7) pc::store_pack_global(mine, pack);
      if (fault == 8) pc::store_pack_global(fixed, pack);
      if (fault == 9) pc::store_pack_global(own, pack);
      if (fault == 10) pc::store16_shared(reinterpret_cast<float*>(to), pack);
      if (fault == 11) pc::copy_async<16>(to, to + 2, 16);
      if (fault == 12) pc::copy_async<16>(mine, mine + 4, 16);
      if (fault == 13) pc::copy_async<16>(mine, fixed, 16);
      if (fault == 14) pc::copy_async<16>(mine, own, 16);
      if (fault == 15) {  // no fault: each access has the right kind of memory
        pc::store16_shared(mine, pack), pc::store16_shared(fixed, pack);
        pc::copy_async<16>(mine + 4, to + 2, 16), pc::copy_async<8>(fixed, to + 2, 8);
        pc::copy_commit(), pc::copy_wait<0>();
        pc::store_pack_global(reinterpret_cast<float*>(to), pack);
      }
    };
    PFLCORE_LAUNCH(kernel, 1, 64, 64 * sizeof(float), nullptr, static_cast<int>(which), out);
  });
}

// A kernel that takes 96 KiB of shared memory, after requests of so many KiB, until a 0.
int launch_large(const int64_t* limits) {
  return guarded([&] {
    auto* const kernel = +[](int) {
      PFLCORE_DYNAMIC_SHARED(shared);
      shared[0] = 1;
    };
    const void* const address = reinterpret_cast<const void*>(kernel);
    cuda_on_cpu::shared_limit(address) = 48 * 1024;
    for (; *limits; ++limits)
      cudaFuncSetAttribute(address, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(*limits * 1024));
    PFLCORE_LAUNCH(kernel, 1, 1, 96 * 1024, nullptr, 0);
  });
}

}  // extern "C"
