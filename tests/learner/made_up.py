"""Small runs for the learner's tests: a config, a model, rows, and a worker that needs no model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from tandem.common.config import Config, build, to_yaml
from tandem.common.records import (
    ExpertTrace,
    FinishReason,
    Group,
    Problem,
    Sample,
    SamplingParams,
    Source,
    Verdict,
    Version,
    VersionSpan,
)
from tandem.common.run_folder import JoinInfo, RunFolder
from tandem.common.seeds import keyed_generator
from tandem.learner.objectives import Objective
from tandem.learner.rows.groups import MixedGroup, rows_of
from tandem.learner.rows.rows import Rows
from tandem.replay.connection import connect
from tandem.replay.evaluating.evaluations import EvaluationRequest, EvaluationResult
from tandem.replay.ledger import Ledger
from tandem.replay.ledger_records import Lease, LedgerSettings
from tandem.replay.store import RunStore


def config_of(**sections: Any) -> Config:
    """A small run's config; sections are merged over it."""
    tree: dict[str, Any] = {
        "run": {"steps": 6, "seed": 3},
        "data": {"train": [{"path": "unused.parquet", "name": "a"}]},
        "rollout": {
            "group_size": 4,
            "groups_per_batch": 2,
            "max_new_tokens": 12,
            "engine": "torch",
        },
        "replay": {"groups_per_step": 2, "max_staleness": 1},
        "learner": {"optimizer": {"lr": 1e-3, "betas": [0.9, 0.95]}},
    }
    for name, values in sections.items():
        for key, value in values.items():
            if isinstance(value, dict) and isinstance(tree.setdefault(name, {}).get(key), dict):
                tree[name][key] |= value
            else:
                tree.setdefault(name, {})[key] = value
    if tree["learner"].get("objective", {}).get("name") == "distill":
        tree["learner"].setdefault("teacher", "a/teacher")
    # The mathematics is tested for choices too that no run may make.
    return build(tree, stored=True)


def tiny_model(
    seed: int = 0,
    *,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    hidden: int = 32,
    vocabulary: int = 32,
) -> Any:
    """A random Qwen2 of some thousand parameters, tied embeddings."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    sizes = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        intermediate_size=48,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(sizes).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3)
    return model


def tiny_teacher(vocabulary: int = 40) -> Any:
    """A wider model than :func:`tiny_model`, whose output has padding beyond the ids of the tokenizer."""
    return tiny_model(seed=5, hidden=48, vocabulary=vocabulary)


def other_model(path: str, **options: Any) -> Any:
    """In the place of ``load_model``: :func:`tiny_model` as reference, or a teacher."""
    return tiny_teacher() if options["key"] == "learner.teacher" else tiny_model()


def random_rows(
    seed: int = 0,
    groups: int = 4,
    size: int = 4,
    *,
    lag: int = 0,
    temperature: float = 1.0,
    objective: Objective | None = None,
) -> Rows:
    """Rows of step 6: own ones, an expert's in each second group, a mixed one and a tool's text."""
    rng = np.random.default_rng(seed)
    made = []
    for group_number in range(groups):
        prompt = rng.integers(3, 24, int(rng.integers(3, 8))).astype(np.int32)
        samples = []
        for place in range(size):
            length = int(rng.integers(4, 12))
            source = np.full(length, Source.OWN, np.uint8)
            if place == size - 1 and group_number % 2 == 0:
                source[:] = Source.EXPERT
            if place == 0 and group_number == 1:
                source[:2] = Source.EXPERT
            if place == 1 and group_number == 2:
                source[1:3] = Source.ENVIRONMENT
            own = source == Source.OWN
            samples.append(
                Sample(
                    tokens=rng.integers(3, 24, length).astype(np.int32),
                    source=source,
                    logprobs=np.where(own, rng.uniform(-5, -1, length), np.nan).astype(np.float32),
                    spans=tuple(
                        VersionSpan(term=1, step=5 - lag, start=token, end=token + 1)
                        for token in np.flatnonzero(own).tolist()
                    ),
                    finish_reason=FinishReason.LENGTH if place == 2 else FinishReason.STOP,
                    sampling=SamplingParams(
                        temperature=temperature, top_p=1.0, top_k=0, max_new_tokens=1024
                    ),
                    text="",
                    reward=float(rng.integers(0, 2)) if place < size - 1 else 1.0,
                    verdict=Verdict.CORRECT,
                    components={},
                    extracted=None,
                    grader=None,
                )
            )
        made.append(
            MixedGroup(
                group=Group(
                    group_id=f"0-{group_number}",
                    attempt=1,
                    worker="rollout-0",
                    problem_id=f"a/{group_number}",
                    prompt_tokens=prompt,
                    prompt_text="",
                    gold="",
                    data_source="",
                    samples=tuple(samples),
                    trace_ids=(),
                    extra={},
                )
            )
        )
    return rows_of(
        made,
        step=6,
        temperature=temperature,
        baseline="group_mean",
        plain_temperature=() if objective is None else objective.plain_temperature,
    )


EXPERTS = 3


def problem(number: int) -> Problem:
    """Problem ``a/<number>``; the first ones have an expert trace."""
    rng = keyed_generator("prompt", number)
    return Problem(
        problem_id=f"a/{number}",
        prompt_text="1+1=?",
        prompt_tokens=rng.integers(9, 24, 5).astype(np.int32),
        gold="2",
        data_source="miniature",
        trace_ids=(f"a/{number}#0",) if number < EXPERTS else (),
        ability="math",
        extra={},
    )


def trace(number: int) -> ExpertTrace:
    """The expert trace of problem ``a/<number>``: always the same few tokens."""
    return ExpertTrace(
        trace_id=f"a/{number}#0",
        problem_id=f"a/{number}",
        tokens=np.array([12, 13, 14, 15 + number, 10, 1], np.int32),
        logprobs=None,
        text="expert",
        tokenizer_digest="",
        reward=1.0,
        verdict=Verdict.CORRECT,
        components={},
        grader="made_up@1",
    )


def samples_of(lease: Lease, held: Version, count: int) -> tuple[Sample, ...]:
    """Graded samples that depend on the group's id alone, but for the version that they name."""
    rng = keyed_generator("samples", lease.group_id)
    made = []
    for number in range(count):
        length = int(rng.integers(4, 12))
        right = number % 2 == 0
        made.append(
            Sample(
                tokens=rng.integers(3, 24, length).astype(np.int32),
                source=np.zeros(length, np.uint8),
                logprobs=rng.uniform(-4, -2, length).astype(np.float32),
                spans=(VersionSpan(term=held.term, step=held.step, start=0, end=length),),
                finish_reason=FinishReason.STOP,
                sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1024),
                text="own",
                reward=float(right),
                verdict=Verdict.CORRECT if right else Verdict.WRONG,
                components={"accuracy": float(right), "format": 1.0},
                extracted=None,
                grader=None,
            )
        )
    return tuple(made)


