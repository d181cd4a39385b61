"""Pretended cards: tensors that say `cuda:0` and compute on the CPU.

They test the places of tensors on machines without a GPU. There may be several cards,
such as `cuda:0` and `cuda:1`. As on real cards:

- An operation on tensors of two devices is refused.
- A card that does not exist is refused.
- A generator of another device than that of the random numbers is refused.
- An op that has neither a kernel for cards nor a body is refused. An op without a
  kernel runs its body.
- Convolutions round float32 to TF32 where torch's flags allow it, as by default.
- numpy cannot read a tensor.
- Reading a value makes the host wait. Such waits are counted.

The cards show nothing about kernels (tests/internal/cuda_on_cpu does) or about time.
"""

import contextlib
import re
from unittest.mock import patch

import pretend_graph
import torch
from parts.modes import Mode
from places import ROOT
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    _disable_current_modes,
    return_and_correct_aliasing,
)

from pflcore.ops import _rank1
from pflcore.ops._library import references
from pflcore.train._gpu_flags import allows_tf32

# Ops whose result the host must know, by name, or by name and overload.
VALUES = {
    "_linalg_check_errors",
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "repeat_interleave.Tensor",
    "unique_consecutive",
    "unique_dim",
}
BY_INDEX = ("index", "index_put", "index_put_", "_index_put_impl_")
# Number of first arguments that are rounded to TF32.
ROUNDED = {"convolution": 2, "convolution_backward": 3}
SOURCES = "".join(path.read_text() for path in (ROOT / "csrc" / "cuda").glob("*.cu"))
KERNELS = frozenset(re.findall(r'm\.impl\("(\w+)"', SOURCES))  # pflcore's ops on a card
COMPOSED = {  # pflcore's ops that call torch's ops on a card
    "rank1_linear": _rank1.rank1_on_gpu,
    "rank1_linear_backward": _rank1.rank1_on_gpu_backward,
}


class Waits(list):
    """Names of the operations that made the host wait for the device."""

    def append(self, name):
        pretend_graph.refuse_wait(name)
        super().append(name)


Generator = torch.Generator
waits = Waits()
unrepeated: list[str] = []  # operations that may give other bits when repeated
contexts: set[int] = set()  # cards on which this process has worked
_cards = [1]  # number of cards
_current = [0]  # card that "cuda" means
_given = [0]  # card that the test asked for
# Cards of pretended generators, by the generators' address.
_generators: dict[int, torch.device] = {}


class Pretend(torch.Tensor):
    """A tensor on a pretended card; `real_` is on the CPU."""

    real_: Tensor
    card_: torch.device

    @staticmethod
    def __new__(cls, real, card):
        out = torch.Tensor._make_wrapper_subclass(
            cls,
            real.shape,
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device="meta",
        )
        out.real_ = real
        out.card_ = card
        contexts.add(card.index)
        return out

    device = property(lambda self: self.card_)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    is_meta = property(lambda self: False)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})

    def __deepcopy__(self, memo):
        copied = Pretend(self.real_.detach().clone(), self.card_)
        # torch recognizes a parameter of another class by this attribute.
        if getattr(self, "_is_param", False):
            copied._is_param = True
        if self.requires_grad and torch._C._functorch.maybe_current_level() is None:
            copied.requires_grad_()
        return copied

    def __repr__(self, **_):
        return f"Pretend({self.real_}, {self.card_})"

    def numpy(self, **_):
        raise TypeError(f"can't convert {self.card_} device type tensor to numpy")

    __array__ = numpy


def looked_at(name):
    def look(self):
        waits.append(name)
        return getattr(self.real_, name)()

    return look


for _name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__"):
    setattr(Pretend, _name, looked_at(_name))


class Draws(Generator):
    """A torch.Generator that knows the pretended cards."""

    def __new__(cls, device="cpu"):
        generator = super().__new__(cls, "cpu")
        generator.kept_ = torch.device(device)
        _generators.pop(generator._cdata, None)  # of a deleted generator
        if generator.kept_.type == "cuda":
            generator.kept_ = _generators[generator._cdata] = card_of(generator.kept_)
        return generator

    device = property(lambda self: self.kept_)


# the device of an operation ---------------------------------------------------


def card_of(device):
    """The device of a card with its number.

    Raises RuntimeError where the card does not exist.
    """
    index = _current[0] if device.index is None else device.index
    if index >= _cards[0]:
        raise RuntimeError("CUDA error: invalid device ordinal")
    return torch.device("cuda", index)


