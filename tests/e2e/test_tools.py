"""``miniature-tools`` as a user runs it, a few steps of it: episodes of two turns, and what was recorded of them."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from processes import Run

from tandem.common.records import Sample, Source
from tandem.launch.miniature.tools.problems import TOOLS_HEAD, result_message
from tandem.launch.miniature.tools.tokenizer import build
from tandem.replay import archive

FEW = (
    "run.steps=30",
    "log.archive=true",
    "evaluate.every=0",
    "evaluate.limit=40",
    "data.evaluate.0.limit=40",
    "environments.episodes=8",
)


def pieces(sample: Sample) -> list[tuple[Source, str]]:
    """The response as runs of tokens with one source each, as text."""
    tokenizer = build()
    parts = groupby(
        zip(sample.source.tolist(), sample.tokens.tolist(), strict=True), lambda at: at[0]
    )
    return [(Source(source), tokenizer.decode([t for _, t in part])) for source, part in parts]


@pytest.mark.byhand
@pytest.mark.timeout(400)
def test_episodes_are_played_recorded_as_sampled_and_learned_from(tmp_path: Path) -> None:
    run = Run(tmp_path, "start", "miniature-tools", "run.dir=run", *FEW)
    assert run.wait(360) == 0, run.said()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accuracy_before"] <= 0.1
    # Half of the job; without learning one sample in fourteen is right.
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    steps = [record for record in records if "environment/turns" in record]
    assert len(steps) == 30
    assert sum(record["reward/mean"] for record in steps[-5:]) / 5 > 0.25
    assert sum(record["environment/retokenised"] for record in steps) == 0
    assert steps[-1]["environment/turns"] > steps[0]["environment/turns"]

    called = 0
    for step in archive.steps(tmp_path / "run" / "archive"):
        for found in step.read():
            assert found.group.prompt_text.startswith(TOOLS_HEAD)
            for sample in found.group.samples:
                parts = pieces(sample)
                assert parts[0][0] is Source.OWN
                own = sample.source == Source.OWN
                assert np.isfinite(sample.logprobs[own]).all()
                turns = sample.episode.turns if sample.episode is not None else ()
                if len(parts) != 3 or "<tool_call>" not in parts[0][1] or turns[0].malformed:
                    continue
                (_, call), (told, result), (_, answer) = parts
                called += 1
                arguments = json.loads(call.split("\n")[1])["arguments"]
                if result_message("")[:8] != result[:8] or '"error"' in result:
                    continue  # A tool or an argument that isn't there.
                product = str(arguments["a"] * arguments["b"])
                assert told is Source.ENVIRONMENT
                assert result == result_message(product)
                if answer.startswith(f"\\boxed{{{product}}}") and product == found.group.gold:
                    assert sample.reward == 1.0
    # 6 in 100 of 12 steps of 64 episodes, at least, and more with every step.
    assert called >= 20


@pytest.mark.byhand
@pytest.mark.timeout(300)
def test_without_the_tool_nothing_is_called_and_nothing_learned(tmp_path: Path) -> None:
    run = Run(
        *(tmp_path, "start", "miniature-tools", "run.dir=run", *FEW, "run.steps=3"),
        "environments.default=no_calculator",
    )
    assert run.wait(280) == 0, run.said()
    for step in archive.steps(tmp_path / "run" / "archive"):
        for found in step.read():
            assert not found.group.prompt_text.startswith(TOOLS_HEAD)
            for sample in found.group.samples:
                assert (sample.source == Source.OWN).all()


@pytest.mark.byhand
@pytest.mark.timeout(300)
def test_an_agent_with_an_openai_client_is_trained_by_the_command_in_the_docs(
    tmp_path: Path, root: Path
) -> None:
    page = (root / "docs" / "environments.md").read_text(encoding="utf-8")
    (block,) = (one for one in page.split("```bash\n") if "my_agent.py" in one)
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parents[1])
    done = subprocess.run(
        ["bash", "-e", "-c", block.partition("```")[0]],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
    lines = (tmp_path / "runs" / "agent" / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    rewards = [record["reward/mean"] for record in steps]
    assert len(rewards) == 20
    assert sum(rewards[-4:]) > 2 * sum(rewards[:4])
    for figure in ("failed", "retokenised", "branches"):
        assert sum(record[f"environment/{figure}"] for record in steps) == 0, figure
