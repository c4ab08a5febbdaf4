"""The documentation's code runs, and its links and its table of contents lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
WITH_README = [*PAGES, ROOT / "README.md"]
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
NAV_ENTRY = re.compile(r"^\s*- ([\w./-]+\.md)$", re.MULTILINE)


def name_of(page):
    return page.relative_to(DOCS if page.is_relative_to(DOCS) else ROOT).as_posix()


def python_blocks(page):
    """(line number of the first line, code) of each block of a page."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, m.start()) + 2, m[1]) for m in PYTHON.finditer(text)]


@pytest.mark.parametrize("page", [p for p in WITH_README if python_blocks(p)], ids=name_of)
def test_python_blocks_run_in_order(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    namespace = {"__name__": "__docs__"}
    for line, code in python_blocks(page):
        # Leading newlines make a traceback name the page's own lines.
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", WITH_README, ids=name_of)
def test_relative_links_lead_to_files(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_table_of_contents_names_every_page_once():
    entries = NAV_ENTRY.findall((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(entries) == sorted(name_of(p) for p in PAGES)
