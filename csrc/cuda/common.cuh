// Parts that every kernel shares: dtypes, 16-byte accesses, copies that run during the arithmetic,
// the launch. Knows nothing of torch. With PFLCORE_CUDA_ON_CPU the same kernels are compiled by a
// plain C++ compiler and run block by block (tests/internal/cuda_on_cpu).
#pragma once
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "../inputs.h"

// A kernel that is no template; where it runs on a CPU, one whose name can be looked up.
#ifdef PFLCORE_CUDA_ON_CPU
#include "cuda_on_cpu.h"
#define PFLCORE_PLAIN_KERNEL __global__
#else
#define PFLCORE_PLAIN_KERNEL static __global__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define PFLCORE_LAUNCH(kernel, grid, block, shared, stream, ...) \
  (kernel<<<grid, block, shared, stream>>>(__VA_ARGS__), pflcore::cuda::launched(__func__))
#define PFLCORE_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif

namespace pflcore::cuda {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T>
constexpr Dtype dtype_of = std::is_same_v<T, float>    ? Dtype::f32
                           : std::is_same_v<T, double> ? Dtype::f64
                           : std::is_same_v<T, __half> ? Dtype::f16
                                                       : Dtype::bf16;

inline int64_t bytes_of(Dtype dtype) {
  return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2;
}

// May rows that start at `base` and lie `row` elements apart be read 16 bytes at a time? A null
// pointer asks for nothing.
inline bool aligned16(const void* base, int64_t row, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && (row * bytes) % 16 == 0;
}

constexpr int64_t kAlwaysShared = 48 * 1024;  // bytes that every card gives without asking

// Lets a kernel be launched with `wanted` bytes of dynamic shared memory. More than every card
// gives must be asked for, and what a kernel may have is a fact of the device that all host threads
// share: where one thread asks for less, a launch of another one fails. So the most that the card
// has is asked for, once. It makes no work for the device, so it may be called while a graph is
// captured.
inline void allow_shared(const void* kernel, int64_t wanted) {
  int device = 0, most = 0;
  if (wanted <= kAlwaysShared || cudaGetDevice(&device) != cudaSuccess) return;
  static std::mutex mutex;
  static std::set<std::pair<const void*, int>> allowed;
  const std::lock_guard<std::mutex> lock(mutex);
  if (allowed.count({kernel, device})) return;
  cudaFuncAttributes code{};
  if (cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) ==
          cudaSuccess &&
      cudaFuncGetAttributes(&code, kernel) == cudaSuccess &&
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           most - static_cast<int>(code.sharedSizeBytes)) == cudaSuccess)
    allowed.insert({kernel, device});
  else
    cudaGetLastError();  // the launch says what is wrong
}

// The number of the card's processors, each of which runs several blocks.
inline int64_t multiprocessors() {
#ifdef PFLCORE_CUDA_ON_CPU
  return 2;
#else
  int device = 0, count = 0;
  if (cudaGetDevice(&device) == cudaSuccess &&
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess &&
      count > 0)
    return count;
  return 128;
#endif
}

// The card's compute capability, 90 for 9.0; 0: it cannot be known.
inline int card_generation() {
#ifdef PFLCORE_CUDA_ON_CPU
  return cuda_on_cpu::device().generation;
#else
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) == cudaSuccess &&
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess)
    return 10 * major + minor;
  return 0;
#endif
}

// That for which the kernel's code was written: less than the card's where the driver makes code
// for it from that of an older generation.
inline int code_generation(const void* kernel) {
#ifdef PFLCORE_CUDA_ON_CPU
  (void)kernel;
  return cuda_on_cpu::device().generation;
#else
  cudaFuncAttributes code;
  if (cudaFuncGetAttributes(&code, kernel) == cudaSuccess) return code.ptxVersion;
  cudaGetLastError();  // it is no error of the launch
  return 0;
#endif
}

