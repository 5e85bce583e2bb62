"""What a run says of itself while something of the user's own fails."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from processes import Run

pytestmark = pytest.mark.timeout(300)


def test_a_reward_function_that_always_fails_is_told_while_nothing_is_trained(
    tmp_path: Path,
) -> None:
    (tmp_path / "own.py").write_text(
        "def pays(completions, **columns):\n    raise KeyError('no such column')\n"
    )
    run = Run(
        tmp_path,
        *("start", "miniature-on-policy", "run.dir=run", "evaluate.at_start=false"),
        "reward.components=[{name: accuracy}, {name: 'own:pays', weight: 0.5}]",
    )
    run.wait_for(lambda: "alarm: " in run.said(), "alarm")
    (alarm,) = [line for line in run.said().splitlines() if "alarm: " in line]
    assert "reward" in alarm
    assert "100% of the last minute's requests to graders crashed" in alarm
    assert "own:pays: KeyError: 'no such column'" in alarm
    assert "step " not in run.said()
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