def pair_of(mixed: MixedGroup) -> MixedGroup:
    """The group's first two samples, a right and a wrong one, as a pair of stored responses."""
    traces = tuple(
        replace(
            trace(0),
            trace_id=f"{mixed.group.problem_id}#{number}",
            problem_id=mixed.group.problem_id,
            tokens=sample.tokens,
            reward=sample.reward,
            verdict=sample.verdict,
        )
        for number, sample in enumerate(mixed.group.samples[:2])
    )
    return MixedGroup(group=replace(mixed.group, samples=()), traces=traces)


def groups_of(count: int, size: int = 4, step: int = 0) -> list[MixedGroup]:
    """Graded groups of own samples that the version of this step sampled, without traces."""
    found: list[MixedGroup] = []
    for number in range(count):
        lease = Lease(
            group_id=f"0-{number}",
            attempt=1,
            problem_id=f"a/{number}",
            deadline_ms=0,
        )
        asked = problem(number)
        group = Group.of(
            asked,
            samples_of(lease, Version(term=1, step=step), size),
            group_id=lease.group_id,
            attempt=1,
            worker="rollout-0",
            trace_ids=(),
        )
        found.append(MixedGroup(group=group))
    return found


class Run:
    """A run on a Redis, with a thread that is worker and reward pool in one."""

    def __init__(self, join: JoinInfo, config: Config, folder: Path, problems: int = 6) -> None:
        self.join = join
        self.config = config
        self.folder = RunFolder(folder)
        self.folder.make()
        self.folder.write_join(join)
        self.store = connect(join, name="test")
        self.runs = RunStore(self.store)
        self.runs.put_config(to_yaml(config))
        self.runs.put_problems([problem(n) for n in range(problems)])
        self.runs.put_traces([trace(n) for n in range(EXPERTS)])
        self.ledger = Ledger(self.store, "rollout-0")
        self.ledger.create(LedgerSettings.of(config, [("a", problems, 1)], "digest"))
        self.poison: set[str] = set()
        """Groups whose behaviour log-probs make the gradient overflow."""
        self.evaluates: Callable[[EvaluationRequest], bool] = lambda request: True
        """Whether an evaluation that is claimed is finished."""
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def work(self) -> None:
        """Starts to lease, answer and commit, as fast as it is admitted."""
        self._done.clear()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        hints = self.store.hints("taken", "state")
        while not self._done.is_set():
            term, journalled = self.ledger.term(), self.ledger.journalled()
            held = Version(term=term, step=journalled)
            self.evaluate(held)
            reply = self.ledger.lease(held, 2) if term else None
            for lease in reply.leases if reply else ():
                self.ledger.commit(self.answer(lease, held))
            if reply is None or not reply.leases:
                hints.wait(0.05)
        hints.close()

    def evaluate(self, held: Version) -> None:
        """Makes an evaluation that is due, if there is one and it is let through."""
        request = self.runs.claim_evaluation("rollout-0", held)
        # One that isn't let through stays claimed, as by a worker that is at it.
        if request is not None and self.evaluates(request):
            self.finish_evaluation(request, held.step)

    def finish_evaluation(self, request: EvaluationRequest, step: int) -> None:
        """Hands in the result of an evaluation of a step's weights."""
        self.runs.finish_evaluation(
            request.id,
            EvaluationResult(
                id=request.id,
                set_name=request.set_name,
                step=step,
                accuracy=0.5,
                problems=2,
                format_share=1.0,
                mean_length=4.0,
                seconds=0.1,
                member="rollout-0",
            ),
        )

    def answer(self, lease: Lease, held: Version) -> Group:
        """A graded group for a lease."""
        asked = problem(int(lease.problem_id.partition("/")[2]))
        traces = asked.trace_ids[: self.config.expert.per_group]
        count = self.config.rollout.group_size - len(traces)
        return Group.of(
            asked,
            samples_of(lease, held, count),
            group_id=lease.group_id,
            attempt=lease.attempt,
            worker="rollout-0",
            trace_ids=traces,
        )

    def rest(self) -> None:
        """Ends the worker."""
        self._done.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def close(self) -> None:
        """Ends the worker and the connection."""
        self.rest()
        self.store.close()
