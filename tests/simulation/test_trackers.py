"""Trackers send each round's numbers, and stop no run."""

import re
import sys
import types

import pytest
import torch
from parts.commands import DIGITS, block, command, draw_nothing
from parts.user import simulation

from pflcore import Evaluation, Federation, MLflow, Stop, TensorBoard, Training, Wandb
from pflcore.simulation.callbacks import Tracker

WILD = Training(lr=1e200, batch_size=8)  # with which a run diverges
# The names that MLflow takes, and that are no path to another name.
MLFLOW_NAME = re.compile(
    r"(?!\.{1,2}(/|\Z))[\w.\- :]+(/(?!\.{1,2}(/|\Z))[\w.\- :]+)*\Z"
)


class Kept(Tracker):
    """A tracker of one's own, which keeps the numbers."""

    def __init__(self, clients=False):
        super().__init__(clients)
        self.numbers = {}
        self.closed = []

    def log(self, round, numbers):
        self.numbers[round] = dict(numbers)

    def close(self, failed=False):
        self.closed.append(failed)


class FakeWandb(types.ModuleType):
    """What `Wandb` uses of W&B, which keeps what it gets."""

    def __init__(self):
        super().__init__("wandb")
        self.runs = []

    def init(self, **options):
        run = FakeWandbRun(options)
        self.runs.append(run)
        return run


class FakeWandbRun:
    def __init__(self, options):
        self.options = options
        self.numbers = {}
        self.exit_code = None

    def log(self, numbers, step):
        assert type(numbers) is dict
        self.numbers[step] = numbers

    def finish(self, exit_code):
        self.exit_code = exit_code


class FakeMLflow(types.ModuleType):
    """What `MLflow` uses of MLflow, which keeps what it gets."""

    def __init__(self):
        super().__init__("mlflow")
        self.runs = {}
        self.experiments = {"Default": "0"}
        self.uris = []
        self.entities = types.SimpleNamespace(
            Metric=self.metric,
            Param=lambda key, value: (key, value),
        )

    def metric(self, key, value, timestamp, step):
        assert type(timestamp) is int and timestamp >= 1_000
        return key, value, step

    def MlflowClient(self, uri):
        self.uris.append(uri)
        return self

    def get_experiment_by_name(self, name):
        if name in self.experiments:
            return types.SimpleNamespace(experiment_id=self.experiments[name])
        return None

    def create_experiment(self, name):
        self.experiments[name] = str(len(self.experiments))
        return self.experiments[name]

    def create_run(self, experiment_id, run_name):
        run_id = f"run {len(self.runs)}"
        self.runs[run_id] = {
            "experiment": experiment_id,
            "name": run_name,
            "params": {},
            "numbers": {},
        }
        info = types.SimpleNamespace(run_id=run_id, start_time=1_000)
        return types.SimpleNamespace(info=info)

    def log_batch(self, run_id, metrics=(), params=()):
        assert len(params) <= 100
        assert all(isinstance(value, str) and len(value) <= 500 for _, value in params)
        self.runs[run_id]["params"].update(params)
        names = [*dict(params), *(key for key, *_ in metrics)]
        for name in names:
            if len(name) > 250 or not MLFLOW_NAME.match(name):
                raise ValueError(f"Invalid value {name!r}")
        for key, value, step in metrics:
            assert type(value) is float
            self.runs[run_id]["numbers"].setdefault(step, {})[key] = value

    def set_terminated(self, run_id, status):
        self.runs[run_id]["status"] = status


class FakeWriter:
    """Torch's writer of events, whose folder keeps what TensorBoard shows."""

    folders = None  # each folder, and what it shows; set by the fixture

    def __init__(self, folder, purge_step=None):
        self.shown = self.folders.setdefault(folder, {})
        for tag, points in self.shown.items():
            if purge_step is not None:
                self.shown[tag] = [p for p in points if p[0] < purge_step]

    def add_scalar(self, tag, value, step):
        self.shown.setdefault(tag, []).append((step, value))

    def flush(self):
        pass

    def close(self):
        pass


@pytest.fixture
def tensorboard(monkeypatch):
    """What TensorBoard shows of each folder: pairs of step and value, by name."""
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = FakeWriter
    monkeypatch.setattr(FakeWriter, "folders", {})
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return FakeWriter.folders


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.fixture
def mlflow(monkeypatch):
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    return fake


def kept_numbers(**options):
    """The numbers of the default run, as a tracker gets them."""
    tracker = Kept(**options)
    history = simulation(evaluation=Evaluation(every=2)).run(tracker)
    return history, tracker.numbers


