"""Puts a snapshot together: a pure function of what was read elsewhere, and of the clock.

Its inputs are the history of ``metrics.jsonl``, a look into Redis, and the restarts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...common.records import Verdict
from ...replay.hosts import HEAD
from .facts import Activity, Facts
from .history import Evaluated, History, first_number
from .snapshot import (
    Episodes,
    Grading,
    HostStanding,
    Judging,
    Known,
    MemberStanding,
    Queues,
    RoleStanding,
    Snapshot,
    Staleness,
)

FRESH_SECONDS = 15.0
"""A process whose report is older than this is taken to be gone."""
LONGEST_WAIT = 10.0
"""A wait that is still going on counts for at most this long: idle shares look back as far."""
BUSY = 0.05
"""A role that waits for less than this share of its time isn't said to wait for anybody."""

WAITS: Mapping[str, tuple[str, str]] = {
    "batch": ("rollout", "the next batch"),
    "evaluation": ("rollout", "an evaluation"),
    "version": ("learner", "the first weights"),
    "pool": ("reward", "receipts"),
    "redis": ("redis", "an answer"),
    "groups": ("rollout", "groups to grade"),
    "graders": ("graders", "verdicts"),
    "admission": ("learner", "the next step"),
}
"""Activity ``wait/<name>`` of a process to the role that it waits for and what it needs from it."""


def assemble(
    known: Known,
    history: History,
    facts: Facts | None = None,
    activity: Activity | None = None,
    *,
    restarts: Sequence[Mapping[str, Any]] = (),
    problem: str = "",
    now: float,
) -> Snapshot:
    """Builds the snapshot.

    Args:
        known: what the folder says.
        history: from ``metrics.jsonl``; empty if the folder is on another host.
        facts: a look into Redis; None if there is none.
        activity: from the reports of the latest looks; None = from ``facts`` alone.
        restarts: noted by the supervisor.
        problem: why ``facts`` is old or missing.
        now: seconds since the epoch.
    """
    if activity is None:
        activity = Activity()
        activity.add(facts.reports if facts else {})
    fresh = _fresh(facts, now)
    members = _members(facts, fresh, activity, history, now)
    learner: Mapping[str, Any] = next((r for r in fresh.values() if r.get("role") == "learner"), {})
    step = max(history.step, int((learner.get("version") or (0, 0))[1]))
    # The ledger has the number of all steps, of which the run may be told to make fewer.
    total = learner.get("total_steps") or known.total_steps or (facts.steps if facts else None)
    pace = history.seconds_per_step()
    state = _state(known, facts)
    left = pace * max(0, total - step) if pace and total and state == "running" else None
    return Snapshot(
        time=now,
        run=known.run,
        preset=known.preset,
        state=state,
        supervisor=known.supervisor,
        elapsed_seconds=known.elapsed_seconds,
        step=step,
        total_steps=total,
        seconds_per_step=pace,
        seconds_left=left,
        reward=_or(history.last("reward/mean"), learner.get("reward")),
        rewards=history.values("reward/mean"),
        loss=_or(history.last("train/loss"), learner.get("loss")),
        zero_variance=history.mean("reward/zero_variance"),
        response_length=history.mean("rollout/length_mean"),
        entropy=history.mean("train/entropy"),
        held_out=known.held_out,
        evaluations=_evaluations(facts, history),
        tokens_sampled_per_second=_sum(m.tokens_per_second for m in members),
        tokens_trained_per_second=history.per_second("train/tokens_own", "train/tokens_expert"),
        samples_trained_per_second=history.per_second("train/rows"),
        ledger=dict(facts.counts) if facts else dict(known.ledger),
        queues=_queues(facts, fresh),
        staleness=Staleness(
            mean=history.mean("replay/staleness_mean"),
            max=max(history.values("replay/staleness_max"), default=None),
            limit=facts.limit if facts else known.limit,
            shares=history.staleness(),
        ),
        memory_peaks=history.memory(),
        roles=_roles(members, fresh, activity, history, facts, now) or _summed(known.idle),
        members=members,
        hosts=_hosts(facts, now),
        restarts=tuple(restarts),
        grader_restarts=facts.grader_restarts if facts else 0,
        grading=_grading(fresh),
        episodes=_episodes(fresh),
        alarms=_alarms(fresh, history),
        dead_letters=facts.dead_letters if facts else known.dead_letters,
        journalled=facts.journalled if facts else None,
        term=facts.term if facts else None,
        waiting_for=facts.waiting_for if facts else "",
        problem=problem,
    )


def _state(known: Known, facts: Facts | None) -> str | None:
    if facts is None or known.state == "draining":
        return known.state
    # An external Redis outlives the run's processes and still says "running".
    if known.state in ("starting", "stopped", "failed") and not facts.members:
        return known.state
    # The state in Redis stays "running" while the run drains: the head says so of itself.
    heads = [host for host in facts.hosts if host.state.role == HEAD and host.age < FRESH_SECONDS]
    if facts.state == "running" and any(head.state.leaving for head in heads):
        return "draining"
    return facts.state


