"""A program that ranks run: it takes up a run where another program left it.

`rank_resume.py CASES FOLDER` plays cases of `parts.ranks`, each with a checkpoint in
the folder, and resumes those whose checkpoint lies there. A case may hold

- "stop_after", the round after which a callback stops the run,
- "kill_after", the round after which rank 1 kills itself, once in a folder.

Every rank writes a file `resumed-RANK.json`, with the rounds and digests of the runs.
"""

import json
import os
import signal
import sys
import warnings
from pathlib import Path

from parts.ranks import digest_records, digest_tensors, make_simulation, tensors_of

from pflcore.algorithms import Stop

RANK = os.environ.get("RANK", "0")


def kill_once(simulation, after, marker):
    """Makes rank 1 kill itself when it begins the round after round `after`."""
    original = type(simulation)._start_round

    def start_round(self, round):
        if RANK == "1" and round == after + 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, round)

    type(simulation)._start_round = start_round


def resume(case, folder):
    """The rounds and the digests of a run that goes on from the folder's checkpoint."""
    simulation = make_simulation(case)
    if "kill_after" in case:
        kill_once(simulation, case["kill_after"], Path(folder, "killed"))

    def stop(round, record):
        if round == case.get("stop_after"):
            raise Stop("Enough for today.")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder, case["algorithm"])
        history = simulation.run(stop, checkpoint=path, resume=True)
    return {
        "rounds": len(history.rounds),
        "records": digest_records(history.rounds),
        "state": digest_tensors(tensors_of(history.state)),
    }


def resume_all(cases, folder):
    """What `resume` returns of each case."""
    return [resume(case, folder) for case in cases]


if __name__ == "__main__":
    seen = resume_all(json.loads(sys.argv[1]), sys.argv[2])
    Path(sys.argv[2], f"resumed-{RANK}.json").write_text(json.dumps(seen))