# what is sent -------------------------------------------------------------------
def test_a_tracker_gets_the_means_of_each_round():
    history, numbers = kept_numbers()
    assert [*numbers] == [1, 2, 3]
    assert "eval/accuracy" not in numbers[1]  # the round was not evaluated
    accuracy = history.series()[1]
    assert numbers[3]["eval/accuracy"] == pytest.approx(accuracy[-1].mean().item())
    assert numbers[1]["traffic/bytes_up"] == history.rounds[0]["bytes_up"]
    assert not any("client" in name for name in numbers[3])


def test_clients_have_numbers_of_their_own_where_they_are_wanted():
    history, numbers = kept_numbers(clients=True)
    got = [numbers[3][f"eval/accuracy/client {i}"] for i in range(3)]
    assert got == history.rounds[2]["eval"]["accuracy"]


def test_wandb_gets_the_numbers_the_facts_and_the_end(wandb):
    run = simulation(evaluation=Evaluation(every=2))
    config = run.header()
    with Wandb("mine", "first", config, mode="offline", tags=["a"]) as tracker:
        run.run(tracker)
    (got,) = wandb.runs
    assert got.numbers == without_seconds(kept_numbers()[1], got.numbers)
    assert (got.options["project"], got.options["name"]) == ("mine", "first")
    assert got.options["config"]["algorithm"] == "fedavg"
    assert (got.options["mode"], got.options["tags"]) == ("offline", ["a"])
    assert got.exit_code == 0


def test_mlflow_gets_the_numbers_the_facts_and_the_end(mlflow, monkeypatch):
    run = simulation(evaluation=Evaluation(every=2))
    config = {**run.header(), "long": list(range(1000))}
    with MLflow("mine", "first", config, tracking_uri="sqlite:///x") as tracker:
        run.run(tracker)
    (got,) = mlflow.runs.values()
    assert got["numbers"] == without_seconds(kept_numbers()[1], got["numbers"])
    assert got["name"] == "first" and got["experiment"] == mlflow.experiments["mine"]
    assert got["params"]["algorithm"] == "fedavg"
    assert float(got["params"]["training.lr"]) == 0.1 and "long" not in got["params"]
    assert got["status"] == "FINISHED" and mlflow.uris == ["sqlite:///x"]
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of the shell")
    MLflow()
    MLflow("mine")
    assert [*mlflow.experiments] == ["Default", "mine", "of the shell"]


def without_seconds(numbers, others):
    """The numbers with the seconds of the other run."""
    return {
        round: {**of_round, "train/seconds": others[round]["train/seconds"]}
        for round, of_round in numbers.items()
    }


def test_a_run_that_fails_is_marked_as_failed(wandb, mlflow):
    for tracker in (Wandb(), MLflow()):
        with pytest.raises(KeyError), tracker:
            raise KeyError
    assert wandb.runs[0].exit_code == 1
    assert mlflow.runs["run 0"]["status"] == "FAILED"


def stop_after_two(round, record):
    if round == 2:
        raise Stop("Two rounds are enough.")


def interrupt_after_two(round, record):
    if round == 2:
        raise KeyboardInterrupt


def fail_after_two(round, record):
    if round == 2:
        raise OSError("the disk is full")


def play_quietly(**options):
    """A function that plays a run to its end, whatever that is."""

    def play(*callbacks):
        try:
            return simulation(**options).run(callbacks)
        except OSError:
            return None

    return play


ENDS = {
    "diverged": (play_quietly(training=WILD), (), True),
    "interrupted": (play_quietly(), (interrupt_after_two,), True),
    "an error that the user catches": (play_quietly(), (fail_after_two,), True),
    "stopped by a callback": (play_quietly(), (stop_after_two,), False),
    "whole": (play_quietly(), (), False),
}


@pytest.mark.filterwarnings("ignore:.*stopped early")
@pytest.mark.parametrize("end", ENDS)
def test_the_service_knows_a_run_that_broke_off(end, wandb, mlflow):
    play, callbacks, has_failed = ENDS[end]
    tracker = Kept()
    with Wandb() as first, MLflow() as second, tracker:
        play(first, second, tracker, *callbacks)
    assert wandb.runs[0].exit_code == has_failed
    status = "FAILED" if has_failed else "FINISHED"
    assert mlflow.runs["run 0"]["status"] == status
    assert tracker.closed == [has_failed]


def test_a_run_that_goes_on_to_its_end_has_not_failed(wandb):
    run = simulation()
    with Wandb() as tracker:
        run.run([tracker, interrupt_after_two])
        run.run(tracker)
    assert wandb.runs[0].exit_code == 0


