"""What episodes cost: the token endpoint beside the bare engine, and places of environment servers that are idle.

    .venv/bin/python tests/benchmarks/environments.py                  # all of it, about five minutes
    .venv/bin/python tests/benchmarks/environments.py --models 3M --pairs 5 --no-places

**The endpoint.** 64 conversations of some turns on random models of about 3M and 100M parameters, temperature 1. The
bare engine is asked for each turn in its own process, with the prompt's tokens. The endpoint gets the same turns as
messages over HTTP from another process, as an environment server sends them; it renders them, finds the session's
tokens, samples, records and answers with text. Both sides count the tokens that were sampled. They take turns; the
ratios are of the clock on the wall, and the engine computes with all cores but one, or one.

**Places.** A run (``tandem start``) with one environment server, whose episodes have one to ten turns of equal time:
the share of the places' time that no episode held, from the first step on, and the share that an arrangement would
leave idle in which places wait for the longest episode of a group.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import engines

from tandem.common.config import ModelConfig, RolloutConfig
from tandem.common.models import load_tokenizer
from tandem.common.records import SamplingParams
from tandem.common.run_folder import RunFolder, read_join
from tandem.replay.connection import connect
from tandem.replay.store import RunStore
from tandem.rollout.endpoint.server import Endpoint
from tandem.rollout.endpoint.sessions import SessionSpec
from tandem.rollout.engine import GroupRequest
from tandem.rollout.engines import make_engine

HERE = Path(__file__).resolve().parent
SESSIONS = 64
CONTEXT = 1024
OBSERVATION = "{number}, and then {other}?"
TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
SPECIAL = ("<|im_end|>", "<|im_start|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """How much is sampled from a model."""

    turns: int
    new: int
    """Tokens of a turn."""


WORK = {"3M": Work(turns=6, new=64), "100M": Work(turns=2, new=24)}


def save_model(case: engines.Case, folder: Path) -> int:
    """Writes a random model with a chat template, whose special tokens are its last two; returns its parameters."""
    count = engines.save_model(case, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    last = {one: word for word, one in vocabulary.items() if one >= case.vocabulary - len(SPECIAL)}
    for word in last.values():
        del vocabulary[word]
    tokenizer["added_tokens"] = [
        {
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
            "id": case.vocabulary - len(SPECIAL) + place,
            "content": content,
            "special": True,
        }
        for place, content in enumerate(SPECIAL)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[0],
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name in ("special_tokens_map.json", "added_tokens.json"):
        (folder / name).unlink(missing_ok=True)
    return count


def spoken(session: int, turn: int) -> str:
    """What the environment says before a turn."""
    return OBSERVATION.format(number=7 * session + turn, other=session * turn)


# The client: a process of its own, as an environment server's are.


def client(pipe: Connection) -> None:
    """Holds conversations whose sessions' URLs it is sent, until it is sent none."""
    import aiohttp

    async def converse(http: aiohttp.ClientSession, number: int, url: str, work: Work) -> int:
        messages: list[dict[str, Any]] = []
        sampled = 0
        for turn in range(work.turns):
            messages.append({"role": "user", "content": spoken(number, turn)})
            body = {"model": "bench", "messages": messages, "max_tokens": work.new}
            async with http.post(f"{url}/chat/completions", json=body) as reply:
                answer = await reply.json()
            messages.append(answer["choices"][0]["message"])
            sampled += answer["usage"]["completion_tokens"]
        return sampled

    async def all_of(urls: Sequence[str], work: Work) -> int:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:
            return sum(
                await asyncio.gather(*(converse(http, n, url, work) for n, url in enumerate(urls)))
            )

    while (given := pipe.recv()) is not None:
        pipe.send(asyncio.run(all_of(*given)))


