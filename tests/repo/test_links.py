"""Every local link in the Markdown files leads somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = {".venv", "runs", "build", "dist", "node_modules", ".git", ".import"}
FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^\s{0,3}\[[^\]]+\]:\s*<?(\S+?)>?\s*$", re.MULTILINE)
SOURCE = re.compile(r"(?:src|href)=\"([^\"]+)\"")


def markdown_files() -> list[Path]:
    """The repository's own Markdown files."""
    found = []
    for path in ROOT.rglob("*.md"):
        parts = path.relative_to(ROOT).parts
        if not any(part in SKIPPED or part.startswith(".venv") for part in parts):
            found.append(path)
    return sorted(found)


def anchors(text: str) -> set[str]:
    """The anchors that a Markdown file's headings get: lower case, punctuation gone, blanks to hyphens."""
    found: set[str] = set()
    counts: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6}\s+(.+?)\s*#*\s*$", FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        seen = counts.get(slug, 0)
        counts[slug] = seen + 1
        found.add(slug if seen == 0 else f"{slug}-{seen}")
    found.update(re.findall(r"<a\s+(?:id|name)=\"([^\"]+)\"", text))
    return found


def local_links(text: str) -> Iterator[str]:
    """Targets that are no web or mail address, outside code blocks."""
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))
    for pattern in (LINK, REFERENCE, SOURCE):
        for target in pattern.findall(prose):
            if not re.match(r"[a-z][a-z0-9+.-]*:", target, re.IGNORECASE):
                yield target


def broken(path: Path, text: str) -> list[str]:
    """The links of a Markdown file that lead nowhere."""

    def content(goal: Path) -> str:
        return text if goal == path else goal.read_text("utf-8")

    bad = []
    for target in local_links(text):
        name, _, anchor = unquote(target).partition("#")
        goal = (path.parent / name).resolve() if name else path
        if not goal.exists():
            bad.append(f"{target}: {name} does not exist")
        elif ROOT not in goal.parents and goal != ROOT:
            bad.append(f"{target}: leads out of the repository")
        elif anchor and goal.suffix == ".md" and anchor not in anchors(content(goal)):
            bad.append(f"{target}: no heading gives #{anchor}")
    return bad


@pytest.mark.parametrize("path", markdown_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_local_links_resolve(path: Path) -> None:
    bad = broken(path, path.read_text("utf-8"))
    assert not bad, f"{path.relative_to(ROOT)}: " + "; ".join(bad)


def ragged(text: str) -> list[str]:
    """The rows of tables that haven't as many cells as the table's head."""
    bad, cells = [], 0
    for line in FENCE.sub("", text).splitlines():
        if not line.startswith("|"):
            cells = 0
            continue
        # A bar in code or behind a backslash separates nothing.
        own = re.sub(r"`[^`]*`|\\\|", "", line).strip().strip("|").count("|") + 1
        cells = cells or own
        if own != cells:
            bad.append(line)
    return bad


@pytest.mark.parametrize("path", markdown_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_rows_of_tables_have_the_cells_of_their_head(path: Path) -> None:
    assert not ragged(path.read_text("utf-8"))


def test_a_row_with_a_cell_too_many_is_found() -> None:
    assert ragged("| a | b |\n|---|---|\n| `|` | 1 |\n| x | y | z |\n") == ["| x | y | z |"]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("[a](nowhere.md)", 1),
        ("![figure](no/such.png)", 1),
        ("[a][b]\n\n[b]: nowhere.md\n", 1),
        ("[a](#no-such-heading)", 1),
        ("[a](#a-heading)\n\n## A heading\n", 0),
        ("[a](README.md#no-such-heading)", 1),
        ("[a](README.md#everyday-commands)", 0),
        ("[a](https://example.org/nowhere)", 0),
        ("```\n[a](nowhere.md)\n```\n", 0),
        ("`[a](nowhere.md)`", 0),
    ],
)
def test_a_link_that_leads_nowhere_is_found(text: str, count: int) -> None:
    assert len(broken(ROOT / "CONTRIBUTING.md", text)) == count
