"""Builds the kernels (`pflcore._C`) against the torch that is installed; without torch or a compiler, the package is pure Python.

PFLCORE_EXT=auto (default) builds what can be built; =0 builds nothing; =cpu and =cuda fail where they cannot be built.
"""

import glob
import os
import shutil
import sys

from setuptools import setup

WANT = os.environ.get("PFLCORE_EXT", "auto").lower()
HINT = "for the kernels: `pip install --no-build-isolation .` where torch >= 2.10 and a C++ compiler are installed"


def say(line):
    print(f"pflcore: {line}", file=sys.stderr, flush=True)


def pure(why):
    if WANT in ("cpu", "cuda"):
        raise SystemExit(f"pflcore: PFLCORE_EXT={WANT}, but {why}")
    say(f"pure Python ({why}); {HINT}")
    return {}


def torch_version(torch):
    return tuple(int("".join(ch for ch in part if ch.isdigit()) or 0) for part in torch.__version__.split("+")[0].split(".")[:2])


def cuda_home(cpp_extension, torch):
    """The home of a CUDA compiler for this torch, whether or not a GPU is visible here; None where there is none.

    CUDA_HOME where it is set; else the compiler that pip can bring (nvidia-cuda-nvcc, nvidia-nvvm and nvidia-cuda-crt of torch's
    CUDA version), which lies beside the CUDA libraries that torch's own wheel brought; else an installed one.
    """
    if not torch.version.cuda:
        return None
    asked = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    brought = [os.path.join(folder, "nvidia", f"cu{torch.version.cuda.split('.')[0]}") for folder in sys.path]
    for home in [asked] if asked else [*brought, cpp_extension.CUDA_HOME, "/usr/local/cuda"]:
        if home and os.path.exists(os.path.join(home, "bin", "nvcc")):
            if any(os.path.exists(os.path.join(home, lib, "libcudart.so")) for lib in ("lib64", "lib")):
                return home
            if glob.glob(os.path.join(home, "lib", "libcudart.so.*")):
                return linked_home(home)
    return None


def linked_home(wheels):
    """pip's CUDA in the layout of an installed one, by links: the wheels have no lib64 and no libcudart.so without a version."""
    home = os.path.abspath(os.path.join("build", "cuda_home"))
    shutil.rmtree(home, ignore_errors=True)
    os.makedirs(os.path.join(home, "lib64"))
    for part in ("bin", "include", "nvvm"):
        os.symlink(os.path.join(wheels, part), os.path.join(home, part))
    for path in glob.glob(os.path.join(wheels, "lib", "libcuda*")):  # libcudart.so.13, libcudadevrt.a
        name = os.path.basename(path)
        for link in {name, name[: name.index(".so") + 3] if ".so" in name else name}:
            os.symlink(path, os.path.join(home, "lib64", link))
    return home


def extension():
    if WANT not in ("0", "cpu", "cuda", "auto"):
        raise SystemExit(f"pflcore: PFLCORE_EXT is {WANT!r}, expected 0, cpu, cuda or auto")
    if WANT == "0":
        return pure("PFLCORE_EXT=0")
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        return pure(f"torch cannot be imported: {error}")
    if torch_version(torch) < (2, 10):
        return pure(f"the kernels need torch >= 2.10, this is {torch.__version__}")
    if not any(map(shutil.which, [os.environ.get("CXX", "c++").split()[0], "g++", "clang++"])):
        return pure("no C++ compiler was found")

    sources = ["csrc/module.cpp", *sorted(glob.glob("csrc/cpu/*.cpp"))]
    cuda_sources = sorted(glob.glob("csrc/cuda/*.cu"))
    defines = ["-DTORCH_TARGET_VERSION=0x020a000000000000"]
    cxx = ["-O3", "-g0", "-fvisibility=hidden", *defines]
    link = ["-Wl,-s"] if sys.platform == "linux" else []
    home = cuda_home(cpp_extension, torch) if cuda_sources and WANT != "cpu" else None
    no_cuda = None if home else "no CUDA compiler for this torch was found"
    if WANT == "cuda" and no_cuda:
        raise SystemExit(f"pflcore: PFLCORE_EXT=cuda, but {no_cuda}")

    cpu = cpp_extension.CppExtension("pflcore._C", sources, extra_compile_args={"cxx": cxx}, extra_link_args=link)
    plans = [(cpu, f"CPU kernels (no CUDA: {no_cuda})" if no_cuda else "CPU kernels")]
    if WANT != "cpu" and not no_cuda:
        cpp_extension.CUDA_HOME = home
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
        flags = {"cxx": [*cxx, "-DPFLCORE_CUDA", "-DUSE_CUDA"], "nvcc": ["-O3", *defines, "-DPFLCORE_CUDA", "-DUSE_CUDA"]}
        cuda = cpp_extension.CUDAExtension("pflcore._C", sources + cuda_sources, extra_compile_args=flags, extra_link_args=link)
        plans.insert(0, (cuda, "CPU and CUDA kernels"))

    class Build(cpp_extension.BuildExtension):
        """Where a build fails, CUDA is left away, then the kernels, unless PFLCORE_EXT asked for them."""

        def build_extensions(self):
            ext = self.extensions[0]
            for plan, what in plans:
                for field in ("sources", "extra_compile_args", "include_dirs", "library_dirs", "libraries", "extra_link_args"):
                    setattr(ext, field, getattr(plan, field))
                try:
                    super().build_extensions()
                    return say(f"built {what} against torch {torch.__version__}")
                except (Exception, SystemExit) as error:
                    if WANT != "auto":
                        raise
                    why = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                    say(f"{what} cannot be built here: {why}")
            pure("the build failed, see above")
            self.extensions = []

    ext = plans[0][0]
    ext.depends = [*glob.glob("csrc/*.h"), *glob.glob("csrc/*/*.h"), *glob.glob("csrc/cuda/*.cuh")]
    return {"ext_modules": [ext], "cmdclass": {"build_ext": Build}}


setup(**extension())
