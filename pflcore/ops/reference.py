"""The specification of the ops: one pure PyTorch function each, right before it is fast.

These are the default bodies of the ops, so they run wherever no kernel is registered, and the tests hold the kernels against them.
Arguments have been checked by `pflcore.ops`. N clients, M rows of the result, P parameters, K kept neighbours, B batch, F factors.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

BUDGET = 1 << 22  # elements of a temporary: what a reference may hold beside its result


def pairwise_sqdist(
    a: Tensor,  # [M, P]
    b: Tensor | None,  # [N, P]
) -> Tensor:  # [M, N] float64
    """Squared distances of rows: subtract, square, sum, all in float64.

    Columns are folded in halves, so that the order of a pair's sum depends neither on the threads nor on where the pair stands.
    """
    symmetric = b is None
    b = a if b is None else b
    m, n, p = a.shape[0], b.shape[0], a.shape[1]
    out = torch.zeros(m, n, dtype=torch.float64, device=a.device)
    width = 1 << max(8, min(16, (BUDGET // max(m, n, 1)).bit_length() - 1))
    for start in range(0, p, width):
        size = min(width, p - start)
        fold = 1 << (size - 1).bit_length()
        rows_a = F.pad(a[:, start : start + size].double(), (0, fold - size))  # [M, fold]
        rows_b = rows_a if symmetric else F.pad(b[:, start : start + size].double(), (0, fold - size))
        for i in range(m):
            first = i + 1 if symmetric else 0
            if first < n:
                square = (rows_b[first:] - rows_a[i]).square()  # [N, fold]
                half = fold // 2
                while half:
                    square = square[:, :half] + square[:, half:]
                    half //= 2
                out[i, first:] += square[:, 0]
    return out + out.T if symmetric else out


def waffle_weights(
    dist: Tensor,  # [..., N] distances (not squared) from the target
    target: Tensor,  # [...] int64
    omega: float,
    psi: float,
    uniform_ties: bool,
) -> Tensor:  # [..., N] float64
    """WAFFLE's CalcWeights (Beaussart et al. 2021, Algorithm 1) in a form that never divides by zero."""
    d = dist.double().contiguous()
    is_target = torch.arange(d.shape[-1], device=d.device) == target[..., None]  # [..., N]
    other = d.isfinite() & ~is_target  # before the clamp: -Inf is no distance
    d = d.clamp(min=0)
    high = torch.where(other, d, 0.0).amax(-1, keepdim=True)  # [..., 1]
    low = torch.where(other, d, math.inf).amin(-1, keepdim=True)
    gap = high - low
    tied = gap <= 1e-12 * high
    t = torch.where(tied, 0.0, (d - low) / gap)
    s = torch.where(tied, 1.0, low / high) * (1 - omega)
    ratio = (t + s) / (1 + s) if omega <= 1 else t + s
    ratio = torch.where((high == 0) | (tied & uniform_ties), 0.0, ratio)
    raw = torch.where(other, (psi - ratio).clamp(min=0), 0.0)
    raw = torch.where(is_target, psi, raw)
    alone = ~other.any(-1, keepdim=True) | (psi == 0)
    return torch.where(alone, is_target.double(), raw / raw.sum(-1, keepdim=True))


def feddwa_weights(
    sqdist: Tensor,  # [M, N] squared distances
    k: int,
) -> tuple[Tensor, Tensor]:  # [M, K] float64, [M, K] int64
    """The K nearest of each row by (distance, index), weighted by 1 / squared distance (FedDWA, Liu et al. 2023, Eq. 15 and 8)."""
    d = sqdist.double().contiguous()
    d = torch.where(d.isnan(), math.inf, d.clamp(min=0))
    value, index = d.sort(dim=1, stable=True)
    value, index = value[:, :k], index[:, :k].contiguous()
    nearest = value[:, :1]
    equal = (nearest == 0) | nearest.isinf()  # only equals of the nearest count; else nearest / value is in [0, 1]
    weight = torch.where(equal, (value == nearest).double(), nearest / value)
    return weight / weight.sum(1, keepdim=True), index


