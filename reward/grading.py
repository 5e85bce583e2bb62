"""The grader: from a response and a gold answer to a verdict, its components and a reward.

One path for the reward pool, for expert traces at ingest, for evaluation and for ``tandem grade``::

    read the answer -> decide (text, numbers, words, guard) -> cache -> grader process
    all verdicts of a group -> functions of the user's own, code -> components -> reward

Most of what a model writes is decided without a grader process. The processes are started when
the first answer needs one (or by :meth:`Grader.warm`). An equal question that is already in flight
isn't asked again. Verdicts of grader processes, timeouts among them, are cached.
"""

from __future__ import annotations

import logging
import selectors
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from ..common.config import RewardConfig
from ..common.errors import DeadlineError
from ..common.records import FinishReason, Group, Verdict
from ..common.waiting import Wait
from .answers.comparison import decide, question
from .components.registry import Graded
from .components.scoring import OWN_FAILURES, Found, Scorer
from .graders import canary
from .graders.canary import CANARY, Known
from .graders.grader_processes import START_SECONDS, GraderProcesses
from .graders.requests import Restart
from .graders.verdicts import Recent, Verdicts
from .grades import Grade, GradeItem, with_grade
from .outside import Outside
from .reading import modes
from .reading.extraction import MAX_ANSWER

logger = logging.getLogger("tandem.reward")

SOLVED = 1.0
"""Reward from which an episode without a gold answer counts as right."""
Done = Callable[[list[Grade]], None]


@dataclass(slots=True)
class _Batch:
    """A group on its way through the grader."""

    items: Sequence[GradeItem]
    done: Done
    left: int
    read: list[str | None]
    verdicts: list[Verdict | None]
    seconds: list[float]
    cached: list[bool]


