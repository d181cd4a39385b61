// Runs CUDA kernels on a CPU, one block at a time. So the source of a kernel can be tested without
// a GPU.
//
// Each thread of a block is a fiber (ucontext) that runs until it waits at a barrier or a warp
// exchange. Where CUDA's rules leave a choice, this file makes the choice that shows most faults:
// - The order of the threads is a setting, and results must not depend on it.
// - Dynamic shared memory starts as NaN and has a guard behind it.
// - Asynchronous copies arrive only when they are waited for, or at once.
// - Errors are misaligned 16-byte accesses, stores and copies to the wrong kind of memory, and
//   barriers that not all threads reach.
// The file has only the part of CUDA that these kernels use.
#pragma once
#include <link.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../cpu/simd.h"

#define __global__
#define __device__
#define __shared__ static  // one block at a time
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __forceinline__ inline
#define __launch_bounds__(...)
#define PFLCORE_LAUNCH(kernel, grid, block, shared, stream, ...)                     \
  (cuda_on_cpu::device().launched.insert(reinterpret_cast<void*>(kernel)),           \
   cuda_on_cpu::launch(reinterpret_cast<void*>(kernel), grid, block, shared, stream, \
                       [&] { kernel(__VA_ARGS__); }))
#define PFLCORE_DYNAMIC_SHARED(name) unsigned char* const name = cuda_on_cpu::dynamic_shared()

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
using cudaStream_t = void*;

namespace cuda_on_cpu {

enum class Wait { none, block, warp, done };

struct Copy {
  void* to;
  const void* from;
  int bytes, valid, group;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<unsigned char[]> stack;
  dim3 thread;
  int linear = 0;
  Wait wait = Wait::none;
  unsigned exchanges = 0;
  int group = 0;
  std::vector<Copy> copies;
};

struct Device {
  static constexpr size_t stack_bytes = 128 * 1024, guard = 256;
  // The most bytes of shared memory that this GPU gives a kernel on request, and those that kernels
  // on it may have; 48 KiB without a request.
  int64_t shared_most = 99 * 1024;
  std::map<std::pair<int, const void*>, int64_t> shared_limits;
  bool copies = true;  // true: copies to shared memory run beside the arithmetic
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<int> order;
  std::vector<unsigned char> shared;
  int generation = 75;  // compute capability: 90 for 9.0
  // [warp][2][32]: the values that the lanes of a warp show each other. Exchanges alternate between
  // two sets, so that a fast lane does not overwrite a value that a slow lane still needs.
  std::vector<uint64_t> slots;
  // [warp][2][32][6]: the elements of a and b of each lane, also in two sets.
  std::vector<double> fragments;
  std::function<void()> body;
  ucontext_t scheduler;
  Fiber* now = nullptr;
  dim3 grid, block, index;
  int threads = 0, vote = 0, verdict = 0;
  // 0: the threads run in order; 1: backwards; else shuffled. Unless 0, each warp runs ahead of the
  // others. Above 2, copies arrive at once.
  unsigned seed = 0;
  std::string error;
  std::set<void*> launched;  // every kernel that has run
};

inline Device& device() {
  static Device d;
  return d;
}

inline void fail(const std::string& what) {
  if (device().error.empty()) device().error = what;
}

inline void pause(Wait why) {
  Fiber* const me = device().now;
  me->wait = why;
  swapcontext(&me->context, &device().scheduler);
}

inline void enter() {
  Device& d = device();
  d.body();
  d.now->wait = Wait::done;
  swapcontext(&d.now->context, &d.scheduler);
}

inline unsigned char* dynamic_shared() {
  const uintptr_t at = reinterpret_cast<uintptr_t>(device().shared.data());
  return device().shared.data() + (16 - at % 16) % 16;
}

inline void expect_aligned(const void* p, uintptr_t bytes) {
  if (reinterpret_cast<uintptr_t>(p) % bytes)
    fail("misaligned " + std::to_string(bytes) + "-byte access");
}

// The variables of this library. Of these, a kernel uses only static shared memory.
inline bool is_variable(uintptr_t at) {
  struct Search {
    uintptr_t own, at;
    bool found;
  } search{reinterpret_cast<uintptr_t>(&device()), at, false};
  const auto look = [](dl_phdr_info* library, size_t, void* data) {
    Search& s = *static_cast<Search*>(data);
    for (int i = 0; i < library->dlpi_phnum; ++i) {
      const auto& part = library->dlpi_phdr[i];
      const uintptr_t first = library->dlpi_addr + part.p_vaddr;
      if (part.p_type != PT_LOAD || s.own - first >= part.p_memsz) continue;
      s.found = s.at - first < part.p_memsz;
      return 1;
    }
    return 0;
  };
  dl_iterate_phdr(look, &search);
  return search.found;
}

inline bool is_shared(const void* p) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(p),
                  dynamic = reinterpret_cast<uintptr_t>(dynamic_shared());
  return at - dynamic < device().shared.size() - 16 || is_variable(at);
}

