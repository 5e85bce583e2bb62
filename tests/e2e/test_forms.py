"""The miniature trains from its problems in any form, by presets that differ in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import Run

STEPS = 150
PRESET = """
base: miniature
run: {{steps: {steps}}}
evaluate: {{every: 0}}
data:
  train: [{{path: {expert}, name: expert}}, {{path: {fresh}, name: fresh}}]
"""


@pytest.mark.byhand
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("expert", "fresh"),
    [
        (None, None),
        ("luffy", "luffy"),
        ("conversation", "conversation"),
        ("prompt_response", "question_answer"),
        ("problem_solution", "gsm8k"),
    ],
)
def test_the_miniature_trains_from_every_form(
    tmp_path: Path, finished_run: Path, expert: str | None, fresh: str | None
) -> None:
    paths = {}
    for name, form in (("expert", expert), ("fresh", fresh)):
        paths[name] = finished_run / "data" / f"{name}.parquet"
        if form is not None:
            source, paths[name] = paths[name], tmp_path / f"{name}.jsonl"
            made = Run(tmp_path, "ingest", str(source), "--write", str(paths[name]), "--as", form)
            assert made.wait() == 0, made.said()
    preset = tmp_path / "mine.yaml"
    preset.write_text(PRESET.format(steps=STEPS, **paths))
    run = Run(tmp_path, "start", str(preset), f"run.dir={tmp_path / 'run'}")
    assert run.wait() == 0, run.said()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["samples_trained"] == STEPS * 64
    # Without its traces it learns nothing.
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.2
