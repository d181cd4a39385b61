# ruff: noqa: E501  (one fault a line)
"""One small fault at a time, and the tests that must notice it: `python tests/mutants.py [--only WORD] [--sample N] [--workers N]`.

Not collected by pytest. Each fault is made in a copy of the tree, and the test files named beside it run there, with -x. It is *killed* where one
of them fails, *survived* where none does. A survivor is a law that no test knows: write the test, or say in CONTRIBUTING.md why there is none
to write. That each old text stands exactly once in its file is a test of its own (tests/package/test_trust.py): no entry goes stale unseen.
"""

from __future__ import annotations

import argparse
import compileall
import json
import multiprocessing
import os
import py_compile
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path
from queue import Queue
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PRELOAD = ["torch", "torch.func", "torch.utils.flop_counter", "numpy", "pytest", "hypothesis", "hypothesis.strategies"]
LIMIT = 300  # seconds that the tests of one fault may take: longer is no verdict


class Mutant(NamedTuple):
    """`old` becomes `new` in `file`; `tests`, below tests/, must notice; `references`: with the kernels left unloaded."""

    file: str
    old: str
    new: str
    tests: str
    references: bool = False


# Each of these once went unnoticed: found by people who broke the code by hand.
KNOWN = [
    Mutant("csrc/cpu/sqdist.h", "for (int64_t k = 0; k < split; ++k) value += sums[", "for (int64_t k = 0; k < std::max<int64_t>(1, split - 1); ++k) value += sums[", "ops/test_cpu_kernels.py -k tiny_distances"),
    Mutant("csrc/cpu/sqdist.h", "constexpr double kTiny = 1e-30;", "constexpr double kTiny = 1e-36;", "ops/test_cpu_kernels.py -k float32_holds_badly"),
    Mutant("csrc/cpu/aggregate.h", "  for (; c + line <= width; c += line)\n    PFL_UNROLL\n    for (int64_t i = 0; i < line; i += lanes) {\n      Vec<A, bytes> s;", "  for (; c < width; c += line)\n    PFL_UNROLL\n    for (int64_t i = 0; i < line; i += lanes) {\n      Vec<A, bytes> s;", "ops/test_cpu_kernels.py -k large_results"),
    Mutant("csrc/cpu/sgd.h", "whole(a.anchor, a.anchor_row) && whole(a.buffer, a.buffer_row)", "whole(a.anchor, a.anchor_row)", "ops/test_cpu_kernels.py -k row_stride"),
    Mutant("csrc/cpu/small_gemm.h", "v = s != 0 ? v * s : Vec<T, bytes>{};", "v = v * s;", "ops/test_cpu_kernels.py -k turned_on"),
    Mutant("csrc/cpu/weights.h", "if (k <= 32) {", "if (k <= 33) {", "sanitize/test_sanitize.py -k 'clean and address'"),
    Mutant("csrc/cpu/weights.h", "gap <= 1e-12 * high;", "gap <= 1e-10 * high;", "ops/test_cpu_kernels.py -k waffle"),
    Mutant("csrc/cpu/chain_layers.h", "g = margin <= 0 ? V{} : -sign * share;", "g = margin < 0 ? V{} : -sign * share;", "ops/test_chain.py -k very_edge"),
    Mutant("pflcore/algorithms/scaffold.py", "factor = factor.to(new[\"c\"])", "factor = torch.ones_like(factor).to(new[\"c\"])", "algorithms/test_fine_points.py -k clipped_round"),
    Mutant("pflcore/simulation/personal.py", "self.setting, torch.arange(n), self.buffers)", "self.setting, torch.arange(n))", "algorithms/test_fine_points.py -k models_have_the_statistics"),
    Mutant("pflcore/simulation/everyone.py", "0.0 if report else math.nan", "0.0", "simulation/test_for_everyone.py -k whoever_took_part"),
    Mutant("pflcore/simulation/loop.py", "said = {} if done.void else self", "said = self", "algorithms/test_fine_points.py -k void_round"),
    Mutant("pflcore/simulation/kept.py", "(run._earlier + run.history.rounds if", "(run.history.rounds if", "simulation/test_checkpoint.py -k went_on_by_itself"),
    Mutant("pflcore/local/losses.py", "if scores.numel() == y.numel():", "if False:", "simulation/test_scores.py -k one_score_a_step"),
    Mutant("pflcore/local/losses.py", "scores, counts = by_place(scores, y), y != IGNORED", "counts = y != IGNORED", "simulation/test_scores.py -k metrics_of_steps"),
    Mutant("pflcore/local/preflight.py", "elif spreads(net.criterion) and", "elif False and", "simulation/test_scores.py -k spreads_columns"),
    Mutant("pflcore/local/preflight.py", "if data.fields is not None and low == IGNORED and", "if False and", "simulation/test_scores.py -k mask_leaves"),
    Mutant("pflcore/simulation/personal.py", "alone, labels = self.net.criterion in ONE_BY_ONE,", "alone, labels = False,", "simulation/test_scores.py -k targets_were"),
    Mutant("pflcore/simulation/kept.py", '({"eval_clients": run._asked} if run._drawn else {})', "{}", "simulation/test_checkpoint.py -k evaluated_clients"),
    Mutant("pflcore/simulation/kept.py", "rounds = run._past or (", "rounds = (", "simulation/test_checkpoint.py -k each_round_once"),
    Mutant("pflcore/simulation/loop.py", "with unbroken():", "with contextlib.nullcontext():", "simulation/test_interrupts.py -k every_callback"),
    Mutant("pflcore/simulation/loop.py", "broken = error", "raise", "simulation/test_interrupts.py -k broke_off"),
    Mutant("pflcore/simulation/loop.py", "(self._state.void or broke_off)", "self._state.void", "simulation/test_interrupts.py -k without_its_evaluation"),
    Mutant("pflcore/simulation/interrupts.py", "if len(came) > 1:", "if False:", "simulation/test_interrupts.py -k second"),
    Mutant("pflcore/simulation/round.py", "max(m + extra,", "max(m,", "simulation/test_attacks.py -k joins_beside"),
    Mutant("pflcore/simulation/everyone.py", '"moved": [ratio.get(i) for i in cohort] if ratio else None,', "", "simulation/test_for_everyone.py -k ran_away"),
    Mutant("pflcore/reproduce/runs.py", "[replace(p, data=held_out(p.data, t.job.options.seed))", "[Protocol(held_out(p.data, t.job.options.seed), *[torch.arange(p.data.n)] * 3, '')", "reproduce/test_reproduce.py -k searched_on_it"),
    Mutant("pflcore/results/record.py", "(same or k in shared)", "same", "results/test_results.py -k other_data"),
    Mutant("pflcore/ops/_library.py", "any(i.key() == of.TransformType.Grad for", "any(False for", "ops/test_autograd.py -k is_autograds"),
    Mutant("pflcore/metrics.py", "(scores.shape[:1] == y.shape[:1] or scores.shape[:-1] == y.shape)", "True", "test_metrics.py -k other_samples"),
    Mutant("pflcore/results/record.py", "line[\"round\"] <= before[\"round\"] or any(", "any(", "results/test_results.py -k header_is_lost"),
    Mutant("pflcore/results/record.py", "if \"round\" in line and out[-1].rounds:\n            before", "if \"round\" in line and out[-1].rounds and False:\n            before", "results/test_results.py -k header_is_lost"),
    Mutant("pflcore/local/group.py", "own = passes // self.batches if self.own_steps is None else -(-self.own_steps // cuts)", "own = passes // self.batches", "algorithms/test_fine_points.py -k on_the_company"),
    Mutant("pflcore/ops/stream.py", "(lr * weight[some].double()) != 0", "(lr * weight[some]) != 0", "ops/test_stream.py -k small_in_its_own"),
    Mutant("pflcore/algorithms/fedala.py", "torch.where(count > 1, count - 1, lists", "torch.where(count > 1, count, lists", "algorithms/test_fedala.py -k batch_of_one"),
    Mutant("pflcore/algorithms/knnper.py", ".logit(eps=1e-12)", "", "algorithms/test_fine_points.py -k binary_labels"),
    Mutant("pflcore/algorithms/clustered_fl.py", "cohort)[\"cluster\"]}  # a level", "cohort)[\"cluster\"] * 0}  # a level", "algorithms/test_fine_points.py -k newcomer_finds"),
    Mutant("csrc/cuda/rank1.cuh", "    __syncthreads();\n    sums[threadIdx.y][threadIdx.x] = sum;", "    sums[threadIdx.y][threadIdx.x] = sum;", "cuda_on_cpu/test_kernels.py -k rank1"),
    Mutant("pflcore/algorithms/scaffold.py", "local.grad(x) + t.gradient_decay * x", "local.grad(x)", "algorithms/test_fine_points.py"),
    Mutant("pflcore/algorithms/waffle.py", 'look = up["control"] if self.control_agg == "recompute" else up["grad"]', 'look = up["control"]', "algorithms/test_fine_points.py"),
    Mutant("pflcore/algorithms/feddwa.py", 'stream="ahead", ', "", "algorithms/test_fine_points.py"),
    Mutant("pflcore/algorithms/fedamp.py", "& gives[:, None]\n        share", "\n        share", "algorithms/test_fine_points.py"),
    Mutant("pflcore/algorithms/fedfomo.py", "self.decay * (cohort.round - 1)", "self.decay * cohort.round", "algorithms/test_fine_points.py"),
    Mutant("pflcore/algorithms/fedfomo.py", '(g["p"], g["p"][cohort.ids] + a)', '(g["p"], a)', "algorithms/test_fine_points.py"),
    Mutant("pflcore/algorithms/per_fedavg.py", "v = grad(w - alpha * grad(w), 1)", "v = grad(w - alpha * grad(w), 0)", "algorithms/test_fine_points.py"),
    Mutant("pflcore/algorithms/clustered_fl.py", 'weighting: str = "uniform"', 'weighting: str = "samples"', "algorithms/test_fine_points.py"),
    Mutant("pflcore/algorithms/apfl.py", 'weighting: str = "uniform"', 'weighting: str = "samples"', "algorithms/test_apfl.py algorithms/test_waffle.py"),
    Mutant("pflcore/algorithms/hypcluster.py", 'stream=f"fit {j}" if j else "fit"', 'stream="fit"', "algorithms/test_fine_points.py"),
    Mutant("pflcore/algorithms/mocha.py", 'up["lr_sum"].double().mean() * self.lam', 'up["lr"].double().mean() * self.lam', "algorithms/test_fine_points.py"),
    Mutant("pflcore/algorithms/finetune.py", "better = (now > best)", "better = (now >= best)", "algorithms/test_motley_algorithms.py -k 'selection or candidate'"),
    Mutant("pflcore/reproduce/runs.py", "0, p.report, picks(simulation.state, simulation.setting, p.report).cpu()", "0, p.train, picks(simulation.state, simulation.setting, p.train).cpu()", "reproduce/test_motley.py -k cross_device_plan"),
    Mutant("pflcore/reproduce/table.py", '"final_std": metrics.std([f for _, f in best])', '"final_std": metrics.std([e["std"] for e in each])', "reproduce/test_motley.py -k 'must_hold or same_run'"),
    Mutant("pflcore/reproduce/table.py", "before[i].last(measure)", "before[0].last(measure)", "reproduce/test_motley.py -k same_run"),
    Mutant("pflcore/reproduce/table.py", "(0.98 if higher_is_better else 1.02)", "(1.02 if higher_is_better else 0.98)", "reproduce/test_motley.py -k near_enough"),
    Mutant("pflcore/tuning.py", "self.blind = [p.blind for p in protocols]", "self.blind = [p.data for p in protocols]", "test_tuning.py -k 'poisoned or no_test_split'"),
    Mutant("pflcore/reproduce/study.py", '(protocol.blind, protocol.choose) if split == "val" else (protocol.data, protocol.report)', '(protocol.data, protocol.report)\n    split = "test"', "reproduce/test_motley.py -k results_on_validation"),
    Mutant("pflcore/results/table.py", 'of_seed.get(r.header.get("seed"))', "base[0]", "results/test_results.py -k 'hurt or worse'"),
    Mutant("pflcore/reproduce/plan.py", 'k != "workers"}', 'k not in ("workers", "participation")}', "reproduce/test_motley.py -k digest"),
    Mutant("pflcore/local/net.py", "pieces[i] = owner[name].detach().reshape(-1)", "pieces[i] = pieces[i]", "local/test_path.py -k forward_made"),
    Mutant("pflcore/local/path.py", "if gap is None and make is by_module:", "if False:", "local/test_path.py -k leaves_to_the_next"),
    Mutant("pflcore/simulation/round.py", "nan_to_num(math.inf, math.inf)", "nan_to_num(nan=math.inf)", "simulation/test_hostile.py -k large_number"),
    Mutant("pflcore/interop/client.py", "if about.factor < 1:", "if False:", "interop/test_server.py -k long_update"),
    Mutant("pflcore/ops/stream.py", "if shapes != self._shapes or", "if len(row) != self.shape[1] or", "ops/test_stream.py -k other_shapes"),
    Mutant("pflcore/tuning.py", ", repr(net.module)]", "]", "test_tuning.py -k not_used_again"),
    Mutant("pflcore/nn/factorized.py", "module.named_modules(remove_duplicate=False) if other is m", "module.named_modules() if other is m", "nn/test_factorized.py -k called_twice"),
    Mutant("pflcore/metrics.py", "won = scores.argmax(1).masked_fill(scores.isnan().any(1), -1)", "won = scores.argmax(1)", "test_metrics.py -k wins_no_class"),
]  # fmt: skip