// True if the address is on the stack of a thread.
inline bool is_local(const void* p) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(p);
  const auto holds = [&](const std::unique_ptr<Fiber>& f) {
    return at - reinterpret_cast<uintptr_t>(f->stack.get()) < Device::stack_bytes;
  };
  return std::any_of(device().fibers.begin(), device().fibers.end(), holds);
}

inline void expect_shared(const void* p, uintptr_t bytes) {
  expect_aligned(p, bytes);
  if (!is_shared(p)) fail("a store to shared memory went elsewhere");
}

inline void expect_global(const void* p, uintptr_t bytes) {
  expect_aligned(p, bytes);
  if (is_shared(p) || is_local(p)) fail("a store to global memory went elsewhere");
}

inline void arrive(const Copy& c) {
  std::memcpy(c.to, c.from, static_cast<size_t>(c.valid));
  std::memset(static_cast<unsigned char*>(c.to) + c.valid, 0,
              static_cast<size_t>(c.bytes - c.valid));
}

inline void copy_async(void* to, const void* from, int bytes, int valid) {
  expect_aligned(to, static_cast<uintptr_t>(bytes));
  expect_aligned(from, static_cast<uintptr_t>(bytes));
  if (!is_shared(to)) fail("a copy to memory that is not shared");
  if (is_shared(from) || is_local(from)) fail("a copy from memory that is not global");
  const Copy copy{to, from, bytes, valid, device().now->group};
  device().seed > 2 ? arrive(copy) : device().now->copies.push_back(copy);
}

inline void copy_commit() { ++device().now->group; }

inline void copy_wait(int pending) {
  Fiber& me = *device().now;
  const auto arrived = [&](const Copy& c) {
    if (c.group >= me.group - pending) return false;
    arrive(c);
    return true;
  };
  me.copies.erase(std::remove_if(me.copies.begin(), me.copies.end(), arrived), me.copies.end());
}

inline void run(int t) {
  Device& d = device();
  Fiber& f = *d.fibers[t];
  if (f.wait != Wait::none) return;
  d.now = &f;
  swapcontext(&d.scheduler, &f.context);
}

// Wakes a warp if all of its threads that still run wait for each other.
inline bool release_warp(int first) {
  Device& d = device();
  const int end = std::min(first + 32, d.threads);
  bool some = false;
  for (int t = first; t < end; ++t) {
    if (d.fibers[t]->wait != Wait::warp && d.fibers[t]->wait != Wait::done) return false;
    some = some || d.fibers[t]->wait == Wait::warp;
  }
  for (int t = first; t < end; ++t)
    if (d.fibers[t]->wait == Wait::warp) d.fibers[t]->wait = Wait::none;
  return some;
}

// Wakes the threads of a complete barrier. A barrier is complete if all threads of the block, or of
// a warp, that still run have reached it. Returns false if no thread can continue.
inline bool release() {
  Device& d = device();
  bool all = true, any = false;
  for (int t = 0; t < d.threads; ++t)
    all = all && (d.fibers[t]->wait == Wait::block || d.fibers[t]->wait == Wait::done);
  if (all) {
    for (int t = 0; t < d.threads; ++t)
      if (d.fibers[t]->wait == Wait::block) d.fibers[t]->wait = Wait::none, any = true;
    d.verdict = d.vote, d.vote = 0;
    return any;
  }
  for (int w = 0; w < d.threads; w += 32) any = release_warp(w) || any;
  return any;
}

inline void run_block(size_t shared_bytes) {
  Device& d = device();
  unsigned char* const shared = dynamic_shared();
  std::memset(shared, 0xff, shared_bytes);  // NaN as float, double and half
  std::memset(shared + shared_bytes, 0xa5, Device::guard);
  for (int t = 0; t < d.threads; ++t) {
    Fiber& f = *d.fibers[t];
    f.wait = Wait::none, f.exchanges = 0, f.group = 0, f.linear = t;
    f.copies.clear();
    const unsigned u = static_cast<unsigned>(t);
    f.thread = dim3(u % d.block.x, u / d.block.x % d.block.y, u / d.block.x / d.block.y);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = Device::stack_bytes;
    f.context.uc_link = nullptr;
    makecontext(&f.context, &enter, 0);
  }
  d.vote = 0;
  for (bool alive = true; alive;) {
    alive = false;
    for (int t : d.order) {
      run(t);
      while (d.seed != 0 &&
             release_warp(t / 32 *
                          32)) {  // one warp far ahead of the others, as far as the barriers allow
        for (int other : d.order)
          if (other / 32 == t / 32) run(other);
      }
    }
    for (int t = 0; t < d.threads && !alive; ++t) alive = d.fibers[t]->wait != Wait::done;
    if (alive && !release()) {
      fail("a barrier or a warp exchange that not every thread reaches");
      break;
    }
  }
  for (size_t i = 0; i < Device::guard; ++i)
    if (shared[shared_bytes + i] != 0xa5) fail("written past the end of shared memory");
}