// The architectures of a list as nvcc has it, "750,900", as "sm_75, sm_90".
inline std::string architecture_names(const std::string& list) {
  std::string names;
  for (size_t at = 0; at < list.size();) {
    const size_t end = list.find(',', at) == std::string::npos ? list.size() : list.find(',', at);
    names += (names.empty() ? "sm_" : ", sm_") + list.substr(at, end - at - 1);
    at = end + 1;
  }
  return names;
}

#ifndef PFLCORE_CUDA_ON_CPU
#define PFLCORE_TEXT_OF(...) #__VA_ARGS__
#define PFLCORE_TEXT(...) PFLCORE_TEXT_OF(__VA_ARGS__)
inline std::string architectures() { return architecture_names(PFLCORE_TEXT(__CUDA_ARCH_LIST__)); }

// The card that is here, as TORCH_CUDA_ARCH_LIST names it.
inline std::string card_name() {
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return std::to_string(major) + "." + std::to_string(minor);
}

// Right after each launch, so that an error is that of this kernel (or of earlier work that has
// failed meanwhile).
inline void launched(const char* where) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return;
  if (error == cudaErrorNoKernelImageForDevice)
    throw std::runtime_error("pflcore: the kernels were built for " + architectures() +
                             ", this card is " + card_name() +
                             "; build them again with TORCH_CUDA_ARCH_LIST=" + card_name());
  throw std::runtime_error(std::string("pflcore: a CUDA kernel could not be launched (") + where +
                           "): " + cudaGetErrorString(error));
}
#endif

// Grid-stride kernels: enough blocks to fill any card, never more than the work.
inline unsigned grid_for(int64_t pieces, int64_t limit = 16384) {
  return static_cast<unsigned>(pieces < 1 ? 1 : pieces < limit ? pieces : limit);
}

// ---- scalars ----
template <class To, class From>
struct Convert {
  static __device__ __forceinline__ To run(From v) { return static_cast<To>(v); }
};
template <class To>
struct Convert<To, __half> {
  static __device__ __forceinline__ To run(__half v) { return static_cast<To>(__half2float(v)); }
};
template <class To>
struct Convert<To, __nv_bfloat16> {
  static __device__ __forceinline__ To run(__nv_bfloat16 v) {
    return static_cast<To>(__bfloat162float(v));
  }
};
template <class From>
struct Convert<__half, From> {
  static __device__ __forceinline__ __half run(From v) {
    return __float2half_rn(static_cast<float>(v));
  }
};
template <class From>
struct Convert<__nv_bfloat16, From> {
  static __device__ __forceinline__ __nv_bfloat16 run(From v) {
    return __float2bfloat16_rn(static_cast<float>(v));
  }
};
template <class To, class From>
__device__ __forceinline__ To convert(From v) {
  return Convert<To, From>::run(v);
}

// ---- neighbours of one type in registers: 16 bytes, unless a number is said ----
template <class T>
constexpr int per16 = 16 / static_cast<int>(sizeof(T));

template <class T, int kCount = per16<T>>
struct alignas(kCount * sizeof(T)) Pack {
  T v[kCount];
};

// One access of 4, 8 or 16 bytes whatever T is.
template <int kCount, class T>
__device__ __forceinline__ Pack<T, kCount> load_pack(const T* p) {
  constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "4, 8 or 16 bytes");
  Pack<T, kCount> out;
#ifdef PFLCORE_CUDA_ON_CPU
  cuda_on_cpu::expect_aligned(p, kBytes);
  std::memcpy(&out, p, kBytes);
#else
  using Raw =
      std::conditional_t<kBytes == 4, unsigned, std::conditional_t<kBytes == 8, uint2, uint4>>;
  const Raw raw = *reinterpret_cast<const Raw*>(p);
  memcpy(&out, &raw, kBytes);
#endif
  return out;
}

// Stores are named after the memory that they go to. A store to the other one is a fault of the
// card, and the stand-in refuses it.
template <int kCount, class T>
__device__ __forceinline__ void store_pack_shared(T* p, const Pack<T, kCount>& value) {
  constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  static_assert(kBytes == 8 || kBytes == 16, "8 or 16 bytes");
#ifdef PFLCORE_CUDA_ON_CPU
  cuda_on_cpu::expect_shared(p, kBytes);
  std::memcpy(p, &value, kBytes);
#else
  using Raw = std::conditional_t<kBytes == 8, uint2, uint4>;
  Raw raw;
  memcpy(&raw, &value, kBytes);
  *reinterpret_cast<Raw*>(p) = raw;
#endif
}