def _fresh(facts: Facts | None, now: float) -> dict[str, Mapping[str, Any]]:
    """Reports of processes that are still there."""
    if facts is None:
        return {}
    heard = {member.member for member in facts.members if member.age < FRESH_SECONDS}
    return {
        member: report
        for member, report in facts.reports.items()
        if member in heard or now - float(report.get("time") or 0.0) < FRESH_SECONDS
    }


def _alarms(fresh: Mapping[str, Mapping[str, Any]], history: History) -> tuple[str, ...]:
    """Alarms of the pools, and of the learner since the run began if its metrics are at hand."""
    reports = {m: r for m, r in sorted(fresh.items()) if r.get("alarm")}
    if history.alarm:
        reports = {m: r for m, r in reports.items() if r.get("role") != "learner"}
    own = (f"learner: {history.alarm}",) if history.alarm else ()
    away = tuple(f"{m}: {r['weights_alarm']}" for m, r in fresh.items() if r.get("weights_alarm"))
    return own + away + tuple(f"{member}: {report['alarm']}" for member, report in reports.items())


def _evaluations(facts: Facts | None, history: History) -> tuple[Evaluated, ...]:
    by_key = {(one.step, one.set): one for one in history.evaluations}
    for result in facts.evaluations if facts else ():
        # The learner copies a result into the metrics only at its next step.
        by_key[(result.step, result.set_name)] = Evaluated(
            set=result.set_name,
            step=result.step,
            accuracy=result.accuracy,
            problems=result.problems,
            figures={
                name: float(value)
                for name, value in result.all_figures().items()
                if value is not None and math.isfinite(value)
            },
        )
    return tuple(by_key[key] for key in sorted(by_key))


def _grading(fresh: Mapping[str, Mapping[str, Any]]) -> Grading | None:
    pools = [r for r in fresh.values() if r.get("role") == "reward" and "grader/recent" in r]
    if not pools:
        return None

    def total(name: str) -> float:
        return sum(float(r.get(f"grader/{name}") or 0) for r in pools)

    verdicts = {v.value: int(total(v.value)) for v in Verdict if total(v.value)}
    requests = max(1.0, total("requests"))
    return Grading(
        samples=sum(verdicts.values()),
        verdicts=verdicts,
        to_process=int(total("to_process")),
        cached=int(total("cache_hits") + total("coalesced")),
        queued=int(total("queued")),
        queue_wait=total("queue_wait_seconds") / requests,
        seconds=total("grade_seconds") / requests,
        hang_share=max(float(r.get("grader/hang_share") or 0) for r in pools),
        crash_share=max(float(r.get("grader/crash_share") or 0) for r in pools),
        judge=_judge(total, pools) if any("grader/judge_asked" in r for r in pools) else None,
    )


def _episodes(fresh: Mapping[str, Mapping[str, Any]]) -> Episodes | None:
    counts = [r["episodes"] for r in fresh.values() if isinstance(r.get("episodes"), Mapping)]
    if not counts:
        return None

    def total(name: str) -> float:
        return sum(float(one.get(name) or 0) for one in counts)

    return Episodes(
        under_way=int(total("under_way")),
        played=int(total("episodes")),
        failed=int(total("failed")),
        turns=int(total("turns")),
        retokenised=int(total("retokenised")),
        environment_seconds=total("environment_seconds"),
        model_seconds=total("model_seconds"),
    )


def _judge(total: Callable[[str], float], pools: Sequence[Mapping[str, Any]]) -> Judging:
    return Judging(
        asked=int(total("judge_asked")),
        failed=int(total("judge_failures")),
        retries=int(total("judge_retries")),
        cached=int(total("judge_cached")),
        waiting=int(total("judge_in_flight")),
        seconds=total("judge_seconds") / max(1.0, total("judge_asked")),
        failed_share=max(float(r.get("grader/judge_share") or 0) for r in pools),
    )


def _queues(facts: Facts | None, fresh: Mapping[str, Mapping[str, Any]]) -> Queues:
    if facts is None:
        return Queues()
    counts = facts.counts
    return Queues(
        returned=counts.get("admitted", 0),
        leased=counts.get("leased", 0),
        submitted=sum(int(_inside(r, "submission", "outstanding")) for r in fresh.values()),
        grading=sum(int(r.get("pool/in_hand") or 0) for r in fresh.values()),
        graded=counts.get("graded", 0),
        taken=counts.get("taken", 0),
        evaluations=facts.evaluations_open,
    )