def aggregate_out(
    updates: Tensor,  # [N, P]
    weight: Tensor,  # [M, N], or [M, K] with index
    index: Tensor | None,  # [M, K] int64
    base: Tensor | None,  # [P] or [M, P]
    lr: float,
    precise: bool,
    out: Tensor,  # [M, P]
) -> None:
    """out = base + lr * (weight @ updates), strip by strip."""
    wide = precise or torch.float64 in (updates.dtype, out.dtype)
    dtype = torch.float64 if wide else torch.float32
    w = (lr * weight.double()).to(dtype)
    width = max(1, BUDGET // max(1, sum(updates.shape[:1]) + w.shape[0]))
    for start in range(0, updates.shape[1], width):
        strip = slice(start, start + width)
        if index is None:
            total = w @ updates[:, strip].to(dtype)  # [M, width]
        else:
            total = torch.zeros(w.shape[0], updates[:, strip].shape[1], dtype=dtype, device=w.device)
            for k in range(w.shape[1]):
                weight_k = w[:, k, None]
                total += torch.where(weight_k != 0, weight_k * updates[index[:, k], strip].to(dtype), 0.0)
        out[:, strip] = total if base is None else base[..., strip].to(dtype) + total


def aggregate(updates: Tensor, weight: Tensor, index: Tensor | None, base: Tensor | None, lr: float, precise: bool) -> Tensor:  # [M, P]
    """The same into a fresh result of base's dtype, or else of updates'."""
    out = updates.new_empty(weight.shape[0], updates.shape[1], dtype=updates.dtype if base is None else base.dtype)
    aggregate_out(updates, weight, index, base, lr, precise, out)
    return out


def rank1_linear(
    x: Tensor,  # [B, I] or [N, B, I]
    w_a: Tensor,  # [O, F] or [N, O, F]
    lam: Tensor,  # [F] or [N, F]
    w_b: Tensor,  # [F, I] or [N, F, I]
) -> Tensor:  # [B, O] or [N, B, O]
    """((x w_b^T) * lam) w_a^T: a linear layer of weight sum_f lam_f w_a[:, f] w_b[f, :], which is never built."""
    scale = lam[..., None, :]
    hidden = torch.where(scale != 0, x @ w_b.mT * scale, 0.0)  # [.., B, F]
    return hidden @ w_a.mT


def rank1_linear_backward(
    grad: Tensor,  # [B, O] or [N, B, O]
    x: Tensor,
    w_a: Tensor,
    lam: Tensor,
    w_b: Tensor,
    need_x: bool,
    need_a: bool,
    need_lam: bool,
    need_b: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of rank1_linear in its inputs' shapes; an empty tensor where one is not needed."""
    scale = lam[..., None, :]
    hidden, back = x @ w_b.mT, grad @ w_a  # [.., B, F] both
    none = grad.new_empty(0)

    def scaled(t: Tensor) -> Tensor:
        """A factor that is off is skipped; where this is differentiated once more, by lam too, the plain product has the derivative."""
        return t * scale if torch.is_grad_enabled() else torch.where(scale != 0, t * scale, 0.0)

    def like(t: Tensor, g: Tensor) -> Tensor:
        """Clients that share an input add up."""
        return g.sum_to_size(t.shape).contiguous()

    return (
        like(x, scaled(back) @ w_b) if need_x else none,
        like(w_a, grad.mT @ scaled(hidden)) if need_a else none,
        like(lam, (hidden * back).sum(-2)) if need_lam else none,
        like(w_b, scaled(back).mT @ x) if need_b else none,
    )


def sgd_step_(
    w: Tensor,  # [S, Q], changed
    grad: Tensor,  # [S, Q]
    lr: float,
    shift: Tensor | None,  # [S, Q]
    mask: Tensor | None,  # [Q] or [S, Q]
    mu: float,
    mu_rows: Tensor | None,  # [S], replaces mu
    anchor: Tensor | None,  # [S, Q]
    momentum: float,
    buffer: Tensor | None,  # [S, Q], changed
    weight_decay: float,
) -> None:
    """One SGD step on flat rows with a correction, a proximal term, momentum, weight decay and a mask."""
    d = grad if shift is None else grad + shift
    if anchor is not None:
        d = d + (mu if mu_rows is None else mu_rows[:, None].to(w.dtype)) * (w - anchor)
    if weight_decay:
        d = d + weight_decay * w
    if buffer is not None and momentum:
        buffer.mul_(momentum).add_(d)
        d = buffer
    w.sub_(lr * d if mask is None else lr * mask * d)


def linear_sgd_(
    w: Tensor,  # [S, Q] rows [weight C x I | bias C], changed
    x: Tensor,  # [n, I] the pool
    y: Tensor,  # [n] int64 labels, or numbers of w's dtype
    relabel: Tensor | None,  # [S, classes] a label as each client knows it
    order: Tensor,  # [S, passes, longest] places in the pool
    size: Tensor,  # [S] samples of each client, on the CPU
    steps: Tensor,  # [S] steps it takes, on the CPU
    batch_size: int,
    drop_last: bool,
    criterion: str,
    bias: bool,
    lr: float,
    shift: Tensor | None,  # [S, Q]
    mask: Tensor | None,  # [Q] or [S, Q]
    mu: float,
    mu_rows: Tensor | None,  # [S], replaces mu
    anchor: Tensor | None,  # [S, Q]
    momentum: float,
    weight_decay: float,
    grad_sum: Tensor | None,  # [S, Q], added to
) -> Tensor:  # [S] float64, the sum of the batches' mean losses
    """The whole local training of linear models: everybody's k-th step at once, with sample weights that are 0 beyond a short batch."""
    inputs, device = x.shape[1], w.device
    matrix = w.shape[1] // (inputs + bias) * inputs
    buffer = torch.zeros_like(w) if momentum else None
    loss = torch.zeros(len(w), dtype=torch.float64, device=device)
    whole = torch.clamp(size, max=batch_size).clamp(min=1)
    cuts = (size // whole if drop_last else -(size // -whole)).clamp(min=1)
    at = torch.arange(min(batch_size, max(1, order.shape[2])))
    for k in range(int(steps.max()) if len(steps) else 0):
        on = (steps > k).nonzero()[:, 0]  # those who still train
        first = k % cuts[on] * whole[on]
        inside = at < torch.minimum(whole[on], size[on] - first)[:, None]  # [s, B]
        place = (first[:, None] + at) * inside
        index = order[on.to(device), (k // cuts[on]).to(device)].gather(1, place.to(device))
        on, weight = on.to(device), (inside.double() / inside.sum(1, keepdim=True)).to(w)
        rows, samples, labels = w[on], x[index], y[index]
        if relabel is not None:
            labels = relabel[on].gather(1, labels)
        scores = torch.einsum("sbi,sci->sbc", samples, rows[:, :matrix].view(len(on), -1, inputs))
        scores = scores + rows[:, None, matrix:] if bias else scores
        losses, slope = losses_and_slopes(criterion, scores, labels)
        loss[on] += (losses * weight).masked_fill(weight == 0, 0.0).sum(1).double()
        slope = (slope * weight[..., None]).masked_fill(weight[..., None] == 0, 0.0)  # [s, B, C]
        grad = torch.cat([torch.einsum("sbc,sbi->sci", slope, samples).flatten(1), *([slope.sum(1)] if bias else [])], 1)
        if grad_sum is not None:
            grad_sum[on] += grad + weight_decay * rows
        own = None if buffer is None else buffer[on]
        sgd_step_(
            rows, grad, lr, None if shift is None else shift[on], mask if mask is None or mask.dim() == 1 else mask[on], mu,
            None if mu_rows is None else mu_rows.to(device)[on], None if anchor is None else anchor[on], momentum, own, weight_decay,
        )  # fmt: skip
        w[on] = rows
        if buffer is not None and own is not None:
            buffer[on] = own
    return loss


def losses_and_slopes(
    criterion: str,
    scores: Tensor,  # [s, B, C]
    y: Tensor,  # [s, B]
) -> tuple[Tensor, Tensor]:
    """Per-sample losses [s, B] and their derivative by the scores [s, B, C]."""
    if criterion == "cross_entropy":
        log_p = scores.log_softmax(2)
        index = y[..., None]
        slope = log_p.exp()
        slope.scatter_add_(2, index, torch.full_like(index, -1, dtype=slope.dtype))
        return -log_p.gather(2, index)[..., 0], slope
    z = scores.reshape(y.shape)
    if criterion == "hinge":
        sign = torch.where(y > 0, 1.0, -1.0).to(z.dtype)
        margin = 1 - sign * z
        return margin.clamp(min=0), torch.where(margin >= 0, -sign, torch.zeros_like(sign)).view_as(scores)
    gap, factor = z - y.to(z.dtype), 1.0 if criterion == "squared" else 0.5
    return factor * gap * gap, (2 * factor * gap).view_as(scores)


def pool2x2(
    x: Tensor,  # [B, C, H, W]
    average: bool,
) -> Tensor:  # [B, C, H // 2, W // 2]
    """2x2 pooling with stride 2: the mean or the maximum of each window."""
    return F.avg_pool2d(x, 2) if average else F.max_pool2d(x, 2)


def pool2x2_backward(
    grad: Tensor,  # [B, C, H // 2, W // 2]
    x: Tensor,  # [B, C, H, W]
    average: bool,
) -> Tensor:  # [B, C, H, W]
    """The gradient of `pool2x2` by its input; a maximum's goes to the first of equals."""
    aten = torch.ops.aten
    if average:
        g: Tensor = aten.avg_pool2d_backward(grad, x, [2, 2], [2, 2], [0, 0], False, True, None)
    else:
        _, index = aten.max_pool2d_with_indices(x, [2, 2], [2, 2])
        g = aten.max_pool2d_with_indices_backward(grad, x, [2, 2], [2, 2], [0, 0], [1, 1], False, index)
    return g.contiguous()


def conv2d(
    x: Tensor,  # [B, C, H, W]
    weight: Tensor,  # [O, C, KH, KW]
    bias: Tensor | None,  # [O]
    pad_h: int,
    pad_w: int,
) -> Tensor:  # [B, O, H + 2 pad_h - KH + 1, W + 2 pad_w - KW + 1]
    """Convolution with stride 1 of images with zeros around them."""
    return F.conv2d(x, weight, bias, padding=(pad_h, pad_w)).contiguous()


def conv2d_backward(
    grad: Tensor,  # like the result
    x: Tensor,
    weight: Tensor,
    pad_h: int,
    pad_w: int,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # [B, C, H, W], [O, C, KH, KW], [O]; empty where not needed
    """The gradients of `conv2d`."""
    need = [need_x, need_weight, need_bias]
    sizes = [weight.shape[0]] if need_bias else None
    found = torch.ops.aten.convolution_backward(grad, x, weight, sizes, [1, 1], [pad_h, pad_w], [1, 1], False, [0, 0], 1, need)
    gx, gw, gb = (g.contiguous() if want else x.new_empty(0) for g, want in zip(found, need, strict=True))
    return gx, gw, gb
