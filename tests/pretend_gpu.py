"""A pretended GPU: tensors that say `cuda:0` and compute on the CPU, for testing where things live
on machines without a GPU.

As on a real one, an operation on tensors of two devices is refused, numpy sees nothing, and looking
at a value makes the host wait; such waits are counted. What it cannot show is anything about
kernels (tests/internal/cuda_on_cpu does) or about time.
"""

import contextlib
from unittest.mock import patch

import pretend_graph
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    return_and_correct_aliasing,
)
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda:0")
VALUES = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "is_nonzero",
    "unique",
    "_unique2",
}  # ops whose result the host must know


class Waits(list):
    """What made the host wait for the device since the list was last emptied."""

    def append(self, name):
        pretend_graph.refuse_wait(name)
        super().append(name)


waits = Waits()


class Pretend(torch.Tensor):
    """A tensor on the pretended GPU: `real` is where it really is."""

    real_: Tensor

    @staticmethod
    def __new__(cls, real):
        out = torch.Tensor._make_wrapper_subclass(
            cls,
            real.shape,
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device="meta",
        )
        out.real_ = real
        return out

    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    is_meta = property(lambda self: False)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})

    def __deepcopy__(self, memo):
        copied = Pretend(self.real_.detach().clone())
        return (
            copied.requires_grad_()
            if self.requires_grad and torch._C._functorch.maybe_current_level() is None
            else copied
        )

    def __repr__(self, **_):
        return f"Pretend({self.real_})"

    def numpy(self, **_):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    __array__ = numpy


def looked_at(name):
    def look(self):
        waits.append(name)
        return getattr(self.real_, name)()

    return look


for _name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__"):
    setattr(Pretend, _name, looked_at(_name))


def where(kwargs):
    """The device that is asked for; C++ takes a pretended tensor for one on `meta` and asks for
    that."""
    asked = kwargs.get("device")
    return None if asked is None else "cpu" if torch.device(asked).type == "cpu" else "cuda"


def dispatch(func, args, kwargs):
    name = func._schema.name.split("::")[1]
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    here = [t for t in tensors if isinstance(t, Pretend)]
    plain = [t for t in tensors if not isinstance(t, Pretend) and t.dim()]
    target = where(kwargs)
    on_gpu = target == "cuda" or (target is None and bool(here))
    if name in ("_to_copy", "copy_"):
        if name == "copy_":
            on_gpu = isinstance(args[0], Pretend)
        if here and not on_gpu:
            waits.append("to the CPU")
        elif on_gpu and plain and not (kwargs.get("non_blocking") or args[2:] == (True,)):
            waits.append("to the GPU")
    else:
        by_index = name in ("index", "index_put", "index_put_", "_index_put_impl_") and isinstance(
            args[0], Pretend
        )
        # a GPU takes indices of the CPU
        if here and plain and not (by_index and all(any(t is i for i in args[1]) for t in plain)):
            raise RuntimeError(
                f"{func}: expected all tensors on one device, got cuda:0 and cpu "
                f"({[list(t.shape) for t in plain]})"
            )
        masks = by_index and any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1])
        if here and (name in VALUES or masks or (by_index and plain)):
            waits.append(name)

    def real(value):
        return value.real_ if isinstance(value, Pretend) else value

    plainly = {**kwargs, "device": torch.device("cpu")} if target == "cuda" else dict(kwargs)
    plainly.pop("pin_memory", None)
    real_args, real_kwargs = tree_map(real, args), tree_map(real, plainly)
    with _disable_current_modes():
        out = func(*real_args, **real_kwargs)
    pretend_graph.note(func, real_args, real_kwargs, out, copied=bool(plain) and on_gpu)
    if not on_gpu:
        return out
    out = tree_map(lambda t: Pretend(t) if isinstance(t, Tensor) else t, out)
    return return_and_correct_aliasing(func, args, kwargs, out)


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if where(kwargs) == "cuda" or any(issubclass(t, Pretend) for t in types):
            return dispatch(func, args, kwargs)
        return func(*args, **kwargs)


class _Function(TorchFunctionMode):
    """`t.to(other)` and `t.cpu()` ask C++ for the device, which knows no pretended one."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], Tensor):
            return func(args[0], device=args[1].device, dtype=args[1].dtype, **kwargs)
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.cpu:
            return func.__objclass__.to(args[0], "cpu")
        return func(*args, **kwargs)


@contextlib.contextmanager
def pretended_gpu():
    """Within it `device="cuda:0"` is there, on this thread: what would run on worker threads runs
    here, one after another."""
    here = patch("pflcore.train._workers.Workers.map", lambda self, f, items: [f(i) for i in items])
    seen, started = (
        patch("torch.cuda.is_available", lambda: True),
        patch("torch.cuda._lazy_init", lambda: None),
    )
    waits.clear()
    with here, seen, started, pretend_graph.patches(), _Function(), _Dispatch():
        yield GPU
