"""Writes docs/presets.md from the presets that are shipped.

.venv/bin/python docs/presets.py
"""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path

from tandem.launch.plan.placement import workers_of
from tandem.launch.run.opened.presets import FOLDER, Preset, load, names
from tandem.launch.run.several.placing import of_plan

PAGE = Path(__file__).with_name("presets.md")

HEAD = """# Presets

These presets are shipped; `tandem presets` lists them too. `.venv/bin/python docs/presets.py` writes this page from the
files in [launch/configs/](../launch/configs/), to which the names link.

A preset with a source has the settings that its source has published; the comment at the top of its file says what differs. A test
compares each with a table that is written by hand from the source, with every deviation listed
(`tests/launch/plan/test_published_presets.py`). Nobody has run those for GPUs yet, so their results are the
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

The column "GPUs" has the least memory that is enough; *shared* means that engine and learner use the same GPU. A dash means that the
settings are Tandem's own; where such a preset departs from a paper, its file says how.
"""


GPUS = re.compile(
    r"[;,] (?:one node of |engine and learner share )?(?P<count>\d+|one) GPUs? (?:with|of) (?P<size>\d+) GB"
    r"(?: or more|, one for the learner and one for vLLM)?"
)
"""What an ``about`` says of GPUs."""
SOURCE = re.compile(r"Source: (?P<source>(?:[^():.]|\([^()]*\)|[:.](?! |$))+)")
"""The source that a comment names, before it goes on to what was taken from there."""


def source(name: str) -> str:
    """Where a preset's settings were published; a dash if they are Tandem's own."""
    lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("#"), lines)
    found = SOURCE.match(" ".join(line.removeprefix("#").strip() for line in comment))
    return found["source"] if found else "–"


def gpus(preset: Preset) -> str:
    """How many GPUs a preset is for, of what size, and whether an engine and the learner share one of them."""
    found = GPUS.search(preset.about)
    if found is None:
        return "none"
    configs = [run.resolve(words) for _, run, words in of_plan(preset, [])]
    shared = any(config.launch.share_gpu and workers_of(config) for config in configs)
    count = found["count"].replace("one", "1")
    return f"{count} x {found['size']} GB" + (", shared" if shared else "")


def page() -> str:
    """The whole page."""
    rows = ["| name | what it is | GPUs | source |", "|---|---|---|---|"]
    for name in names():
        preset = load(name)
        cells = (
            f"[{name}](../launch/configs/{name}.yaml)",
            GPUS.sub("", preset.about),
            gpus(preset),
            source(name),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([HEAD, *rows]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
