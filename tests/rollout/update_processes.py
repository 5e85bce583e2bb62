"""A learner and a rollout worker that take orders: two real processes of the live-update tests.

    python update_processes.py LEARNER_FD WORKER_FD

Each end of a pair of sockets is one process's orders: a tuple ``(method, *arguments)``, answered by
``(value, error)``. What both need is imported once, before one becomes two.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

from tandem.common.adapters import base_of
from tandem.common.config import Config, build
from tandem.common.models import load_tokenizer, resolve
from tandem.common.records import SamplingParams, Version
from tandem.common.run_folder import JoinInfo
from tandem.common.weights.receiver import Target, WeightReceiver
from tandem.common.weights.sender import WeightSender
from tandem.common.weights.shared_memory import StagedTensors
from tandem.replay.connection import connect
from tandem.replay.ledger import Ledger
from tandem.replay.members import membership
from tandem.rollout.engine import GroupRequest
from tandem.rollout.engines import make_engine

sys.path.insert(0, str(Path(__file__).parents[1]))
from served import wait_served, wait_version

SECONDS = 30.0
"""Deadline of whatever is waited for in here."""
NOISE = 0.01
"""Relative to each weight, so that all tensors of all versions differ."""
CLEAR = 2e-3
"""Least distance of the two best logits along the greedy continuations of a version."""
CLIENTS = 40
"""Requests that run at a time, so that those in between two don't make them less than 32."""
BUSY = 36
"""Requests in the engine when new weights are to come."""
WAVE = 8
"""Clients that begin at one time."""
STEPS = 2
"""Token steps that are looked at."""
NEW_TOKENS = 64
"""Of the longest request."""

EXTENSION = "TANDEM_TEST_EXTENSION"
"""Environment variable with what vLLM's workers are given in place of Tandem's own."""
ADAPTERS = ("learner.lora.rank=4", "learner.lora.alpha=4")
WAYS = {
    "": (),
    "ranks": ("rollout.vllm.args.tensor_parallel_size=2",),
    "bf16": ("rollout.dtype=bfloat16",),
    "all-bf16": ("rollout.dtype=bfloat16", "model.dtype=bfloat16"),
    "lora": ADAPTERS,
    "ranks-lora": ("rollout.vllm.args.tensor_parallel_size=2", *ADAPTERS),
}
"""Ways to run an engine, named behind it as in ``vllm-ranks``, and what they set."""


def config(folder: str, engine: str, transport: str) -> Config:
    """Of both processes."""
    return build(
        {
            "run": {"steps": 1},
            "data": {"train": [{"path": "unused"}], "max_prompt_tokens": 32},
            "model": {"path": folder, "dtype": "float32"},
            "rollout": {
                "engine": engine.partition("-")[0],
                "max_new_tokens": NEW_TOKENS,
                "vllm": {"kv_cache_mb": 256, "max_num_seqs": 128},
            },
            "weights": {
                "transport": transport,
                "bucket_mb": 1,
                "open_seconds": 20,
                "stage_seconds": 20,
                "commit_seconds": 20,
            },
        },
        WAYS[engine.partition("-")[2]],
    )