# A sample of everything else.
SAMPLED = [
    # the methods
    Mutant("pflcore/algorithms/base.py", 'share / share.sum(), size, n', 'share / n, size, n', "algorithms/test_fine_points.py"),
    Mutant("pflcore/algorithms/base.py", "    except BaseException:\n        old.write()", "    except BaseException:\n        new.write()", "simulation/test_memory.py"),
    Mutant("pflcore/algorithms/waffle.py", "if 20 * cohort.round >= 19 * cohort.rounds:", "if 20 * cohort.round > 19 * cohort.rounds:", "algorithms/test_waffle.py"),
    Mutant("pflcore/algorithms/waffle.py", "mine = mine * (len(mine) / cohort.n)", "mine = mine * 1.0", "algorithms/test_waffle.py simulation/test_edges.py"),
    Mutant("pflcore/algorithms/waffle.py", "(round + self.r0) / (rounds / 2)", "(round - self.r0) / (rounds / 2)", "algorithms/test_waffle.py"),
    Mutant("pflcore/algorithms/weight_erosion.py", "seen // (n if self.size_unit", "(seen + t.batch_size) // (n if self.size_unit", "algorithms/test_weight_erosion.py"),
    Mutant("pflcore/algorithms/scaffold.py", "lr=len(cohort.ids) / cohort.n", "lr=1.0", "algorithms/test_scaffold.py algorithms/test_waffle.py"),
    Mutant("pflcore/algorithms/scaffold.py", "- m * (1 - m**steps) / (1 - m) ** 2", "- m * (1 - m**steps) / (1 - m)", "algorithms/test_scaffold.py"),
    Mutant("pflcore/algorithms/apfl.py", "self.adaptive and k == 0  #", "self.adaptive  #", "algorithms/test_apfl.py algorithms/test_waffle.py"),
    Mutant("pflcore/algorithms/apfl.py", "context.buffers = before  #", "before = None  #", "algorithms/test_apfl.py"),
    Mutant("pflcore/algorithms/feddwa.py", "d = torch.where((d == d.diagonal()[:, None]) & ~own,", "d = torch.where((d == d.diagonal()[:, None]) & own,", "algorithms/test_feddwa.py"),
    Mutant("pflcore/algorithms/feddwa.py", 'x[~seen[cohort.ids]] = g["x"][seen].mean(0)', 'x[~seen[cohort.ids]] = g["x"].mean(0)', "algorithms/test_feddwa.py"),
    Mutant("pflcore/algorithms/feddwa.py", "near[:, : index.shape[1]] = weight.to(p), ids[index.cpu()]", "near[:, : index.shape[1]] = weight.to(p), index.cpu()", "algorithms/test_feddwa.py simulation/test_edges.py"),
    Mutant("pflcore/algorithms/feddwa.py", "self.theta * inner + (1 - self.theta)", "inner + (1 - self.theta)", "algorithms/test_feddwa.py"),
    Mutant("pflcore/algorithms/feddwa.py", ".scatter_add_(1, near, p)", ".scatter_(1, near, p)", "algorithms/test_fine_points.py"),
    Mutant("pflcore/algorithms/clustered_fl.py", "cohort.share * ~lost", "cohort.share", "algorithms/test_rivals_server.py simulation/test_edges.py"),
    Mutant("pflcore/algorithms/clustered_fl.py", "torch.minimum(link[a], link[b]) if", "torch.maximum(link[a], link[b]) if", "algorithms/test_rivals_server.py"),
    Mutant("pflcore/algorithms/fedamp.py", "prox=(self.lam / self.alpha,", "prox=(self.lam,", "algorithms/test_fine_points.py"),
    Mutant("pflcore/algorithms/fedamp.py", "(self.alpha / self.sigma) * (-sqdist / self.sigma).exp()", "(self.alpha / self.sigma) * (-sqdist).exp()", "algorithms/test_rivals_server.py"),
    Mutant("pflcore/algorithms/fedfomo.py", "own[\"old\"] if self.none_positive == \"discard\"", "own[\"old\"] if self.none_positive != \"discard\"", "algorithms/test_rivals_client.py -k fedfomo"),
    Mutant("pflcore/algorithms/fedfomo.py", "a[:, :-1] *= given", "a[:, :-1] *= 1", "algorithms/test_fine_points.py"),
    Mutant("pflcore/algorithms/sfl.py", "(self.lam1 * down[\"u\"] + self.lam2 * down[\"x\"])", "(self.lam2 * down[\"u\"] + self.lam1 * down[\"x\"])", "algorithms/test_rivals_server.py"),
    Mutant("pflcore/algorithms/sfl.py", "return graph + torch.diag((graph.diagonal() == 0).double())", "return graph", "algorithms/test_rivals_server.py"),
    Mutant("pflcore/algorithms/sfl.py", "torch.linalg.matrix_power(a, layers)", "torch.linalg.matrix_power(a, layers + 1)", "algorithms/test_rivals_server.py"),
    Mutant("pflcore/algorithms/sfl.py", "order = far.sort(dim=1, stable=True).indices[:, : k + 1]", "order = far.sort(dim=1, stable=True).indices[:, :k]", "algorithms/test_rivals_server.py"),
    Mutant("pflcore/algorithms/_latest.py", '.index_copy_(1, ids, rows.T)', "", "algorithms/test_rivals_server.py"),
    Mutant("pflcore/algorithms/l2c.py", "slope - (w * slope).sum(1, keepdim=True)", "slope", "algorithms/test_rivals_client.py -k l2c"),
    Mutant("pflcore/algorithms/ditto.py", 'prox=(self.lam, x), lr', "prox=(self.lam, own[\"v\"]), lr", "algorithms/test_motley_algorithms.py"),
    Mutant("pflcore/algorithms/fedopt.py", "torch.sign(v - d**2)", "torch.sign(d**2 - v)", "algorithms/test_motley_algorithms.py"),
    Mutant("pflcore/algorithms/fedopt.py", "self.tau**2 if self.v0 is None", "self.tau if self.v0 is None", "algorithms/test_motley_algorithms.py"),
    Mutant("pflcore/algorithms/fedrod.py", "net.head(w[net.size :], z.detach())", "net.head(w[net.size :], z)", "algorithms/test_rivals_client.py -k fedrod"),
    Mutant("pflcore/algorithms/fedrod.py", "(n**self.gamma).log()", "(self.gamma * n).log()", "algorithms/test_rivals_client.py -k fedrod"),
    Mutant("pflcore/algorithms/knnper.py", "far = square.sqrt() if kernel", "far = square if kernel", "algorithms/test_motley_algorithms.py -k 'neighbours or vote or points'"),
    Mutant("pflcore/algorithms/mocha.py", "((1 - delta) * root + delta / len(w))", "(root + delta / len(w))", "algorithms/test_motley_algorithms.py -k 'relation or mocha'"),
    Mutant("pflcore/algorithms/per_fedavg.py", "/ (2 * delta)", "/ delta", "algorithms/test_rivals_client.py -k per_fedavg"),
    Mutant("pflcore/algorithms/pfedme.py", "self.lam * (w - theta)", "(w - theta)", "algorithms/test_rivals_client.py -k pfedme"),
    Mutant("pflcore/algorithms/qfedavg.py", "* norm / (local.lr or 1) +", "* norm +", "algorithms/test_motley_algorithms.py"),
    Mutant("pflcore/algorithms/ibp.py", "by_p = ((1 - pi) * logit_p.exp() - pi)", "by_p = ((1 - pi) * logit_p.exp() + pi)", "algorithms/test_factorized_golden.py"),
    Mutant("pflcore/algorithms/factorized_waffle.py", "slope[:, : len(at)] += by_strength * r * by_b", "slope[:, : len(at)] += by_strength * by_b", "algorithms/test_factorized_waffle.py"),
    # a round
    Mutant("pflcore/simulation/round.py", "ids = ids[fine]\n", "ids = ids[fine | True]\n", "algorithms/test_contract.py -k 'breaks and ditto'"),
    Mutant("pflcore/simulation/round.py", "| state.moments\n", "\n", "local/test_adamw.py"),
    Mutant("pflcore/simulation/round.py", "*((all_moments[k], v) for k, v in moments.items())]", "]", "local/test_adamw.py"),
    Mutant("pflcore/simulation/round.py", "up, new, moments = ({k: v[fine.to(v.device)] for k, v in d.items()} for d in (up, new, moments))", "up, new = ({k: v[fine.to(v.device)] for k, v in d.items()} for d in (up, new))\n        moments = {k: v[: len(ids)] for k, v in moments.items()}", "local/test_adamw.py"),
    Mutant("pflcore/simulation/round.py", "return replace(state, g=g, round=round, void=0,", "return replace(state, g=g, round=round,", "algorithms/test_fine_points.py"),
    Mutant("pflcore/simulation/round.py", "(state.joined, torch.ones(len(ids), dtype=torch.bool))", "(state.joined, torch.zeros(len(ids), dtype=torch.bool))", "simulation/test_edges.py"),
    Mutant("pflcore/simulation/round.py", "state.buffers[onto(state.joined, buffer.device)].mean(0)", "state.buffers.mean(0)", "simulation/test_edges.py"),
    Mutant("pflcore/simulation/round.py", "torch.where(onto(total > 0, rows.device), mixed, old)", "mixed", "simulation/test_edges.py"),
    Mutant("pflcore/simulation/round.py", "int((v.index >= 0).sum())", "v.index.numel()", "algorithms/test_rivals_client.py algorithms/test_motley_algorithms.py"),
    Mutant("pflcore/simulation/round.py", "alg.server({k: v.clone() for k, v in state.g.items()} if averaged else state.g, up, cohort)", "alg.server(state.g, up, cohort)", "algorithms/test_fine_points.py"),
    Mutant("pflcore/simulation/uploads.py", "rows, held.to(rows.dtype), onto(ids[:, None], held.device)", "rows, held.to(rows.dtype), onto(ids[:, None].flip(0), held.device)", "simulation/test_hostile.py -k measured_from"),
    Mutant("pflcore/simulation/uploads.py", "square[:, 0].sqrt().cpu()", "square[:, 0].cpu()", "simulation/test_hostile.py"),
    Mutant("pflcore/simulation/uploads.py", '["control"] if "control" in up else []', "[]", "algorithms/test_fine_points.py"),
    Mutant("pflcore/simulation/uploads.py", "middle = norm.quantile(0.5)", "middle = norm.mean()", "simulation/test_hostile.py simulation/test_scale.py"),
    # checkpoints, rows on disk, records
    Mutant("pflcore/simulation/checkpoint.py", 'if whole["sha256"] != _sha256([json.dumps(facts).encode()]):', "if not facts:", "test_damage.py -k checkpoint"),
    Mutant("pflcore/simulation/checkpoint.py", 'if _sha256([data]) != facts["sha256"]:', "if not data:", "test_damage.py -k checkpoint"),
    Mutant("pflcore/simulation/checkpoint.py", "        if old.name != name:\n", "        if old.name == name + 'x':\n", "simulation/test_checkpoint.py -k leavings"),
    Mutant("pflcore/simulation/checkpoint.py", "t.clone() if t.untyped_storage().data_ptr() in memory else t", "t", "simulation/test_checkpoint.py -k 'dtype or rounds'"),
    Mutant("pflcore/simulation/rows.py", "self[k][new] = v\n", "self[k][ids] = v\n", "simulation/test_scale.py"),
    Mutant("pflcore/simulation/rows.py", "new = ids[~self.known[ids]]", "new = ids", "simulation/test_scale.py"),
    Mutant("pflcore/results/record.py", 'min(2**20, mark["bytes"] - self._size)', 'min(2**20, mark["bytes"] + 1 - self._size)', "simulation/test_checkpoint.py -k mark"),
    Mutant("pflcore/results/record.py", "os.truncate(self.side, aside)", "pass", "results/test_side_file.py"),
    Mutant("pflcore/results/record.py", "(torch.tensor(size) > 0), math.inf, values)", "(torch.tensor(size) > 0), math.nan, values)", "simulation/test_hostile.py results/test_results.py"),
    Mutant("pflcore/results/record.py", "matrix / torch.bincount(torch.arange(n) // block)[:, None]", "matrix", "results simulation/test_scale.py"),
    # local training
    Mutant("pflcore/local/adamw.py", "w.sub_(move.mul_(lr) if mask is None", "w.add_(move.mul_(lr) if mask is None", "local/test_adamw.py"),
    Mutant("pflcore/local/adamw.py", "steps += 1\n", "steps += 2\n", "local/test_adamw.py"),
    Mutant("pflcore/local/adamw.py", "move.add_(w, alpha=self.training.weight_decay)", "move.add_(w, alpha=-self.training.weight_decay)", "local/test_adamw.py"),
    Mutant("pflcore/local/group.py", "g = clipped(g, t.clip_grad)", "g = clipped(g, 2 * t.clip_grad)", "local/test_hooks.py local/test_adamw.py"),
    Mutant("pflcore/local/group.py", "t.clip_grad or float(\"inf\")", "float(\"inf\")", "local/test_hooks.py local/test_adamw.py"),
    Mutant("pflcore/local/group.py", "round = local.round if t.reshuffle else 0", "round = local.round", "local/test_hooks.py"),
    Mutant("pflcore/local/group.py", 'local.setting.seed, local.round, stream, "noise", p)', 'local.setting.seed, local.round, stream, "noise", 0)', "nn/test_nn.py local/test_path.py ops/test_chain.py local/test_hooks.py"),
    Mutant("pflcore/local/group.py", "        if not self.probe:", "        if self.probe:", "local/test_hooks.py"),
    Mutant("pflcore/local/hooks.py", "kept = self.moments if t.keep_moments and not probe else None", "kept = self.moments if t.keep_moments else None", "local/test_adamw.py"),
    Mutant("pflcore/local/hooks.py", "(right & ~losses.isnan()).cpu()", "right.cpu()", "local/test_evaluate.py simulation/test_hostile.py"),
    Mutant("pflcore/local/hooks.py", "order = torch.from_numpy(np.lexsort((self._ids, -self._size)))", "order = torch.from_numpy(np.argsort(self._ids))", "local/test_hooks.py"),
    Mutant("pflcore/local/random.py", "np.asarray(ids, np.uint64) + np.uint64(1)", "np.asarray(ids, np.uint64)", "package/test_trust.py -k random_numbers"),
    Mutant("pflcore/local/random.py", "if 4 * count >= n:", "if 4 * count > n:", "package/test_trust.py -k random_numbers"),
    Mutant("pflcore/local/steps.py", "if c[1] - c[0] == min(t.batch_size, n)] if t.drop_last", "if c[1] - c[0] == t.batch_size] if t.drop_last", "local/test_hooks.py"),
    Mutant("pflcore/local/schedules.py", "if round < rounds:\n                try:", "if True:\n                try:", "simulation/test_user.py -k schedule"),
    Mutant("pflcore/local/training.py", "max(round, rounds))[round - 1]", "max(round, rounds))[round - 2]", "simulation/test_user.py local/test_hooks.py"),
    # the references
    Mutant("pflcore/ops/aggregate.py", "torch.where(weight_k != 0, weight_k * updates", "torch.where(weight_k != 2, weight_k * updates", "ops/test_aggregate.py", True),
    Mutant("pflcore/ops/aggregate.py", "grad_updates = (ctx.lr * (dense.T @ grad64)).to(updates.dtype)", "grad_updates = (dense.T @ grad64).to(updates.dtype)", "ops/test_aggregate.py"),
    Mutant("pflcore/ops/sqdist.py", "square = (other.double() - a[i, strip].double()).square()", "square = (other - a[i, strip]).double().square()", "ops/test_sqdist.py", True),
    Mutant("pflcore/ops/sqdist.py", "torch.where(index < 0, math.inf, out)\n        return", "out\n        return", "ops/test_sqdist.py", True),
    Mutant("pflcore/ops/weights.py", "tied = gap <= 1e-12 * high\n", "tied = gap <= 1e-10 * high\n", "ops/test_weights.py ops/test_cpu_kernels.py", True),
    Mutant("pflcore/ops/rank1.py", "torch.is_grad_enabled() else torch.where(scale != 0, t * scale, 0.0)", "torch.is_grad_enabled() else t * scale", "ops/test_rank1.py", True),
    Mutant("pflcore/ops/sgd.py", "buffer.mul_(momentum).add_(d)", "buffer.mul_(momentum).add_(d, alpha=1 - momentum)", "ops/test_sgd.py", True),
    Mutant("pflcore/ops/chain.py", "keep = uniform(seeds, random, x.shape[1:]) >=", "keep = uniform(seeds, 0, x.shape[1:]) >=", "ops/test_chain.py"),
    Mutant("pflcore/ops/chain.py", "grad_sum[some] += grad + weight_decay * rows", "grad_sum[some] += grad", "ops/test_chain.py"),
    Mutant("pflcore/ops/chain.py", "mixed(seed + jump)[..., None] + places", "mixed(seed + jump)[..., None] ^ places", "ops/test_chain.py nn/test_nn.py"),
    Mutant("pflcore/ops/chain.py", "seeds[some, epoch] + turn.to(device)", "seeds[some, epoch]", "ops/test_chain.py"),
    Mutant("pflcore/ops/nearest.py", "(pivots.bound[:, g] <= self.sqdist[:, -1])", "(pivots.bound[:, g] < self.sqdist[:, -1] * 0.9)", "ops/test_nearest.py"),
    # data
    Mutant("pflcore/data/ragged.py", "(self.begin[ids] - begin[:-1]).repeat_interleave(size)", "(self.begin[ids] - begin[1:]).repeat_interleave(size)", "data/test_table.py"),
    Mutant("pflcore/data/ragged.py", "torch.cat([size.new_zeros(1), size.cumsum(0)])", "torch.cat([size.new_ones(1), size.cumsum(0)])", "data/test_table.py"),
    Mutant("pflcore/data/ragged.py", "size = self.size[ids] if size is None else size\n", "size = self.size[ids]\n", "data/test_federation.py"),
    Mutant("pflcore/data/splits.py", 'want["val"] / (1 - want["test"])', 'want["val"]', "data/test_federation.py"),
    Mutant("pflcore/data/partition.py", "[np.arange(classes)] + [rng", "[rng.permutation(classes)] + [rng", "data/test_partition.py"),
    Mutant("pflcore/data/dirichlet.py", "room = (size < totals.sum() / n)", "room = (size <= totals.sum())", "data/test_partition.py"),
    Mutant("pflcore/data/sources.py", "if want is not None and got != want:", "if want is not None and len(got) != len(want):", "data/test_sources.py"),
    # measures and tables
    Mutant("pflcore/metrics.py", "kept.std(correction=0)", "kept.std(correction=1)", "test_metrics.py"),
    Mutant("pflcore/metrics.py", "(a < b if higher_is_better else a > b) | a.isnan()", "(a <= b if higher_is_better else a >= b) | a.isnan()", "test_metrics.py"),
    Mutant("pflcore/metrics.py", "mean(v[at > at[-1] - k])", "mean(v[at >= at[-1] - k])", "test_metrics.py"),
    Mutant("pflcore/metrics.py", "(scores.argmax(-1) == y) & ~scores.isnan().any(-1)", "scores.argmax(-1) == y", "local/test_evaluate.py simulation/test_hostile.py"),
    Mutant("pflcore/results/table.py", "dropped = sum(bool(r.get(\"void\")) for r in run.rounds), sum(len(", "dropped = sum(bool(r.get(\"void\")) for r in run.rounds), max(0, *(len(", "results/test_results.py"),
    Mutant("pflcore/reproduce/costs.py", "float(3 * a[0]", "float(2 * a[0]", "reproduce/test_reproduce.py"),
    Mutant("pflcore/reproduce/costs.py", "custom_mapping=_own_ops()", "custom_mapping={}", "reproduce/test_reproduce.py"),
    # other people's code
    Mutant("pflcore/interop/packing.py", "(not self.include or bool(hits & {*self.include})) and not hits", "(not self.include or bool(hits & {*self.include})) or not hits", "interop/test_packing.py"),
    Mutant("pflcore/interop/packing.py", 'if statistic and buffers == "local":', "if statistic:", "interop/test_packing.py"),
    Mutant("pflcore/interop/forms.py", 'order="F" if fortran else "C"', 'order="C"', "interop/test_packing.py"),
    Mutant("pflcore/interop/server.py", "(about.number, about.round) != (number, self.round + 1)", "about.number != number", "interop/test_server.py"),
    Mutant("pflcore/interop/server.py", "[i for i in outcome.ids if i not in outcome.dropped]", "outcome.ids", "interop/test_server.py"),
    Mutant("pflcore/interop/server.py", "self._gone.add(self._known(client_id))", "self._known(client_id)", "interop/test_server.py interop/test_server_machine.py"),
    Mutant("pflcore/interop/client.py", "if about.accepted == self._pending[0]:", "if True:", "interop/test_server.py"),
    Mutant("pflcore/interop/wire.py", "rows[sent] = few", "rows[: len(few)] = few", "interop/test_server.py"),
    Mutant("pflcore/interop/mixing.py", "torch.stack([more[where[i]] if i in where else rows[j]", "torch.stack([more[j % len(more)] if i in where else rows[j]", "interop/test_personalize.py"),
    Mutant("pflcore/interop/lowrank.py", "b / (scale * basis.size), a * basis.size", "b / basis.size, a * basis.size", "interop/test_lowrank.py"),
    Mutant("pflcore/interop/lowrank.py", "float(s[rank:].square().sum()) / total", "float(s[rank:].sum()) / total", "interop/test_lowrank.py"),
    Mutant("pflcore/interop/lowrank.py", "all(x.shape == first.shape and torch.equal(x, first)", "all(x.shape == first.shape", "interop/test_lowrank.py"),
    # other kernels
    Mutant("csrc/cpu/weights.h", "return a < b || (a == b && i < j);", "return a < b;", "ops/test_weights.py -k many_ties"),
]  # fmt: skip

