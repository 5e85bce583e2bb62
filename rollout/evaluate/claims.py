"""Evaluations that a worker claims from the ledger between two batches."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from ...common.config import Config, RewardConfig, of_set
from ...common.errors import StoreError, TandemError
from ...common.records import Sample, Version
from ...replay.evaluating.evaluated import EvaluatedSample
from ...replay.evaluating.evaluations import EvaluationJob, EvaluationRequest, EvaluationResult
from ...replay.store import RunStore
from ..engine import Engine
from ..new_weights.commit_check import CommitCheck
from ..player import Player

if TYPE_CHECKING:
    from .evaluation import Evaluation, Evaluator

log = logging.getLogger("tandem.rollout")


class ClaimedEvaluations:
    """Evaluates the weights in use, which are kept from changing meanwhile; for use in one loop.

    Args:
        name: the worker's member id.
        engine: samples the responses.
        runs: has the held-out sets, and takes the results.
        config: the run's config.
        check: the check of new weights, for which a result waits.
        steady: whoever holds it keeps the engine's weights from changing.
        in_redis: runs a call that blocks on Redis outside the loop.
        sampler: samples the responses; None = the engine. A player where problems have environments.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        runs: RunStore,
        config: Config,
        check: CommitCheck,
        steady: asyncio.Lock,
        in_redis: Callable[[Callable[[], Any]], Awaitable[Any]],
        sampler: Engine | Player | None = None,
    ) -> None:
        self._sampler = sampler or engine
        self._name = name
        self._engine = engine
        self._runs = runs
        self._config = config
        self._check = check
        self._steady = steady
        self._in_redis = in_redis
        self._evaluators: dict[str, Evaluator] = {}
        self._task: asyncio.Task[Any] | None = None
        self._claimed: EvaluationRequest | None = None
        # Of the claimed evaluation, where it mustn't begin any more: why.
        self._cancelled = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self.done = 0
        """Number of evaluations whose results this worker has submitted."""

    def renew(self) -> None:
        """Keeps a claimed evaluation from other workers, or ends it if it is this one's no more; called from
        the keeper's thread.

        Raises:
            StoreError: Redis is away.
        """
        claimed, loop = self._claimed, self._loop
        if claimed is None or loop is None:
            return
        if not self._runs.renew_evaluation(claimed.id, self._name):
            loop.call_soon_threadsafe(self._lose, claimed)

    def _lose(self, lost: EvaluationRequest) -> None:
        # It may have been done meanwhile, and another one begun.
        if self._claimed is lost:
            self.cancel("it is claimed by another worker now, or done")

    def cancel(self, reason: str = "drained") -> None:
        """Ends the claimed evaluation, also one that waits for new weights; :meth:`run` gives it back."""
        self._cancelled = reason
        if self._task is not None:
            self._task.cancel()

    def close(self) -> None:
        """Ends the graders."""
        for evaluator in self._evaluators.values():
            evaluator.close()

    async def run(self, request: EvaluationRequest) -> None:
        """Does one claimed evaluation; submits its result, or gives it back.

        Raises:
            StoreError: Redis is away; the claim expires by itself.
        """
        self._loop = asyncio.get_running_loop()
        self._claimed, self._cancelled = request, ""
        try:
            if request.job is not None:
                await self._do(request, request.job)
                return
            evaluation, step = await self._evaluate(request)
            if evaluation is None:
                await self._give_back(request, self._why_ended(request), failed=False)
                return
            result = EvaluationResult(
                id=request.id,
                set_name=request.set_name,
                step=step,
                version=evaluation.version,
                accuracy=evaluation.accuracy,
                samples=evaluation.samples,
                pass_rate=evaluation.pass_rate,
                accuracy_by_source=evaluation.by_source,
                pass_by_source=evaluation.pass_by_source,
                problems_by_source=evaluation.problems_by_source,
                problems=evaluation.problems,
                format_share=evaluation.format_share,
                right_and_formed=evaluation.right_and_formed,
                mean_length=evaluation.mean_length,
                seconds=evaluation.seconds,
                member=self._name,
                figures=evaluation.figures,
            )
            await self._in_redis(lambda: self._runs.finish_evaluation(request.id, result))
            self.done += 1
            log.info(
                f"{request.set_name} at step {result.step}: accuracy {evaluation.accuracy:.1%} of "
                f"{evaluation.problems} problems in {evaluation.seconds:.1f} s"
            )
        except StoreError:
            raise
        except (TandemError, ValueError) as error:
            # This or another worker tries again, unless it has failed too often.
            log.error(f"evaluation {request.id} failed: {error}")
            await self._give_back(request, str(error), failed=True)
        finally:
            self._claimed = None

    def _why_ended(self, request: EvaluationRequest) -> str:
        if self._check.suspect:
            return "the weights failed their check"
        if _is_older(self._engine.version, request):
            return "new weights weren't loaded"
        return self._cancelled

    def _by(self, reward: RewardConfig) -> Evaluator:
        """The evaluator that grades by a reward. Imported here, so that only a worker that
        evaluates pays for the graders' imports."""
        from .evaluation import Evaluator

        found = self._evaluators.get(reward.model_dump_json())
        if found is None:
            found = Evaluator(self._sampler, reward)
            self._evaluators[reward.model_dump_json()] = found
        return found

    async def _do(self, request: EvaluationRequest, job: EvaluationJob) -> None:
        """Makes the samples of a job, and stores them before the result."""
        from .answering import Benchmark, SamplesRefusedError, answer

        cell = job.cell
        reward = RewardConfig.model_validate(job.reward)
        grader = self._by(reward.model_copy(update={"mode": cell.mode})).grader
        second = None
        if cell.second_mode is not None:
            second = self._by(reward.model_copy(update={"mode": cell.second_mode})).grader
        problems = await self._in_redis(lambda: self._runs.eval_set(request.set_name))
        benchmark = Benchmark(
            problems=problems,
            grader=grader,
            second=second,
            subject=job.subject,
            level=job.level,
        )
        kept: list[EvaluatedSample] = []
        start = time.perf_counter()
        async with self._steady:
            version = self._engine.version
            if self._cancelled or _is_older(version, request):
                await self._give_back(request, self._why_ended(request), failed=False)
                return
            self._task = asyncio.create_task(
                answer(
                    self._sampler,
                    benchmark,
                    cell,
                    job.wanted,
                    kept.extend,
                    token_ids=job.token_ids,
                )
            )
            await asyncio.wait([self._task])
        await self._check.settled(version=version)
        if self._task.cancelled() or self._check.suspect:
            await self._give_back(request, self._why_ended(request), failed=False)
            return
        refused: tuple[str, ...] = ()
        try:
            self._task.result()
        except SamplesRefusedError as error:
            refused = error.reasons
        await self._in_redis(lambda: self._runs.put_samples(request.id, kept))
        result = EvaluationResult(
            id=request.id,
            set_name=request.set_name,
            step=version.step if version is not None else request.step,
            accuracy=sum(one.correct for one in kept) / max(1, len(kept)),
            problems=len({one.place for one in kept}),
            format_share=0.0,
            mean_length=sum(one.tokens for one in kept) / max(1, len(kept)),
            seconds=time.perf_counter() - start,
            member=self._name,
            refused=refused,
        )
        await self._in_redis(lambda: self._runs.finish_evaluation(request.id, result))
        self.done += 1

    async def _evaluate(self, request: EvaluationRequest) -> tuple[Evaluation | None, int]:
        """The result, and the step of the weights that were measured; None if it was ended or the weights
        failed their check."""
        sets = {held.name: held for held in self._config.data.evaluate}
        # A set that the config doesn't name (any more) is evaluated as the run says.
        held = sets.get(request.set_name)
        own = self._config if held is None else of_set(self._config, held)
        evaluator = self._by(own.reward)
        problems = await self._in_redis(
            lambda: self._runs.eval_set(request.set_name, request.limit)
        )
        async with self._steady:
            version = self._engine.version
            if self._cancelled or _is_older(version, request):
                return None, request.step
            task = asyncio.create_task(
                evaluator.evaluate(
                    problems,
                    temperature=request.temperature,
                    top_p=own.evaluate.top_p,
                    samples=request.samples,
                    max_new_tokens=own.rollout.max_new_tokens,
                    seed=own.run.seed,
                    stop=own.data.stops,
                    name=f"evaluate {request.set_name}",
                )
            )
            self._task = task
            await asyncio.wait([task])
        await self._check.settled(_responses(task))
        step = version.step if version is not None else request.step
        if task.cancelled() or self._check.suspect:
            return None, step
        evaluation = task.result()
        return evaluation, evaluation.step if evaluation.step is not None else step

    async def _give_back(self, request: EvaluationRequest, reason: str, *, failed: bool) -> None:
        # It is no longer renewed, so another worker may claim it from here on.
        self._claimed = None
        await self._in_redis(
            lambda: self._runs.give_back_evaluation(
                request.id, self._name, reason=reason, failed=failed
            )
        )
        log.info(f"evaluation {request.id} was given back: {reason}")


def _is_older(version: Version | None, request: EvaluationRequest) -> bool:
    """Whether an evaluation that was claimed for weights to come has to do without them."""
    return version is not None and version.step < request.step


def _responses(evaluation: asyncio.Task[Evaluation]) -> list[Sample]:
    if evaluation.cancelled() or evaluation.exception() is not None:
        return []
    return [sample for sample, _ in evaluation.result().responses]
