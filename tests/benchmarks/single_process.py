"""A plain loop in one process and one thread: what the running system is measured against.

The same sampler, grader, batch, objective and schedule as the system's; no queue, no Redis, no
other process, plain ``torch.optim.AdamW`` in DeepSpeed's place. Sample a batch, grade it, learn
from it, load the weights into the sampler, again. Every batch is on-policy.

    .venv/bin/python tests/benchmarks/single_process.py --preset miniature --steps 60

Prints one JSON line: seconds of every update, by part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tandem.common import models
from tandem.common.config import Config, build
from tandem.common.records import Group, Problem, SamplingParams, Version
from tandem.common.run_folder import RunFolder
from tandem.launch.ingest import prepare as ingest
from tandem.launch.run.opened import presets
from tandem.learner.engine.update_result import UpdateResult
from tandem.learner.forward.policy import Policy
from tandem.learner.loop.schedule import learning_rate
from tandem.learner.objectives import Objective
from tandem.learner.rendezvous import Seat, process_group
from tandem.learner.rows.groups import MixedGroup
from tandem.learner.rows.microbatch import MicroBatch
from tandem.learner.updates.updates import Updates
from tandem.replay.rules.mixing import choose_traces
from tandem.replay.rules.order import Order
from tandem.reward.grading import Grader
from tandem.rollout.decoding.torch_engine import TorchEngine
from tandem.rollout.engine import GroupRequest, NamedWeights


class PlainEngine:
    """``torch.optim.AdamW`` behind the interface of the learner's engine."""

    world_size = 1
    rank = 0
    device = torch.device("cpu")
    critic = None
    adapters = None
    drops = False

    def __init__(self, config: Config) -> None:
        model = models.load_model(
            config.model.path, dtype="float32", attention="sdpa", device=self.device
        )
        self.policy = Policy(model)
        wanted = config.learner.optimizer
        self._clip = wanted.grad_clip
        self._optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=wanted.lr,
            betas=wanted.betas,
            eps=wanted.eps,
            weight_decay=wanted.weight_decay,
        )

    def update(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        scalars: Mapping[str, float],
        *,
        lr: float,
        critic_lr: float = 0.0,
        critic_alone: bool = False,
        before_step: Callable[[], None] | None = None,
        inspect: Callable[[Sequence[torch.Tensor]], bool] | None = None,
        teach: None = None,
    ) -> UpdateResult:
        """One optimizer step on the sum of the micro-batches' losses; nothing is inspected, nobody teaches."""
        total = 0.0
        sums: dict[str, float] = {}
        logprobs, entropies = [], []
        for micro in micro_batches:
            scored, entropy = self.policy(
                micro.input_ids,
                micro.index,
                micro.targets,
                micro.temperature,
                objective.needs_entropy,
            )
            loss, parts = objective.loss(
                micro.rows.with_columns(logprobs=scored, entropy=entropy), scalars
            )
            loss.backward()
            total += float(loss.detach())
            for name, value in parts.items():
                sums[name] = sums.get(name, 0.0) + float(value)
            logprobs.append(scored.detach())
            entropies.append(entropy.detach())
        if inspect is not None:
            inspect(logprobs)
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self._clip)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        return UpdateResult(
            applied=True,
            loss=total,
            grad_norm=float(norm),
            sums=sums,
            logprobs=logprobs,
            entropies=entropies,
        )

    def seed_dropout(self, step: int, update: int) -> None:
        """There is none."""

    def sum_by_name(self, values: dict[str, float]) -> dict[str, float]:
        """There is one rank."""
        return values


async def loop(config: Config, steps: int) -> dict[str, Any]:
    """Trains ``steps`` updates and returns the seconds of each, by part."""
    with tempfile.TemporaryDirectory() as temporary:
        prepared = ingest.prepare(config, RunFolder(temporary))
    traces = {trace.trace_id: trace for trace in prepared.traces}
    problems: dict[str, list[Problem]] = {}
    for problem in prepared.problems:
        problems.setdefault(problem.problem_id.rpartition("/")[0], []).append(problem)
    names = [name for name, _, _ in prepared.sources]
    order = Order(prepared.sources, config.run.seed)
    grader = Grader(config.reward)
    tokenizer = models.load_tokenizer(config.model.path)
    sampler = TorchEngine(
        models.load_model(
            config.model.path, dtype="float32", attention="sdpa", device=torch.device("cpu")
        ),
        tokenizer,
        version=Version(term=1, step=0),
    )
    await sampler.start()
    engine = PlainEngine(config)
    updates = Updates(engine, config)  # type: ignore[arg-type]
    size = config.replay.groups_per_step
    sampling = SamplingParams(
        temperature=config.rollout.temperature,
        top_p=1.0,
        top_k=0,
        max_new_tokens=config.rollout.max_new_tokens,
    )
    parts: dict[str, list[float]] = {"sample": [], "grade": [], "learn": [], "load": []}
    rewards = []
    for step in range(1, steps + 1):
        began = time.perf_counter()
        chosen: dict[str, tuple[Problem, tuple[str, ...]]] = {}
        requests = []
        for serial in range((step - 1) * size, step * size):
            pass_, position = divmod(serial, order.pass_length)
            source, index = order.place(pass_, position)
            problem = problems[names[source]][index]
            group_id = f"{pass_}-{position}"
            picked = choose_traces(problem, config.run.seed, group_id, config.expert.per_group)
            chosen[group_id] = (problem, picked)
            requests.append(
                GroupRequest(
                    group_id=group_id,
                    prompt_tokens=problem.prompt_tokens,
                    count=config.rollout.group_size - len(picked),
                    sampling=sampling,
                    seed=config.run.seed,
                )
            )
        finished = {f.group_id: f async for f in sampler.generate(requests)}
        sampled = time.perf_counter()
        groups: list[MixedGroup] = []
        for group_id, (problem, picked) in chosen.items():
            group = Group.of(
                problem,
                finished[group_id].samples,
                group_id=group_id,
                attempt=1,
                worker="loop",
                trace_ids=picked,
            )
            groups.append(
                MixedGroup(
                    group=grader.grade_group(group), traces=tuple(traces[name] for name in picked)
                )
            )
        graded = time.perf_counter()
        rewards.append(sum(s.reward or 0.0 for m in groups for s in m.group.samples))
        updates.train(
            step,
            groups,
            lr=learning_rate(config.learner.optimizer, step, config.run.steps or steps),
        )
        learned = time.perf_counter()
        weights = {n: p.detach().clone() for n, p in engine.policy.model.named_parameters()}
        await sampler.load(NamedWeights(weights), Version(term=1, step=step))
        parts["sample"].append(sampled - began)
        parts["grade"].append(graded - sampled)
        parts["learn"].append(learned - graded)
        parts["load"].append(time.perf_counter() - learned)
    await sampler.close()
    grader.close()
    total = [sum(step) for step in zip(*parts.values(), strict=True)]
    return {"update": total, **parts, "reward_last": rewards[-1]}


def main() -> None:
    """Runs the loop."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--preset", default="miniature")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    preset = presets.load(options.preset)
    config = build(preset.tree, options.overrides)
    # The diagnostics sum over ranks; a group of one rank has no socket.
    with process_group(Seat()):
        print(json.dumps(asyncio.run(loop(config, options.steps))))


if __name__ == "__main__":
    main()
