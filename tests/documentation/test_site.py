"""The site: it builds with no warning, asks no other host for anything, and its drawings are whole."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site; a warning fails the build."""
    where = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", where], cwd=ROOT,
        capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert not done.returncode and "WARNING" not in done.stderr, done.stderr  # --quiet would pass over warnings
    return where


def test_every_page_is_built(site) -> None:
    pages = {p.relative_to(ROOT / "docs") for p in (ROOT / "docs").rglob("*.md")}
    for page in pages:
        name = page.parent if page.stem == "index" else page.with_suffix("")
        assert (site / name / "index.html").is_file(), page


def test_no_page_loads_anything_from_elsewhere(site) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]+src=\"?([^\s\">]+)", text)
        loaded += re.findall(r"<link[^>]+rel=\"?stylesheet\"?[^>]*href=\"?([^\s\">]+)", text)
        strangers = [x for x in loaded if x.startswith(("http:", "https:", "//"))]
        assert not strangers, (page, strangers)


def test_the_api_stands_in_its_pages(site) -> None:
    text = (site / "api" / "attach" / "index.html").read_text(encoding="utf-8")
    assert "token_budget" in text and "save_prefix" in text and "SparseKVError" in text


@pytest.mark.parametrize("name", ["way-of-a-key.svg", "way-of-a-query.svg"])
def test_a_drawing_takes_the_pages_colour_and_its_labels_fit(name, site) -> None:
    text = (ROOT / "docs" / "assets" / name).read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert "currentColor" in text and "#000" not in text and "#fff" not in text
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    labels = [e for e in root.iter("{http://www.w3.org/2000/svg}text")]
    for label in labels:
        assert 0 < float(label.attrib["x"]) < width and 0 < float(label.attrib["y"]) < height
    page = (site / "concepts" / "index.html").read_text(encoding="utf-8")
    assert all(label.text.split()[0] in page for label in labels)
