"""Evaluations that a worker claims from the ledger between two batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from ...common.config import Config
from ...common.errors import StoreError, TandemError
from ...common.records import Sample
from ...replay.store import EvaluationRequest, EvaluationResult, RunStore
from ..commit_check import CommitCheck
from ..engine import Engine

if TYPE_CHECKING:
    from .evaluation import Evaluation, Evaluator

log = logging.getLogger("tandem.rollout")


class ClaimedEvaluations:
    """Evaluates the weights in use, which are held still meanwhile; for one loop.

    Args:
        name: the worker's member id.
        engine: samples.
        runs: has the held-out sets, and takes the results.
        config: the run's.
        check: of new weights; a result waits for it.
        steady: whoever holds it keeps the engine's weights as they are.
        in_redis: runs a call that blocks on Redis, beside the loop.
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
    ) -> None:
        self._name = name
        self._engine = engine
        self._runs = runs
        self._config = config
        self._check = check
        self._steady = steady
        self._in_redis = in_redis
        self._evaluator: Evaluator | None = None
        self._task: asyncio.Task[Evaluation] | None = None
        self._claimed: EvaluationRequest | None = None
        self.done = 0
        """Evaluations whose results this worker has handed in."""

    def renew(self) -> None:
        """Keeps what is claimed from other workers; called from the keeper's thread.

        Raises:
            StoreError: Redis is away.
        """
        claimed = self._claimed
        if claimed is not None:
            self._runs.renew_evaluation(claimed.id, self._name)

    def cancel(self) -> None:
        """Ends what is under way; :meth:`run` gives it back."""
        if self._task is not None:
            self._task.cancel()

    def close(self) -> None:
        """Ends the graders."""
        if self._evaluator is not None:
            self._evaluator.close()

    async def run(self, request: EvaluationRequest) -> None:
        """Does one evaluation that was claimed; hands its result in, or gives it back.

        Raises:
            StoreError: Redis is away; the claim expires by itself.
        """
        self._claimed = request
        try:
            found, step = await self._evaluate(request)
            if found is None:
                spoiled = self._check.suspect
                reason = "the weights failed their check" if spoiled else "drained"
                await self._give_back(request, reason, failed=False)
                return
            result = EvaluationResult(
                id=request.id,
                set_name=request.set_name,
                step=step,
                version=found.version,
                accuracy=found.accuracy,
                samples=found.samples,
                pass_rate=found.pass_rate,
                accuracy_by_source=found.by_source,
                pass_by_source=found.pass_by_source,
                problems_by_source=found.problems_by_source,
                problems=found.problems,
                format_share=found.format_share,
                right_and_formed=found.right_and_formed,
                mean_length=found.mean_length,
                seconds=found.seconds,
                member=self._name,
            )
            await self._in_redis(lambda: self._runs.finish_evaluation(request.id, result))
            self.done += 1
            log.info(
                f"{request.set_name} at step {result.step}: accuracy {found.accuracy:.1%} of "
                f"{found.problems} problems in {found.seconds:.1f} s"
            )
        except StoreError:
            raise
        except (TandemError, ValueError) as error:
            # This or another worker tries again, unless it has failed too often.
            log.error(f"evaluation {request.id} failed: {error}")
            await self._give_back(request, str(error), failed=True)
        finally:
            self._claimed = None

    async def _evaluate(self, request: EvaluationRequest) -> tuple[Evaluation | None, int]:
        """What was found, and the step of the weights that were measured; None if it was ended or
        the weights failed their check."""
        # The graders' imports are paid for only by a worker that evaluates.
        from .evaluation import Evaluator

        if self._evaluator is None:
            self._evaluator = Evaluator(self._engine, self._config.reward)
        problems = await self._in_redis(
            lambda: self._runs.eval_set(request.set_name, request.limit)
        )
        async with self._steady:
            version = self._engine.version
            self._task = asyncio.create_task(
                self._evaluator.evaluate(
                    problems,
                    temperature=request.temperature,
                    top_p=self._config.evaluate.top_p,
                    samples=request.samples,
                    max_new_tokens=self._config.rollout.max_new_tokens,
                    seed=self._config.run.seed,
                    name=f"evaluate {request.set_name}",
                )
            )
            await asyncio.wait([self._task])
        await self._check.settled(_responses(self._task))
        step = version.step if version is not None else request.step
        if self._task.cancelled() or self._check.suspect:
            return None, step
        found = self._task.result()
        return found, found.step if found.step is not None else step

    async def _give_back(self, request: EvaluationRequest, reason: str, *, failed: bool) -> None:
        # It is not renewed any more: another worker may claim it from here on.
        self._claimed = None
        await self._in_redis(
            lambda: self._runs.give_back_evaluation(
                request.id, self._name, reason=reason, failed=failed
            )
        )
        log.info(f"evaluation {request.id} was given back: {reason}")


def _responses(evaluation: asyncio.Task[Evaluation]) -> list[Sample]:
    if evaluation.cancelled() or evaluation.exception() is not None:
        return []
    return [sample for sample, _ in evaluation.result().responses]