// A GPU with another amount of shared memory is another device.
inline int device_number() { return static_cast<int>(device().shared_most / 1024); }

inline int64_t& shared_limit(const void* kernel) {
  return device().shared_limits.insert({{device_number(), kernel}, 48 * 1024}).first->second;
}

inline void launch(const void* kernel, dim3 grid, dim3 block, int64_t shared_bytes, cudaStream_t,
                   std::function<void()> body) {
  Device& d = device();
  d.threads = static_cast<int>(block.x * block.y * block.z);
  if (d.threads < 1 || d.threads > 1024 || block.z > 64)
    throw std::runtime_error("launch: bad block of " + std::to_string(d.threads));
  if (grid.x < 1 || grid.y < 1 || grid.z < 1 || grid.x > 0x7fffffffu || grid.y > 65535 ||
      grid.z > 65535)
    throw std::runtime_error("launch: bad grid");
  if (shared_bytes < 0 || shared_bytes > shared_limit(kernel))
    throw std::runtime_error("launch: " + std::to_string(shared_bytes) + " bytes of shared memory");
  d.grid = grid, d.block = block, d.body = std::move(body);
  d.shared.resize(static_cast<size_t>(shared_bytes) + Device::guard + 16);
  d.slots.assign(static_cast<size_t>((d.threads + 31) / 32) * 64, 0);
  d.fragments.assign(static_cast<size_t>((d.threads + 31) / 32) * 64 * 6, 0);
  while (static_cast<int>(d.fibers.size()) < d.threads) {
    d.fibers.push_back(std::make_unique<Fiber>());
    d.fibers.back()->stack.reset(new unsigned char[Device::stack_bytes]);
  }
  d.order.resize(static_cast<size_t>(d.threads));
  for (int t = 0; t < d.threads; ++t)
    d.order[static_cast<size_t>(t)] = d.seed == 1 ? d.threads - 1 - t : t;
  if (d.seed > 1) std::shuffle(d.order.begin(), d.order.end(), std::mt19937(d.seed));
  std::vector<dim3> blocks;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) blocks.emplace_back(x, y, z);
  if (d.seed == 1) std::reverse(blocks.begin(), blocks.end());
  for (const dim3& index : blocks) {
    d.index = index;
    run_block(static_cast<size_t>(shared_bytes));
    if (!d.error.empty()) {
      std::string error;
      error.swap(d.error);
      throw std::runtime_error(error);
    }
  }
}

// Each lane shows a value and receives the value of lane `from(lane)`. Threads that have ended show
// no value, and no lane may read from them.
template <class T>
T exchange(T value, int from) {
  static_assert(sizeof(T) <= 8, "up to 8 bytes at a time");
  Device& d = device();
  Fiber& me = *d.now;
  const int warp = me.linear / 32, lane = me.linear % 32;
  uint64_t* const slots = d.slots.data() + warp * 64 + (me.exchanges++ & 1) * 32;
  slots[lane] = 0;
  std::memcpy(&slots[lane], &value, sizeof(T));
  pause(Wait::warp);
  const int other = warp * 32 + from;
  if (from < 0 || from > 31 || other >= d.threads) {
    fail("a warp exchange with a lane that is not there");
    return value;
  }
  T out;
  std::memcpy(&out, &slots[from], sizeof(T));
  return out;
}

// ---- tensor cores: D += A B, fragments as the PTX ISA lays them out ----
// Shows the lane's elements of A and then of B to its warp. Those of lane l begin at 6 l.
template <int kA, int kB>
const double* show_fragments(const double (&a)[kA], const double (&b)[kB]) {
  static_assert(kA + kB <= 6, "up to 6 elements a lane");
  Device& d = device();
  Fiber& me = *d.now;
  const int warp = me.linear / 32, lane = me.linear % 32;
  double* const all = d.fragments.data() + (warp * 2 + (me.exchanges++ & 1)) * 32 * 6;
  std::copy(a, a + kA, all + lane * 6);
  std::copy(b, b + kB, all + lane * 6 + kA);
  pause(Wait::warp);
  return all;
}

