"""The snippets of docs/interop.md run unchanged inside their frameworks.

A test of a framework is skipped where the framework is not installed.
"""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from places import ROOT
from torch import nn
from torch.testing import assert_close

import pflcore

TEXT = (ROOT / "docs" / "interop.md").read_text(encoding="utf-8")
SNIPPETS = {
    name: text
    for text, name in re.findall(r"```python\n((?:# (\S+): .*\n)[\s\S]*?)```", TEXT)
}
NAMES = ("NVFlare", "APPFL", "fluke", "PFLlib", "FL-bench")


def personal(name, **names):
    """The class that a snippet defines."""
    space = {"pflcore": pflcore, **names}
    exec(compile(SNIPPETS[name], f"docs/interop.md, {name}", "exec"), space)
    return space.get("Personal") or space["PersonalServer"]


def models():
    torch.manual_seed(0)
    return [nn.Linear(3, 2) for _ in range(3)]


def close(got, want):
    for a, b in zip(got.parameters(), want.parameters(), strict=True):
        assert_close(a, b)


def test_at_most_five_lines_of_a_snippet_call_pflcore():
    for name in NAMES:
        calls = [line for line in SNIPPETS[name].splitlines() if "pflcore" in line]
        assert 1 <= len(calls) <= 5
        compile(SNIPPETS[name], name, "exec")


def test_appfl():
    """APPFL's scheduler gives each client the model that `aggregate` made for it."""
    base = pytest.importorskip("appfl.algorithm.aggregator.base_aggregator")
    scheduler = pytest.importorskip("appfl.algorithm.scheduler.sync_scheduler")
    omegaconf = pytest.importorskip("omegaconf")
    aggregator = personal("APPFL", BaseAggregator=base.BaseAggregator)()
    options = omegaconf.OmegaConf.create({"num_clients": 3})
    server = scheduler.SyncScheduler(options, aggregator, None)
    sent = {f"site-{i}": dict(m.state_dict()) for i, m in enumerate(models())}
    futures = {i: server.schedule(i, model) for i, model in sent.items()}
    want = pflcore.personalize(sent, "fedamp")
    for i, future in futures.items():
        got = future.result(10) if hasattr(future, "result") else future
        assert_close(got, want[i])
    assert not torch.equal(want["site-0"]["weight"], want["site-1"]["weight"])


def test_fluke():
    """Clients of fluke get their own models over fluke's channel.

    A client that was absent gets the server's model, and in a later round its own last
    one.
    """
    server = pytest.importorskip("fluke.server")
    comm = pytest.importorskip("fluke.comm")
    clients = [SimpleNamespace(index=i, n_examples=4) for i in range(3)]
    start = nn.Linear(3, 2)
    one = personal("fluke", Server=server.Server, Message=comm.Message)(
        start, None, clients
    )
    sent = models()
    for c in clients[:2]:
        one.channel.send(
            comm.Message(sent[c.index], "model", c.index, inmemory=True), "server"
        )
    one.aggregate(clients[:2], one.receive_client_models(clients[:2], state_dict=False))
    one.broadcast_model(clients)
    got = [one.channel.receive(c.index, "server", "model").payload for c in clients]
    want = pflcore.personalize({0: sent[0], 1: sent[1]}, "fedamp")
    close(got[0], want[0])
    close(got[1], want[1])
    close(got[2], start)


JOB = """
import sys
import torch
import pflcore
from nvflare.collab import CollabRecipe, collab
from nvflare.recipe.sim_env import SimEnv

{snippet}

class Site:
    @collab.publish
    def train(self, model):
        number = float(collab.site_name.rpartition("-")[2])
        return {{"w": torch.full((3,), number) if model is None else model["w"]}}


class Written(Personal):
    @collab.main
    def run(self):
        torch.save(super().run(), {out!r})


if __name__ == "__main__":
    import personal_job
    server, site = personal_job.Written(), personal_job.Site()
    recipe = CollabRecipe("personal", server=server, client=site, min_clients=3)
    recipe.execute(SimEnv(num_clients=3, workspace_root={root!r}))
"""


def test_nvflare(tmp_path):
    """Each simulated site gets its own model back in three rounds."""
    pytest.importorskip("nvflare.recipe.sim_env")
    out = tmp_path / "models.pt"
    (tmp_path / "personal_job.py").write_text(
        JOB.format(
            snippet=SNIPPETS["NVFlare"], out=str(out), root=str(tmp_path / "work")
        )
    )
    path = f"{tmp_path}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "personal_job.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert out.exists(), done.stderr[-2000:] + done.stdout[-2000:]
    want = {f"site-{i}": {"w": torch.full((3,), float(i))} for i in (1, 2, 3)}
    for _ in range(3):
        want = pflcore.personalize(want, "fedamp")
    assert_close(torch.load(out), want)


def test_pfllib_and_fl_bench_by_the_attributes_that_their_sources_name():
    """The snippets for PFLlib and FL-bench run with stand-ins for the frameworks.

    The stand-ins have the attributes that the snippets use, so that the lines of the
    snippets run without the frameworks. A second run in the same process starts without
    the models of the first.
    """
    sent = models()
    start = nn.Linear(3, 2)
    want = pflcore.personalize(dict(enumerate(sent[:2])), "fedamp")
    cls = personal("PFLlib", Server=type("Server", (), {}))
    one = cls()
    received = [start] * 3
    one.clients = [
        SimpleNamespace(id=i, set_parameters=lambda m, i=i: received.__setitem__(i, m))
        for i in range(3)
    ]
    one.uploaded_ids = [0, 1]
    one.uploaded_models = sent[:2]
    one.global_model = start
    one.aggregate_parameters()
    one.send_models()
    close(received[0], want[0])
    assert received[2] is start and not cls().personal
    rest = {"regular_model_params": dict(start.state_dict()), "rest": 1}
    base = type(
        "FedAvgServer", (), {"get_client_model_params": lambda self, client: rest}
    )
    cls = personal("FL-bench", FedAvgServer=base)
    two = cls()
    packages = [{"regular_model_params": dict(m.state_dict())} for m in sent[:2]]
    two.aggregate_client_updates(dict(enumerate(packages)))
    got = two.get_client_model_params(1)
    assert_close(dict(got["regular_model_params"]), dict(want[1].state_dict()))
    assert got["rest"] == 1 and not cls().personal
    assert two.get_client_model_params(2) == rest
