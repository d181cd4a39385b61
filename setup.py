"""Builds the kernels against the torch of the environment that pip was called in.

It does so with build isolation and without. Where torch or a compiler is missing, the
package is pure Python.

The kernels are one library, `pflcore/lib_pflcore.so`, which knows nothing of Python. A
small module for this Python, `pflcore._C`, is built with it. Environment variables:

- PFLCORE_EXT=auto (the default) builds what can be built; 0 builds nothing; cpu and
  cuda fail where they cannot be built. CUDA takes minutes. So auto compiles it only
  where torch sees a card, or where FORCE_CUDA=1 or TORCH_CUDA_ARCH_LIST asks for it.
- PFLCORE_MODULE=0 leaves the module out: then a wheel fits every Python.
"""

import glob
import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import contextmanager, suppress
from site import getusersitepackages

from setuptools import setup

WANT = os.environ.get("PFLCORE_EXT", "auto").lower()
MODULE = os.environ.get("PFLCORE_MODULE", "1") != "0"
HINT = (
    "for the kernels: `pip install .` again where torch >= 2.10 and a C++ compiler "
    "are installed"
)


def say(line):
    """Prints a line on stderr."""
    print(f"pflcore: {line}", file=sys.stderr, flush=True)


def pure(why):
    """The arguments of `setup` for a package without kernels, with a reason.

    Raises SystemExit where PFLCORE_EXT asks for kernels.
    """
    if WANT in ("cpu", "cuda"):
        raise SystemExit(f"pflcore: PFLCORE_EXT={WANT}, but {why}")
    say(f"pure Python ({why}); {HINT}")
    return {}


def torch_version(torch):
    """The first two numbers of torch's version."""
    numbers = []
    for part in torch.__version__.split("+")[0].split(".")[:2]:
        digits = "".join(ch for ch in part if ch.isdigit())
        numbers.append(int(digits or 0))
    return tuple(numbers)


def seen_torch():
    """The module torch, also where build isolation hides it.

    It is that of the environment in which pip or uv was called: pip keeps the prefix of
    that environment, uv has its folder on the path, or finds .venv. Raises ImportError
    where there is none.
    """
    with suppress(ImportError):
        return importlib.import_module("torch")
    path = [
        os.path.dirname(folder)
        for folder in os.environ.get("PATH", "").split(os.pathsep)
    ]
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    libs = [
        os.path.join(home, "lib", python, "site-packages")
        for home in [*path, ".venv"]
        if home
    ]
    for folder in [
        *map(sysconfig.get_path, ("purelib", "platlib")),
        getusersitepackages(),
        *libs,
    ]:
        if folder and os.path.exists(os.path.join(folder, "torch", "version.py")):
            sys.path.append(folder)  # behind the build's own packages
            break
    return importlib.import_module("torch")


def cuda_home(cpp_extension, torch):
    """The home of a CUDA compiler for this torch; None where there is none.

    It is CUDA_HOME where that is set. Else it is the compiler of pip's packages
    nvidia-cuda-nvcc, nvidia-nvvm and nvidia-cuda-crt of torch's CUDA version, which is
    in the folder of torch's own CUDA libraries. Else it is an installed one. A GPU need
    not be visible.
    """
    if not torch.version.cuda:
        return None
    asked = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    brought = [
        os.path.join(folder, "nvidia", f"cu{torch.version.cuda.split('.')[0]}")
        for folder in sys.path
    ]
    for home in (
        [asked] if asked else [*brought, cpp_extension.CUDA_HOME, "/usr/local/cuda"]
    ):
        if home and os.path.exists(os.path.join(home, "bin", "nvcc")):
            if any(
                os.path.exists(os.path.join(home, lib, "libcudart.so"))
                for lib in ("lib64", "lib")
            ):
                return home
            if glob.glob(os.path.join(home, "lib", "libcudart.so.*")):
                return linked_home(home)
    return None


