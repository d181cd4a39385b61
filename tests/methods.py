"""The algorithms' classes by their own names, taken from the public table."""

from pflcore.algorithms import ALGORITHMS

globals().update({cls.__name__: cls for cls in ALGORITHMS.values()})
