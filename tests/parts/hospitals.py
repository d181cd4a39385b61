"""Tables of three hospitals, with names for columns, classes and clients."""

import numpy as np
import pandas as pd

from pflcore import Federation

FEATURES = ("age", "income", "visits")
CLASSES = ("no", "yes", "unknown")
HOSPITALS = ("H03", "H11", "north")


def table(size=40, seed=0):
    """A data frame with a column of hospitals and one of answers.

    Hospitals differ in the scales of their features. A person's income and age decide
    the answer.
    """
    rng = np.random.default_rng(seed)
    frames = []
    for i, hospital in enumerate(HOSPITALS):
        age = 40 + 10 * i + 12 * rng.normal(size=size)
        income = 50 + (5 + 10 * i) * rng.normal(size=size)
        answer = np.where(income > 50, "yes", "no")
        answer = np.where(age > 60, "unknown", answer)
        columns = {"age": age, "income": income, "visits": rng.poisson(3, size)}
        frame = pd.DataFrame(columns)
        frames.append(frame.assign(hospital=hospital, answer=answer))
    return pd.concat(frames, ignore_index=True)


def hospitals(**options):
    """The federation of the table, split and standardized."""
    options = {"classes": CLASSES, **options}
    data = Federation.from_table(table(), "answer", "hospital", **options)
    return data.split(test=0.3, val=0.1)


def test_rows(data, hospital):
    """The rows of the table that are a hospital's test samples, in their order."""
    positions = data.lists("test")[data.client_id(hospital)]
    return table().iloc[positions.numpy()]


test_rows.__test__ = False  # it is no test
