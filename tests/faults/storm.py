"""A storm: a whole run of real processes, killed with SIGKILL at random seeded instants, then audited.

``bash tests/faults/run.sh --seed N --kills K`` runs it. The seed settles the plan of kills (how many
of which process, after which step, how long after the one before) and, unless told otherwise, the
run's staleness, window and number of pools. What really happened stands in ``kills.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import psutil
import redis

from tandem.common.run_folder import RunFolder, read_join

HERE = Path(__file__).resolve().parent
for place in (HERE, HERE.parent / "e2e", HERE.parent / "launch" / "board"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

import audit  # noqa: E402
from processes import Run, tandem  # noqa: E402

WORKERS = 3
GROUPS_PER_STEP = 4
TARGETS = {"rollout": 10, "reward": 5, "grader": 4, "learner": 5, "redis": 4}
"""How often each is hit, relatively."""
ENVIRONMENTS = {**TARGETS, "environments": 5, "episode": 8}
"""The same with environment servers, and the processes in which they play episodes."""
SERVERS = 2
STALL_SECONDS = 150.0
"""Without a new row for so long the run counts as wedged; a Redis call may last 60 s."""
LAST_KILL = 0.8
"""Share of the run's steps after which no kill is due."""
HURRY = 0.9
"""Share of the run's steps after which kills don't wait: all are made before its end."""
LEAST_STEPS_PER_KILL = 1.5
CALCULATOR = "tandem.launch.miniature.tools.environments:Calculator"
LAST_TARGETS = ("learner", "learner", "redis", "rollout", "reward")
"""What one more kill hits once the last row is journalled; the run may end before it comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill of the plan."""

    step: int
    """It waits until so many rows are journalled,"""
    pause: float
    """and then so many seconds."""
    target: str
    """A key of :data:`ENVIRONMENTS`."""
    pick: float
    """Which of several processes, in [0, 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a seed says."""

    seed: int
    staleness: int
    window: int
    late: str
    pools: int
    passes: int
    traces: bool
    """Half of the groups hold an expert's trace."""
    when: str
    """``expert.when`` where they do."""
    ahead: int
    """Groups that a worker leases ahead."""
    every: int
    """Steps between publications of the weights."""
    checkpoints: int
    """Steps between checkpoints."""
    problems: int
    """Of one pass, those with a trace not counted."""
    ranks: int
    """Of the learner; a kill hits any one of them."""
    evaluations: int
    """Steps between evaluations; there is one before the first and one after the last besides."""
    rewrites: int
    """How often the append-only file is rewritten, spread over the run's rows."""
    environments: bool
    """Whether groups are episodes with a tool."""
    kills: tuple[Kill, ...]
    last: Kill
    """Beyond the others: into the run's end, if that still lasts then."""

    def settings(self) -> list[str]:
        """Overrides of the preset."""
        fresh = {"path": "{run}/data/fresh.parquet", "name": "fresh", "weight": 1}
        expert = {"path": "{run}/data/expert.parquet", "name": "expert", "weight": 1}
        played = [
            "model.path=miniature-tools",
            "data.miniature=tools",
            'data.train=[{path: "{run}/data/train.parquet", name: train}]',
            "data.max_prompt_tokens=128",
            "rollout.max_new_tokens=96",
            f"environments.use={{calculator: {{form: tools, target: {CALCULATOR}}}}}",
            f"environments.servers={SERVERS}",
            "environments.episodes=8",
            "environments.max_turns=4",
            "environments.reset_seconds=30",
            "environments.step_seconds=30",
            # A storm may end the servers of one episode several times.
            "environments.retries=20",
        ]
        return [
            *(played if self.environments else []),
            f"run.seed={self.seed}",
            f"run.passes={self.passes}",
            f"data.miniature_fresh={self.problems}",
            *(
                []
                if self.environments
                else [f"data.train={json.dumps([fresh, expert] if self.traces else [fresh])}"]
            ),
            f"expert.per_group={int(self.traces)}",
            f"expert.when={self.when if self.traces else 'always'}",
            f"rollout.workers={WORKERS}",
            f"rollout.groups_ahead={self.ahead}",
            f"reward.pools={self.pools}",
            f"replay.max_staleness={self.staleness}",
            f"replay.window={self.window}",
            f"replay.late={self.late}",
            f"weights.every={self.every}",
            f"learner.checkpoint_every={self.checkpoints}",
            f"learner.ranks={self.ranks}",
            f"evaluate.every={self.evaluations}",
        ]


