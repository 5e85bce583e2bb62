"""The grader: from a response and a gold answer to a verdict, its components and a reward.

One path for the reward pool, for expert traces at ingest and for evaluation::

    read the answer -> decide (text, numbers, words, guard) -> cache -> grader process -> score

Most of what a model writes is decided without a grader process. The processes are started when
the first answer needs one (or by :meth:`Grader.warm`). Equal questions that are in flight are
asked once; verdicts of grader processes, timeouts among them, are cached.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..common.config import RewardConfig
from ..common.errors import DeadlineError, TandemError
from ..common.records import FinishReason, Group, Int32Array, Sample, Verdict
from . import answers
from .canary import CANARY, Known
from .components import Graded
from .graders import START_SECONDS, GraderProcesses, Outcome, Restart
from .scoring import Scorer

logger = logging.getLogger("tandem.reward")

CACHED_VERDICTS = 1 << 18
"""Entries of the verdict cache; one takes about 150 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradeItem:
    """One text to grade."""

    text: str
    """The response."""
    gold: str
    """The gold answer as the data set states it."""
    data_source: str = ""
    """The data set's name."""
    finish_reason: FinishReason = FinishReason.STOP
    """A truncated text is graded only on a closed box or answer tag."""
    prompt_text: str = ""
    """The prompt, where it is known: it tells whether the text begins inside ``<think>``."""
    tokens: Int32Array | None = None
    """``[L]`` token ids, for the components that count tokens."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The problem's ``extra``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """What was found and what it pays."""

    verdict: Verdict
    """What the grader found."""
    reward: float | None
    """The composed reward; None where the row has no verdict to pay."""
    components: dict[str, float | None]
    """Every component by name, unweighted."""
    extracted: str | None
    """The answer that was read."""
    seconds: float
    """In the grader process; 0 where none was needed."""
    cached: bool
    """Another text's verdict was used."""


Done = Callable[[Grade], None]
_Ask = Callable[[Verdict, float, bool], None]


