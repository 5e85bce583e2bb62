"""Plays the episodes of groups whose problem has an environment; all other groups go straight to the engine.

An episode gets a session at the worker's endpoint and is handed to an environment server, which plays it by asking
that session. What comes back is a sample: the session's tokens as they were sampled, with the environment's tokens
between them, and what the environment says of it. A group's prompt is what all its episodes began with.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace as replaced

from ..common.config import AgentEnvironment, Config, VerifiersEnvironment
from ..common.records import (
    Episode,
    FinishReason,
    Int32Array,
    Sample,
    Source,
    Turn,
    Verdict,
    VersionSpan,
)
from .endpoint.sessions import Recorded, Session, SessionSpec
from .engine import Engine, FinishedGroup, GroupRequest, Task, no_tokens
from .environments.wire import (
    Played,
    failed,
)

if TYPE_CHECKING:
    from .endpoint.server import Endpoint
    from .environments.client import EnvironmentClient

log = logging.getLogger("tandem.rollout")

LIMITS = ("max_turns", "max_calls")
"""What episodes say that ended at a limit of ours."""
RECENT = 64
"""Number of the latest episodes that an alarm looks at."""
ALARM_SHARE = 0.2
"""Share of failed ones over which there is one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Outcome:
    """One episode that is over."""

    played: Played
    recorded: Recorded | None
    """What its session sampled; None if nothing was."""
    was_cut: bool
    """Whether it was ended from outside."""
    seconds: float


@dataclass(slots=True, kw_only=True, eq=False)
class _Group:
    """A group under way."""

    request: GroupRequest
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the group is to end with what it has."""
    left: int = 0
    """Episodes that aren't over."""


