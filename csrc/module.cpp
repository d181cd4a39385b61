// pflcore._C: what was built and which path runs. No tensors: the ops register themselves when this library is loaded.
#undef TORCH_TARGET_VERSION   // with it, torch 2.10's pybind11 is refused; this file holds no tensors, and nothing of it could break
#include <pybind11/pybind11.h>
#include <torch/headeronly/version.h>

#include <string>

#include "cpu/isa.h"
#include "cpu/roofline.h"

#ifdef PFLCORE_CUDA
constexpr bool built_cuda = true;
#else
constexpr bool built_cuda = false;
#endif

PYBIND11_MODULE(_C, m) {
  namespace cpu = pflcore::cpu;
  m.doc() = "What was built and which CPU path runs.";
  m.attr("torch_version") = TORCH_VERSION;
  m.attr("compiler") =
#if defined(__clang__)
      "clang " __clang_version__;
#elif defined(__GNUC__)
      "gcc " __VERSION__;
#else
      "unknown";
#endif
  m.attr("cuda") = built_cuda;
  m.def("isa", [] { return std::string(cpu::name(cpu::isa())); }, "The instruction set the CPU kernels use: plain, avx2 or avx512.");
  m.def("best_isa", [] { return std::string(cpu::name(cpu::best_isa())); }, "The best instruction set of this machine.");
  m.def("set_isa", [](const std::string& wanted) {
    cpu::isa_slot() = cpu::isa_from(wanted.c_str());
    return std::string(cpu::name(cpu::isa()));
  }, pybind11::arg("isa"), "Choose the instruction set (for tests); returns the one chosen: never more than the machine has.");
  m.def("limits", [](int threads, int64_t bytes) {
    const cpu::Limits limits = [&] {
      pybind11::gil_scoped_release release;
      return cpu::limits(threads, bytes);
    }();
    pybind11::dict out;
    out["read"] = limits.read, out["write"] = limits.write, out["fma"] = limits.fma, out["sub_fma"] = limits.sub_fma;
    return out;
  }, pybind11::arg("threads"), pybind11::arg("bytes"), "This machine's limits: bytes read and written a second, float32 operations a second.");
}