// One access by an intrinsic: the compiler cuts a plain store into its parts and may not join them
// again.
template <int kCount, class T>
__device__ __forceinline__ void store_pack_global(T* p, const Pack<T, kCount>& value) {
  constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  static_assert(kBytes == 8 || kBytes == 16, "8 or 16 bytes");
#ifdef PFLCORE_CUDA_ON_CPU
  cuda_on_cpu::expect_global(p, kBytes);
  std::memcpy(p, &value, kBytes);
#else
  using Raw = std::conditional_t<kBytes == 8, uint2, uint4>;
  Raw raw;
  memcpy(&raw, &value, kBytes);
  __stwb(reinterpret_cast<Raw*>(p), raw);
#endif
}

// The plain store, which the compiler may cut: where registers are short, it spills less.
template <int kCount, class T>
__device__ __forceinline__ void store_pack_global_plain(T* p, const Pack<T, kCount>& value) {
#ifdef PFLCORE_CUDA_ON_CPU
  store_pack_global(p, value);
#else
  constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  static_assert(kBytes == 8 || kBytes == 16, "8 or 16 bytes");
  using Raw = std::conditional_t<kBytes == 8, uint2, uint4>;
  Raw raw;
  memcpy(&raw, &value, kBytes);
  *reinterpret_cast<Raw*>(p) = raw;
#endif
}

template <class T>
__device__ __forceinline__ Pack<T> load16(const T* p) {
  return load_pack<per16<T>>(p);
}
template <class T>
__device__ __forceinline__ void store16_shared(T* p, const Pack<T>& value) {
  store_pack_shared<per16<T>>(p, value);
}

// ---- global to shared memory during the arithmetic ----
// kBytes (4, 8 or 16) to `shared`, of which the first `valid` come from `global` and the rest are
// zero.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global, int valid) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "4, 8 or 16 bytes");
#ifdef PFLCORE_CUDA_ON_CPU
  cuda_on_cpu::copy_async(shared, global, kBytes, valid);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  if constexpr (kBytes == 16)  // past the first cache: each is read once
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(valid)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(global),
                 "n"(kBytes), "r"(valid)
                 : "memory");
#else
  using Raw =
      std::conditional_t<kBytes == 4, unsigned, std::conditional_t<kBytes == 8, uint2, uint4>>;
  if (valid == kBytes) {
    *static_cast<Raw*>(shared) = *static_cast<const Raw*>(global);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kBytes; ++i)
    static_cast<unsigned char*>(shared)[i] =
        i < valid ? static_cast<const unsigned char*>(global)[i] : 0;
#endif
}

__device__ __forceinline__ void copy_commit() {
#ifdef PFLCORE_CUDA_ON_CPU
  cuda_on_cpu::copy_commit();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most kPending of this thread's newest groups are under way.
template <int kPending>
__device__ __forceinline__ void copy_wait() {
#ifdef PFLCORE_CUDA_ON_CPU
  cuda_on_cpu::copy_wait(kPending);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// ---- reductions over a block, in one fixed order ----
struct Sum {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Max {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};
struct Min {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};

// The same total in every thread. `scratch` holds one T per warp; all threads of the block take
// part; blockDim.x is a multiple of 32.
template <class T, class Op>
__device__ T block_reduce(T value, T* scratch, Op op) {
  for (int step = 16; step > 0; step /= 2)
    value = op(value, __shfl_xor_sync(0xffffffffu, value, step));
  const int warps = static_cast<int>(blockDim.x) / 32;
  __syncthreads();  // scratch may still be read from the reduction before
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  T total = scratch[0];
  for (int w = 1; w < warps; ++w) total = op(total, scratch[w]);
  return total;
}

}  // namespace pflcore::cuda
