"""Attacks on uploads: membership inference and model inversion.

Membership inference tells whether a sample was among a client's training data, by
shadow models (Shokri et al. 2017) and by likelihood ratios (LiRA, Carlini et al. 2022).
Model inversion by MI-FACE (Fredrikson et al. 2015) makes images of a client's classes.

The adversary sees one round's messages of a federation. It knows the protocol, the
model, and data of the same kind, and never the client's state. A factorized upload
lacks the client's choice of factors, which the adversary guesses: see `views`.

Symbols: S clients with models of P parameters; n samples of C classes; F factors; x, y
are samples and labels, z scores.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from pflcore.algorithms._proximal import MRMTL
from pflcore.check import NonNegativeInt, PositiveInt, check_fields, require
from pflcore.simulation.round import RunConfig, initial_state, sample_cohort
from pflcore.train._random import IsolatedDraws
from pflcore.train._select_engine import make_context
from pflcore.train._workers import single_threaded

# -- the adversary's view ----------------------------------------------------


class Upload(NamedTuple):
    """One round's messages as models, and the clients' states for comparison.

    Attributes:
        net: the model's structure
        down: the model that each client received; None where it is not one model
        row: the model that each client sent
        own: the clients' states after the round, which never travel
    """

    net: Net
    down: Tensor | None  # [S, P]
    row: Tensor  # [S, P]
    own: Mapping[str, Tensor]  # [S, ...]


def intercept(
    algorithm: Algorithm,
    model: Callable[[], nn.Module],
    data: Federation,
    training: Training,
    rounds: int,
    seed: int = 0,
    workers: int | None = None,
) -> Upload:
    """The messages of the last of `rounds` rounds with every client.

    Raises ValueError where the uploads show no client's model, and where an update is
    not finite.
    """
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
    config = RunConfig.of(tapped, setting)
    state = initial_state(tapped, net, data.n)
    for r in range(1, rounds + 1):
        state, done = step(config, state, sample_cohort(config, r))
        if done.dropped:
            raise ValueError(
                f"training: client(s) {done.dropped} sent updates that are not finite "
                f"in round {r}; lower the learning rate."
            )
    down = _models_of(caught["down"], net)
    up = _models_of(caught["up"], net)
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


def _models_of(message: Mapping[str, Any], net: Net) -> dict[str, Tensor]:
    """The tensors of a message that hold one model per client."""
    models = {}
    for name, value in message.items():
        if getattr(value, "shape", ())[1:] == (net.size,):
            models[name] = value
    return models


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
    """The models [S, P] that the adversary makes, by name.

    They differ in the factor scores b that the adversary fills in:

    - "all": b = 1
    - "prior": the prior's mean
    - "random": drawn from the prior
    - "adaptive": fitted to `known`, the adversary's own samples of the same task; the
      dictionary stays as it is
    - "trace": computed from how far each factor moved since the download, since factors
      that a client does not use do not move
    - "own": the client's beliefs, which never travel; they show what anonymity hides

    With other algorithms the upload is the model: {"upload": rows}.
    """
    if not isinstance(algorithm, FactorizedWaffle):
        return {"upload": upload.row}
    net = upload.net
    row = upload.row
    at = strength_columns(net)
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
    models = {}
    for name in names:
        scores = ways[name]()
        models[name] = row.index_copy(1, at, row[:, at] * scores)
    return models


def descend(
    parameters: Sequence[Tensor], loss: Callable[[], Tensor], **options: float
) -> None:
    """Minimizes a loss by 200 steps of Adam, in place."""
    optimizer = torch.optim.Adam(parameters, **options)  # type: ignore[arg-type]
    for _ in range(200):
        optimizer.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def fit_scores(net: Net, row: Tensor, at: Tensor, known: Samples) -> Tensor:
    """The best scores b [F] in (0, 1) for a dictionary.

    Adam fits them.

    Args:
        row: the dictionary [P]
        at: the columns of the factors' strengths [F]
        known: the samples
    """
    logit = torch.zeros(len(at), dtype=row.dtype, requires_grad=True)

    def loss() -> Tensor:
        scored = row.index_copy(0, at, row[at] * logit.sigmoid())
        return net.loss(scored, *known)

    descend([logit], loss, lr=0.1)
    return logit.detach().sigmoid()


def trace(net: Net, upload: Upload) -> Tensor:
    """The scores b [S, F] that the clients' updates betray.

    A factor's score is how far its two vectors moved, relative to the median of the
    upper half of all factors of its layer, and at most 1.
    """
    if upload.down is None:
        raise ValueError(
            "views: 'trace' needs the download, which is not one model; leave it out."
        )
    moved = upload.row - upload.down

    def moved_part(name: str) -> Tensor:
        shape = net.shapes[net.names.index(name)]
        part: Tensor = moved[:, net.slices[name]].unflatten(1, shape)
        return part

    scores = []
    for strength in net.names:
        if not strength.endswith("strength"):
            continue
        layer = strength.removesuffix("strength")
        w_a = moved_part(f"{layer}w_a")
        w_b = moved_part(f"{layer}w_b")
        size = (w_a.norm(dim=1) * w_b.norm(dim=2)).sqrt()
        upper = size.topk((size.shape[1] + 1) // 2, 1).values
        usual = upper.median(1, keepdim=True).values
        scores.append((size / usual.clamp(min=1e-30)).clamp(max=1))
    return torch.cat(scores, 1)


# -- the success of an attack ------------------------------------------------


def measures(score: Tensor, member: Tensor, threshold: float = 0.5) -> dict[str, float]:
    """Measures of an attack by name: "accuracy", "f1", "auc" and "tpr".

    Accuracy and F1 are those of the decision score > threshold. "tpr" is the rate of
    true positives where at most 1 % of the others are false ones.

    Args:
        score: the attack's scores [n], higher for members
        member: bool [n]
    """
    guess = score > threshold
    score = score.double()
    hits = int((guess & member).sum())
    positives = int(guess.sum() + member.sum())
    out = score[~member].sort().values
    inside = score[member]
    # The mean of both ranks counts ties half.
    below = torch.searchsorted(out, inside, right=False).double()
    at_most = torch.searchsorted(out, inside, right=True).double()
    limit = out[-1 - int(0.01 * len(out))]
    return {
        "accuracy": float((guess == member).double().mean()),
        "f1": 2 * hits / max(1, positives),
        "auc": float(torch.stack([below, at_most]).mean()) / len(out),
        "tpr": float((inside > limit).double().mean()),
    }


def intervals(
    score: Tensor, member: Tensor, threshold: float = 0.5
) -> dict[str, list[float]]:
    """95 % intervals of `measures`, by resampling 200 times.

    Members are drawn among members, and others among others.
    """
    rng = np.random.RandomState(0)
    drawn = []
    groups = [side.nonzero()[:, 0].numpy() for side in (member, ~member)]
    for _ in range(200):
        sample = np.concatenate([rng.choice(g, len(g)) for g in groups])
        at = torch.from_numpy(sample)
        drawn.append(measures(score[at], member[at], threshold))
    found = {}
    for name in drawn[0]:
        values = [measured[name] for measured in drawn]
        found[name] = np.percentile(values, [2.5, 97.5]).tolist()
    return found


# -- membership inference ----------------------------------------------------


class Game(NamedTuple):
    """Candidates of N clients, half of which are training samples.

    Attributes:
        candidates: the numbers of samples
        member: True for the client's training samples
    """

    candidates: Tensor  # [N, 2 m]
    member: Tensor  # bool [N, 2 m]

    @classmethod
    def draw(cls, candidates: Tensor, seed: int) -> Game:
        """The game whose members are a random half of each client's candidates."""
        rng = np.random.RandomState(seed)
        n, both = candidates.shape
        ranks = [rng.permutation(both) for _ in range(n)]
        rank = torch.from_numpy(np.stack(ranks))
        return cls(candidates, rank < both // 2)


MIN_RECORDS = 20  # of either kind, for an attack model of one class


@single_threaded()
def shokri(
    shadow: Sequence[Tensor], target: Samples, classes: int, seed: int = 0
) -> Tensor:
    """Probabilities [n] of membership, by shadow models (Shokri et al. 2017).

    There is an attack model for each class, C -> 64 ReLU -> 1. It sees the logarithms
    of the sorted posterior, and the loss. A class with fewer than 20 records of either
    kind uses a model that is trained on all classes.

    Args:
        shadow: scores [k, C], labels [k] and membership [k] of the shadow models'
            records
        target: scores [n, C] and labels [n] of the records that are attacked
    """
    z, y, member = shadow
    _, target_y = target
    f = _attack_features(z, y)
    g = _attack_features(*target)
    mean = f.mean(0)
    std = f.std(0).clamp(min=1e-6)
    f = (f - mean) / std
    g = (g - mean) / std

    @cache
    def attack_on_all() -> nn.Module:
        return _attack_model(f, member, seed)

    out = torch.empty(len(target_y))
    for c in range(classes):
        of_class = y == c
        asked = target_y == c
        inside = member[of_class]
        most = len(inside) - MIN_RECORDS
        if MIN_RECORDS <= inside.sum() <= most:
            attack = _attack_model(f[of_class], inside, seed)
        else:
            attack = attack_on_all()
        with torch.no_grad():
            out[asked] = attack(g[asked])[:, 0].sigmoid()
    return out


def _attack_features(z: Tensor, y: Tensor) -> Tensor:
    """Features [n, C + 1] of records, for an attack model.

    A record has scores [n, C] and labels [n].
    """
    log_p = z.log_softmax(1).clamp(min=-20)
    posterior = log_p.sort(1, descending=True).values
    return torch.cat([posterior, log_p.gather(1, y[:, None])], 1)


def _attack_model(f: Tensor, member: Tensor, seed: int) -> nn.Module:
    """A model that tells members by their features [n, C + 1]."""
    with IsolatedDraws(seed):
        model = nn.Sequential(nn.Linear(f.shape[1], 64), nn.ReLU(), nn.Linear(64, 1))
        model = model.to(f.dtype)
    wanted = member.to(f.dtype)

    def loss() -> Tensor:
        return F.binary_cross_entropy_with_logits(model(f)[:, 0], wanted)

    descend([*model.parameters()], loss, lr=0.01, weight_decay=1e-4)
    return model


def confidence(z: Tensor, y: Tensor) -> Tensor:
    """log(p_y / (1 - p_y)) of scores `z` [..., C].

    LiRA takes it for normally distributed.
    """
    true = z.gather(-1, y[..., None])
    rest = z.scatter(-1, y[..., None], -torch.inf).logsumexp(-1)
    return true[..., 0] - rest


def lira(shadow: Tensor, inside: Tensor, target: Tensor) -> Tensor:
    """LiRA's log likelihood ratios [n], above 0 for members.

    It is the online attack with common variances (Carlini et al. 2022, section V). Of a
    candidate that no shadow model was trained on, or all of them, one mean is missing;
    the mean over all candidates takes its place.

    Args:
        shadow: `confidence` of each candidate in each of L shadow models [L, n]
        inside: True where the shadow model was trained on the candidate [L, n]
        target: `confidence` of each candidate in the attacked model [n]
    """

    def normal(side: Tensor) -> tuple[Tensor, Tensor]:
        """The target's distance from the mean in deviations, and the deviation."""
        count = side.sum(0)
        of_side = shadow * side
        of_all = of_side.sum() / side.sum().clamp(min=1)
        mean = torch.where(count > 0, of_side.sum(0) / count.clamp(min=1), of_all)
        # Each candidate's mean takes one degree of freedom.
        free = (count - 1).clamp(min=0).sum().clamp(min=1)
        squares = ((shadow - mean) ** 2) * side
        std = (squares.sum() / free).sqrt().clamp(min=1e-6)
        return (target - mean) / std, std

    fit_in, std_in = normal(inside)
    fit_out, std_out = normal(~inside)
    return (fit_out**2 - fit_in**2) / 2 + (std_out / std_in).log()


class Verdict(NamedTuple):
    """The result of an attack on one view.

    Attributes:
        view: the view's name
        attack: "shadow models" or "LiRA"
        value: the attack's `measures`
        interval: their `intervals`
        train: the view's accuracy on members
        test: the view's accuracy on the others
    """

    view: str
    attack: str
    value: dict[str, float]
    interval: dict[str, list[float]]
    train: float
    test: float


class Attacked(NamedTuple):
    """The results of `membership`, and the federation that was attacked.

    Attributes:
        verdicts: the attacks' results
        upload: the federation's upload
        game: its candidates and members
        known: the adversary's own samples
    """

    verdicts: list[Verdict]
    upload: Upload
    game: Game
    known: Samples


@dataclass(frozen=True)
class Played:
    """The federations of an attack.

    Args:
        clients: clients of a federation
        samples: training samples of a client
        rounds: rounds of a federation
        shadows: shadow federations on other data
        ratios: federations for LiRA; 0: without
        views: views of a factorized upload
        seed: seed of the first federation
        workers: threads; never changes a result
    """

    clients: PositiveInt = 4
    samples: PositiveInt = 1000
    rounds: PositiveInt = 20
    shadows: NonNegativeInt = 3
    ratios: NonNegativeInt = 16
    views: tuple[View, ...] = VIEWS
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
    """Plays a federation and attacks every client's upload of the last round.

    The shadow models are federations on other data of the same kind (Shokri). Those of
    LiRA are federations on random halves of the candidates.

    Args:
        pool: all samples, of which clients and adversary get disjoint parts
        say: is called with a sentence before each federation
    """
    check_fields(how)
    known, blocks = _split_pool(pool, how)
    count = 1 + how.shadows + how.ratios

    def played(game: Game, number: int) -> tuple[Upload, dict[str, Tensor]]:
        say(f"{type(algorithm).__name__}: federation {number + 1} of {count}")
        own_seed = how.seed + number
        index = {
            "train": [*map(getitem, game.candidates, game.member)],
            "test": [*map(getitem, game.candidates, ~game.member)],
        }
        data = Federation(*pool, index, classes)
        upload = intercept(
            algorithm, model, data, training, how.rounds, own_seed, how.workers
        )
        models = views(algorithm, upload, known, own_seed, how.views)
        scores = {}
        for view, rows in models.items():
            scores[view] = _candidate_scores(upload.net, rows, game, pool[0])
        return upload, scores

    games = [Game.draw(block, how.seed + i) for i, block in enumerate(blocks)]
    for i in range(how.ratios):
        games.append(Game.draw(blocks[0], how.seed + 1000 + i))
    upload, first = played(games[0], 0)
    scores = [first]
    for i, game in enumerate(games[1:], 1):
        scores.append(played(game, i)[1])
    labels = torch.stack([pool[1][game.candidates].flatten() for game in games])
    inside = torch.stack([game.member.flatten() for game in games])
    verdicts: list[Verdict] = []
    for view in first:
        z = torch.stack([of_game[view] for of_game in scores])  # [games, n, C]
        verdicts += _verdicts(view, z, labels, inside, classes, how)
    return Attacked(verdicts, upload, games[0], known)


def _split_pool(pool: Samples, how: Played) -> tuple[Samples, Tensor]:
    """The adversary's samples, and the candidates of each client of each federation.

    The candidates are [1 + shadows, N, 2 m]. Raises ValueError where the pool is too
    small.
    """
    x, y = pool
    samples = how.samples
    parts = 2 * how.clients * (1 + how.shadows) + 1
    most = len(y) // parts
    expected = f"at most {most} of these data a client"
    require(samples <= most, "samples", expected, samples)
    permutation = np.random.RandomState(how.seed).permutation(len(y))
    order = torch.from_numpy(permutation)[: parts * samples]
    known = x[order[:samples]], y[order[:samples]]
    blocks = order[samples:].view(1 + how.shadows, how.clients, 2 * samples)
    return known, blocks


def _candidate_scores(net: Net, rows: Tensor, game: Game, x: Tensor) -> Tensor:
    """The scores [n, C] of all candidates by their clients' models."""
    scores = []
    with torch.no_grad():
        for row, candidates in zip(rows, game.candidates, strict=True):
            for part in candidates.split(250):
                scores.append(net(row, x[part]))
    return torch.cat(scores)


def _verdicts(
    view: str,
    z: Tensor,  # [games, n, C]
    labels: Tensor,  # [games, n]
    inside: Tensor,  # bool [games, n]
    classes: int,
    how: Played,
) -> Iterator[Verdict]:
    """The results of both attacks on one view.

    The first game is the one that is attacked; the shadow federations follow, then
    those of LiRA.
    """
    shadow = slice(1, 1 + how.shadows)
    ratio = slice(1 + how.shadows, None)
    tries: dict[str, tuple[Tensor, float]] = {}  # scores and threshold, by attack
    if how.shadows:
        records = [v[shadow].flatten(0, 1) for v in (z, labels, inside)]
        score = shokri(records, (z[0], labels[0]), classes, how.seed)
        tries["shadow models"] = score, 0.5
    if how.ratios:
        phi = confidence(z, labels)
        tries["LiRA"] = lira(phi[ratio], inside[ratio], phi[0]), 0.0
    member = inside[0]
    right = (z[0].argmax(1) == labels[0]).double()
    for attack, (score, threshold) in tries.items():
        yield Verdict(
            view,
            attack,
            measures(score, member, threshold),
            intervals(score, member, threshold),
            train=float(right[member].mean()),
            test=float(right[~member].mean()),
        )


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
    """Inputs [K, ...] that the model takes for `targets`, and confidences [K].

    It is MI-FACE (Fredrikson et al. 2015, Algorithm 1): `x <- process(x - lr grad
    c(x))` with c = 1 - p_target, where process clips to [low, high]. It ends when the
    model is confident, p >= .99, or when c has not fallen for 100 steps. The best x of
    each target is kept.

    The paper prints "c <= gamma" with gamma = .99, which is true from the start; p >=
    .99 is meant.
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
        best[better] = x[better]
        least[better] = cost[better]
        idle = torch.where(better, 0, idle + 1)
        active &= (cost > 1 - 0.99) & (idle < 100)
        if not active.any():
            break
        # Inputs that are done move, too, but their best ones are kept.
        x = (x - lr * g).clamp(*bounds)
    return best, 1 - least


def likeness(made: Tensor, real: Tensor, span: float) -> dict[str, float]:
    """Likeness of images [K, C, H, W] by "correlation", "mse" and "ssim".

    They are means over the images.

    SSIM is that of Wang et al. 2004, with windows of 7 x 7.

    Args:
        span: the value of white less that of black
    """
    a = made.flatten(1)
    b = real.flatten(1)
    centred_a = a - a.mean(1, keepdim=True)
    centred_b = b - b.mean(1, keepdim=True)
    correlation = F.cosine_similarity(centred_a, centred_b)

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