def where(kwargs, cards=()):
    """The device that an operation asks for, or None.

    C++ takes a pretended tensor for one on `meta` and asks for `meta`. For numbers it
    does not say which tensor is meant.
    """
    if kwargs.get("device") is None:
        return None
    asked = torch.device(kwargs["device"])
    if asked.type == "meta":
        return cards[0] if cards else torch.device("cuda", _given[0])
    return asked if asked.type == "cpu" else card_of(asked)


def leaves(value):
    """What stands in nested tuples, lists and dicts, in order.

    torch's own `tree_leaves` takes several times as long, which counts for the hundred
    thousand operations of a run.
    """
    if isinstance(value, (tuple, list)):
        return [leaf for part in value for leaf in leaves(part)]
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves(part)]
    return [value]


def mapped(change, value):
    """The same nest with `change(leaf)` in place of each leaf."""
    if isinstance(value, (tuple, list)):
        return type(value)([mapped(change, part) for part in value])
    if isinstance(value, dict):
        return {k: mapped(change, part) for k, part in value.items()}
    return change(value)


def check_generator(given, device):
    """Raises RuntimeError where a generator draws on another device."""
    for value in given:
        if not isinstance(value, Generator):
            continue
        drawn_on = _generators.get(value._cdata, torch.device("cpu"))
        if drawn_on != device:
            raise RuntimeError(
                f"Expected a '{device}' generator device but found '{drawn_on}'"
            )


def check_devices(func, name, args, tensors):
    """Raises RuntimeError for tensors of several devices.

    Numbers, and indices on the CPU, are allowed. An operation that makes the host wait
    is counted.
    """
    here = [t for t in tensors if isinstance(t, Pretend)]
    plain = [t for t in tensors if not isinstance(t, Pretend) and t.dim()]
    cards = {str(t.card_) for t in here}
    indexed = name in BY_INDEX and isinstance(args[0], Pretend)
    # A GPU accepts indices on the CPU.
    indices = indexed and all(any(t is i for i in args[1]) for t in plain)
    if len(cards) > 1 or (here and plain and not indices):
        places = sorted(cards) + ["cpu"] * bool(plain)
        shapes = [list(t.shape) for t in plain]
        raise RuntimeError(
            f"{func}: expected all tensors on one device, got {' and '.join(places)} "
            f"({shapes})"
        )
    masks = indexed and any(
        isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1]
    )
    overload = f"{name}.{func._overloadname}"
    if here and (name in VALUES or overload in VALUES or masks or (indexed and plain)):
        waits.append(name)


def check_order(name, args):
    """Notes an operation whose sums have no fixed order on a card.

    These are sums of several numbers by index, or along a row.
    """
    if not isinstance(args[0], Pretend) or not args[0].is_floating_point():
        return
    name = name.removesuffix("_")
    if name in ("cumsum", "cumprod"):
        unrepeated.append(name)
    elif name in ("index_add", "scatter_add"):
        index = args[2].real_.movedim(args[1], -1).sort(-1).values
        if (index[..., 1:] == index[..., :-1]).any():
            unrepeated.append(name)


def check_copy(args, kwargs, tensors, target):
    """Counts a copy between the CPU and a card as a wait.

    A copy from pinned memory does not wait.
    """
    here = any(isinstance(t, Pretend) for t in tensors)
    plain = any(not isinstance(t, Pretend) and t.dim() for t in tensors)
    free = kwargs.get("non_blocking") or args[2:] == (True,)
    if here and target.type == "cpu":
        waits.append("to the CPU")
    elif target.type == "cuda" and plain and not free:
        waits.append("to the GPU")


def rounded(value):
    """A float32 tensor in TF32, which keeps 10 bits behind the first."""
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return value
    wide = value * 8193.0
    return wide - (wide - value)