// float64 m8n8k4. Lane 4 g + t: A is row g, column t; B row t, column g; D row g, columns 2 t and
// 2 t + 1.
inline void mma_m8n8k4(double& d0, double& d1, double a, double b) {
  const double* const all = show_fragments<1, 1>({a}, {b});
  const int lane = device().now->linear % 32, g = lane / 4, t = lane % 4;
  for (int k = 0; k < 4; ++k) {
    const double x = all[(4 * g + k) * 6];
    d0 = std::fma(x, all[(8 * t + k) * 6 + 1], d0);
    d1 = std::fma(x, all[(8 * t + 4 + k) * 6 + 1], d1);
  }
}

// float64 m16n8k8. Lane 4 g + t: A's elements are (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4);
// B's (t, g), (t + 4, g); D's (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1).
inline void mma_m16n8k8(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
  const double* const all = show_fragments(a, b);
  const int lane = device().now->linear % 32, g = lane / 4, t = lane % 4;
  for (int e = 0; e < 4; ++e)
    for (int k = 0; k < 8; ++k) {
      const double x = all[(4 * g + k % 4) * 6 + k / 4 * 2 + e / 2];
      const double y = all[(4 * (2 * t + e % 2) + k % 4) * 6 + 4 + k / 4];
      d[e] = std::fma(x, y, d[e]);
    }
}

}  // namespace cuda_on_cpu

#define threadIdx (cuda_on_cpu::device().now->thread)
#define blockIdx (cuda_on_cpu::device().index)
#define blockDim (cuda_on_cpu::device().block)
#define gridDim (cuda_on_cpu::device().grid)

inline void __syncthreads() { cuda_on_cpu::pause(cuda_on_cpu::Wait::block); }
inline int __syncthreads_or(int predicate) {
  cuda_on_cpu::device().vote |= predicate != 0;
  __syncthreads();
  return cuda_on_cpu::device().verdict;
}
inline void __syncwarp(unsigned = 0xffffffffu) { cuda_on_cpu::pause(cuda_on_cpu::Wait::warp); }

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return cuda_on_cpu::exchange(value, lane & 31);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int bits) {
  return cuda_on_cpu::exchange(value, cuda_on_cpu::device().now->linear % 32 ^ bits);
}

inline unsigned __ballot_sync(unsigned, int predicate) {
  cuda_on_cpu::Device& d = cuda_on_cpu::device();
  const int warp = d.now->linear / 32;
  const unsigned turn = d.now->exchanges & 1;
  cuda_on_cpu::exchange<int>(predicate != 0, d.now->linear % 32);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane)
    bits |= d.slots[static_cast<size_t>(warp * 64 + static_cast<int>(turn) * 32 + lane)]
                ? 1u << lane
                : 0u;
  return bits;
}
inline unsigned __float_as_uint(float v) {
  unsigned bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }

// ---- the half types, converted as the CPU's kernels do (nearest, ties to even) ----
using __half = pflcore::cpu::Half;
using __nv_bfloat16 = pflcore::cpu::BFloat16;

namespace cuda_on_cpu {

template <class To, class From>
To converted(From v) {
  const From some[4] = {v};
  To out[4];
  pflcore::cpu::Vec<float, 16> four;
  pflcore::cpu::load_as<16, float>(four, some);
  pflcore::cpu::store_as<16, float>(out, four);
  return out[0];
}

}  // namespace cuda_on_cpu

inline float __bfloat162float(__nv_bfloat16 v) { return cuda_on_cpu::converted<float>(v); }
inline float __half2float(__half v) { return cuda_on_cpu::converted<float>(v); }
inline __nv_bfloat16 __float2bfloat16_rn(float v) {
  return cuda_on_cpu::converted<__nv_bfloat16>(v);
}
inline __half __float2half_rn(float v) { return cuda_on_cpu::converted<__half>(v); }

// ---- the host's functions ----
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
struct cudaFuncAttributes {
  size_t sharedSizeBytes;
};

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = cuda_on_cpu::device_number();
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = static_cast<int>(cuda_on_cpu::device().shared_most);
  return cudaSuccess;
}
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* code, const void*) {
  code->sharedSizeBytes = 0;
  return cudaSuccess;
}
// A host thread may ask for less between another one's request and its launch, which then fails.
// So asking for less is an error at once.
inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int bytes) {
  if (bytes > cuda_on_cpu::device().shared_most) return cudaErrorInvalidValue;
  int64_t& limit = cuda_on_cpu::shared_limit(kernel);
  if (bytes < limit) throw std::runtime_error("a kernel's limit of shared memory was lowered");
  limit = bytes;
  return cudaSuccess;
}
