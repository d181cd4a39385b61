"""AdamW's trajectories on each engine are those of torch."""

from parts.adamw import ADAMW, build, federation

from pflcore import Net, Training
from pflcore.train.bridge import prepared


def test_the_record_says_who_takes_the_steps():
    net, data = Net(build), federation()
    for training, said in ((Training(), False), (Training(**ADAMW), True)):
        path = prepared(net, data, training)[1]
        assert path.form == "chain" and ("AdamW" in path.why) is said