def dispatch(func, args, kwargs):
    name = func._schema.name.split("::")[1]
    given = leaves((args, kwargs))
    tensors = [t for t in given if isinstance(t, Tensor)]
    cards = [t.card_ for t in tensors if isinstance(t, Pretend)]
    target = where(kwargs, cards) or (cards[0] if cards else torch.device("cpu"))
    if name == "copy_":
        target = args[0].card_ if isinstance(args[0], Pretend) else torch.device("cpu")
    check_generator(given, target)
    if name in ("_to_copy", "copy_"):
        check_copy(args, kwargs, tensors, target)
    elif func.namespace == "pflcore" and name in COMPOSED and cards:
        check_devices(func, name, args, tensors)
        return COMPOSED[name](*args)
    elif func.namespace == "pflcore" and name not in KERNELS:
        raise NotImplementedError(f"{func}: it has no kernel for CUDA, and no body")
    else:
        check_devices(func, name, args, tensors)
        check_order(name, args)

    count = ROUNDED.get(name, 0)
    if count and not (cards and allows_tf32()):
        count = 0

    def compute(*args, **kwargs):
        return func(*map(rounded, args[:count]), *args[count:], **kwargs)

    def real(value):
        return value.real_ if isinstance(value, Pretend) else value

    plainly = (
        {**kwargs, "device": torch.device("cpu")}
        if kwargs.get("device")
        else dict(kwargs)
    )
    plainly.pop("pin_memory", None)
    real_args = mapped(real, args)
    real_kwargs = mapped(real, plainly)
    with _disable_current_modes():
        out = compute(*real_args, **real_kwargs)
    if target.type != "cpu":
        from_host = any(not isinstance(t, Pretend) and t.dim() for t in tensors)
        pretend_graph.note(compute, real_args, real_kwargs, out, from_host)
    if target.type == "cpu":
        return out
    out = mapped(lambda t: Pretend(t, target) if isinstance(t, Tensor) else t, out)
    return return_and_correct_aliasing(func, args, kwargs, out)


class _Dispatch(Mode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        asked = torch.device(kwargs.get("device") or "cpu").type
        drawn = any(isinstance(v, Generator) for v in leaves((args, kwargs)))
        if asked != "cpu" or drawn or any(issubclass(t, Pretend) for t in types):
            return dispatch(func, args, kwargs)
        return func(*args, **kwargs)


def body_of(func, args):
    """The body of an op without a kernel for cards, or None."""
    name = (
        func.name().split("::")[1]
        if getattr(func, "namespace", "") == "pflcore"
        else ""
    )
    if (
        not name
        or name in KERNELS
        or name in COMPOSED
        or not any(isinstance(a, Pretend) for a in args)
    ):
        return None
    return references.get(func)


class _Function(TorchFunctionMode):
    """Handles functions that need a tensor's device in C++.

    C++ knows no pretended device. The mode also handles copies in C++, and ops without
    a kernel.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        body = body_of(func, args)
        if body is not None:
            with self:  # a mode is inactive while it handles a function
                return body(*args)
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], Tensor):
            return func(args[0], device=args[1].device, dtype=args[1].dtype, **kwargs)
        if func is torch.Tensor.pin_memory:
            contexts.add(_current[0])  # the current card pins memory
            return args[0]
        if func is torch.Tensor.cpu:
            return func.__objclass__.to(args[0], "cpu")
        if func is torch.Tensor.new_tensor and isinstance(args[0], Pretend):
            kwargs.setdefault("dtype", args[0].dtype)
            kwargs.setdefault("device", args[0].device)
            func = torch.tensor
            args = args[1:]
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)


def exchange(index):
    """Makes another card the current one; returns the former's number."""
    before = _current[0]
    if index >= 0:
        _current[0] = card_of(torch.device("cuda", index)).index
    return before


@contextlib.contextmanager
def pretended_gpu(index=0, cards=1):
    """Pretends `cards` cards on this thread, and yields card `index`.

    Work of worker threads runs on this thread instead, one item after another.
    """
    changes = {
        "pflcore.train._workers.Workers.map": lambda self, f, items: [
            f(i) for i in items
        ],
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.device_count": lambda: cards,
        "torch.cuda.current_device": lambda: _current[0],
        "torch.cuda._lazy_init": lambda: None,
        "torch.cuda._exchange_device": exchange,
        "torch.cuda._maybe_exchange_device": exchange,
        "torch.Generator": Draws,
        # `parameter.data = other` changes the tensor that C++ knows, not the real one
        # behind it
        "torch.__future__._overwrite_module_params_on_conversion": True,
    }
    for seen in (waits, unrepeated, contexts):
        seen.clear()
    _cards[0] = cards
    _current[0] = 0
    _given[0] = index
    with contextlib.ExitStack() as stack:
        for name, new in changes.items():
            stack.enter_context(patch(name, new))
        stack.enter_context(pretend_graph.patches())
        stack.enter_context(_Function())
        stack.enter_context(_Dispatch())
        try:
            yield torch.device("cuda", index)
        finally:
            _generators.clear()
