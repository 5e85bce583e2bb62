"""The commands that the Markdown files show do work: marked blocks are run as they stand.

An HTML comment on the line before a fenced block says what is done with it:

``<!-- test: run -->``
    run from a folder that looks like the repository, with an empty ``runs/``;
``<!-- test: run after-run -->``
    the same, with a finished run of the miniature in ``runs/miniature``;
``<!-- test: no: REASON -->``
    not run, for the reason given.

In README.md every ``bash`` and ``python`` block must carry one of them.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from blocks import (
    BLOCK_DEADLINE_S,
    FINISHED_RUN_S,
    MARK,
    MARKED,
    ROOT,
    Block,
    blocks,
    lost_marks,
    place,
    run,
    run_after_run,
    sandbox,
)

MAIN_JOB = "bash launch/start_all.sh\n"
ALL = [block for name in ("README.md", "CONTRIBUTING.md") for block in blocks(ROOT / name)]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def keep(made: Path, shared: Path) -> None:
    """Gives a run of the main job to the fixture ``finished_run`` of this and the later stages."""
    complete = shared / "miniature.complete"
    if complete.exists() or not (made / "summary.json").exists():
        return
    shutil.copytree(made, shared / "miniature", ignore=shutil.ignore_patterns("*.sock"))
    complete.touch()


@pytest.mark.timeout(BLOCK_DEADLINE_S + 60)
@pytest.mark.parametrize("block", [one for one in ALL if one.mark == "run"], ids=place)
def test_a_marked_block_runs(block: Block, tmp_path: Path) -> None:
    folder = sandbox(tmp_path)
    if block.code != MAIN_JOB or "TANDEM_TEST_RUNS" not in os.environ:
        run(block, folder)
        return
    shared = Path(os.environ["TANDEM_TEST_RUNS"])
    shared.mkdir(parents=True, exist_ok=True)
    with (shared / "miniature.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run(block, folder)
        keep(folder / "runs" / "miniature", shared)


@pytest.mark.timeout(FINISHED_RUN_S + BLOCK_DEADLINE_S)
@pytest.mark.parametrize("block", [one for one in ALL if one.mark == "run after-run"], ids=place)
def test_a_block_for_a_finished_run_runs(block: Block, tmp_path: Path, finished_run: Path) -> None:
    run_after_run(block, tmp_path, finished_run)


def test_the_main_job_takes_the_model_from_almost_no_problem_to_most_of_them(
    finished_run: Path,
) -> None:
    summary = json.loads((finished_run / "summary.json").read_text())
    assert summary["accuracy_before"] < 0.05
    assert summary["accuracy_after"] > 0.5


def test_every_block_of_the_readme_says_whether_it_is_run() -> None:
    unmarked = [
        block.place for block in blocks(ROOT / "README.md") if not MARK.fullmatch(block.mark)
    ]
    assert not unmarked, f"no <!-- test: ... --> before these blocks: {unmarked}"


def test_a_mark_is_read_with_its_block(tmp_path: Path) -> None:
    text = "<!-- test: run -->\n```bash\ntrue\n```\n\n```python\npass\n```\n"
    found = [(m["mark"], m["language"], m["code"]) for m in MARKED.finditer(text)]
    assert found == [("run", "bash", "true\n"), (None, "python", "pass\n")]


def test_the_presets_that_the_readme_names_get_their_data_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are made by the run, or fetched from the hub."""
    from tandem.common.hub import is_hub_name
    from tandem.launch.run.opened.presets import load, names

    monkeypatch.chdir(tmp_path)
    named = re.findall(r"start_all\.sh ([\w.-]+)", (ROOT / "README.md").read_text("utf-8"))
    shown = [name for name in names() if name in named]
    assert "qwen2.5-math-7b-luffy-8gpu" in shown
    lacking = {}
    for name in shown:
        data = load(name).resolve([]).data
        paths = [one.path for one in (*data.train, *data.evaluate)]
        lacking[name] = [
            path for path in paths if "{run}" not in path and not is_hub_name(path, Path(path))
        ]
    assert not {name: paths for name, paths in lacking.items() if paths}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_mark_of_a_page_is_that_of_a_block(page: Path) -> None:
    assert lost_marks(page.read_text("utf-8")) == []


@pytest.mark.parametrize(
    ("mark", "block", "lost"),
    [
        ("<!-- test: run -->", "```bash", False),
        ("<!-- test: run -->\n", "```python", False),
        ("<!-- test: no: it takes an hour -->", "```bash", False),
        ("<!-- test: no -->", "```bash", True),
        ("<!-- test: run after run -->", "```bash", True),
        ("<!-- tests: run -->", "```bash", True),
        ("<!-- test run -->", "```bash", True),
        ("<!-- test: run -->", "```sh", True),
        ("<!-- test: run -->\nSo it is done:", "```bash", True),
    ],
)
def test_a_mark_by_which_nothing_is_done_is_found(mark: str, block: str, lost: bool) -> None:
    assert lost_marks(f"{mark}\n{block}\ntrue\n```\n") == [mark.splitlines()[0]] * lost
