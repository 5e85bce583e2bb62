"""Records what a real server of verifiers answers, for the server that stands in for it in the tests.

::

    PYTHONPATH=.import .venv/bin/python tests/rollout/foreign/record_frames.py /tmp/verifiers-env/bin/python

Each answer is kept as ``[kind, map]``, the map in base64.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import small_model

from tandem.common.config.environments import VerifiersEnvironment
from tandem.rollout.environments import verifiers, wire
from tandem.rollout.environments.descendants import Family

HERE = Path(__file__).resolve().parent
FRAMES = HERE / "verifiers_frames.json"
CONFIG = {
    "taskset": {"id": "textarena", "game": "Wordle-v0"},
    "player": {
        "harness": {"id": "failing_harness"},
        "runtime": {"type": "subprocess"},
        "max_turns": 2,
    },
}


async def record(python: str, folder: Path) -> dict[str, list[list[str]]]:
    spec = VerifiersEnvironment(python=python, config=CONFIG, path=(str(HERE / "planted"),))
    world = verifiers.VerifiersWorld("game", spec, Family(), folder / "log")
    found: dict[str, list[list[str]]] = {}
    async with small_model.serving(folder) as endpoint:
        child = await world._started()
        assert child.listening is not None
        child.listening.cancel()

        async def ask(name: str, method: bytes, data: bytes, **changes: Any) -> None:
            await child.socket.send_multipart([name.encode(), method, data])

        async def hear(name: str) -> None:
            answers = found[name] = []
            while not answers or answers[-1][0] != "reply":
                said, kind, data = await asyncio.wait_for(child.socket.recv_multipart(), 60)
                if said == name.encode():
                    answers.append([kind.decode(), base64.b64encode(data).decode()])

        async def run(name: str, task: dict[str, Any], **changes: Any) -> None:
            session = small_model.session(endpoint, name, **changes)
            request = small_model.request(task, session.base_url)
            await ask(name, b"run", verifiers.run_map(request, {}))
            if name == "cancelled":
                await asyncio.sleep(3)
                await ask("cancel", b"cancel", msgspec.msgpack.encode({"request_id": name}))
                await hear("cancel")
            await hear(name)
            await endpoint.finish(session)

        task = small_model.blackjack(3)
        await run("played", task)
        await run("full", task, longest=30)
        await run("failed", task | {"name": "#fails"})
        await run("cancelled", task | {"name": "#sleeps"})
        await run("refused", {"prompt": "no info"})
        await ask("health", b"health", msgspec.msgpack.encode({}))
        await hear("health")
        await ask("unknown", b"unknown", msgspec.msgpack.encode({}))
        await hear("unknown")
    await world.close()
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(record(sys.argv[1], Path(folder)))
    FRAMES.write_text(json.dumps(found, indent=0) + "\n")
    for name, answers in found.items():
        *deltas, reply = [base64.b64decode(data) for _, data in answers]
        print(name, len(deltas), sum(map(len, deltas)) + len(reply), wire.read_reply(reply))


if __name__ == "__main__":
    main()