def plan(
    seed: int,
    kills: int,
    *,
    staleness: int | None = None,
    groups: int | None = None,
    ranks: int | None = None,
    environments: bool = False,
) -> Plan:
    """The plan of a seed."""
    targets = ENVIRONMENTS if environments else TARGETS
    draw = random.Random(f"storm {seed}")
    eta = draw.choice((0, 0, 1, 2, 3))
    eta = eta if staleness is None else staleness
    window = draw.randint(1, eta + 1)
    late = draw.choice(("wait", "drop"))
    pools = draw.choice((1, 2))
    passes, traces = draw.choice((1, 1, 2)), draw.random() < 0.4 and not environments
    ahead, every = draw.randint(0, 2), draw.randint(1, eta + 1)
    checkpoints = draw.choice((2, 5, 9))
    groups = groups or max(120, int(kills * LEAST_STEPS_PER_KILL) * GROUPS_PER_STEP)
    # Each problem with a trace comes after one without; the last row is short.
    problems = groups // passes // (1 + traces) | 1
    rows = -(-passes * problems * (1 + traces) // GROUPS_PER_STEP)
    last = max(1, int(LAST_KILL * rows))
    steps = sorted(draw.randint(0, last) for _ in range(kills))
    planned: list[Kill] = []
    for index in range(kills):
        # A third comes in bursts: into the restart after the kill before.
        burst = index > 0 and draw.random() < 0.35
        planned.append(
            Kill(
                step=planned[-1].step if burst else steps[index],
                pause=draw.uniform(0.05, 4.0) if burst else draw.uniform(0.0, 0.6),
                target=draw.choices(list(targets), list(targets.values()))[0],
                pick=draw.random(),
            )
        )
    more = random.Random(f"storm {seed}, ranks and rewrites")
    drawn = more.choice((1, 1, 1, 2))
    return Plan(
        seed=seed,
        staleness=eta,
        window=window,
        late=late,
        pools=pools,
        passes=passes,
        traces=traces,
        when=random.Random(f"storm {seed}, traces").choice(("always", "all_failed")),
        ahead=ahead,
        every=every,
        checkpoints=checkpoints,
        problems=problems,
        ranks=drawn if ranks is None else ranks,
        rewrites=more.randint(0, 6),
        evaluations=more.choice((1, 3, 5)),
        environments=environments,
        kills=tuple(planned),
        last=Kill(
            step=rows,
            pause=draw.uniform(0.0, 1.0),
            target=draw.choice(LAST_TARGETS),
            pick=draw.random(),
        ),
    )


class Storm:
    """One run under a plan, in a folder of its own, with further overrides."""

    def __init__(self, plan: Plan, here: Path, *overrides: str) -> None:
        self.plan = plan
        self.folder = here / "run"
        self.hit: Counter[str] = Counter()
        self.seconds = 0.0
        self.log = here / "kills.jsonl"
        self._began = time.monotonic()
        self._moved = self._began
        self._rows = 0
        self._rewritten = 0
        words = [f"run.dir={self.folder}", *plan.settings(), *overrides]
        self.run = Run(here, "start", str(HERE / "storm.yaml"), *words)

    def through(self) -> str | None:
        """Kills as planned and sees the run to its end; why it didn't get there, or None."""
        try:
            # Nobody starts a redis-server anew that dies before the first process of the run has begun.
            trouble = self._until(self._running)
            if trouble is not None:
                return trouble
            for kill in self.plan.kills:
                trouble = self._await_and_kill(kill)
                if trouble is not None:
                    return trouble
            trouble = self._await_and_kill(self.plan.last)
            if trouble is not None and self.run.process.poll() != 0:
                return trouble
            return self._until(lambda: False, ends=True)
        finally:
            self.seconds = time.monotonic() - self._began
            self.run.end()

    def _running(self) -> bool:
        record = RunFolder(self.folder).read_run()
        return record.get("state", "starting") != "starting"

    def _await_and_kill(self, kill: Kill) -> str | None:
        trouble = self._until(lambda: self._journalled() >= kill.step)
        if trouble is None:
            due = time.monotonic() + kill.pause
            hurry = HURRY * self.plan.last.step
            counted = kill is not self.plan.last
            trouble = self._until(
                lambda: time.monotonic() >= due or (counted and self._journalled() >= hurry)
            )
        return self._kill(kill) if trouble is None else trouble

    def _until(self, condition: object, *, ends: bool = False) -> str | None:
        """Waits for a condition, or for the run's end; why it can't come, or None."""
        assert callable(condition)
        while not condition():
            code = self.run.process.poll()
            if code is not None:
                if ends and code == 0:
                    return None
                return f"the run ended with exit code {code} after {sum(self.hit.values())} kills"
            self._journalled()
            if time.monotonic() - self._moved > STALL_SECONDS:
                _, out, err = tandem(self.folder.parent, "status", str(self.folder))
                return f"no step for {STALL_SECONDS:.0f} s: the run is wedged\n{out}{err}"
            time.sleep(0.02)
        return None

    def _journalled(self) -> int:
        rows = journalled(self.folder)
        if rows != self._rows:
            self._rows, self._moved = rows, time.monotonic()
            if rows * (self.plan.rewrites + 1) > (self._rewritten + 1) * self.plan.last.step:
                self._rewritten += 1
                self._rewrite()
        return rows

    def _rewrite(self) -> None:
        """Has the append-only file rewritten; the server may be killed in the middle of it."""
        join = read_join(self.folder / "join.json")
        client = redis.Redis(port=join.port, password=join.password, socket_timeout=5)
        try:
            client.bgrewriteaof()
        except redis.RedisError:
            pass  # It is dead just now, or at it already.
        finally:
            client.close()

    def _kill(self, kill: Kill) -> str | None:
        """Kills one process of the target, as soon as there is one."""
        alive = self._until(lambda: bool(self._alive(kill.target)))
        if alive is not None:
            return alive
        found = self._alive(kill.target)
        if not found:  # It has died by itself just now.
            return self._kill(kill)
        name, process = found[int(kill.pick * len(found))]
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            return self._kill(kill)
        self.hit[kill.target] += 1
        entry = {
            "kill": sum(self.hit.values()),
            "seconds": round(time.monotonic() - self._began, 3),
            "target": kill.target,
            "process": name,
            "pid": process.pid,
            "step": self._journalled(),
        }
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        return None

    def _alive(self, target: str) -> list[tuple[str, psutil.Process]]:
        """Living processes of a target, by name."""
        found: list[tuple[str, psutil.Process]] = []
        for child in self.run.tree.children():
            try:
                words, ended = child.cmdline(), child.status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                continue
            if ended or not words:
                continue
            if "redis-server" in words[0]:
                name = "redis"
            elif "--name" in words:
                name = words[words.index("--name") + 1]
            else:
                continue
            role = name.partition("-")[0]
            if role == target:
                found.append((name, child))
            elif target == "grader" and role == "reward":
                try:
                    below = child.children(recursive=True)
                except psutil.NoSuchProcess:
                    continue
                found += [(f"grader of {name}", process) for process in below]
            elif target == "episode" and role == "environments":
                try:
                    found += [(f"episode of {name}", process) for process in child.children()]
                except psutil.NoSuchProcess:
                    continue
        return sorted(found, key=lambda pair: (pair[0], pair[1].pid))


def journalled(folder: Path) -> int:
    """Rows in the journal."""
    return sum(record["kind"] == "row" for record in audit.journal_of(folder))


def restarts(folder: Path) -> Counter[str]:
    """Deaths that the supervisor answered with a new start, by role."""
    found: Counter[str] = Counter()
    path = folder / "logs" / "restarts.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        found[json.loads(line)["process"].partition("-")[0]] += 1
    return found


def report(storm: Storm, trouble: str | None, found: audit.Findings | None) -> list[str]:
    """The table, as lines."""
    plan = storm.plan
    again = restarts(storm.folder)
    settings = [field.name for field in fields(plan) if field.name not in ("kills", "last")]
    lines = [
        "  ".join(f"{name} {getattr(plan, name)}" for name in settings),
        f"{'target':<10}{'kills':>8}{'restarts':>10}",
    ]
    for target in ENVIRONMENTS if plan.environments else TARGETS:
        started = "-" if target in ("grader", "episode") else str(again[target])
        lines.append(f"{target:<10}{storm.hit[target]:>8}{started:>10}")
    lines.append(f"{'all':<10}{sum(storm.hit.values()):>8}{sum(again.values()):>10}")
    if found is not None:
        lines += [f"{name:<34}{value:>8}" for name, value in found.figures.items()]
    lines.append(f"{'seconds':<34}{storm.seconds:>8.0f}")
    breaches = ([trouble] if trouble else []) + (found.breaches if found is not None else [])
    lines += [f"BREACH: {breach}" for breach in breaches]
    lines.append("audit: clean" if not breaches else f"audit: {len(breaches)} breach(es)")
    return lines


def main(arguments: Sequence[str]) -> int:
    """Runs one storm; 0 where the audit found nothing."""
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of plan and run (default 0)")
    parser.add_argument("--kills", type=int, default=30, help="SIGKILLs (default 30)")
    parser.add_argument("--staleness", type=int, help="replay.max_staleness (default: by the seed)")
    parser.add_argument(
        "--groups", type=int, help="groups of the run, about (default: by the kills)"
    )
    parser.add_argument("--ranks", type=int, help="learner.ranks (default: by the seed)")
    parser.add_argument(
        "--environments",
        action="store_true",
        help="groups are episodes with a tool, and their servers and processes are killed too",
    )
    parser.add_argument("--keep", metavar="DIR", help="keep the run's folder there")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="further settings of the run"
    )
    options = parser.parse_args(arguments)
    here = Path(options.keep or tempfile.mkdtemp(prefix="tandem-storm-")).absolute()
    here.mkdir(parents=True, exist_ok=True)
    wanted = plan(
        options.seed,
        options.kills,
        staleness=options.staleness,
        groups=options.groups,
        ranks=options.ranks,
        environments=options.environments,
    )
    storm = Storm(wanted, here, *options.overrides)
    trouble = storm.through()
    found = None
    if (storm.folder / "checkpoints" / "LATEST").exists():
        found = audit.examine(audit.gather(storm.folder))
    lines = report(storm, trouble, found)
    print("\n".join(lines), flush=True)
    clean = lines[-1] == "audit: clean"
    if trouble:
        print(f"what the run said last:\n{storm.run.said()[-3000:]}")
    if clean and not options.keep:
        shutil.rmtree(here)
    else:
        print(f"the run's folder and kills.jsonl: {here}")
    return 0 if clean else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
