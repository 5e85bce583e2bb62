"""Evaluations in Redis: who asks for one, who has claimed it, and its result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...common.errors import StoreError
from ...common.plain import Record, as_json, read_message, read_record
from ...common.records import Version
from ..answers import text as read_text
from ..connection import Store
from ..ledger_records import WAY_OUT
from .evaluated import Cell, EvaluatedSample

CLAIM_SECONDS = 30.0
"""An evaluation whose worker doesn't renew its claim for this long goes to another worker."""
EVALUATION_FAILURES = 5
"""Number of failed attempts after which an evaluation is given up."""
FAILED_SECONDS = 2.0
"""Time after a failed attempt during which nobody claims the evaluation."""
JOB = "job:"
"""Beginning of the ids of evaluations that are no run's own, and of the names of their sets."""


class EvaluationJob(Record, frozen=True, kw_only=True):
    """Some samples of an evaluation that no run has asked for, to be kept: ``tandem evaluate --fleet``."""

    cell: Cell
    """What is sampled, and how."""
    wanted: tuple[tuple[int, int], ...]
    """Each sample's problem by its place in the set, and its number."""
    reward: dict[str, Any]
    """The section ``reward`` by which they are graded; the mode is the cell's."""
    token_ids: bool = False
    """Whether the samples keep their tokens."""
    subject: str | None = None
    level: str | None = None
    """Columns that say what a problem is about, and how hard it is."""


class EvaluationRequest(Record, frozen=True, kw_only=True):
    """An evaluation for some rollout worker to make."""

    id: str
    """Unique in the run, such as ``heldout@50``."""
    set_name: str
    """Name of the held-out set."""
    step: int
    """The worker must hold this step's weights or newer ones."""
    limit: int | None = None
    """Use only this many problems, the first ones; None = all."""
    temperature: float = 0.0
    """Sampling temperature; 0 = greedy."""
    samples: int = 1
    """Responses per problem."""
    job: EvaluationJob | None = None
    """What is to be done instead of a whole evaluation of the run's own."""


