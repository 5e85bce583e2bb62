"""Writes docs/presets.md from the first lines of the presets that are shipped.

.venv/bin/python docs/presets.py
"""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

from tandem.launch.run.opened.presets import FOLDER, load, names

PAGE = Path(__file__).with_name("presets.md")

HEAD = """# Presets

The presets that are shipped, as `tandem presets` lists them. `.venv/bin/python docs/presets.py` writes this page from the
first lines of the files in [launch/configs/](../launch/configs/).

A preset with a source has the settings that its source has published, and says what differs. A test holds each against
a table that is written by hand from the source, with every deviation listed
(`tests/launch/plan/test_published_presets.py`). Nobody has run those for GPUs yet, so that their results are the
sources' and not Tandem's. Their methods do run: `miniature-twin`, laid over a preset, keeps its objective, optimizer,
schedule, staleness, rewards and use of traces, and replaces model, data and sizes by the miniature's:

<!-- test: no: tests/e2e/test_twins.py runs this for the presets below -->
```bash
.venv/bin/tandem start qwen2.5-math-7b-rl-sft-loss-8gpu+miniature-twin
.venv/bin/tandem offline llama3-8b-cs336-sft-4gpu+miniature-twin data.pack_tokens=32
```

`one+another` lays the second preset over the first wherever a preset is named; in a file, `base` may be a list. Sections
are merged key by key, lists are replaced, and what the last named objective, optimizer or engine doesn't read is left
out.
"""


def paragraphs(name: str) -> list[str]:
    """The comment with which a preset's file begins, if that names a source."""
    lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comment = [line.removeprefix("#").strip() for line in takewhile(_is_comment, lines)]
    return comment if comment and comment[0].startswith("Source:") else []


def _is_comment(line: str) -> bool:
    return line.startswith("#")


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for heading, own in (("With published settings", False), ("Tandem's own", True)):
        parts.append(f"## {heading}\n")
        for name in names():
            comment = paragraphs(name)
            if own == bool(comment):
                continue
            about = load(name).about
            parts.append(f"- [`{name}`](../launch/configs/{name}.yaml): {about}.")
            parts += [f"  {line}" for line in comment]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
