"""A taskset of verifiers that nobody has changed, in its own virtual environment, with a real model and endpoint.

::

    bash tests/rollout/foreign/verifiers_env.sh /tmp/verifiers-env
    TANDEM_VERIFIERS=/tmp/verifiers-env/bin/python bash tests/run.sh tests/rollout/foreign -m byhand

The first line needs the network and 600 MB; the tests need none (``unshare -rn`` shows it), and two minutes.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import small_model  # noqa: E402

from tandem.common.config.environments import VerifiersEnvironment  # noqa: E402
from tandem.common.records import Source, Verdict  # noqa: E402
from tandem.rollout.environments.descendants import Family  # noqa: E402
from tandem.rollout.environments.verifiers import VerifiersWorld  # noqa: E402
from tandem.rollout.environments.wire import Played  # noqa: E402

PYTHON = os.environ.get("TANDEM_VERIFIERS", "")
pytestmark = [
    pytest.mark.byhand,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="TANDEM_VERIFIERS names no Python with verifiers"),
]


def spec(harness: str, client: dict[str, Any]) -> VerifiersEnvironment:
    config = {
        "taskset": {"id": "textarena", "game": "Wordle-v0"},
        "player": {
            "harness": {"id": harness},
            "runtime": {"type": "subprocess"},
            "max_turns": 2,
        },
    }
    path = (str(HERE / "planted"),)
    return VerifiersEnvironment(python=PYTHON, config=config, client=client, path=path)


def clients(folder: Path) -> dict[str, dict[str, Any]]:
    # A local folder is no name that renderers knows, so the renderer is named. Qwen3's own way is to leave earlier
    # thoughts out once the user speaks again: rows would break there.
    renderer = {"name": "qwen3", "thinking_retention": "all"}
    named = {"renderer": renderer, "renderer_model_name": str(folder)}
    return {"eval": {"type": "eval"}, "train": {"type": "train", **named}}


@pytest.mark.parametrize("kind", ["eval", "train"])
def test_64_rollouts_of_blackjack_in_four_steps(tmp_path: Path, kind: str) -> None:
    async def body() -> list[tuple[Played, Any]]:
        world = VerifiersWorld(
            "game", spec("null", clients(tmp_path)[kind]), Family(), tmp_path / "server.log"
        )
        async with small_model.serving(tmp_path) as endpoint:

            async def one(name: str, seed: int) -> tuple[Played, Any]:
                session = small_model.session(endpoint, name)
                task = small_model.blackjack(seed)
                played = await world.play(small_model.request(task, session.base_url), 300)
                return played, await endpoint.finish(session)

            found = []
            try:
                await world.start()
                for step in range(4):
                    episodes = (one(f"{step}/{n}", 4 * step + n // 4) for n in range(16))
                    found += await asyncio.gather(*episodes)
            finally:
                await world.close()
            assert world.starts == 1
            return found

    found = asyncio.run(body())
    assert len(found) == 64
    failed = [played for played, _ in found if played.failure is not None]
    # A random model writes <|endoftext|> now and then. To renderers an answer ends there, but it goes on, and
    # verifiers refuses the next turn: "prompt tokens do not exactly extend the stored rollout prefix".
    assert len(failed) <= (6 if kind == "train" else 0), failed
    for played, recorded in found:
        if played.failure is not None:
            assert (played.failure, played.reward) == (Verdict.ENV_FAILED, None)
            continue
        assert played.reward in (-1.0, 0.0, 1.0)
        assert recorded is not None
        assert recorded.retokenised == 0
        own = int((recorded.source == Source.OWN).sum())
        assert own == sum(turn.end - turn.start for turn in recorded.turns)
    assert max(len(recorded.turns) for _, recorded in found) == 2


def test_a_planted_failure_of_its_harness_is_no_zero(tmp_path: Path) -> None:
    async def body() -> None:
        world = VerifiersWorld("game", spec("failing_harness", {}), Family(), tmp_path / "log")
        async with small_model.serving(tmp_path) as endpoint:

            async def play(name: str, seconds: float) -> Played:
                session = small_model.session(endpoint, name)
                task = {**small_model.blackjack(1), "name": name}
                played = await world.play(small_model.request(task, session.base_url), seconds)
                await endpoint.finish(session)
                return played

            try:
                await world.start()
                fails, sleeps, well = await asyncio.gather(
                    play("#fails", 60), play("#sleeps", 5), play("well", 60)
                )
                assert (fails.failure, fails.reward) == (Verdict.ENV_FAILED, None)
                assert "planted" in fails.detail
                assert sleeps.failure is Verdict.ENV_TIMEOUT
                assert well.failure is None
                assert (await play("well again", 60)).failure is None
                assert world.starts == 1
            finally:
                await world.close()

    asyncio.run(body())
