"""The site: it builds with no warning and asks no other host for anything."""

import os
import re
import subprocess
import sys
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
