"""AdamW's trajectories on each engine are those of torch."""

from parts.adamw import ADAMW, build, federation

from pflcore import Net, Training
from pflcore.train import prepared


def test_the_record_says_who_takes_the_steps():
    net, data = Net(build), federation()
    for training, said in ((Training(), False), (Training(**ADAMW), True)):
        engine = prepared(net, data, training).engine
        assert engine.chain is not None and ("AdamW" in engine.why) is said
