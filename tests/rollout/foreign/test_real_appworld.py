"""AppWorld's real server, for those who have its data.

::

    TANDEM_APPWORLD=/opt/appworld TANDEM_APPWORLD_PYTHON=/opt/appworld-env/bin/python \\
      bash tests/run.sh tests/rollout/foreign -m byhand

Without the data (an empty folder ``data`` is enough) it is seen at least that the server starts and refuses.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.rollout.environments.appworld import AppWorld, AppWorldError

PYTHON = os.environ.get("TANDEM_APPWORLD_PYTHON", "")
ROOT = Path(os.environ.get("TANDEM_APPWORLD", "."))
TASKS = ROOT / "data" / "datasets" / "dev.txt"
pytestmark = [
    pytest.mark.byhand,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="TANDEM_APPWORLD_PYTHON names no Python with AppWorld"),
]


@pytest.fixture
def world() -> Iterator[AppWorld]:
    serve = "-m uvicorn appworld.serve.environment:app --host 127.0.0.1 --port {port}"
    made = AppWorld(f"{PYTHON} {serve}", root=str(ROOT))
    yield made
    made.close()


def test_an_unknown_task_is_refused_and_the_server_ended(world: AppWorld) -> None:
    with pytest.raises(AppWorldError, match="/initialize with 500"):
        world.reset({"task_id": "no_such_task_1"})
    assert world._server is None


@pytest.mark.skipif(not TASKS.exists(), reason="there is no data")
def test_a_task_is_played_and_evaluated(world: AppWorld) -> None:
    task = TASKS.read_text().split()[0]
    prompt = world.reset({"task_id": task})[1]["content"]
    assert "Task: " in prompt
    shown, reward, over = world.step("<code>print(apis.api_docs.show_app_descriptions())</code>")
    assert "spotify" in shown
    assert (reward, over) == (0.0, False)
    assert "Traceback" in world.step("<code>1 / 0</code>")[0]
    _, reward, over = world.step("<code>apis.supervisor.complete_task()</code>")
    assert over
    assert 0.0 <= reward < 1.0, "nothing was done"
    # Opened again, it begins anew.
    assert world.reset({"task_id": task})[1]["content"] == prompt