class Player:
    """Generates groups like an :class:`Engine`; for use in one loop.

    Args:
        engine: generates the groups without an environment.
        endpoint: has been started; its sessions record what is sampled.
        client: hands episodes to the environment servers.
        config: the run's config.
        tokenizer: gives the text of a group's prompt.
    """

    def __init__(
        self,
        engine: Engine,
        endpoint: Endpoint,
        client: EnvironmentClient,
        config: Config,
        tokenizer: Any,
    ) -> None:
        self._engine = engine
        self._endpoint = endpoint
        self._client = client
        self._config = config
        self._tokenizer = tokenizer
        self._groups: dict[str, _Group] = {}
        self.counts = {"episodes": 0, "failed": 0, "turns": 0, "retokenised": 0}
        """Counters since the start, for the worker's report."""
        self.seconds = {"environment": 0.0, "model": 0.0}
        """Time of episodes that are over, by whom it was spent on."""
        self._recent: deque[str] = deque(maxlen=RECENT)

    @property
    def episodes(self) -> int:
        """Number of episodes under way."""
        return sum(group.left for group in self._groups.values())

    @property
    def over(self) -> int:
        """Number of episodes that are over, of groups that aren't."""
        return sum(group.request.count - group.left for group in self._groups.values())

    @property
    def alarm(self) -> str:
        """What a person should look at; empty if few of the latest episodes have failed."""
        failed = [why for why in self._recent if why]
        if len(self._recent) < RECENT // 2 or len(failed) <= ALARM_SHARE * len(self._recent):
            return ""
        return (
            f"{len(failed)} of the last {len(self._recent)} episodes have failed, the latest with "
            f"{failed[-1]}"
        )

    def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[FinishedGroup]:
        """Yields each group once, as it finishes; see :class:`Engine`.

        Raises:
            ValueError: a request's ``group_id`` is already running.
        """
        return self._generate(requests)

    async def abort(self, group_ids: Iterable[str]) -> None:
        """Ends groups with what they have; they are yielded with their partial samples."""
        wanted = list(group_ids)
        for name in wanted:
            if name in self._groups:
                self._groups[name].cut.set()
        await self._engine.abort([name for name in wanted if name not in self._groups])

    async def _generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[FinishedGroup]:
        for request in requests:
            if request.group_id in self._groups:
                raise ValueError(f"group {request.group_id} is running already")
        plain = [request for request in requests if request.task is None]
        arrived: asyncio.Queue[FinishedGroup | BaseException] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._group(request, arrived))
            for request in requests
            if request.task is not None
        ]
        if plain:
            tasks.append(asyncio.create_task(self._engines(plain, arrived)))
        try:
            for _ in requests:
                group = await arrived.get()
                if isinstance(group, BaseException):
                    raise group
                yield group
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _engines(
        self, requests: list[GroupRequest], arrived: asyncio.Queue[FinishedGroup | BaseException]
    ) -> None:
        """Groups without an environment."""
        try:
            async for group in self._engine.generate(requests):
                arrived.put_nowait(group)
        except Exception as error:  # noqa: BLE001 - raised to whoever asked
            arrived.put_nowait(error)

    # Episodes.

    async def _group(
        self, request: GroupRequest, arrived: asyncio.Queue[FinishedGroup | BaseException]
    ) -> None:
        """Plays the episodes of one group, all at a time as far as the servers have places."""
        group = _Group(request=request, left=request.count)
        self._groups[request.group_id] = group
        try:
            async with asyncio.TaskGroup() as episodes:
                playing = [
                    episodes.create_task(self._episode(group, index))
                    for index in range(request.count)
                ]
            arrived.put_nowait(self._finished(group, [task.result() for task in playing]))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            log.exception(f"group {request.group_id} couldn't be played")
            arrived.put_nowait(
                FinishedGroup(group_id=request.group_id, samples=(), error=_first(error))
            )
        finally:
            del self._groups[request.group_id]

    async def _episode(self, group: _Group, index: int) -> _Outcome:
        request, settings = group.request, self._config.environments
        assert request.task is not None
        began = asyncio.get_running_loop().time()
        sessions = [self._open(request, index)]
        was_cut = True
        leaving: list[asyncio.Task[None]] = []

        def again() -> tuple[str, str]:
            """The session for another try, which samples the same noise as the first."""
            leaving.append(asyncio.create_task(self._endpoint.abort(sessions[-1])))
            sessions.append(self._open(request, index, attempt=len(sessions)))
            return sessions[-1].base_url, sessions[-1].key

        playing = asyncio.create_task(
            self._client.play(
                request.task,
                base_url=sessions[0].base_url,
                api_key=sessions[0].key,
                model=self._endpoint.model,
                limits={
                    "turns": settings.max_turns,
                    "calls": settings.max_calls,
                    "observation_tokens": settings.observation_tokens,
                },
                on_retry=again,
            )
        )
        cutting = asyncio.create_task(group.cut.wait())
        try:
            await asyncio.wait({playing, cutting}, return_when=asyncio.FIRST_COMPLETED)
            was_cut = not playing.done()
            if was_cut:
                await self._endpoint.abort(sessions[-1])
                playing.cancel()
                await asyncio.wait({playing})
                played = failed(Verdict.ENV_TIMEOUT, "its group was ended")
            else:
                played = playing.result()
        finally:
            playing.cancel()
            cutting.cancel()
            recorded = [
                await self._endpoint.finish(session, was_cut=was_cut) for session in sessions
            ]
            group.left -= 1
        seconds = asyncio.get_running_loop().time() - began
        spec = settings.use.get(request.task.environment)
        if isinstance(spec, AgentEnvironment) and recorded[-1] is not None:
            # Its server can't know when an agent waits for the model.
            spent = max(0.0, played.seconds - recorded[-1].model_seconds)
            played = replace(played, seconds=spent)
        last = recorded[-1]
        if (
            last is not None
            and played.detail in LIMITS
            and not isinstance(spec, VerifiersEnvironment)
        ):
            # As where an agent is refused another turn. A taskset of verifiers has limits of its own, and scores
            # what ends at them as it sees fit.
            recorded[-1] = replace(last, finish_reason=FinishReason.LENGTH)
        outcome = _Outcome(played=played, recorded=recorded[-1], was_cut=was_cut, seconds=seconds)
        self._count(outcome)
        return outcome

    def _open(self, request: GroupRequest, index: int, attempt: int = 0) -> Session:
        config = self._config
        return self._endpoint.open(
            SessionSpec(
                name=f"{request.group_id}#{index}",
                sampling=request.sampling,
                seed=request.seed,
                # The longest row that the learner takes.
                longest=config.data.max_prompt_tokens + request.sampling.max_new_tokens,
                max_turns=config.environments.max_turns,
                stop=request.stop,
                attempt=attempt,
            )
        )

    def _count(self, outcome: _Outcome) -> None:
        played, recorded = outcome.played, outcome.recorded
        self.counts["episodes"] += 1
        if not outcome.was_cut:
            self.counts["failed"] += played.failure is not None
            self._recent.append(f"{played.failure}: {played.detail}" if played.failure else "")
        self.seconds["environment"] += played.seconds
        if recorded is not None:
            self.counts["turns"] += len(recorded.turns)
            self.counts["retokenised"] += recorded.retokenised
            self.seconds["model"] += recorded.model_seconds

    def _finished(self, group: _Group, outcomes: Sequence[_Outcome]) -> FinishedGroup:
        """The group's samples, in the order of its episodes."""
        request = group.request
        assert request.task is not None
        prompt = shared_prompt([o.recorded.prompt_tokens for o in outcomes if o.recorded])
        samples = tuple(_sample(request, request.task, outcome, prompt) for outcome in outcomes)
        if not len(prompt):
            return FinishedGroup(group_id=request.group_id, samples=samples)
        text = self._tokenizer.decode(
            prompt.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return FinishedGroup(
            group_id=request.group_id, samples=samples, prompt_tokens=prompt, prompt_text=text
        )


def shared_prompt(prompts: Sequence[Int32Array]) -> Int32Array:
    """``[P]`` what all prompts begin with that begin like the first one; nothing without prompts.

    >>> shared_prompt([np.array([1, 2, 3]), np.array([1, 2, 4]), np.array([7])]).tolist()
    [1, 2]
    """
    shared = prompts[0] if prompts else no_tokens()
    for prompt in prompts[1:]:
        size = min(len(shared), len(prompt))
        differ = np.flatnonzero(shared[:size] != prompt[:size])
        size = int(differ[0]) if len(differ) else size
        if size:
            shared = shared[:size]
    return shared


def _sample(request: GroupRequest, task: Task, outcome: _Outcome, prompt: Int32Array) -> Sample:
    """One episode as a sample that follows the group's prompt.

    An episode that never asked the model has no tokens, so it doesn't become a row; it still says how it failed.
    """
    played, recorded = outcome.played, outcome.recorded
    figures = {**played.metrics, "environment_seconds": played.seconds}
    figures["episode_seconds"] = outcome.seconds
    if recorded is not None and not np.array_equal(recorded.prompt_tokens[: len(prompt)], prompt):
        # The learner's rows of a group share their first tokens.
        why = "its prompt has nothing in common with that of the group's first episode"
        played, recorded = failed(Verdict.ENV_FAILED, why, played.seconds), None
    if recorded is None and played.failure is None:
        # Whatever it was paid, there is nothing of the policy's to learn from.
        why = "it ended without asking the model"
        if played.detail == "context_length":
            why = (
                "what it began with leaves no room for an answer: raise data.max_prompt_tokens or "
                "rollout.max_new_tokens"
            )
        played = failed(Verdict.ENV_FAILED, why, played.seconds)
    episode = Episode(
        environment=task.environment,
        reward=played.reward,
        failure=played.failure,
        detail=played.detail,
        turns=(),
        metrics=figures,
    )
    empty = no_tokens()
    sample = Sample(
        tokens=empty,
        source=empty.astype(np.uint8),
        logprobs=empty.astype(np.float32),
        spans=(),
        finish_reason=FinishReason.ABORT if outcome.was_cut else FinishReason.STOP,
        sampling=request.sampling,
        text="",
        reward=None,
        verdict=None,
        components={},
        extracted=None,
        grader=None,
        episode=episode,
    )
    if recorded is None:
        return sample
    before = recorded.prompt_tokens[len(prompt) :]
    shift = len(before)
    rewards = played.turn_rewards
    turns = tuple(
        Turn(
            start=turn.start + shift,
            end=turn.end + shift,
            reward=rewards[number] if number < len(rewards) else None,
            malformed=turn.malformed,
        )
        for turn, number in zip(recorded.turns, recorded.order, strict=True)
    )
    figures |= {
        "tool_calls": float(recorded.tool_calls),
        "malformed_calls": float(recorded.malformed_calls),
        "branches": float(recorded.branches),
        "retokenised": float(recorded.retokenised),
        "model_seconds": recorded.model_seconds,
    }
    shown = np.full(shift, Source.ENVIRONMENT, np.uint8)
    return replaced(
        sample,
        tokens=np.concatenate([before, recorded.tokens]).astype(np.int32),
        source=np.concatenate([shown, recorded.source]),
        logprobs=np.concatenate([np.full(shift, np.nan, np.float32), recorded.logprobs]),
        spans=tuple(
            VersionSpan(term=s.term, step=s.step, start=s.start + shift, end=s.end + shift)
            for s in recorded.spans
        ),
        finish_reason=FinishReason.ABORT if outcome.was_cut else recorded.finish_reason,
        text=recorded.texts[-1],
        episode=replaced(episode, turns=turns, metrics=figures),
    )


def _first(error: BaseException) -> str:
    """The first error of a group of them, as text."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
