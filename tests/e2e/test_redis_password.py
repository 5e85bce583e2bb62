"""Stages on a Redis whose password stands in ``replay.redis_url``; a sweep on one is in test_sweep.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from passwords import holding, server_with_password, words_until_the_end
from processes import Run, summary

BRIEF = ("evaluate.every=0", "evaluate.at_start=false", "evaluate.at_end=false")


@pytest.mark.timeout(400)
@pytest.mark.byhand
def test_stages_are_summed_up_without_it(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with server_with_password(tmp_path_factory.mktemp("redis")) as url:
        words = ("sft.run.steps=1", "rl.run.steps=1", *BRIEF, f"rl.replay.redis_url={url}")
        run = Run(tmp_path, "start", "miniature-sft-rl", *words)
        # What the command forks has its words, in which the user has written the password.
        words_until_the_end(run)
    assert run.process.returncode == 0, run.said()
    assert holding(tmp_path) == {"join.json"}
    overrides = summary(tmp_path / "runs" / "miniature-sft-rl")["overrides"]
    assert any(word.startswith("rl.replay.redis_url=") for word in overrides)