class Grader:
    """Grades texts and groups by a reward config.

    Usable from any thread (calls are serialised) and any process (each has its own graders).

    Args:
        config: ``reward`` of the run.
        processes: grader processes; None = ``config.graders``.

    Raises:
        ConfigError: an unknown mode or component.
    """

    def __init__(self, config: RewardConfig, *, processes: int | None = None) -> None:
        self.config = config
        self.mode = answers.mode(config.mode)
        self.name = self.mode.grader
        """``name@version``, as samples record it."""
        self.restarts: list[Restart] = []
        """The newest 1,000 graders and zygotes that died and were replaced."""
        self.on_restart: Callable[[Restart], None] | None = None
        """Called with every restart, besides."""
        self._scorer = Scorer(config)
        self._lock = threading.RLock()
        self._processes = GraderProcesses(
            processes or config.graders,
            deadline=config.deadline_seconds,
            memory_mb=config.memory_mb,
            on_restart=self._restarted,
        )
        self._cache: OrderedDict[bytes, Verdict] = OrderedDict()
        self._asked: dict[bytes, list[_Ask]] = {}
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0
        self._waited = 0.0
        self._longest_wait = 0.0
        self._recent: deque[tuple[float, bool]] = deque()

    # --- for the owner of an event loop --------------------------------------------------------

    @property
    def limits(self) -> list[str]:
        """What confines the graders besides rlimits; known once they have started."""
        return self._processes.limits

    def grader_pids(self) -> list[int]:
        """Of the live grader processes."""
        return self._processes.pids()

    def zygote_pid(self) -> int | None:
        """Of the graders' parent."""
        return self._processes.zygote_pid

    def fileno(self) -> int:
        """Readable when :meth:`pump` has something to do."""
        return self._processes.fileno()

    def next_deadline(self) -> float | None:
        """``time.monotonic`` at which :meth:`pump` must be called even without an event."""
        return self._processes.next_deadline()

    @property
    def in_flight(self) -> int:
        """Questions that a grader process works on or that wait for one."""
        return self._processes.in_flight

    def pump(self, timeout: float = 0.0) -> None:
        """Takes in what the grader processes found; calls what was begun and is now done."""
        with self._lock:
            self._processes.poll(timeout)

    def begin_group(self, group: Group, done: Callable[[Group], None]) -> None:
        """Starts grading a group; ``done`` gets it graded, now or from a later :meth:`pump`."""
        with self._lock:
            samples = group.samples
            graded: list[Sample | None] = [None] * len(samples)
            left = len(samples)
            if not left:
                done(group)
                return

            def one(index: int, sample: Sample) -> Done:
                def finish(grade: Grade) -> None:
                    nonlocal left
                    graded[index] = _with_grade(sample, grade, self.name)
                    left -= 1
                    if not left:
                        whole = tuple(s for s in graded if s is not None)
                        done(dataclasses.replace(group, samples=whole))

                return finish

            for index, sample in enumerate(samples):
                self._begin(
                    GradeItem(
                        text=sample.text,
                        gold=group.gold,
                        data_source=group.data_source,
                        finish_reason=sample.finish_reason,
                        prompt_text=group.prompt_text,
                        tokens=sample.tokens,
                        extra=group.extra,
                    ),
                    one(index, sample),
                )

    # --- for callers that wait -----------------------------------------------------------------

    def grade_texts(self, items: Sequence[GradeItem]) -> list[Grade]:
        """Grades texts, in their order.

        Raises:
            DeadlineError: graders neither answered nor died in many times their deadline.
        """
        with self._lock:
            grades: list[Grade | None] = [None] * len(items)

            def into(index: int) -> Done:
                def finish(grade: Grade) -> None:
                    grades[index] = grade

                return finish

            for index, item in enumerate(items):
                self._begin(item, into(index))
            self._wait(lambda: all(g is not None for g in grades), f"{len(items)} texts")
            return [g for g in grades if g is not None]

    def grade_group(self, group: Group) -> Group:
        """Fills in reward, verdict, components, extracted answer and grader of every sample."""
        with self._lock:
            graded: list[Group] = []
            self.begin_group(group, graded.append)
            self._wait(lambda: bool(graded), f"group {group.group_id}")
            return graded[0]

    def warm(self) -> None:
        """Starts the grader processes without waiting for them."""
        with self._lock:
            self._processes.start()

    def canary(self, known: Sequence[Known] = CANARY) -> None:
        """Grades known answers through the real path.

        Raises:
            TandemError: a known-right answer doesn't score, or a known-wrong one does.
        """
        with self._lock:
            found: dict[int, Verdict] = {}

            def into(index: int) -> Callable[[Outcome], None]:
                def finish(outcome: Outcome) -> None:
                    found[index] = outcome.verdict

                return finish

            boxed = answers.mode("boxed")
            for index, item in enumerate(known):
                # As a response would have it: what is tested is the whole way of an answer.
                answer = boxed.read(f"</think> \\boxed{{{item.answer}}}", "", False).answer
                decided = answers.decide(answer, item.gold, boxed)
                if decided is not None:
                    found[index] = decided.verdict
                else:
                    gold = answers.read_gold(item.gold).text
                    self._processes.submit(answer or "", gold, into(index))
            # One always goes to a process, so that these are known to work too.
            self._processes.submit(known[0].answer, known[0].gold, into(-1))
            self._wait(lambda: len(found) == len(known) + 1, "the canary")
            found.pop(-1)
            for index, item in enumerate(known):
                if (found[index] is Verdict.CORRECT) != item.correct:
                    should = "score" if item.correct else "not score"
                    raise TandemError(
                        f"the grader is broken: the answer {item.answer!r} to gold {item.gold!r} "
                        f"should {should}, and its verdict is {found[index]}; nothing is graded. "
                        f"Check the installed math-verify (0.9) and reward.memory_mb="
                        f"{self.config.memory_mb}, reward.deadline_seconds="
                        f"{self.config.deadline_seconds}"
                    )

    def stats(self) -> dict[str, float]:
        """Counters since the start: verdicts, where they came from, waits and seconds."""
        with self._lock:
            now = time.monotonic()
            self._forget_recent(now)
            hung = sum(bad for _, bad in self._recent) / max(1, len(self._recent))
            stats: dict[str, float] = dict(self._counts)
            stats |= {
                "grade_seconds": self._seconds,
                "queue_wait_seconds": self._waited,
                "longest_queue_wait": self._longest_wait,
                "queued": self._processes.queued,
                "in_flight": self._processes.in_flight,
                "hang_share": hung,
                "cache_size": len(self._cache),
                "restarts": self._counts["restarts"],
            }
            self._longest_wait = 0.0
            return stats

    def close(self) -> None:
        """Ends the grader processes."""
        with self._lock:
            self._processes.close()

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- one text ------------------------------------------------------------------------------

    def _begin(self, item: GradeItem, done: Done) -> None:
        truncated = item.finish_reason is not FinishReason.STOP
        answer = self.mode.read(item.text, item.prompt_text, truncated).answer
        decided = answers.decide(answer, item.gold, self.mode)
        if decided is not None:
            self._counts[f"by_{decided.how}"] += 1
            done(self._score(item, answer, decided.verdict, 0.0, False))
            return

        def found(verdict: Verdict, seconds: float, cached: bool) -> None:
            done(self._score(item, answer, verdict, seconds, cached))

        self._ask(answer or "", answers.read_gold(item.gold).text, found)

    def _score(
        self, item: GradeItem, answer: str | None, verdict: Verdict, seconds: float, cached: bool
    ) -> Grade:
        reward, components = self._scorer.score(
            Graded(
                text=item.text,
                verdict=verdict,
                extracted=answer,
                prompt_text=item.prompt_text,
                tokens=item.tokens,
                finish_reason=item.finish_reason,
                extra=item.extra,
            )
        )
        self._counts[verdict.value] += 1
        return Grade(
            verdict=verdict,
            reward=reward,
            components=components,
            extracted=answer[: answers.MAX_ANSWER] if answer is not None else None,
            seconds=seconds,
            cached=cached,
        )

    def _ask(self, answer: str, gold: str, found: _Ask) -> None:
        """Cache, then what is in flight, then a grader process."""
        key = hashlib.blake2b(
            f"{len(answer)}:{answer}{gold}".encode("utf-8", "surrogatepass"), digest_size=16
        ).digest()
        cached = self._cache.get(key)
        if cached is not None:
            self._cache.move_to_end(key)
            self._counts["cache_hits"] += 1
            found(cached, 0.0, True)
            return
        waiting = self._asked.get(key)
        if waiting is not None:
            self._counts["coalesced"] += 1
            waiting.append(found)
            return
        self._counts["to_process"] += 1
        self._asked[key] = [found]

        def finish(outcome: Outcome) -> None:
            self._seconds += outcome.seconds
            self._waited += outcome.waited
            self._longest_wait = max(self._longest_wait, outcome.waited)
            now = time.monotonic()
            self._recent.append((now, outcome.verdict in (Verdict.TIMEOUT, Verdict.MEMORY)))
            self._forget_recent(now)
            if outcome.verdict is not Verdict.CRASHED:
                # A crash isn't the text's own doing: the next one to ask may have an answer.
                self._cache[key] = outcome.verdict
                while len(self._cache) > CACHED_VERDICTS:
                    self._cache.popitem(last=False)
            for index, ask in enumerate(self._asked.pop(key)):
                ask(outcome.verdict, outcome.seconds, index > 0)

        self._processes.submit(answer, gold, finish)

    def _forget_recent(self, now: float) -> None:
        while self._recent and now - self._recent[0][0] > 60.0:
            self._recent.popleft()

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        """Polls until ``ready``; the deadline covers every wait that can be legitimate."""
        start = time.monotonic()
        told = False
        # Of what there was at the start: those that are done have taken their time too.
        turns = 2 + 2 * self._processes.in_flight / self._processes.count
        while not ready():
            self._processes.poll(1.0)
            spent = time.monotonic() - start
            limit = START_SECONDS + turns * self.config.deadline_seconds
            if spent > limit:
                raise DeadlineError(
                    f"grading {what} took over {limit:.0f} s with "
                    f"{self._processes.in_flight} answers left: graders {self._processes.pids()}"
                )
            if spent > limit / 2 and not told:
                told = True
                logger.warning(
                    f"still grading {what} after {spent:.0f} s: waiting for graders "
                    f"{self._processes.pids()} with {self._processes.in_flight} answers left"
                )

    def _restarted(self, restart: Restart) -> None:
        if restart.reason == "recycled":
            self._counts["recycled"] += 1
            return
        self._counts["restarts"] += 1
        self.restarts.append(restart)
        del self.restarts[:-1000]
        if self.on_restart is not None:
            self.on_restart(restart)


def _with_grade(sample: Sample, grade: Grade, grader: str) -> Sample:
    # Spelled out: dataclasses.replace takes three times as long, and this runs per sample.
    return Sample(
        tokens=sample.tokens,
        source=sample.source,
        logprobs=sample.logprobs,
        spans=sample.spans,
        finish_reason=sample.finish_reason,
        sampling=sample.sampling,
        text=sample.text,
        reward=grade.reward,
        verdict=grade.verdict,
        components=grade.components,
        extracted=grade.extracted,
        grader=grader,
    )