ODD_NAMES = (
    "St. Mary (ICU) #3",
    "St. Mary [ICU] #3",
    "St. Mary _ICU_ _3",
    "Klinik ä/ö",
    "a//b",
    "../up",
    "up/..",
    "/",
    ".",
    "line\nend",
    "a|b`c",
    "x" * 300,
    "x" * 299 + "y",
)


def test_mlflow_gets_each_number_of_oddly_named_clients(mlflow):
    x, y = torch.randn(12, 6), torch.arange(12) % 4
    data = Federation.from_clients(dict.fromkeys(ODD_NAMES, (x, y))).split(test=0.5)
    run = simulation(data=data, rounds=2)
    with MLflow(config=run.header(), clients=True) as tracker:
        history = run.run(tracker)
    numbers = mlflow.runs["run 0"]["numbers"]
    for record in history.rounds:
        of_clients = {}
        for name, value in numbers[record["round"]].items():
            if name.startswith("eval/accuracy/client"):
                of_clients[name] = value
        assert [*of_clients.values()] == record["eval"]["accuracy"]
        assert "eval/accuracy/client St. Mary _ICU_ _3" in of_clients
        assert "eval/accuracy" in numbers[record["round"]]


def test_mlflow_keeps_a_clients_name_in_all_rounds(mlflow):
    tracker = MLflow()
    tracker.log(1, {"a#": 1.0, "a_": 2.0})
    tracker.log(2, {"a_": 3.0})
    numbers = mlflow.runs["run 0"]["numbers"]
    assert numbers == {1: {"a_": 1.0, "a_ 2": 2.0}, 2: {"a_ 2": 3.0}}


def test_mlflow_gets_facts_with_odd_names(mlflow):
    MLflow(config={"options": {"lr (base)": 0.1, "lr [base]": 0.2}})
    params = mlflow.runs["run 0"]["params"]
    assert params == {"options.lr _base_": "0.1", "options.lr _base_ 2": "0.2"}


# what goes wrong ----------------------------------------------------------------
class ServiceError(Exception):
    """An error of a service's own, as those of W&B and MLflow are."""


@pytest.mark.parametrize("kind", [ConnectionError, ServiceError, TypeError])
def test_a_round_that_cannot_be_sent_stops_no_run(kind):
    class Broken(Kept):
        def log(self, round, numbers):
            if round == 2:
                raise kind("no route to host\nand more")
            super().log(round, numbers)

    tracker = Broken()
    words = rf"Broken: round 2 was not sent \({kind.__name__}: no route to host\)"
    with pytest.warns(RuntimeWarning, match=words):
        history = simulation().run(tracker)
    assert [*tracker.numbers] == [1, 3] and len(history.rounds) == 3


class BrokenEnd(Kept):
    """A tracker whose service is gone when the run ends."""

    def close(self, failed=False):
        raise ConnectionError("gone\nfor good")


def test_an_end_that_cannot_be_sent_stops_no_run():
    with (
        pytest.warns(RuntimeWarning, match=r"^BrokenEnd: the end was not sent \(Conn"),
        BrokenEnd() as tracker,
    ):
        history = simulation().run(tracker)
    assert len(history.rounds) == 3


def test_an_end_that_cannot_be_sent_hides_no_error():
    with (
        pytest.warns(RuntimeWarning, match="the end was not sent"),
        pytest.raises(KeyError, match="of the run"),
        BrokenEnd(),
    ):
        raise KeyError("of the run")


@pytest.mark.parametrize("make, package", [(Wandb, "wandb"), (MLflow, "mlflow")])
def test_a_package_that_is_missing_is_named(make, package, monkeypatch):
    block(monkeypatch, package)
    with pytest.raises(ImportError, match=f"get it with: pip install {package}"):
        make()