def copied(model: Any) -> dict[str, torch.Tensor]:
    """A model's parameters by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class Learner:
    """Holds a model and publishes its versions."""

    def __init__(self, join: JoinInfo, folder: str, engine: str) -> None:
        self._join = join
        self._folder = folder
        self._engine = engine
        self._store = connect(join, name="learner-0")
        self._publisher: WeightSender | None = None
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        self._trained = copied(self._model)
        self._base = copied(AutoModelForCausalLM.from_pretrained(resolve("miniature")))
        self._end = load_tokenizer(folder).eos_token_id
        self._attempts: dict[Version, int] = {}
        self._term = 0

    def begin(self, transport: str) -> int:
        """A new term, with a publisher of its own; returns it."""
        self.close()
        self._term = Ledger(self._store, "learner-0").new_term()
        self._publisher = WeightSender(
            membership(self._store, "learner-0"),
            config(self._folder, self._engine, transport),
            self._term,
        )
        self._publisher.start()
        return self._term

    def step(self, step: int, prompts: list[list[int]], new: int) -> list[list[int]]:
        """Takes on the weights of a step; what ``generate`` then makes of the prompts, greedily.

        Noise under which two logits of a continuation come close is drawn again: there float32
        leaves open which token is the likeliest, and the comparison would prove nothing.
        """
        version = Version(term=self._term, step=step)
        for attempt in range(50):
            self._take_on(version, attempt)
            tokens, distance = self._greedy(prompts, new)
            if distance > CLEAR:
                self._attempts[version] = attempt
                return tokens
        raise AssertionError(f"no weights of version {version} keep the best logits apart")

    def publish(self, step: int) -> None:
        """Publishes the weights that were taken on."""
        assert self._publisher is not None
        version = Version(term=self._term, step=step)
        self._publisher.publish(version, list(self._model.named_parameters()))

    def transport(self, step: int) -> str:
        """By what the worker got a version."""
        assert self._publisher is not None
        wait_served(self._publisher, Version(term=self._term, step=step), SECONDS)
        name: str = self._publisher.stats()["transfers"]["rollout-0"]["transport"]
        return name

    def differences(self, rows: list[tuple[Any, ...]]) -> dict[Version, list[float]]:
        """How far each token's log-prob is from the model's own, for each version's spans.

        ``rows``: (prompt, response, log-probs of the response, spans).
        """
        found: dict[Version, list[float]] = {}
        for version, attempt in self._attempts.items():
            mine = [
                (prompt, tokens, logprobs, span)
                for prompt, tokens, logprobs, spans in rows
                for span in spans
                if (span.term, span.step) == (version.term, version.step)
            ]
            if mine:
                self._take_on(version, attempt)
                found[version] = self._differences(mine)
        return found

    def close(self) -> None:
        """Ends the publisher."""
        if self._publisher is not None:
            self._publisher.close()

    def _take_on(self, version: Version, attempt: int) -> None:
        """The weights of a version: the base model's and the trained one's in turn, with noise.

        The one stops after three steps of a problem and the other goes on, so they say different
        things soon, and yet each goes on sensibly from what the other has begun: a text that makes
        no sense to a model lets rounding errors grow beyond what is compared here.
        """
        generator = torch.Generator().manual_seed(
            (version.term * 1000 + version.step) * 100 + attempt
        )
        weights = self._trained if version.step % 2 else self._base
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(weights[name] * (1 + NOISE * noise))

    def _greedy(self, prompts: list[list[int]], new: int) -> tuple[list[list[int]], float]:
        """Continuations up to and with the end token; the least distance of the two best logits."""
        rows = torch.tensor(prompts)
        with torch.no_grad():
            made = self._model.generate(
                rows,
                attention_mask=torch.ones_like(rows),
                do_sample=False,
                max_new_tokens=new,
                eos_token_id=self._end,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        best = torch.stack(made.logits, dim=1).topk(2, dim=-1).values
        continued = []
        distance = float("inf")
        for row, apart in zip(
            made.sequences[:, rows.shape[1] :].tolist(), best[..., 0] - best[..., 1], strict=True
        ):
            length = row.index(self._end) + 1 if self._end in row else len(row)
            continued.append(row[:length])
            distance = min(distance, float(apart[:length].min()))
        return continued, distance

    def _differences(self, mine: list[tuple[Any, ...]]) -> list[float]:
        mine = sorted(mine, key=lambda row: len(row[0]) + row[3].end)
        told = [logprobs[span.start : span.end] for _, _, logprobs, span in mine]
        own = self._own(mine)
        return [float(d) for a, b in zip(told, own, strict=True) for d in np.abs(a - b)]

    def _own(self, mine: list[tuple[Any, ...]]) -> list[np.ndarray]:
        """The model's log-probs of each span."""
        found: list[np.ndarray] = []
        for start in range(0, len(mine), 32):
            texts = [
                [*prompt, *tokens[: span.end]] for prompt, tokens, _, span in mine[start:][:32]
            ]
            rows = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
            for row, text in zip(rows, texts, strict=True):
                row[: len(text)] = torch.tensor(text)
            with torch.no_grad():
                logprobs = self._model(input_ids=rows).logits.log_softmax(-1)
            chosen = logprobs[:, :-1].gather(2, rows[:, 1:, None])[..., 0].numpy()
            for row, (prompt, _, _, span) in zip(chosen, mine[start:][:32], strict=True):
                found.append(row[len(prompt) - 1 :][span.start : span.end])
        return found