class EvaluationResult(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The result of an evaluation."""

    id: str
    """Id of the request."""
    set_name: str
    """Name of the held-out set."""
    step: int
    """Step of the oldest weights that were actually used."""
    accuracy: float
    """Mean over problems and samples, 0 to 1."""
    problems: int
    """Number of problems."""
    format_share: float
    """Share of responses in the right form."""
    mean_length: float
    """Mean tokens per response."""
    seconds: float
    """Wall time in seconds."""
    member: str
    """The worker that made it."""
    right_and_formed: float | None = None
    """Share of responses that are correct and in the right form, if it is known."""
    version: str = ""
    """The weights that were actually used, ``term.step``; several, oldest first, if new ones came
    during the evaluation."""
    samples: int = 1
    """Responses per problem, of those whose rows aren't repeated."""
    pass_rate: float | None = None
    """Share of problems with at least one correct response: pass@k where each has k."""
    accuracy_by_source: dict[str, float] = msgspec.field(default_factory=dict)
    """Accuracy by data source."""
    pass_by_source: dict[str, float] = msgspec.field(default_factory=dict)
    """The same by data source."""
    problems_by_source: dict[str, int] = msgspec.field(default_factory=dict)
    """Number of problems by data source."""
    figures: dict[str, float] = msgspec.field(default_factory=dict)
    """Further figures by name, as in ``pass@4``, ``maj@8`` or ``source/aime/pass@8``."""
    refused: tuple[str, ...] = ()
    """Of a job's samples that can't be made, why."""

    def classes(self) -> dict[str, float]:
        """Shares of responses by form and answer, see :func:`four_classes`."""
        return four_classes(self.accuracy, self.format_share, self.right_and_formed)

    def all_figures(self) -> dict[str, float | None]:
        """Everything that it says of the set and its sources, by the names that metrics have after the set's."""
        several = self.samples > 1 and self.pass_rate is not None
        found: dict[str, float | None] = {
            "accuracy": self.accuracy,
            "format": self.format_share,
            **{f"class_{k}": share for k, share in self.classes().items()},
            "length": self.mean_length,
            "problems": self.problems,
            "samples": self.samples,
            "seconds": self.seconds,
            **self.figures,
        }
        # Where some problems have more responses, any right one of them isn't pass@k: that is among the figures.
        if several:
            found.setdefault(f"pass@{self.samples}", self.pass_rate)
        for source, accuracy in self.accuracy_by_source.items():
            found[f"source/{source}/accuracy"] = accuracy
            found[f"source/{source}/problems"] = self.problems_by_source.get(source)
            if several:
                name = f"source/{source}/pass@{self.samples}"
                found.setdefault(name, self.pass_by_source.get(source))
        return found


def four_classes(accuracy: float, form: float, both: float | None) -> dict[str, float]:
    """Shares of responses by form, then answer: ``11``, ``10``, ``01`` and ``00``.

    ``10`` has the right form with a wrong answer, ``01`` the right answer in a wrong form. Empty if
    one of the three shares isn't known.

    Args:
        accuracy: share of correct responses.
        form: share in the right form.
        both: share that is correct and in the right form.
    """
    if both is None or math.isnan(accuracy + form):
        return {}
    return {
        "11": both,
        "10": max(0.0, form - both),
        "01": max(0.0, accuracy - both),
        "00": max(0.0, 1.0 - form - accuracy + both),
    }


def result_of(
    figures: Mapping[str, Any], *, set_name: str, step: int, id_: str, member: str
) -> EvaluationResult:
    """The result by the figures of an evaluation (:class:`tandem.rollout.evaluate.evaluation.Evaluation`) as plain data."""
    form = figures["format_share"]
    return EvaluationResult(
        id=id_,
        set_name=set_name,
        step=step,
        version=figures["version"],
        accuracy=figures["accuracy"],
        samples=figures["samples"],
        pass_rate=figures["pass_rate"],
        accuracy_by_source=figures["by_source"],
        pass_by_source=figures["pass_by_source"],
        problems_by_source=figures["problems_by_source"],
        problems=figures["problems"],
        format_share=math.nan if form is None else form,
        right_and_formed=figures["right_and_formed"],
        mean_length=figures["mean_length"],
        seconds=figures["seconds"],
        member=member,
        figures=figures["figures"],
    )


class EvaluationStore:
    """The evaluations of a run, and jobs of others. Every method may be repeated safely."""

    def __init__(self, store: Store) -> None:
        self.store = store

    # due -> claimed -> done, and back: claimed -> due (given back, or the claim has expired). After its
    # last failed attempt an evaluation is given up, until it is asked for again.

    def request_evaluation(self, request: EvaluationRequest, term: int) -> None:
        """Asks for an evaluation; asking again for one that is due or done changes nothing.

        Raises:
            FencedError: a newer learner has taken over.
        """
        self.store.script("request_evaluation", request.id, request.step, as_json(request), term)

    def claim_evaluation(self, member: str, held: Version) -> EvaluationRequest | None:
        """Claims the earliest evaluation that is due with the weights that the worker holds.

        A claim expires after 30 s; see :meth:`renew_evaluation`.
        """
        raw = self.store.script("claim_evaluation", member, held.step, int(CLAIM_SECONDS * 1000))
        return read_request(raw) if raw else None

    def renew_evaluation(self, id_: str, member: str) -> bool:
        """Keeps a claim for another 30 s; False if another worker has it now."""
        return bool(self.store.script("renew_evaluation", id_, member, int(CLAIM_SECONDS * 1000)))

    def give_back_evaluation(self, id_: str, member: str, *, reason: str, failed: bool) -> bool:
        """Ends a claim without a result; False if another worker has it now.

        Args:
            id_: id of the evaluation.
            member: the worker that has claimed it.
            reason: why there is no result.
            failed: whether the evaluation itself failed, which counts: after
                :data:`EVALUATION_FAILURES` failures it is given up.
        """
        limits = EVALUATION_FAILURES, int(FAILED_SECONDS * 1000)
        answer = self.store.script(
            "give_back_evaluation", id_, member, reason[:2000], int(failed), *limits
        )
        return bool(answer)

    def finish_evaluation(self, id_: str, result: EvaluationResult) -> bool:
        """Stores the result unless there is one already; returns whether it was stored.

        A job that was forgotten meanwhile has none, and the samples that came for it are dropped.
        """
        return bool(self.store.script("finish_evaluation", id_, as_json(result)))

    def evaluation(self, id_: str) -> EvaluationResult | None:
        """The result of one evaluation, if it is done."""
        raw = self.store.call("hget", self.store.key("evaluation_results"), id_)
        return read_result(raw) if raw else None

    def evaluation_results(self, ids: Sequence[str]) -> dict[str, EvaluationResult]:
        """Results of those of these evaluations that are done."""
        if not ids:
            return {}
        raw = self.store.call("hmget", self.store.key("evaluation_results"), list(ids))
        return {id_: read_result(text) for id_, text in zip(ids, raw, strict=True) if text}

    def asked_evaluations(self) -> list[str]:
        """Ids of all evaluations of the run's own that were ever asked for, sorted."""
        raw = self.store.call("hkeys", self.store.key("evaluations"))
        found = sorted(read_text(name, "an evaluation's id") for name in raw)
        return [name for name in found if not name.startswith(JOB)]

    def given_up_evaluations(self) -> dict[str, str]:
        """Ids of evaluations that failed too often, with the last attempt's reason."""
        # In this order: of one that is done between the two, there are no failures any more.
        raw_due = self.store.call("zrange", self.store.key("evaluations_open"), 0, -1)
        failures = self.store.call("hgetall", self.store.key("evaluation_failures"))
        due = {name.decode() for name in raw_due}
        return {
            id_: read_text(raw, f"the failures of evaluation {id_}").partition(" ")[2]
            for name, raw in failures.items()
            if (id_ := read_text(name, "an evaluation's id")) not in due
        }

    def evaluations(self) -> list[EvaluationResult]:
        """All results of the run's own evaluations, by step and set."""
        raw = self.store.call("hvals", self.store.key("evaluation_results"))
        results = [one for one in map(read_result, raw) if not one.id.startswith(JOB)]
        return sorted(results, key=lambda result: (result.step, result.set_name, result.id))

    def open_evaluations(self) -> list[str]:
        """Ids of the run's own evaluations that were asked for and aren't done, by step."""
        raw = self.store.call("zrange", self.store.key("evaluations_open"), 0, -1)
        return [name for one in raw if not (name := one.decode()).startswith(JOB)]

    # Jobs of other evaluations. A worker puts the samples, then finishes the job; whoever has asked takes
    # them, then forgets the job.

    def put_samples(self, id_: str, samples: Sequence[EvaluatedSample]) -> None:
        """Stores a job's samples; those of a repeat take their place."""
        data = msgspec.msgpack.encode(samples)
        self.store.call("hset", self.store.key("evaluation_samples"), id_, data)

    def samples(self, id_: str) -> list[EvaluatedSample]:
        """A job's samples.

        Raises:
            StoreError: there are none.
        """
        raw = self.store.call("hget", self.store.key("evaluation_samples"), id_)
        if raw is None:
            raise StoreError(f"the samples of {id_} aren't in Redis; {WAY_OUT}")
        return read_kept(raw)

    def jobs(self) -> list[str]:
        """Ids of all jobs that were asked for and not forgotten, sorted."""
        raw = self.store.call("hkeys", self.store.key("evaluations"))
        found = sorted(read_text(name, "an evaluation's id") for name in raw)
        return [name for name in found if name.startswith(JOB)]

    def forget_job(self, id_: str) -> None:
        """Removes a job with its samples, whether it is done or not; a worker may still be at it."""

        def forget() -> None:
            pipeline = self.store.redis.pipeline(transaction=True)
            pipeline.zrem(self.store.key("evaluations_open"), id_)
            for name in _OF_JOB:
                pipeline.hdel(self.store.key(name), id_)
            pipeline.execute()

        self.store.persist(f"the end of {id_}", forget)

    def forget_set(self, name: str) -> None:
        """Removes the held-out set of jobs."""
        self.store.call("delete", self.store.key(f"eval:{name}"))


_OF_JOB = (
    "evaluations",
    "evaluation_claims",
    "evaluation_failures",
    "evaluation_results",
    "evaluation_samples",
)


def read_kept(raw: bytes) -> list[EvaluatedSample]:
    """Reads the samples of a job; raises ``WireError`` if they aren't any."""
    found: list[EvaluatedSample] = read_message(list[EvaluatedSample], raw, "a job's samples")
    return found


def read_request(raw: bytes) -> EvaluationRequest:
    """Reads a request for an evaluation; raises ``StoreError`` if it isn't one."""
    return read_record(EvaluationRequest, raw, "a request to evaluate", StoreError, WAY_OUT)


def read_result(raw: bytes) -> EvaluationResult:
    """Reads the result of an evaluation; raises ``StoreError`` if it isn't one."""
    return read_record(EvaluationResult, raw, "the result of an evaluation", StoreError, WAY_OUT)
