"""Makers of golden numbers agree with the stored files, and can rewrite them."""

import json
import shutil

from places import ROOT, ran

GOLDEN = ROOT / "tests" / "golden"
MAKERS = GOLDEN / "make"


def test_golden_makers_agree_with_the_stored_numbers():
    done = ran(str(MAKERS))

    assert done.returncode == 0, done.stdout + done.stderr
    assert "no maker" not in done.stdout


def test_golden_makers_share_no_code_with_the_package():
    for path in MAKERS.glob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        imports = [x for x in lines if x.lstrip().startswith(("import ", "from "))]
        assert not any("pflcore" in line or "torch" in line for line in imports), path


def test_golden_maker_finds_and_replaces_a_wrong_number(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "golden")
    rounds = tmp_path / "golden" / "rounds.json"
    right = rounds.read_text(encoding="utf-8")
    case = json.loads(right)["fedprox, 3 epochs"]
    (number,) = case["rounds"][0]["then"]["server"]["x"]
    wrong = number + 1.0
    assert right.count(f"[{number}]") == 1
    text = right.replace(f"[{number}]", f"[{wrong}]")
    rounds.write_text(text, encoding="utf-8")
    maker = str(tmp_path / "golden" / "make" / "fedavg.py")

    found = ran(maker)
    ran(maker, "--write")

    assert found.returncode == 1 and f"stored {wrong}, computed" in found.stdout
    assert rounds.read_text(encoding="utf-8") == right
