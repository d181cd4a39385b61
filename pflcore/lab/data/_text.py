"""Text as numbers: tokens of characters or of words.

A vocabulary is a tuple of tokens, whose places are their numbers. It begins with
`SPECIAL`: a padded step, a token that the vocabulary lacks, and the two ends of a text.

Symbols: a text has t tokens, of which T are read; n texts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pflcore.check import require

SPECIAL = ("<pad>", "<other>", "<begin>", "<end>")
PAD = 0
OTHER = 1
# Printable ASCII, and the end of a line.
CHARACTERS = (*SPECIAL, "\n", *map(chr, range(ord(" "), ord("~") + 1)))
Numbers = NDArray[np.int64]


def split_words(text: str) -> list[str]:
    """The words and the marks of a text, in lower case."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def frequent_words(texts: Iterable[Sequence[str]], size: int) -> tuple[str, ...]:
    """A vocabulary of the `size` most frequent words; words as frequent by spelling."""
    counts = Counter(word for words in texts for word in words)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return (*SPECIAL, *ranked[:size])


class Numbering:
    """The numbers of tokens in a vocabulary.

    Args:
        vocabulary: the tokens, as `CHARACTERS` or `frequent_words` gives them
    """

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self.number_of = {token: number for number, token in enumerate(vocabulary)}

    def encode(self, tokens: Iterable[str]) -> Numbers:
        """The numbers [t] of tokens."""
        numbers = [self.number_of.get(token, OTHER) for token in tokens]
        return np.array(numbers, dtype=np.int64)

    def encode_rows(self, texts: Sequence[Iterable[str]], length: int) -> Numbers:
        """The numbers [n, T] of the first T = `length` tokens of each text."""
        rows = np.full((len(texts), length), PAD, dtype=np.int64)
        for row, tokens in zip(rows, texts, strict=True):
            numbers = self.encode(tokens)[:length]
            row[: len(numbers)] = numbers
        return rows


SENT140_TEXT = 4  # the place of the text in a row of Sent140


def number_texts(
    users: dict[str, dict[str, tuple[Any, Any]]],
    kind: Literal["characters", "words"],
    length: int,
    words: int,
) -> bool:
    """Turns the texts of LEAF's users into tokens, in place.

    Returns True where the targets were characters. Raises ValueError where an input is
    no text.

    Args:
        users: for each split the users' texts and targets
        kind: what tokens are
        length: T, tokens of a text
        words: size of the vocabulary of words, which is that of the training users
    """
    texts: dict[tuple[str, str], list[Sequence[str]]] = {}
    for split, pairs in users.items():
        for user, (x, _) in pairs.items():
            texts[split, user] = [_tokens(value, kind, user) for value in x]
    vocabulary = CHARACTERS
    if kind == "words":
        training = []
        for (split, _), rows in texts.items():
            if split == "train":
                training += rows
        vocabulary = frequent_words(training, words)
    numbering = Numbering(vocabulary)
    has_text_targets = False
    for split, pairs in users.items():
        for user, (_, y) in pairs.items():
            x = numbering.encode_rows(texts[split, user], length)
            has_text_targets = has_text_targets or any(isinstance(v, str) for v in y)
            pairs[user] = (x, _targets(y, kind, user))
    return has_text_targets and kind == "characters"


def _tokens(value: Any, kind: str, user: str) -> Sequence[str]:
    """The tokens of a text, or of the text in a row of Sent140."""
    if isinstance(value, list) and len(value) > SENT140_TEXT:
        value = value[SENT140_TEXT]
    require(isinstance(value, str), f"x of {user}", "texts, or Sent140's rows", value)
    return split_words(value) if kind == "words" else value


def _targets(values: Any, kind: str, user: str) -> Any:
    """The targets as numbers; texts are labels of words, or characters.

    Labels that are texts ("0", "4") are those of some releases of Sent140.
    """
    if not all(isinstance(value, str) for value in values):
        return np.asarray(values)
    if kind == "words":
        fits = all(value.isdecimal() for value in values)
        require(fits, f"y of {user}", "labels, whole numbers", values)
        return np.array(values, dtype=np.int64)
    fits = all(len(value) == 1 for value in values)
    require(fits, f"y of {user}", "labels, or one character for each text", values)
    return Numbering(CHARACTERS).encode(values)
