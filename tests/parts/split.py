"""What the tests of split share."""

from parts.edges import normed as normed
from small import images, wide

from pflcore import Training

LR, EPOCHS, COHORTS = 0.3, 2, ([0, 1, 2], [1], [0, 2])
# whole batches, so that no shuffle plays a part
TRAINING = Training(lr=LR, batch_size=64, epochs=EPOCHS)


def federation():
    return wide(images())