def linked_home(wheels):
    """A folder of links to pip's CUDA, in the layout of an installed one.

    The wheels have no lib64, and no libcudart.so without a version.
    """
    home = os.path.abspath(os.path.join("build", "cuda_home"))
    shutil.rmtree(home, ignore_errors=True)
    os.makedirs(os.path.join(home, "lib64"))
    for part in ("bin", "include", "nvvm"):
        os.symlink(os.path.join(wheels, part), os.path.join(home, part))
    # libcudart.so.13, libcudadevrt.a
    for path in glob.glob(os.path.join(wheels, "lib", "libcuda*")):
        name = os.path.basename(path)
        for link in {name, name[: name.index(".so") + 3] if ".so" in name else name}:
            os.symlink(path, os.path.join(home, "lib64", link))
    return home


def card_list(home):
    """The value of TORCH_CUDA_ARCH_LIST where no card is visible.

    It has every generation that this compiler knows, and PTX for later ones.
    """
    said = subprocess.run(
        [os.path.join(home, "bin", "nvcc"), "--list-gpu-arch"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    known = {
        f"{int(n) // 10}.{int(n) % 10}" for n in re.findall(r"compute_(\d+)\b", said)
    }
    cards = [c for c in ("7.5", "8.0", "8.6", "9.0", "10.0", "12.0") if c in known] or [
        "8.0",
        "9.0",
    ]
    return ";".join(cards) + "+PTX"


@contextmanager
def kept_output(path):
    """Sends the output of a block into a file, and shows it at the end.

    The output of the compiler is a part of it.
    """
    sys.stdout.flush(), sys.stderr.flush()
    before = os.dup(1), os.dup(2)
    with open(path, "wb") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            for fd, old in enumerate(before, 1):
                os.dup2(old, fd), os.close(old)
            with open(path, errors="replace") as said:
                sys.stderr.write(said.read())


def cause(error, path):
    """The reason why a build failed, on one line.

    It is the first complaint of compiler or linker, else the text of the error.
    """
    with open(path, errors="replace") as said:
        complaints = [
            line.strip()
            for line in said
            if re.search(
                r"\b(fatal )?error\b ?:|undefined reference|cannot find|command not "
                r"found",
                line,
            )
        ]
    return (complaints or str(error).strip().splitlines() or [type(error).__name__])[0]


def extension():  # noqa: C901 (a plan, read once)
    """The arguments of `setup` for the kernels that can be built here."""
    if WANT not in ("0", "cpu", "cuda", "auto"):
        raise SystemExit(
            f"pflcore: PFLCORE_EXT is {WANT!r}, expected 0, cpu, cuda or auto"
        )
    if WANT == "0":
        return pure("PFLCORE_EXT=0")
    try:
        torch = seen_torch()
        from setuptools.command.bdist_wheel import bdist_wheel
        from torch.utils import cpp_extension
    except ImportError as error:
        return pure(f"torch cannot be imported: {error}")
    if torch_version(torch) < (2, 10):
        return pure(f"the kernels need torch >= 2.10, this is {torch.__version__}")
    if not any(
        map(shutil.which, [os.environ.get("CXX", "c++").split()[0], "g++", "clang++"])
    ):
        return pure("no C++ compiler was found")

    sources = [
        "csrc/library.cpp",
        *sorted(glob.glob("csrc/cpu/*.cpp") + glob.glob("csrc/chain/*.cpp")),
    ]
    cuda_sources = sorted(glob.glob("csrc/cuda/*.cu"))
    defines = ["-DTORCH_TARGET_VERSION=0x020a000000000000"]
    plain = ["-O3", "-g0", "-fvisibility=hidden", "-Wno-psabi"]
    cxx = [*plain, *defines]
    link = ["-Wl,-s"] if sys.platform == "linux" else []
    asked = (
        WANT == "cuda"
        or os.environ.get("FORCE_CUDA", "0") != "0"
        or bool(os.environ.get("TORCH_CUDA_ARCH_LIST"))
    )
    wanted = WANT != "cpu" and (asked or torch.cuda.is_available())
    home = cuda_home(cpp_extension, torch) if cuda_sources and wanted else None
    no_cuda = (
        None
        if home
        else "no CUDA compiler for this torch was found"
        if wanted
        else "no card is seen; FORCE_CUDA=1 asks for it"
    )
    if WANT == "cuda" and no_cuda:
        raise SystemExit(f"pflcore: PFLCORE_EXT=cuda, but {no_cuda}")

    # With this option torch links nothing of Python.
    common = {"py_limited_api": True, "extra_link_args": link}
    cpu = cpp_extension.CppExtension(
        "pflcore.lib_pflcore", sources, extra_compile_args={"cxx": cxx}, **common
    )
    plans = [(cpu, f"CPU kernels (no CUDA: {no_cuda})" if no_cuda else "CPU kernels")]
    if WANT != "cpu" and not no_cuda:
        cpp_extension.CUDA_HOME = home
        if not torch.cuda.is_available():  # else torch builds for the card that it sees
            os.environ.setdefault("TORCH_CUDA_ARCH_LIST", card_list(home))
        flags = {
            "cxx": [*cxx, "-DPFLCORE_CUDA", "-DUSE_CUDA"],
            "nvcc": ["-O3", *defines, "-DPFLCORE_CUDA", "-DUSE_CUDA"],
        }
        cuda = cpp_extension.CUDAExtension(
            "pflcore.lib_pflcore",
            sources + cuda_sources,
            extra_compile_args=flags,
            **common,
        )
        plans.insert(0, (cuda, "CPU and CUDA kernels"))

    class Build(cpp_extension.BuildExtension):
        """Builds the best of the plans that can be built.

        Where a build fails, CUDA is left out, and then the kernels, unless PFLCORE_EXT
        asks for them.
        """

        def get_ext_filename(self, name):
            # The library fits every Python, so its name has no Python's tag.
            if name.endswith("lib_pflcore"):
                return os.path.join(*name.split(".")) + ".so"
            return super().get_ext_filename(name)

        def build_extensions(self):
            ext, *modules = self.extensions
            self.force = True  # a file that is there may be that of another plan
            for plan, what in plans:
                for field in (
                    "sources",
                    "extra_compile_args",
                    "include_dirs",
                    "library_dirs",
                    "libraries",
                    "extra_link_args",
                ):
                    setattr(ext, field, getattr(plan, field))
                with tempfile.TemporaryDirectory() as folder:
                    log = os.path.join(folder, "log")
                    try:
                        self.build_some([ext], log)
                        self.note(None)
                        say(f"built {what} against torch {torch.__version__}")
                        return self.build_module(ext, modules, log)
                    except (Exception, SystemExit) as error:
                        why = cause(error, log)
                        if WANT != "auto":
                            raise SystemExit(
                                f"pflcore: {what} cannot be built here: {why}"
                            ) from error
                        say(f"{what} cannot be built here: {why}")
            self.note(why)
            pure(f"the build failed: {why}")
            self.extensions = []

        def build_some(self, some, log):
            self.extensions = some
            with kept_output(log):
                super().build_extensions()

        def build_module(self, ext, modules, log):
            """Builds the module, without which the kernels run, too.

            It cannot be built where Python's headers are missing.
            """
            try:
                self.build_some(modules, log)
            except (Exception, SystemExit) as error:
                say(f"the module of facts cannot be built here: {cause(error, log)}")
                modules = []
            self.extensions = [ext, *modules]

        def note(self, why):
            """Writes the reason of a failed build into a file for pflcore.backend().

            The file is in the folder of the kernels. pip does not show the output of a
            build that succeeds.
            """
            path = (
                self.get_ext_fullpath("pflcore.lib_pflcore").removesuffix(".so")
                + ".failed"
            )
            if why is not None:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "w") as file:
                    file.write(why)
            elif os.path.exists(path):
                os.remove(path)

    class Wheel(bdist_wheel):
        """A wheel for every Python, where it has no module for one."""

        def get_tag(self):
            tag = super().get_tag()
            if MODULE:
                return tag
            return ("py3", "none", tag[2])

    ext = plans[0][0]
    facts = cpp_extension.CppExtension(
        "pflcore._C",
        ["csrc/module.cpp"],
        extra_compile_args={"cxx": plain},
        extra_link_args=link,
    )
    for each in (ext, facts):
        each.depends = [
            *glob.glob("csrc/*.h"),
            *glob.glob("csrc/*/*.h"),
            *glob.glob("csrc/cuda/*.cuh"),
        ]
    return {
        "ext_modules": [ext, *([facts] if MODULE else [])],
        "cmdclass": {"build_ext": Build, "bdist_wheel": Wheel},
    }


if __name__ == "__main__":
    setup(**extension())