MUTANTS = [*KNOWN, *SAMPLED]


def copied(to: Path) -> Path:
    """What tests need of the tree, with bytecode that is checked against its source and not against the clock."""
    for name in ("pflcore", "tests", "bench", "csrc", "docs", "examples", ".ci"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, to)
    compileall.compile_dir(to / "pflcore", quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    return to


def words(tests: str) -> list[str]:
    """Test files, and what pytest is asked to choose of them."""
    paths, _, choice = tests.partition(" -k ")
    return [*(f"tests/{p}" for p in paths.split()), *(["-k", choice.strip("'")] if choice else [])]


def run_tests(place: str, tests: str, references: bool, out: str) -> None:
    """In a process of its own: ends with pytest's exit status."""
    os.chdir(place)
    os.environ |= {"PYTHONPATH": place, "OMP_NUM_THREADS": "1"}
    os.environ["PFLCORE_KERNELS"] = "0" if references else "1"
    sys.path.insert(0, place)
    log = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1), os.dup2(log, 2)
    import pytest
    import torch

    torch.set_num_threads(1)
    status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line", "--disable-warnings", *words(tests)]))
    sys.stdout.flush()
    os._exit(status)


def built(place: Path) -> str:
    """Compiles in the copy what has changed of the CPU kernels; why not, where that fails."""
    env = {"MAX_JOBS": "2", **os.environ, "PFLCORE_EXT": "cpu", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=place, env=env, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr[-2000:]


@contextmanager
def broken_by(m: Mutant, place: Path) -> Iterator[str]:
    """The copy has the fault, compiled where that is what it needs; afterwards all is as it was, for the compiler's clock too.

    Gives why it does not compile, or "".
    """
    path, kernels = place / m.file, compiles(m)
    before, seen = path.read_bytes(), path.stat().st_mtime_ns
    if kernels and not (place / "clean").exists():
        if why := built(place):
            raise SystemExit(f"The kernels do not compile as they are: {why}")
        shutil.copytree(place / "build", place / "clean")
        shutil.copy2(place / "pflcore" / "lib_pflcore.so", place / "clean.so")
    path.write_text(before.decode().replace(m.old, m.new), encoding="utf-8")
    try:
        yield built(place) if kernels else ""
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(seen, seen))
        if kernels:
            shutil.rmtree(place / "build")
            shutil.copytree(place / "clean", place / "build")
            shutil.copy2(place / "clean.so", place / "pflcore" / "lib_pflcore.so")


