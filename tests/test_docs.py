"""What the documentation points to exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *(page for top in ("docs", "csrc", "bench") for page in (ROOT / top).rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]+)")
FILE = re.compile(r"`((?:bench|csrc|docs|engine|examples|kimi_kernels|tests)/[\w./-]+\.\w+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text()
    links = [page.parent / link for link in LINK.findall(text) if "://" not in link]
    missing = [str(path) for path in [*links, *(ROOT / name for name in FILE.findall(text))] if not path.exists()]
    assert missing == []


def test_pages_are_found() -> None:
    assert {"README.md", "architecture.md", "routing.md"} <= {page.name for page in PAGES}
