"""``tandem serve`` on a live run: a real Redis, a real publisher of weights, and the command as a process."""

from __future__ import annotations

import asyncio
import json
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

# In this folder.
from forked import Forked
from forked_targets import command
from planted_engine import PlantedEngine

from tandem.common.config import build, to_yaml
from tandem.common.models import load_model, load_tokenizer
from tandem.common.records import Version
from tandem.common.run_folder import RunFolder
from tandem.common.weights.manifest import ScoredRows
from tandem.common.weights.sender import WeightSender
from tandem.learner.scored import fixed_rows
from tandem.replay.connection import connect
from tandem.replay.ledger import Ledger
from tandem.replay.ledger_records import LedgerSettings
from tandem.replay.members import Members, membership
from tandem.replay.store import RunStore
from tandem.rollout.following import Following

PROMPT = "49-6+8-3=?<think>"


def until(holds: Callable[[], Any], what: str, deadline: float = 60.0) -> Any:
    """Waits for a true value and returns it."""
    end = time.monotonic() + deadline
    while not (found := holds()):
        assert time.monotonic() < end, f"waited {deadline:.0f} s in vain for {what}"
        time.sleep(0.02)
    return found


class Run:
    """What of a run is needed to publish weights."""

    def __init__(self, server: Any, folder: Path) -> None:
        self.join = server.join()
        self.file = folder / "join.json"
        RunFolder(folder).write_join(self.join)
        self.store = connect(self.join)
        self.config = build(
            {
                "run": {"steps": 10},
                "data": {"train": [{"path": "none"}], "max_prompt_tokens": 32},
                "rollout": {"engine": "torch", "max_new_tokens": 60},
            },
            [],
        )
        RunStore(self.store).put_config(to_yaml(self.config))
        ledger = Ledger(self.store, "learner-0")
        ledger.create(LedgerSettings.of(self.config, [("train", 4, 1)], "digest"))
        self.model = load_model("miniature")
        self.term = ledger.new_term()
        self.sender = WeightSender(membership(self.store, "learner-0"), self.config, self.term)
        self.sender.start()
        self.members = Members(self.store)

    def publish(self, step: int) -> None:
        """A version that likes digits less and less."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.0 + 0.05 * step)
        rows = fixed_rows(self.model.config.vocab_size, 64, seed=7).tolist()
        scored = ScoredRows(
            rows=tuple(map(tuple, rows)), logprobs=tuple(tuple(self.logprobs(row)) for row in rows)
        )
        self.sender.publish(
            Version(term=self.term, step=step), list(self.model.named_parameters()), scored
        )

    def logprobs(self, tokens: list[int]) -> list[float]:
        """What the weights that are published make of a row."""
        with torch.no_grad():
            known = self.model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        found: list[float] = known.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
        return found

    def close(self) -> None:
        self.sender.close()
        self.store.close()


class Serving:
    """The command, running."""

    def __init__(self, run: Run, log: Path, *words: str) -> None:
        self.log = log
        whole = ["serve", "--join", str(run.file), "--port", "0", *words]
        self.process = Forked(log, command, whole)

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait(self) -> None:
        until(lambda: "/v1" in self.said or self.process.poll() is not None, "the server", 100)
        assert self.process.poll() is None, self.said

    def ask(self, prompt: str) -> tuple[str, list[float]]:
        """The version that answers, and the log-probs of a prompt's tokens but the first."""
        (line,) = (line for line in self.said.splitlines() if line.startswith("serving"))
        body = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
        url = f"{line.split()[-1]}/completions"
        with urllib.request.urlopen(url, data=json.dumps(body).encode(), timeout=60) as answer:
            content = json.loads(answer.read())
        told = content["choices"][0]["logprobs"]["token_logprobs"][1:-1]
        return content["system_fingerprint"], told

    def end(self) -> int | None:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@pytest.fixture
def run(own_server: Any, tmp_path: Path) -> Iterator[Run]:
    made = Run(own_server, tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.timeout(240)
def test_it_serves_the_newest_weights_or_those_of_its_beginning_and_outlives_the_run(
    forkserver: None, run: Run, own_server: Any, tmp_path: Path
) -> None:
    tokens = load_tokenizer("miniature").encode(PROMPT)
    run.publish(0)
    first = run.logprobs(tokens)
    both = [
        Serving(run, tmp_path / "follows.log"),
        Serving(run, tmp_path / "frozen.log", "--freeze"),
    ]
    follows, frozen = both
    try:
        for one in both:
            one.wait()
            version, told = one.ask(PROMPT)
            assert version == f"{run.term}.0"
            assert told == pytest.approx(first, abs=1e-4)
        here = until(lambda: run.members.live("serve"), "members")
        assert len(here) == 2
        run.publish(1)
        newest = f"{run.term}.1"
        until(lambda: follows.ask(PROMPT)[0] == newest, "new weights")
        second = run.logprobs(tokens)
        assert second != pytest.approx(first, abs=1e-2)
        assert follows.ask(PROMPT)[1] == pytest.approx(second, abs=1e-4)
        assert frozen.ask(PROMPT) == (f"{run.term}.0", pytest.approx(first, abs=1e-4))
        # Nothing was leased, and the one that ends leaves the run.
        assert frozen.end() == 0
        until(lambda: len(run.members.live("serve")) == 1, "its leave")
        own_server.kill()
        assert follows.ask(PROMPT)[0] == newest
        assert follows.end() == 0
        # The publisher ends within a minute of an outage otherwise.
        own_server.start()
    finally:
        for one in both:
            one.process.kill()


def test_what_was_sampled_while_weights_were_wrong_is_sampled_again_by_the_right_ones(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first load of version 1 is wrong, and the second one right."""
    monkeypatch.setattr(PlantedEngine, "_step", 1)
    monkeypatch.setattr(PlantedEngine, "_times", 1)
    tokens = load_tokenizer("miniature").encode(PROMPT)
    run.publish(0)

    async def scenario() -> list[list[float]]:
        engine = PlantedEngine(load_model("miniature"), load_tokenizer("miniature"))
        await engine.start()
        client = RunStore(run.store).curve_client()
        with ThreadPoolExecutor(1) as redis:
            follows = Following(run.config, "serve-0", run.store, client, engine, redis, "")
            check, found = follows._check, []

            async def work() -> int:
                if not found:
                    await asyncio.to_thread(run.publish, 1)
                    while engine.version != Version(term=run.term, step=1):
                        await asyncio.sleep(0.001)
                (told,) = await engine.rank([np.array(tokens, np.int32)], 1)
                found.append(told.own.tolist())
                while check.counts.checks < 3 or check.suspect:
                    await asyncio.sleep(0.001)
                return len(found)

            try:
                await follows.start()
                async with asyncio.timeout(60):
                    assert await follows.vouch(work) == 2
            finally:
                await follows.close()
                await engine.close()
            assert check.counts.failures == 1
        return found

    wrong, right = asyncio.run(scenario())
    assert right == pytest.approx(run.logprobs(tokens), abs=1e-4)
    assert wrong != pytest.approx(right, abs=1e-4)
