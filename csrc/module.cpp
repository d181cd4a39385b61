// pflcore._C: the limits of this machine, and the torch that the module was built with, for
// benchmarks. It shares nothing with the kernels' library (library.cpp), and neither needs the
// other.
#include <pybind11/pybind11.h>
#include <torch/headeronly/version.h>

#include <string>

#include "cpu/isa.h"
#include "cpu/roofline.h"

PYBIND11_MODULE(_C, m, pybind11::mod_gil_not_used()) {
  namespace cpu = pflcore::cpu;
  m.doc() = "What this machine can do, and what the module was built with.";
  m.attr("torch_version") = TORCH_VERSION;
  m.def(
      "best_isa", [] { return std::string(cpu::name(cpu::best_isa())); },
      "The best instruction set of this machine.");
  m.def(
      "limits",
      [](int threads, int64_t bytes) {
        const cpu::Limits limits = [&] {
          pybind11::gil_scoped_release release;
          return cpu::limits(threads, bytes);
        }();
        pybind11::dict out;
        out["read"] = limits.read, out["write"] = limits.write, out["fma"] = limits.fma,
        out["sub_fma"] = limits.sub_fma;
        return out;
      },
      pybind11::arg("threads"), pybind11::arg("bytes"),
      "This machine's limits: bytes read and written a second, float32 operations a second.");
}