class Sides:
    """A model's engine, asked directly and through the endpoint.

    Args:
        engine: has been started.
        folder: of the model.
        pipe: to the process of the client.
    """

    def __init__(self, engine: Any, folder: Path, pipe: Connection) -> None:
        self._engine = engine
        self._tokenizer = load_tokenizer(str(folder))
        self._pipe = pipe
        self._number = 0

    def _sampling(self, work: Work) -> SamplingParams:
        return SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=work.new)

    async def engine(self, work: Work) -> tuple[int, float]:
        """Tokens and seconds of the bare engine."""
        self._number += 1
        texts = [
            [
                self._tokenizer.encode(
                    f"<|im_start|>user\n{spoken(n, turn)}<|im_end|>\n<|im_start|>assistant\n"
                )
                for turn in range(work.turns)
            ]
            for n in range(SESSIONS)
        ]

        async def converse(number: int) -> int:
            tokens: list[int] = []
            sampled = 0
            for turn in range(work.turns):
                tokens += texts[number][turn]
                request = GroupRequest(
                    group_id=f"{self._number}-{number}-{turn}",
                    prompt_tokens=np.array(tokens, dtype=np.int32),
                    count=1,
                    sampling=self._sampling(work),
                    seed=self._number,
                )
                async for group in self._engine.generate([request]):
                    found = group.samples[0].tokens.tolist()
                    tokens += found
                    sampled += len(found)
            return sampled

        began = time.perf_counter()
        sampled = sum(await asyncio.gather(*(converse(n) for n in range(SESSIONS))))
        return sampled, time.perf_counter() - began

    async def endpoint(self, work: Work) -> tuple[int, float]:
        """Tokens and seconds through the endpoint."""
        self._number += 1
        served = Endpoint(self._engine, self._tokenizer, context=CONTEXT, model="bench")
        await served.start()
        try:
            sessions = [
                served.open(
                    SessionSpec(
                        name=f"{self._number}-{n}",
                        sampling=self._sampling(work),
                        seed=self._number,
                        longest=CONTEXT,
                        max_turns=work.turns,
                    )
                )
                for n in range(SESSIONS)
            ]
            began = time.perf_counter()
            self._pipe.send(([session.base_url for session in sessions], work))
            sampled = await asyncio.to_thread(self._pipe.recv)
            seconds = time.perf_counter() - began
            recorded = [await served.finish(session) for session in sessions]
            own = sum(int((one.source == 0).sum()) for one in recorded if one is not None)
            broken = sum(one.retokenised + one.branches for one in recorded if one is not None)
            if own != sampled or broken:
                raise SystemExit(
                    f"{sampled} tokens were sampled, {own} recorded; {broken} other branches"
                )
            return sampled, seconds
        finally:
            await served.close()


async def compare(case: engines.Case, folder: Path, pairs: int, pipe: Connection) -> dict[str, Any]:
    """Both sides in turns; the medians of the pairs."""
    work = WORK[case.name]
    settings = RolloutConfig(
        engine="torch", group_size=1, groups_per_batch=SESSIONS, max_new_tokens=work.new
    )
    engine = make_engine(
        ModelConfig(path=str(folder)), settings, max_prompt_tokens=CONTEXT - work.new
    )
    await engine.start()
    try:
        sides = Sides(engine, folder, pipe)
        for warm in (sides.engine, sides.endpoint):
            await warm(replace(work, turns=1))
        ratios, rates, turn_ms = [], {"engine": [], "endpoint": []}, []
        for pair in range(pairs):
            found = {}
            order = ("engine", "endpoint") if pair % 2 else ("endpoint", "engine")
            for name in order:
                tokens, seconds = await getattr(sides, name)(work)
                found[name] = seconds / tokens
                rates[name].append(tokens / seconds)
            ratios.append(found["engine"] / found["endpoint"])
            lost = (found["endpoint"] - found["engine"]) * work.new * SESSIONS
            turn_ms.append(1000 * lost / SESSIONS)
        return {
            "model": case.name,
            "turns": work.turns,
            "new": work.new,
            "engine": statistics.median(rates["engine"]),
            "endpoint": statistics.median(rates["endpoint"]),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "turn_ms": statistics.median(turn_ms),
        }
    finally:
        await engine.close()


def endpoint_table(models: Sequence[str], pairs: int) -> list[dict[str, Any]]:
    """Compares for each model, and prints a table."""
    torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=client, args=(theirs,), daemon=True)
    process.start()
    found = []
    try:
        print("| model | turns × tokens | engine, tokens/s | endpoint | ratio | a turn costs |")
        print("|---|---|---|---|---|---|")
        for case in engines.CASES:
            if case.name not in models:
                continue
            with tempfile.TemporaryDirectory() as folder:
                save_model(case, Path(folder))
                one = asyncio.run(compare(case, Path(folder), pairs, ours))
            found.append(one)
            spread = f"{min(one['ratios']):.2f}–{max(one['ratios']):.2f}"
            print(
                f"| {one['model']} | {one['turns']} × {one['new']} | {one['engine']:,.0f} | "
                f"{one['endpoint']:,.0f} | {one['ratio']:.3f} ({spread}) | {one['turn_ms']:.2f} ms |",
                flush=True,
            )
    finally:
        with suppress(OSError):
            ours.send(None)
        process.join(10)
        process.kill()
    return found


