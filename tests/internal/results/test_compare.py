"""The explanations of differences are those of the document."""

import re

from places import ROOT

from pflcore.results._compare import EFFECTS


def test_every_explanation_is_a_line_of_the_document():
    text = (ROOT / "docs" / "determinism.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*?) \| (.*?) \|", text, re.M)
    for effect in EFFECTS:
        of_it = [row for row in rows if row[0].startswith(effect.what)]
        assert len(of_it) == 1 and of_it[0][1].startswith(effect.effect), effect
