"""The links of the pages lead somewhere, and so do the walks and the tree of the README; pages stay short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# The most words of the pages that are read from top to bottom.
LIMITS = {"README": 1600, "running": 2500} | dict.fromkeys(
    ("models", "clients", "from_other_servers", "exactness", "troubleshooting"), 900
)


def anchors_of(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    astray = []
    for link in (link for link in links if "://" not in link):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            astray.append(link)
    assert astray == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem in LIMITS], ids=lambda page: page.name)
def test_pages_for_users_are_short(page: Path) -> None:
    assert len(page.read_text().split()) <= LIMITS[page.stem]


def files_of_the_walks(page: str) -> Iterator[str]:
    """A line names a folder with its first file alone: server/http/guard.py, keys.py."""
    for line in re.findall(r"^(?:[ \d]\d|  ) (\w+/.+)$", page, re.MULTILINE):
        folder = ""
        for name in re.findall(r"[\w/]+\.py", line):
            path = name if name.startswith(("server/", "engine/")) else f"{folder}/{name}"
            folder = path.rpartition("/")[0]
            yield path


def folders_of_the_tree(page: str) -> Iterator[str]:
    """A line that is indented names folders of the last one that is not."""
    package = ""
    for line in page.partition("## The tree\n\n```\n")[2].partition("```")[0].splitlines():
        names = re.findall(r"(?:^ *|(?<=/ )|;  )(\w+)/", line)
        if not line.startswith(" "):
            package = names.pop(0)
            yield package
        yield from (f"{package}/{name}" for name in names)


def test_every_file_and_folder_of_the_readme_exists() -> None:
    page = (ROOT / "README.md").read_text()
    files, folders = set(files_of_the_walks(page)), set(folders_of_the_tree(page))
    assert len(files) > 40
    assert len(folders) > 30
    assert [path for path in files | folders if not (ROOT / path).exists()] == []
