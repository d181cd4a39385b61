"""The page of `make demo`: whole in one file, with four systems and the distances, and
no complaint of a browser."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from places import ROOT

pytestmark = [
    pytest.mark.deep("the four systems on real data, ten rounds each"),
    pytest.mark.xdist_group("demo"),
]
NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, ROOT / "examples" / "demo.py", "10"]
    subprocess.run(words, cwd=folder, env=env, check=True)
    return folder / "runs/demo/index.html"


def test_the_page_holds_all_that_it_shows(page):
    text = page.read_text()
    loads = re.findall(
        r"""\s(?:src|data)=["']?([^"'>]*)|<link[^>]*href=["']?([^"'>]*)""", text
    )
    assert not [
        load for pair in loads for load in pair if load and not load.startswith("data:")
    ]
    assert len(re.findall("<h2", text)) == text.count("<svg") == 5
    assert "nan" not in re.findall(r"<td>(.*?)</td>", text)


@pytest.mark.skipif(BROWSER is None, reason="needs a browser, chromium")
def test_a_browser_has_no_complaint(page, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text("<script>nothing()</script>")
    look = [
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
    ]
    look += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    how = {"capture_output": True, "text": True, "timeout": 120, "check": True}
    told, said = (
        subprocess.run([*look, f.as_uri()], **how).stderr for f in (bad, page)
    )
    assert ":CONSOLE" in told  # the browser would say so
    assert ":CONSOLE" not in said, said