class Worker:
    """An engine that clients keep busy while its weights change."""

    def __init__(self, join: JoinInfo, folder: str, engine: str, prompts: list[list[int]]) -> None:
        self._folder = folder
        self._name = engine
        self._prompts = prompts
        self._store = connect(join, name="rollout-0")
        self._receiver: WeightReceiver | None = None
        self._engine: Any = None
        self._clients: set[asyncio.Task[None]] = set()
        self._asked: list[tuple[str, int]] = []
        self._answered: list[tuple[Any, ...]] = []
        self._running: dict[Version, int] = {}
        self._wanted: Version | None = None

    async def start(self) -> None:
        """Makes the engine."""
        self._loop = asyncio.get_running_loop()
        settings = config(self._folder, self._name, "auto")
        self._engine = make_engine(
            settings.model,
            settings.rollout,
            max_rows=128,
            max_prompt_tokens=32,
            lora=settings.learner.lora,
        )
        if EXTENSION in os.environ:
            self._engine._process._arguments["worker_extension_cls"] = os.environ[EXTENSION]
        await self._engine.start()

    async def begin(self, transport: str) -> None:
        """A receiver for the learner's next term, on the same engine."""
        await self.leave()
        settings = config(self._folder, self._name, transport)
        self._receiver = WeightReceiver(
            membership(self._store, "rollout-0"),
            settings,
            Target(
                specs=[(s.name, s.shape, s.dtype) for s in self._engine.parameter_specs()],
                load=self._commit,
                base=base_of(settings.model, settings.learner.lora),
            ),
            Ledger(self._store, "rollout-0").term,
        )
        self._receiver.start()

    async def load(self, version: Version) -> None:
        """Clients ask one thing after another until the version is there; returns when they run."""
        self._wanted = version
        for number in range(CLIENTS):
            client = asyncio.create_task(self._client(version, number))
            self._clients.add(client)
            client.add_done_callback(self._clients.discard)
            if number % WAVE == WAVE - 1:
                # Those that begin together end together.
                await self._until_busy(WAVE)
        await self._until_busy(BUSY)

    async def served(self, version: Version) -> None:
        """Returns when the engine serves it."""
        assert self._receiver is not None
        await asyncio.to_thread(wait_version, self._receiver, version, SECONDS)

    async def greedy(self, prompts: list[list[int]], new: int) -> list[tuple[Any, ...]]:
        """(tokens, spans) of each prompt's likeliest continuation."""
        asked = [
            self._request(
                f"greedy-{i}",
                prompt,
                SamplingParams(temperature=0.0, max_new_tokens=new, top_p=1.0, top_k=0),
            )
            for i, prompt in enumerate(prompts)
        ]
        got = {group.group_id: group async for group in self._engine.generate(asked)}
        samples = [got[request.group_id].samples[0] for request in asked]
        return [(sample.tokens.tolist(), sample.spans) for sample in samples]

    async def rest(self) -> tuple[list[Any], list[Any], dict[Version, int]]:
        """What was asked, what was answered, and the rows that ran as each version was loaded."""
        clients = list(self._clients)
        await asyncio.wait_for(asyncio.gather(*clients), SECONDS)
        told = self._asked, self._answered, self._running
        self._asked, self._answered, self._running = [], [], {}
        return told

    async def close(self) -> None:
        """Ends receiver and engine."""
        await self.leave()
        await self._engine.close()

    async def leave(self) -> None:
        """Ends the receiver, if there is one."""
        if self._receiver is not None:
            await asyncio.to_thread(self._receiver.close)

    def _request(self, group_id: str, prompt: list[int], sampling: SamplingParams) -> GroupRequest:
        return GroupRequest(
            group_id=group_id,
            prompt_tokens=np.array(prompt, dtype=np.int32),
            count=1,
            sampling=sampling,
            seed=0,
        )

    async def _client(self, until: Version, number: int) -> None:
        turn = 0
        while self._engine.version < until:
            name = f"{until}/{number}/{turn}"
            prompt = self._prompts[(number + turn) % len(self._prompts)]
            # Some end by themselves, at 53 tokens, others at their limit.
            most = NEW_TOKENS - 5 * (number % 7)
            sampling = SamplingParams(temperature=1.0, max_new_tokens=most, top_p=1.0, top_k=0)
            self._asked.append((name, most))
            async for group in self._engine.generate([self._request(name, prompt, sampling)]):
                for sample in group.samples:
                    self._answered.append(
                        (
                            group.group_id,
                            prompt,
                            sample.tokens.tolist(),
                            sample.logprobs,
                            sample.spans,
                            str(sample.finish_reason),
                        )
                    )
            turn += 1

    async def _until_busy(self, least: int) -> int:
        """Returns when so many requests have been given a token each at every step of late."""
        end = time.monotonic() + SECONDS
        before = self._engine.stats()
        while True:
            stats = self._engine.stats()
            steps = stats.decode_steps - before.decode_steps
            if steps >= STEPS:
                rows = (stats.sampled_tokens - before.sampled_tokens) / steps
                if rows >= least and stats.running_rows >= least:
                    return int(rows)
                before = stats
            if time.monotonic() > end:
                raise AssertionError(f"{stats.running_rows} of {CLIENTS} requests run")
            await asyncio.sleep(0.001)

    def _commit(self, staged: StagedTensors | None, version: Version) -> float:
        """As a rollout worker does it; live versions are loaded only while requests run."""

        async def change() -> float:
            before = self._engine.stats().load_seconds
            if version == self._wanted:
                self._running[version] = await self._until_busy(BUSY)
            if staged is not None:
                await self._engine.load(staged, version)
            else:
                await self._engine.restamp(version)
            return float(self._engine.stats().load_seconds - before)

        return asyncio.run_coroutine_threadsafe(change(), self._loop).result(SECONDS)