# Places.

STEP_SECONDS = 0.15
LONGEST = 10
"""Turns of the longest episode; the shortest has one."""
PLACES = 8
GROUP = 4


class Waits:
    """An environment whose episodes have a number of turns of their own, each of which takes the same time."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(os.getpid())

    def reset(self, row: dict[str, Any]) -> str:
        """Begins an episode."""
        self._left = int(self._random.integers(1, LONGEST + 1))
        return "1*1=?"

    def step(self, text: str) -> tuple[str, float, bool]:
        """Waits; pays for answers that end in an even character."""
        time.sleep(STEP_SECONDS)
        self._left -= 1
        return "1*1=?", float(ord(text[-1:] or "a") % 2 == 0), self._left == 0


def places(folder: Path, steps: int) -> dict[str, float]:
    """Runs the job, and reads the server's figures while it goes on."""
    words = [
        "miniature-tools",
        f"run.dir={folder}",
        f"run.steps={steps}",
        f"environments.use={{waits: {{form: text, target: {Path(__file__).stem}:Waits}}}}",
        "environments.default=waits",
        f"environments.episodes={PLACES}",
        f"environments.max_turns={LONGEST + 1}",
        f"rollout.group_size={GROUP}",
        "rollout.groups_per_batch=4",
        "rollout.max_new_tokens=300",
        "data.max_prompt_tokens=200",
        "replay.groups_per_step=4",
        "replay.max_staleness=4",
        "learner.optimizer.lr=1e-6",
        "reward.components=[{name: environment}]",
        "evaluate.at_start=false",
        "evaluate.at_end=false",
        "evaluate.every=0",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    log = (folder.parent / "places.log").open("w")
    run = subprocess.Popen(
        [sys.executable, "-m", "tandem.launch.cli", "start", *words],
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
    )
    seen: list[tuple[float, float]] = []
    try:
        while run.poll() is None:
            time.sleep(0.5)
            with suppress(Exception):
                store = connect(read_join(RunFolder(folder).join), deadline=2.0)
                try:
                    report = RunStore(store).reports().get("environments-0", {})
                    if RunFolder(folder).metrics.stat().st_size and report:
                        seen.append((report["time"], report["environments/held_seconds"]))
                finally:
                    store.close()
    finally:
        run.terminate()
        status = run.wait(60)
    if status or len(seen) < 4:
        raise SystemExit(f"the run ended with {status}; see {log.name}")
    # The last seconds have no more groups to begin.
    steady = [one for one in seen if one[0] <= seen[-1][0] - 2 * LONGEST * STEP_SECONDS]
    (began, held), (ended, last) = steady[0], steady[-1]
    rounds = np.random.default_rng(0).integers(1, LONGEST + 1, (10_000, PLACES))
    return {
        "seconds": ended - began,
        "idle": 1 - (last - held) / (PLACES * (ended - began)),
        "in_rounds": 1 - float(rounds.mean() / rounds.max(1).mean()),
    }


def main() -> int:
    """Prints the tables; 1 where a bound isn't kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--models", nargs="*", choices=[*WORK], default=[*WORK])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--no-places", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    least = {"3M": 0.85, "100M": 0.95}
    amiss = [
        f"{one['model']}: {one['ratio']:.3f} of the engine, at least {least[one['model']]} is meant"
        for one in endpoint_table(options.models, options.pairs)
        if one["ratio"] < least[one["model"]]
    ]
    if not options.no_places:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            found = places(Path(folder) / "run", options.steps)
        print(
            f"\nplaces: {PLACES}, episodes of 1 to {LONGEST} turns, {found['seconds']:.0f} s: "
            f"{found['idle']:.1%} idle; {found['in_rounds']:.0%} if each round waited for its longest"
        )
        if found["idle"] > 0.05:
            amiss.append(f"{found['idle']:.1%} of the places' time is idle, at most 5% is meant")
    for complaint in amiss:
        print(f"not as it should be: {complaint}", file=sys.stderr)
    return 1 if amiss else 0


if __name__ == "__main__":
    sys.exit(main())
