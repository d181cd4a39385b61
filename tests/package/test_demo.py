"""A browser shows the page of `make demo` without an error.

The page is one file, and shows four systems and the distances.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest
from places import ROOT

pytestmark = [
    pytest.mark.long("the four systems on real data, ten rounds each"),
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
    urls = [url for pair in loads for url in pair if url]
    assert all(url.startswith("data:") for url in urls), urls
    assert len(re.findall("<h2", text)) == text.count("<svg") == 6
    assert text.count('<svg role="img" aria-label="') == text.count("Data: ") == 6
    assert '<meta name="viewport"' in text
    assert "nan" not in re.findall(r"<td>(.*?)</td>", text)


@pytest.mark.skipif(BROWSER is None, reason="needs a browser, chromium")
def test_a_browser_has_no_complaint(page, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text("<script>nothing()</script>")
    browser = [
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
    ]
    browser += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    options = {"capture_output": True, "text": True, "timeout": 120, "check": True}
    bad_run = subprocess.run([*browser, bad.as_uri()], **options)
    run = subprocess.run([*browser, page.as_uri()], **options)
    assert ":CONSOLE" in bad_run.stderr  # the browser does report errors
    assert ":CONSOLE" not in run.stderr, run.stderr