def answer(pipe: Connection, call: Callable[..., Any]) -> bool:
    """Carries out one order; False once there are no more."""
    try:
        method, *arguments = pipe.recv()
    except EOFError:
        return False
    try:
        pipe.send((call(method, *arguments), None))
    except Exception:  # noqa: BLE001 - whatever it is, the test is to hear of it
        pipe.send((None, traceback.format_exc()))
    return True


def learn(pipe: Connection, kind: type[Learner]) -> None:
    """The learner's process."""
    learner = kind(*pipe.recv())
    while answer(pipe, lambda method, *arguments: getattr(learner, method)(*arguments)):
        pass
    learner.close()


async def work(pipe: Connection, kind: type[Worker]) -> None:
    """The worker's process."""
    worker = kind(*pipe.recv())
    loop = asyncio.get_running_loop()

    def call(method: str, *arguments: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(getattr(worker, method)(*arguments), loop).result()

    try:
        while await asyncio.to_thread(answer, pipe, call):
            pass
    finally:
        if worker._engine is not None:
            await worker.close()


def main(learner: type[Learner] = Learner, worker: type[Worker] = Worker) -> None:
    """Becomes both."""
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    to_learner, to_worker = (Connection(int(word)) for word in sys.argv[1:])
    if os.fork() == 0:
        to_worker.close()
        learn(to_learner, learner)
        os._exit(0)
    to_learner.close()
    asyncio.run(work(to_worker, worker))
    os.wait()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
