"""AdamW's trajectories on each engine are those of torch."""

from small import images, tiny_model

from pflcore import Net, Training
from pflcore.train import prepared


def test_the_record_says_who_takes_the_steps():
    for optimizer, said in (("sgd", False), ("adamw", True)):
        training = Training(local_optimizer=optimizer)
        engine = prepared(Net(tiny_model()), images(), training).engine
        assert engine.chain is not None and ("AdamW" in engine.why) is said
