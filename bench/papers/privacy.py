"""Attacks on what travels: was this sample among the client's training data, and what
do its classes look like?

The adversary sees one round's messages of a federation and knows the protocol, the
model and data of the same kind, never the client's state. Membership inference by
shadow models (Shokri et al.
2017) and by likelihood ratios (LiRA, Carlini et al. 2022); model inversion by MI-FACE
(Fredrikson et al. 2015). What a factorized upload lacks, the client's choice of
factors, an adversary guesses: `views`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import getitem
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from pflcore import Algorithm, Clients, Federation, Net, Training, step
from pflcore.algorithms._factorized_waffle import FactorizedWaffle, strength_columns
from pflcore.algorithms._fedavg import MRMTL
from pflcore.check import NonNegativeInt, PositiveInt, check_fields, require
from pflcore.simulation.round import RunConfig, initial_state, sample_cohort
from pflcore.train._random import IsolatedDraws
from pflcore.train._select_engine import make_context
from pflcore.train._workers import single_threaded

# -- what the adversary gets -------------------------------------------------


class Upload(NamedTuple):
    """One round's messages as model rows, and, for reference only, what never
    travelled."""

    net: Net
    down: Tensor | None  # [S, P] the model each client received, where it is one
    row: Tensor  # [S, P] the model each client sent
    # [S, ...] the clients' state after the round: no adversary has it
    own: Mapping[str, Tensor]


def intercept(
    algorithm: Algorithm,
    model: Callable[[], nn.Module],
    data: Federation,
    training: Training,
    rounds: int,
    seed: int = 0,
    workers: int | None = None,
) -> Upload:
    """Plays `rounds` rounds with every client and takes the last one's messages off
    the wire."""
    if type(algorithm) is MRMTL:
        raise ValueError(
            "algorithm: MR-MTL uploads how far a client's own model moved, which shows "
            "none; choose another."
        )
    net = algorithm.prepare(Net(model, seed=seed))
    words = "one without running statistics (batch norm), which never travel"
    require(not net.buffer_names, "model", words, net.buffer_names)
    caught: dict[str, Any] = {}

    def train(down: Any, client_state: Any, clients: Clients) -> Any:
        new, up, fit = algorithm.train(down, client_state, clients)
        caught.update(down=down, up=up, own=new)
        return new, up, fit

    tapped = copy.copy(algorithm)
    object.__setattr__(tapped, "train", train)  # it is frozen
    setting = make_context(net, data, training, "auto", workers, seed, rounds)
    net = setting.net
    config = RunConfig(tapped, setting)
    state = initial_state(tapped, net, data.n)
    for r in range(1, rounds + 1):
        state, done = step(config, state, sample_cohort(config, r))
        if done.dropped:
            raise ValueError(
                f"training: client(s) {done.dropped} sent updates that are not finite "
                f"in round {r}; lower the learning rate."
            )
    # one model for each client
    down, up = (
        {
            k: v
            for k, v in caught[way].items()
            if getattr(v, "shape", ())[1:] == (net.size,)
        }
        for way in ("down", "up")
    )
    shown = up.get("w")
    x = down.get("x")
    if shown is None and x is not None and "delta" in up:
        shown = x + up["delta"]
    if shown is None:
        raise ValueError(
            f"algorithm: its upload ({', '.join(caught['up']) or 'nothing'}) shows no "
            "client's model; choose one whose clients send a model."
        )
    return Upload(net, x, shown, caught["own"])


Samples = tuple[Tensor, Tensor]
Scores = Callable[[Tensor], Tensor]
View = Literal["all", "prior", "random", "adaptive", "trace", "own"]
VIEWS: tuple[View, ...] = get_args(View)


@single_threaded()
def views(
    algorithm: Algorithm,
    upload: Upload,
    known: Samples,
    seed: int = 0,
    names: Sequence[str] = VIEWS,
) -> dict[str, Tensor]:
    """The models [S, P] that the adversary makes of an upload, by the way it fills in
    the factor scores b.

    "all": b = 1 · "prior": the prior's mean · "random": drawn from it · "adaptive":
    fitted to `known`, the adversary's own samples of the same task, the dictionary
    frozen · "trace": from how far each factor moved since the download, for factors
    that a client does not use do not move · "own": the client's beliefs, which never
    travel: what the anonymity hides. Of other algorithms the upload is the model:
    {"upload": rows}.
    """
    if not isinstance(algorithm, FactorizedWaffle):
        return {"upload": upload.row}
    net, row, at = upload.net, upload.row, strength_columns(upload.net)
    fresh = algorithm.init_client({}, net, 1)["q"][0].chunk(3)[0].sigmoid()
    gen = torch.Generator().manual_seed(seed)
    ways = {
        "all": lambda: torch.ones_like(fresh),
        "prior": lambda: fresh,
        "random": lambda: torch.bernoulli(fresh.expand(len(row), -1), generator=gen),
        "adaptive": lambda: torch.stack([fit_scores(net, r, at, known) for r in row]),
        "trace": lambda: trace(net, upload),
        "own": lambda: upload.own["q"].chunk(3, 1)[0].sigmoid(),
    }
    return {name: row.index_copy(1, at, row[:, at] * ways[name]()) for name in names}


def descend(
    parameters: Sequence[Tensor], loss: Callable[[], Tensor], **options: float
) -> None:
    """200 steps of Adam."""
    optimizer = torch.optim.Adam(parameters, **options)  # type: ignore[arg-type]
    for _ in range(200):
        optimizer.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def fit_scores(net: Net, row: Tensor, at: Tensor, known: Samples) -> Tensor:
    """The scores b [F] in (0, 1) with which the dictionary `row` [P] suits these
    samples best, by Adam."""
    logit = torch.zeros(len(at), dtype=row.dtype, requires_grad=True)

    descend(
        [logit],
        lambda: net.loss(row.index_copy(0, at, row[at] * logit.sigmoid()), *known),
        lr=0.1,
    )
    return logit.detach().sigmoid()


def trace(net: Net, upload: Upload) -> Tensor:
    """The scores b [S, F] that a client's update betrays: how far a factor's two
    vectors moved, the upper half's median being 1."""
    if upload.down is None:
        raise ValueError(
            "views: 'trace' needs the download, which is not one model; leave it out."
        )
    moved = upload.row - upload.down
    trace = []
    for name in (
        n.removesuffix("strength") for n in net.names if n.endswith("strength")
    ):
        w_a, w_b = (
            moved[:, net.slices[name + p]].unflatten(
                1, net.shapes[net.names.index(name + p)]
            )
            for p in ("w_a", "w_b")
        )
        size = (w_a.norm(dim=1) * w_b.norm(dim=2)).sqrt()
        upper = size.topk((size.shape[1] + 1) // 2, 1).values
        usual = upper.median(1, keepdim=True).values
        trace.append((size / usual.clamp(min=1e-30)).clamp(max=1))
    return torch.cat(trace, 1)


# -- how well an attack does -------------------------------------------------


def measures(score: Tensor, member: Tensor, threshold: float = 0.5) -> dict[str, float]:
    """ "accuracy" and "f1" of the decision score > threshold, "auc", and "tpr": true
    positives
    where false ones are at most 1 %.

    `score` [n], higher for members; `member` bool [n].
    """
    yes = score > threshold
    score = score.double()
    hits = int((yes & member).sum())
    said = int(yes.sum() + member.sum())
    out = score[~member].sort().values
    inside = score[member]
    # ties count half
    ranks = [
        torch.searchsorted(out, inside, right=right).double() for right in (False, True)
    ]
    limit = out[-1 - int(0.01 * len(out))]
    return {
        "accuracy": float((yes == member).double().mean()),
        "f1": 2 * hits / max(1, said),
        "auc": float(torch.stack(ranks).mean()) / len(out),
        "tpr": float((inside > limit).double().mean()),
    }


def intervals(
    score: Tensor, member: Tensor, threshold: float = 0.5
) -> dict[str, list[float]]:
    """95 % intervals of `measures`, by resampling members and others, each among
    themselves, 200 times."""
    rng = np.random.RandomState(0)
    drawn = []
    groups = [side.nonzero()[:, 0].numpy() for side in (member, ~member)]
    for _ in range(200):
        at = torch.from_numpy(np.concatenate([rng.choice(g, len(g)) for g in groups]))
        drawn.append(measures(score[at], member[at], threshold))
    return {
        k: np.percentile([d[k] for d in drawn], [2.5, 97.5]).tolist() for k in drawn[0]
    }


# -- membership inference ----------------------------------------------------


class Game(NamedTuple):
    """N clients, each with `candidates` [N, 2 m] of which `member` [N, 2 m] are its m
    training samples."""

    candidates: Tensor
    member: Tensor

    @classmethod
    def draw(cls, candidates: Tensor, seed: int) -> Game:
        """Half of each client's candidates at random."""
        rng = np.random.RandomState(seed)
        n, both = candidates.shape
        rank = torch.from_numpy(np.stack([rng.permutation(both) for _ in range(n)]))
        return cls(candidates, rank < both // 2)


@single_threaded()
def shokri(
    shadow: Sequence[Tensor], target: Samples, classes: int, seed: int = 0
) -> Tensor:
    """Shokri et al. 2017: the probability [n] of being a member, from one attack model
    per class.

    `shadow`: scores [k, C], labels [k] and membership [k] of the shadow models'
    records; `target`: scores [n, C] and labels [n]. The attack models (C -> 64 ReLU ->
    1) see the logarithms of the sorted posterior and the loss. A class with fewer than
    20 records of either kind uses a model trained on all classes.
    """

    def features(z: Tensor, y: Tensor) -> Tensor:
        log_p = z.log_softmax(1).clamp(min=-20)
        return torch.cat(
            [log_p.sort(1, descending=True).values, log_p.gather(1, y[:, None])], 1
        )

    z, y, member = shadow
    f, g = features(z, y), features(*target)
    mean = f.mean(0)
    std = f.std(0).clamp(min=1e-6)
    f, g, out = (f - mean) / std, (g - mean) / std, torch.empty(len(target[1]))
    everybody = cache(lambda: _attack_model(f, member, seed))
    for c in range(classes):
        mine = y == c
        asked = target[1] == c
        inside = member[mine]
        few = 20
        known = few <= inside.sum() <= len(inside) - few
        attack = _attack_model(f[mine], inside, seed) if known else everybody()
        with torch.no_grad():
            out[asked] = attack(g[asked])[:, 0].sigmoid()
    return out


def _attack_model(f: Tensor, member: Tensor, seed: int) -> nn.Module:
    with IsolatedDraws(seed):
        model = nn.Sequential(
            nn.Linear(f.shape[1], 64), nn.ReLU(), nn.Linear(64, 1)
        ).to(f.dtype)

    descend(
        [*model.parameters()],
        lambda: F.binary_cross_entropy_with_logits(model(f)[:, 0], member.to(f.dtype)),
        lr=0.01,
        weight_decay=1e-4,
    )
    return model


def confidence(z: Tensor, y: Tensor) -> Tensor:
    """log(p_y / (1 - p_y)) of scores `z` [..., C]: what LiRA takes for normally
    distributed."""
    true = z.gather(-1, y[..., None])
    rest = z.scatter(-1, y[..., None], -torch.inf).logsumexp(-1)
    return true[..., 0] - rest


def lira(shadow: Tensor, inside: Tensor, target: Tensor) -> Tensor:
    """LiRA, online with common variances (Carlini et al. 2022, section V): log
    likelihood ratios [n], above 0 for members.

    `shadow` [L, n]: `confidence` of each candidate in each shadow model, `inside`
    [L, n] whether it was trained on; `target` [n]. A candidate that is in (or in no)
    shadow model alone takes the mean over all candidates for what is missing.
    """

    def normal(side: Tensor) -> tuple[Tensor, Tensor]:
        """The target's distance from the mean in deviations, and the deviation."""
        count = side.sum(0)
        those = shadow * side
        of_all = those.sum() / side.sum().clamp(min=1)
        mean = torch.where(count > 0, those.sum(0) / count.clamp(min=1), of_all)
        # each candidate's mean takes one
        free = (count - 1).clamp(min=0).sum().clamp(min=1)
        std = ((((shadow - mean) ** 2) * side).sum() / free).sqrt().clamp(min=1e-6)
        return (target - mean) / std, std

    fit_in, std_in = normal(inside)
    fit_out, std_out = normal(~inside)
    return (fit_out**2 - fit_in**2) / 2 + (std_out / std_in).log()


class Verdict(NamedTuple):
    """An attack on one view."""

    view: str
    attack: str
    value: dict[str, float]
    interval: dict[str, list[float]]
    train: float  # the view's accuracy on members
    test: float  # and on the others


class Attacked(NamedTuple):
    """What `membership` found, and on what."""

    verdicts: list[Verdict]
    upload: Upload  # of the federation that was attacked
    game: Game
    known: Samples  # the adversary's own


@dataclass(frozen=True)
class Played:
    """The federations of an attack."""

    clients: PositiveInt = 4
    samples: PositiveInt = 1000  # training samples of a client
    rounds: PositiveInt = 20
    shadows: NonNegativeInt = 3  # shadow federations on other data
    ratios: NonNegativeInt = 16  # federations for LiRA; 0: without
    views: tuple[View, ...] = VIEWS  # of a factorized upload
    seed: NonNegativeInt = 0
    workers: int | None = None


@single_threaded()
def membership(
    algorithm: Algorithm,
    model: Callable[[], nn.Module],
    pool: Samples,
    classes: int,
    training: Training,
    how: Played,
    say: Callable[[str], None] = lambda text: None,
) -> Attacked:
    """Plays a federation and attacks every client's upload of the last round, by shadow
    federations on other data of the same kind (Shokri) and by federations on random
    halves of the candidates (LiRA)."""
    check_fields(how)
    seed = how.seed
    samples = how.samples
    shadows = how.shadows
    ratios = how.ratios
    x, y = pool
    parts = 2 * how.clients * (1 + shadows) + 1
    most = len(y) // parts
    require(
        samples <= most, "samples", f"at most {most} of these data a client", samples
    )
    order = torch.from_numpy(np.random.RandomState(seed).permutation(len(y)))[
        : parts * samples
    ]
    known = x[order[:samples]], y[order[:samples]]
    blocks = order[samples:].view(1 + shadows, how.clients, 2 * samples)

    def played(game: Game, number: int) -> tuple[Upload, dict[str, Tensor]]:
        """The scores [n, C] of each view of the game's uploads, for all clients'
        candidates."""
        say(
            f"{type(algorithm).__name__}: federation {number + 1} of "
            f"{1 + shadows + ratios}"
        )
        sides = {"train": game.member, "test": ~game.member}
        own = seed + number
        index = {k: [*map(getitem, game.candidates, side)] for k, side in sides.items()}
        data = Federation(x, y, index, classes)
        upload = intercept(
            algorithm, model, data, training, how.rounds, own, how.workers
        )
        scores = {}
        for view, rows in views(algorithm, upload, known, own, how.views).items():
            each = zip(rows, game.candidates, strict=True)
            with torch.no_grad():
                parts = [
                    upload.net(r, x[at]) for r, mine in each for at in mine.split(250)
                ]
            scores[view] = torch.cat(parts)
        return upload, scores

    games = [Game.draw(block, seed + i) for i, block in enumerate(blocks)]
    games += [Game.draw(blocks[0], seed + 1000 + i) for i in range(ratios)]
    labels = torch.stack([y[g.candidates].flatten() for g in games])
    inside = torch.stack([g.member.flatten() for g in games])
    out = []
    upload, traces = played(games[0], 0)
    others = [played(game, i)[1] for i, game in enumerate(games[1:], 1)]
    shadow = slice(1, 1 + shadows)
    ratio = slice(1 + shadows, None)
    member = inside[0]
    for view, first in traces.items():
        z = torch.stack([first, *(scores[view] for scores in others)])  # [games, n, C]
        right = (first.argmax(1) == labels[0]).double()
        tries: dict[str, tuple[Tensor, float]] = {}
        if shadows:
            records = tuple(v[shadow].flatten(0, 1) for v in (z, labels, inside))
            tries["shadow models"] = (
                shokri(records, (first, labels[0]), classes, seed),
                0.5,
            )
        if ratios:
            phi = confidence(z, labels)
            tries["LiRA"] = lira(phi[ratio], inside[ratio], phi[0]), 0.0
        for attack, (score, threshold) in tries.items():
            value = (
                measures(score, member, threshold),
                intervals(score, member, threshold),
            )
            sides = (float(right[side].mean()) for side in (member, ~member))
            out.append(Verdict(view, attack, *value, *sides))
    return Attacked(out, upload, games[0], known)


# -- model inversion ---------------------------------------------------------


@single_threaded()
def invert(
    scores: Scores,
    start: Tensor,
    targets: Tensor,
    steps: int = 5000,
    lr: float = 0.1,
    low: float | Tensor = -torch.inf,
    high: float | Tensor = torch.inf,
) -> tuple[Tensor, Tensor]:
    """MI-FACE (Fredrikson et al. 2015, Algorithm 1): inputs [K, ...] that the model
    takes for `targets` [K], and its confidence [K].

    x <- process(x - lr grad c(x)), c = 1 - p_target, process clips to [low, high];
    until the model is confident, p >= .99, or c has not fallen for 100 steps. The best
    x of each target is kept. (The paper prints "c <= gamma" with gamma = .99, true from
    the start; p >= .99 is what it means.)
    """
    x = start.clone()
    at = torch.arange(len(targets))
    best = x.clone()
    least = torch.full((len(targets),), torch.inf, dtype=start.dtype)
    idle = torch.zeros_like(at)
    active = torch.ones_like(at, dtype=torch.bool)
    bounds = [torch.as_tensor(b).to(start) for b in (low, high)]
    for _ in range(steps + 1):
        x = x.detach().requires_grad_()
        cost = 1 - scores(x).softmax(1)[at, targets]
        (g,) = torch.autograd.grad(cost.sum(), x)
        cost = cost.detach()
        x = x.detach()
        better = active & (cost < least)
        best[better], least[better] = x[better], cost[better]
        idle = torch.where(better, 0, idle + 1)
        active &= (cost > 1 - 0.99) & (idle < 100)
        if not active.any():
            break
        x = (x - lr * g).clamp(*bounds)  # where it is over, too: nobody looks
    return best, 1 - least


def likeness(made: Tensor, real: Tensor, span: float) -> dict[str, float]:
    """Means over images [K, C, H, W] of "correlation", "mse" and "ssim" (Wang et al.
    2004, 7 x 7 windows); `span`: white less black."""
    a = made.flatten(1)
    b = real.flatten(1)
    apart = [v - v.mean(1, keepdim=True) for v in (a, b)]
    correlation = F.cosine_similarity(apart[0], apart[1])

    local = partial(F.avg_pool2d, kernel_size=7, stride=1)
    u = local(made)
    w = local(real)
    uu = local(made * made) - u * u
    ww = local(real * real) - w * w
    uw = local(made * real) - u * w
    c = (0.01 * span) ** 2
    d = (0.03 * span) ** 2
    ssim = (2 * u * w + c) * (2 * uw + d) / ((u * u + w * w + c) * (uu + ww + d))
    mse = ((a - b) ** 2).mean(1) / span**2
    each = {"correlation": correlation, "ssim": ssim.flatten(1).mean(1), "mse": mse}
    return {name: float(v.mean()) for name, v in each.items()}