def compiles(m: Mutant) -> bool:
    """Whether the library must be made again; what tests compile for themselves, they do."""
    return m.file.startswith("csrc/cpu") and not m.tests.startswith("sanitize")


def tried(m: Mutant, place: Path, context: ForkServerContext) -> tuple[str, float, str]:
    """ "killed", "survived", "slow" or "broken" (the fault, or the tests, cannot be run), the seconds, and the last words of pytest."""
    start, log = time.monotonic(), place / "log"
    with broken_by(m, place) as why:
        if why:
            return "broken", time.monotonic() - start, why
        child = context.Process(target=run_tests, args=(str(place), m.tests, m.references, str(log)))
        child.start()
        child.join(LIMIT)
        if child.is_alive():
            child.kill()
            child.join()
            return "slow", time.monotonic() - start, f"no end after {LIMIT} s: narrower tests, or a quieter machine"
    last = " | ".join([line for line in log.read_text(errors="replace").splitlines() if line.strip()][-3:])[-300:]
    code = child.exitcode or 0  # pytest's: 1 is a failed test, 2 an interrupted collection; below 0 the process died
    verdict = "survived" if code == 0 else "killed" if code in (1, 2) or code < 0 else "broken"
    return verdict, time.monotonic() - start, last


def check() -> list[str]:
    """Entries whose old text does not stand exactly once in its file, or that change nothing."""
    out = []
    for m in MUTANTS:
        path = ROOT / m.file
        count = path.read_text(encoding="utf-8").count(m.old) if path.is_file() else 0
        missing = [p for p in words(m.tests) if p.startswith("tests/") and not (ROOT / p).exists()]
        if count != 1 or m.old == m.new or missing:
            out.append(f"{m.file}: {m.old!r} stands there {count} times" if count != 1 else f"{m.file}: {missing or 'nothing is changed'}")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--part", choices=["known", "sampled", "all"], default="all", help="those that people once got past the tests, or the sample"
    )
    parser.add_argument("--only", default="", help="a regular expression: faults in these files or lines")
    parser.add_argument("--sample", type=int, default=0, help="so many of them, at random by the day, without those that need a compiler")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a file for the verdicts, as JSON lines")
    given = parser.parse_args()
    stale = check()
    if stale:
        print("\n".join(stale))
        return 2
    todo = [
        m for m in {"known": KNOWN, "sampled": SAMPLED, "all": MUTANTS}[given.part] if re.search(given.only, f"{m.file} {m.old} {m.tests}")
    ]
    if given.sample:
        todo = [m for m in todo if not m.file.startswith("csrc")]
        todo = random.Random(time.strftime("%Y-%m-%d")).sample(todo, min(given.sample, len(todo)))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    count, start, places = {"killed": 0, "survived": 0, "broken": 0, "slow": 0}, time.monotonic(), Queue[Path]()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(given.workers) as pool:
        for i in range(given.workers):
            places.put(copied(Path(folder) / str(i)))

        def several(mutants: list[Mutant]) -> None:
            place = places.get()
            for m in mutants:
                verdict, seconds, said = tried(m, place, context)
                count[verdict] += 1
                tail = "" if verdict == "killed" else f"\n    {said}"
                print(f"{verdict:8} {seconds:5.0f} s  {m.file}: {m.new.strip()[:90]!r}{tail}", flush=True)
                if given.out:
                    with open(given.out, "a") as file:
                        file.write(json.dumps([verdict, round(seconds), m.file, m.old, m.new, said]) + "\n")
            places.put(place)

        compiled = [m for m in todo if compiles(m)]  # one after the other, in one copy, which has the objects of what did not change
        list(pool.map(several, [compiled, *([m] for m in todo if not compiles(m))]))
    print(
        f"{len(todo)} faults: {count['killed']} killed, {count['survived']} survived, {count['broken']} broken, {count['slow']} too slow, in {(time.monotonic() - start) / 60:.0f} minutes"
    )
    return int(count["killed"] < len(todo))


if __name__ == "__main__":
    raise SystemExit(main())