class Grader:
    """Grades texts and groups by a reward config.

    Usable from any thread (calls are serialised) and any process (each has its own graders).

    Args:
        config: the run's ``reward`` section.
        processes: number of grader processes; None = ``config.graders``.

    Raises:
        ConfigError: an unknown mode or component.
    """

    def __init__(self, config: RewardConfig, *, processes: int | None = None) -> None:
        self.config = config
        self.mode = modes.mode(config.mode, tuple_for_set=config.tuple_for_set)
        self.name = self.mode.grader
        """``name@version``, as samples record it."""
        self.restarts: list[Restart] = []
        """The newest 1,000 graders and zygotes that died and were replaced."""
        self.on_restart: Callable[[Restart], None] | None = None
        """Also called with every restart."""
        self._scorer = Scorer(config)
        self._lock = threading.RLock()
        self._counts: Counter[str] = Counter()
        self._recent = Recent()
        self._processes = GraderProcesses(
            processes or config.graders,
            deadline=config.deadline_seconds,
            memory_mb=config.memory_mb,
            on_restart=self._restarted,
            functions=self._scorer.functions,
        )
        self._verdicts = Verdicts(self._processes, self._counts, self._recent)
        self._outside = Outside(
            self._scorer,
            self._processes,
            config,
            counts=self._counts,
            cost=self._verdicts.cost,
            on_restart=self._restarted,
        )
        self._sets = [self._processes, *self._outside.sandboxes]
        self._servers = self._outside.servers
        self._selector = selectors.DefaultSelector()
        for processes_ in self._sets:
            self._selector.register(processes_.fileno(), selectors.EVENT_READ)
        self._selector.register(self._servers.fileno(), selectors.EVENT_READ)

    @property
    def components(self) -> list[str]:
        """Names of the reward's components, in the config's order."""
        return [part.name for part in self._scorer.parts]

    @property
    def works_outside(self) -> bool:
        """Whether the reward may need a grader process at all."""
        return self.needs_verdict or bool(self._scorer.outside)

    def has_tests(self, extra: Mapping[str, Any]) -> bool:
        """Whether a row with this ``extra`` is judged by running its tests."""
        return self._outside.has_tests(extra)

    @property
    def wants_columns(self) -> bool:
        """Whether a function of the user's own may ask for any column of the data set."""
        return self._scorer.wants_columns

    @property
    def wants_messages(self) -> bool:
        """Whether a component may ask for the messages that a prompt was rendered from."""
        return self._scorer.wants_messages

    @property
    def needs_verdict(self) -> bool:
        """Whether a row whose gold answer can't be read has no reward."""
        return self._scorer.needs_verdict

    # --- for the owner of an event loop --------------------------------------------------------
    @property
    def limits(self) -> list[str]:
        """What confines the graders besides rlimits; empty until they have started."""
        return [limit for one in self._sets for limit in one.limits]

    def grader_pids(self) -> list[int]:
        """Process ids of the live graders, including those that run code."""
        return [pid for processes in self._sets for pid in processes.pids()]

    def zygote_pid(self) -> int | None:
        """Process id of the graders' parent."""
        return self._processes.zygote_pid

    def fileno(self) -> int:
        """A descriptor that is readable when :meth:`pump` has something to do."""
        if not self._listens:
            return self._processes.fileno()
        number: int = self._selector.fileno()
        return number

    def next_deadline(self) -> float | None:
        """The ``time.monotonic`` at which :meth:`pump` must be called even without an event."""
        due = [processes.next_deadline() for processes in self._sets]
        due.append(self._servers.next_deadline())
        return min((moment for moment in due if moment is not None), default=None)

    @property
    def in_flight(self) -> int:
        """Number of requests and questions that have no outcome yet."""
        return sum(processes.in_flight for processes in self._sets) + self._servers.in_flight

    @property
    def _listens(self) -> bool:
        """Whether more than one descriptor has to be heard."""
        return len(self._sets) > 1 or bool(self._servers.asked)

    def pump(self, timeout: float = 0.0) -> None:
        """Handles the results of the grader processes, and calls ``done`` of whatever is finished."""
        with self._lock:
            if self._listens:
                due = self.next_deadline()
                if due is not None:
                    timeout = min(timeout, max(0.0, due - time.monotonic()))
                self._selector.select(timeout)
                timeout = 0.0
            for processes in self._sets:
                processes.poll(timeout)
            if self._servers.asked:
                self._servers.poll()

    def begin_group(self, group: Group, done: Callable[[Group], None]) -> None:
        """Starts grading a group; ``done`` gets the graded group, now or from a later :meth:`pump`."""
        with self._lock:
            items = [GradeItem.of(group, sample) for sample in group.samples]

            def finish(grades: list[Grade]) -> None:
                whole = tuple(
                    with_grade(sample, grade, self.name)
                    for sample, grade in zip(group.samples, grades, strict=True)
                )
                done(replace(group, samples=whole))

            self._begin(items, finish)

    def begin_items(self, items: Sequence[GradeItem], done: Done) -> None:
        """Starts grading items that form one group; ``done`` gets their grades, in order."""
        with self._lock:
            self._begin(items, done)

    # --- for callers that wait -----------------------------------------------------------------

    def grade_texts(self, items: Sequence[GradeItem]) -> list[Grade]:
        """Grades texts, in their order.

        Raises:
            DeadlineError: graders neither answered nor died in many times their deadline.
        """
        with self._lock:
            grades: list[Grade | None] = [None] * len(items)
            groups: dict[str | int, list[int]] = {}
            for index, item in enumerate(items):
                groups.setdefault(item.group or index, []).append(index)

            def into(indices: list[int]) -> Done:
                def finish(found: list[Grade]) -> None:
                    for index, grade in zip(indices, found, strict=True):
                        grades[index] = grade

                return finish

            for numbers in groups.values():
                self._begin([items[index] for index in numbers], into(numbers))
            self._wait(lambda: all(g is not None for g in grades), f"{len(items)} texts")
            return [g for g in grades if g is not None]

    def grade_group(self, group: Group) -> Group:
        """Fills in reward, verdict, components, extracted answer and grader of every sample."""
        with self._lock:
            graded: list[Group] = []
            self.begin_group(group, graded.append)
            self._wait(lambda: bool(graded), f"group {group.group_id}")
            return graded[0]

    def unreadable_golds(self, golds: Sequence[str]) -> set[str]:
        """The gold answers that can't be read, or not within the graders' limits."""
        bad = (Verdict.GOLD_UNPARSABLE, Verdict.TIMEOUT, Verdict.MEMORY)
        # With an empty answer, the process only says whether the gold answer can be read.
        verdicts = self._compared([(None, gold) for gold in golds], "gold answers")
        return {gold for gold, verdict in zip(golds, verdicts, strict=True) if verdict in bad}

    def same_answers(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """For each pair of answers, whether the first is right if the second is the gold answer."""
        return [one is Verdict.CORRECT for one in self._compared(pairs, "pairs of answers")]

    def _compared(self, pairs: Sequence[tuple[str | None, str]], what: str) -> list[Verdict]:
        with self._lock:
            verdicts: dict[int, Verdict] = {}

            def into(index: int) -> Callable[[Verdict, float, bool], None]:
                return lambda verdict, *_: verdicts.update({index: verdict})

            for index, (answer, gold) in enumerate(pairs):
                decided = decide(answer, gold, self.mode)
                if decided is not None:
                    verdicts[index] = decided.verdict
                else:
                    self._ask(answer, gold, into(index))
            self._wait(lambda: len(verdicts) == len(pairs), f"{len(pairs)} {what}")
            return [verdicts[index] for index in range(len(pairs))]

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Pumps until ``ready``, which is called at least once a second.

        Raises:
            DeadlineError: no request ended within many times its deadline.
        """
        with self._lock:
            self._wait(ready, what)

    def warm(self) -> None:
        """Starts the grader processes without waiting for them."""
        with self._lock:
            for processes in self._sets:
                processes.start()

    def canary(self, known: Sequence[Known] = CANARY) -> None:
        """Grades known answers the way responses are graded.

        Raises:
            TandemError: a known-right answer doesn't score, or a known-wrong one does; or the key
                of a server that is to be asked is missing.
        """
        self._servers.check_keys()
        with self._lock:
            canary.check(
                known,
                self._processes,
                working=self._outside.check(),
                wait=lambda ready: self._wait(ready, "the canary"),
            )

    def stats(self) -> dict[str, float]:
        """Counters since the start: verdicts, where they came from, waits and seconds."""
        with self._lock:
            self._recent.forget()
            return {
                **dict.fromkeys(("to_process", "cache_hits", "coalesced"), 0),
                **self._counts,
                **self._verdicts.stats(),
                **self._servers.stats(),
                "queued": sum(processes.queued for processes in self._sets),
                "in_flight": self.in_flight,
                "requests": self._recent.total,
                "recent": len(self._recent),
                "hang_share": self._recent.share(*OWN_FAILURES),
                "crash_share": self._recent.share(Verdict.CRASHED),
                "restarts": self._counts["restarts"],
            }

    @property
    def last_error(self) -> str:
        """The last line of the last error that a user's own function, or code, raised."""
        return self._outside.last_error

    @property
    def servers_trouble(self) -> str:
        """What a person should look at about judges and reward models; empty if nothing is wrong."""
        return self._servers.trouble()

    def forget(self) -> None:
        """Empties the verdict cache, for a measurement to begin with."""
        with self._lock:
            self._verdicts.forget()

    def close(self) -> None:
        """Ends the grader processes."""
        with self._lock:
            self._selector.close()
            for processes in self._sets:
                processes.close()
            self._servers.close()

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- one group -----------------------------------------------------------------------------

    def _begin(self, items: Sequence[GradeItem], done: Done) -> None:
        count = len(items)
        batch = _Batch(
            items, done, count, [None] * count, [None] * count, [0.0] * count, [False] * count
        )
        if not count:
            done([])
            return
        for index, item in enumerate(items):
            self._judge(batch, index, item)

    def _judge(self, batch: _Batch, index: int, item: GradeItem) -> None:
        """Determines the verdict of one text's answer."""

        def found(verdict: Verdict | None, seconds: float, cached: bool) -> None:
            batch.verdicts[index] = verdict
            batch.seconds[index] = seconds
            batch.cached[index] = cached
            batch.left -= 1
            if not batch.left:
                self._value(batch)

        episode = item.episode
        if episode is not None and episode.failure is not None:
            found(episode.failure, 0.0, False)
            return
        if episode is not None and not item.gold and not self._scorer.needs_verdict:
            solved = episode.reward is not None and episode.reward >= SOLVED
            found(Verdict.CORRECT if solved else Verdict.WRONG, 0.0, False)
            return
        if self._outside.has_tests(item.extra):
            # Its tests take the place of a gold answer; the verdict comes from them.
            found(None, 0.0, False)
            return
        truncated = item.finish_reason is not FinishReason.STOP
        answer = self.mode.read(item.text, item.prompt_text, truncated).answer
        batch.read[index] = answer
        decided = decide(answer, item.gold, self.mode)
        if decided is not None:
            self._counts[f"by_{decided.how}"] += 1
            found(decided.verdict, 0.0, False)
            return
        self._ask(answer, item.gold, found)

    def _ask(
        self, answer: str | None, gold: str, found: Callable[[Verdict, float, bool], None]
    ) -> None:
        open_ = question(answer, gold, self.mode)
        self._verdicts.ask(
            answer or "",
            open_.gold,
            lambda verdict, *cost: found(open_.settle(verdict), *cost),
        )

    def _value(self, batch: _Batch) -> None:
        """Once all verdicts are there, runs functions, code and components, then computes the rewards."""
        samples = [
            Graded(
                text=item.text,
                verdict=batch.verdicts[index] or Verdict.UNPARSABLE,
                extracted=batch.read[index],
                prompt_text=item.prompt_text,
                tokens=item.tokens,
                finish_reason=item.finish_reason,
                gold=item.gold,
                data_source=item.data_source,
                extra=item.extra,
                episode=item.episode,
            )
            for index, item in enumerate(batch.items)
        ]
        if not self._scorer.outside:
            self._settle(batch, samples, [{}] * len(samples), [None] * len(samples))
            return
        self._outside.begin(
            samples,
            lambda result: self._settle(
                batch, result.samples, result.values, result.failures, result.seconds
            ),
        )

    def _settle(
        self,
        batch: _Batch,
        samples: Sequence[Graded],
        values: Sequence[Found],
        failures: Sequence[Verdict | None],
        seconds: Sequence[float] | None = None,
    ) -> None:
        # An episode's own failure stands above those of components, which have looked at what is left of it.
        failures = [
            failure if item.episode is None else item.episode.failure or failure
            for item, failure in zip(batch.items, failures, strict=True)
        ]
        scored = self._scorer.score_group(samples, values, failures)
        grades = []
        for index, (sample, one) in enumerate(zip(samples, scored, strict=True)):
            verdict = self._verdict(sample.verdict, failures[index])
            self._counts[verdict.value] += 1
            answer = sample.extracted
            grades.append(
                Grade(
                    verdict=verdict,
                    answer=sample.verdict,
                    reward=one.reward,
                    components=one.components,
                    token_rewards=one.token_rewards,
                    extracted=answer[:MAX_ANSWER] if answer is not None else None,
                    seconds=batch.seconds[index] + (seconds[index] if seconds else 0.0),
                    cached=batch.cached[index],
                )
            )
        batch.done(grades)

    def _verdict(self, verdict: Verdict, failure: Verdict | None) -> Verdict:
        if verdict.leaves_baseline and self._scorer.needs_verdict:
            return verdict
        if failure is not None:
            return failure
        # No rewarded component compares with the gold answer, so that a failed comparison is no
        # reason to leave the sample out.
        return Verdict.UNPARSABLE if verdict.leaves_baseline else verdict

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        """Polls until ``ready``; the deadline counts from the last request that ended."""
        limit = START_SECONDS + 4 * max(self._outside.longest_deadline, self._servers.longest)
        wait, ended = Wait("graders", "end a request", limit), -1
        while not ready():
            self.pump(1.0)
            if self._recent.total + self._servers.ended != ended:
                ended = self._recent.total + self._servers.ended
                wait.restart()
            wait.who = f"graders {self.grader_pids()}"
            wait.what = f"end one of {self.in_flight} requests ({what})"
            if wait.expired(logger.warning):
                raise DeadlineError(str(wait))

    def _restarted(self, restart: Restart) -> None:
        if restart.reason == "recycled":
            self._counts["recycled"] += 1
            return
        self._counts["restarts"] += 1
        self.restarts.append(restart)
        del self.restarts[:-1000]
        if self.on_restart is not None:
            self.on_restart(restart)