# the command line -----------------------------------------------------------------
@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a command, without pictures."""
    pytest.importorskip("tyro")
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    draw_nothing(monkeypatch)
    return tmp_path


@pytest.mark.deep("it takes a second")
def test_a_command_tracks_each_of_its_runs(folder, wandb):
    words = f"compare --algorithms fedavg local {DIGITS} --seeds 2 --out o"
    assert command(f"{words} --track wandb") == 0
    names = [run.options["name"] for run in wandb.runs]
    assert names == [f"{a}, seed {s}" for a in ("fedavg", "local") for s in (0, 1)]
    for run in wandb.runs:
        assert [*run.numbers] == [1, 2, 3] and run.exit_code == 0
        assert run.options["config"]["data"] == "digits"


@pytest.mark.deep("it takes a second")
def test_a_run_for_each_client_is_tracked_as_one(folder, mlflow):
    words = f"run waffle {DIGITS} --target all --out o"
    assert command(f"{words} --track mlflow") == 0
    (run,) = mlflow.runs.values()
    assert [*run["numbers"]] == [1, 2, 3] and run["status"] == "FINISHED"


def test_a_command_closes_a_diverged_run_as_failed(folder, wandb):
    words = f"run fedavg {DIGITS} --lr 1e200 --out o --track wandb"
    assert command(words) == 1
    assert [run.exit_code for run in wandb.runs] == [1]


@pytest.mark.deep("it takes a second")
def test_a_resumed_command_shows_each_round_once(folder, tensorboard):
    words = f"run fedavg {DIGITS} --out o --track tensorboard"
    assert command(words) == 0
    assert command(f"{words} --rounds 5") == 0
    (shown,) = tensorboard.values()
    assert [step for step, _ in shown["eval/accuracy"]] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("same_tracker", [True, False])
def test_tensorboard_shows_each_round_of_resumed_runs_once(
    same_tracker, tmp_path, tensorboard
):
    tracker = TensorBoard("events")
    for rounds in (2, 4, 5):
        if not same_tracker:
            tracker = TensorBoard("events")
        run = simulation(rounds=rounds)
        history = run.run(tracker, checkpoint=tmp_path / "c", resume=True)
    points = tensorboard["events"]["eval/accuracy"]
    assert points == [*zip(*map(list, history.curve()), strict=True)]


def test_tensorboard_keeps_the_rounds_before_a_run_that_goes_on(tensorboard):
    run = simulation(rounds=4)
    run.run([TensorBoard("events"), stop_after_two])
    run.run(TensorBoard("events"))
    points = tensorboard["events"]["eval/accuracy"]
    assert [step for step, _ in points] == [1, 2, 3, 4]


def test_a_record_written_twice_shows_each_round_once(tensorboard):
    history = simulation().run()
    history.to_tensorboard("events")
    history.to_tensorboard("events")
    points = tensorboard["events"]["eval/accuracy"]
    assert [step for step, _ in points] == [1, 2, 3]


def test_a_missing_tracker_is_told_before_the_run(folder, monkeypatch, capsys):
    block(monkeypatch, "mlflow")
    assert command(f"run fedavg {DIGITS} --out o --track mlflow") == 2
    assert "--track mlflow needs mlflow, which is not" in capsys.readouterr().err
    assert not (folder / "o").exists()


# the real ones, where they are installed --------------------------------------------
def test_tensorboard_has_a_folder_for_each_run(folder):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = f"run fedavg {DIGITS} --seeds 2 --out o --track tensorboard"
    assert command(words) == 0
    paths = sorted((folder / "o" / "tensorboard").iterdir())
    assert [path.name for path in paths] == ["fedavg-seed-0", "fedavg-seed-1"]
    events = EventAccumulator(str(paths[0])).Reload().Scalars("eval/accuracy")
    assert [event.step for event in events] == [1, 2, 3]


def test_real_tensorboard_shows_each_round_once(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "events"
    for rounds in (3, 5):
        with TensorBoard(folder) as tracker:
            run = simulation(rounds=rounds)
            run.run(tracker, checkpoint=tmp_path / "c", resume=True)
    events = EventAccumulator(str(folder)).Reload().Scalars("eval/accuracy")
    assert [event.step for event in events] == [1, 2, 3, 4, 5]


@pytest.mark.deep("a process of W&B's own")
def test_wandb_writes_files_offline(tmp_path):
    pytest.importorskip("wandb")
    run = simulation(rounds=2)
    with Wandb("mine", dir=str(tmp_path), mode="offline") as tracker:
        run.run(tracker)
    (file,) = tmp_path.rglob("*.wandb")
    assert file.stat().st_size > 0


@pytest.mark.deep("a database")
def test_mlflow_writes_into_a_database(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    run = simulation(rounds=2)
    with MLflow("mine", "first", run.header(), tracking_uri=uri) as tracker:
        history = run.run(tracker)
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("mine")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED" and found.info.run_name == "first"
    assert found.data.params["algorithm"] == "fedavg"
    values = client.get_metric_history(found.info.run_id, "eval/accuracy")
    got = {metric.step: metric.value for metric in values}
    rounds, means = history.curve()
    assert got == pytest.approx(dict(zip(rounds, means, strict=True)))


def test_tensorboard_is_a_tracker(tmp_path):
    pytest.importorskip("tensorboard")
    with TensorBoard(tmp_path) as tracker:
        simulation(rounds=1).run(tracker)
    assert isinstance(tracker, Tracker) and [*tmp_path.iterdir()]