def _members(
    facts: Facts | None,
    fresh: Mapping[str, Mapping[str, Any]],
    activity: Activity,
    history: History,
    now: float,
) -> tuple[MemberStanding, ...]:
    if facts is None:
        return ()
    members = []
    for member in facts.members:
        report = fresh.get(member.member, {})
        version = member.info.get("version") or report.get("version")
        seconds = _seconds(member.member, member.role, report, activity, history, now)
        members.append(
            MemberStanding(
                member=member.member,
                role=member.role,
                # Heartbeats keep ageing while Redis can't be asked.
                age=round(member.age + max(0.0, now - facts.time), 1),
                pid=member.info.get("pid") or report.get("pid"),
                host=member.info.get("host") or report.get("host"),
                version=(int(version[0]), int(version[1])) if version else None,
                idle=_share(seconds),
                waiting_for=str(report.get("waiting_for") or report.get("waiting") or ""),
                tokens_per_second=first_number(report, "tokens_per_second"),
                **_memory(report),
            )
        )
    return tuple(members)


def _hosts(facts: Facts | None, now: float) -> tuple[HostStanding, ...]:
    """The run's hosts, the head first."""
    found = sorted(facts.hosts, key=lambda h: (h.state.role != HEAD, h.member)) if facts else ()
    return tuple(
        HostStanding(
            name=host.state.host,
            member=host.member,
            address=host.state.address,
            role=host.state.role,
            processes=host.state.processes,
            pid=host.state.pid,
            leaving=host.state.leaving,
            age=round(host.age + max(0.0, now - (facts.time if facts else now)), 1),
        )
        for host in found
    )


def _seconds(
    member: str,
    role: str,
    report: Mapping[str, Any],
    activity: Activity,
    history: History,
    now: float,
) -> dict[str, float]:
    """A member's recent seconds by activity, with ``total``."""
    if role != "learner":
        return activity.seconds(member)
    # The learner's report covers only its last step; the metrics cover all of them.
    seconds = history.learner_seconds() or activity.seconds(member)
    moment = history.last("time")
    since = min(now - moment, LONGEST_WAIT) if moment is not None else 0.0
    if report.get("waiting") and since > 2.0:
        for name in ("wait/batch", "total"):
            seconds[name] = seconds.get(name, 0.0) + since
    return seconds


def _roles(
    members: Sequence[MemberStanding],
    fresh: Mapping[str, Mapping[str, Any]],
    activity: Activity,
    history: History,
    facts: Facts | None,
    now: float,
) -> tuple[RoleStanding, ...]:
    roles = []
    for role in ("learner", "rollout", "reward"):
        of_role = [m for m in members if m.role == role]
        if not of_role:
            continue
        total: dict[str, float] = {}
        for one in of_role:
            report = fresh.get(one.member, {})
            recent = _seconds(one.member, role, report, activity, history, now)
            for name, spent in recent.items():
                total[name] = total.get(name, 0.0) + spent
        idle = _share(total)
        whom, what = "", ""
        if idle is not None and idle >= BUSY:
            waits = {n: s for n, s in total.items() if n.startswith("wait/")}
            longest = max(waits, key=lambda name: waits[name]).removeprefix("wait/")
            whom, what = WAITS.get(longest, ("", longest.replace("_", " ")))
            own = [m.waiting_for for m in of_role if m.waiting_for]
            if longest == "admission" and own:
                what = own[0].removeprefix("admission: ")
            if longest == "batch" and facts and not facts.waiting_for:
                whom, what = "", "its source"
        roles.append(
            RoleStanding(
                role=role, members=len(of_role), idle=idle, waits_for=whom, waits_what=what
            )
        )
    return tuple(roles)


def _summed(idle: Mapping[str, float]) -> tuple[RoleStanding, ...]:
    """The roles of a finished run, from its summary."""
    return tuple(
        RoleStanding(role=role, members=0, idle=share, waits_for="", waits_what="")
        for role, share in idle.items()
    )


def _share(seconds: Mapping[str, float]) -> float | None:
    """Share of the time spent in activities named ``wait/…``."""
    total = seconds.get("total")
    if not total:
        return None
    waited = sum(spent for name, spent in seconds.items() if name.startswith("wait/"))
    return min(1.0, waited / total)


def _inside(report: Mapping[str, Any], *names: str) -> float:
    value: Any = report
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return float(value or 0.0)


def _memory(report: Mapping[str, Any]) -> dict[str, int | None]:
    """The peaks of a learner's or worker's report; a learner's is the GPU's if it tells the host's apart."""
    found = report.get("memory")
    peaks = found if isinstance(found, Mapping) else {}
    host = first_number(peaks, "host_bytes", "peak_bytes", "peak")
    gpu = first_number(peaks, "peak_bytes" if "host_bytes" in peaks else "gpu")
    return {
        "memory": None if host is None else int(host),
        "gpu_memory": None if gpu is None else int(gpu),
    }


def _or(value: float | None, other: Any) -> float | None:
    if value is not None:
        return value
    return float(other) if isinstance(other, int | float) else None


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
