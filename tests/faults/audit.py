"""Audits a finished run's folder: is every group trained once, or rejected with a reason, and every
evaluation that was due made and told once?

An independent reading: plain redis-py on a copy of the append-only file, the journal's files,
``samples.jsonl``, ``metrics.jsonl`` and the checkpoint. Of the ledger's code it uses nothing; it knows the names of
its keys. :func:`gather` reads, :func:`examine` judges, so that planted breaches can be judged too.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import itertools
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import redis
import xxhash
import yaml
from safetensors import safe_open

from tandem.common import wire
from tandem.common.records import Group, Sample, Source, Verdict

MOST_REJECTED = 0.02
NOT_BY_KILLS = ("attempts", "ungraded", "quarantined", "run_ended")
"""Reasons that a run whose processes are killed, and nothing else, must never give."""
LIVE_SETS = ("leased", "deadlines", "returned", "graded", "ages", "taken")


@dataclass(slots=True, kw_only=True)
class Evidence:
    """All that a folder says, as plain data."""

    config: dict[str, Any]
    """``config.yaml``."""
    sources: list[tuple[str, int, int]]
    """Name, problems and weight of each source."""
    journal: list[dict[str, Any]]
    """Its records, in order."""
    samples: dict[int, dict[str, list[dict[str, Any]]]]
    """Of ``samples.jsonl``: step -> group id -> rows."""
    checkpoint: dict[str, Any]
    """``state.json`` of the one that LATEST names."""
    optimizer_steps: int
    """As the optimizer's own state in that checkpoint counts them."""
    meta: dict[str, str]
    """Hash ``meta`` in Redis."""
    live: dict[str, list[str]]
    """Members of the sets that hold groups on their way, and keys of live groups."""
    final: dict[int, str]
    """Serial -> ``T|D|R:<step>:<attempt>[:<reason>]``."""
    rows: dict[int, dict[str, Any]]
    """Rows that Redis still has."""
    payloads: dict[str, bytes]
    """``<id>:<attempt>:<digest>`` -> encoded group, where Redis still has it."""
    told: list[dict[str, Any]] = field(default_factory=list)
    """Records of evaluations in ``metrics.jsonl``, in order."""
    evaluations: dict[str, list[str]] = field(default_factory=dict)
    """Ids in Redis that are asked for, open, claimed, and that have failures."""
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Id -> result in Redis."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """What was found."""

    breaches: list[str] = field(default_factory=list)
    """One sentence each."""
    figures: dict[str, int] = field(default_factory=dict)
    """Groups by end and the like, for the table."""


def gather(folder: Path, client: redis.Redis | None = None) -> Evidence:
    """Reads a folder whose run has ended. Its own Redis is read from a copy; for another one, give a client."""
    run = json.loads((folder / "run.json").read_text())
    checkpoints = folder / "checkpoints"
    newest = checkpoints / (checkpoints / "LATEST").read_text().strip()
    samples: dict[int, dict[str, list[dict[str, Any]]]] = {}
    for line in (one for path in sorted(folder.glob("samples*.jsonl")) for one in _lines(path)):
        samples.setdefault(line["step"], {})[line["group_id"]] = line["rows"]
    prefix = f"tandem:{run['run_id']}:"
    with contextlib.ExitStack() as stack:
        if client is None:
            client = stack.enter_context(_copied(folder))
        found = _read_redis(client, prefix)
    metrics = [line for path in sorted(folder.glob("metrics*.jsonl")) for line in _lines(path)]
    return Evidence(
        told=[record for record in metrics if "eval/id" in record],
        config=yaml.safe_load((folder / "config.yaml").read_text()),
        sources=[(name, size, weight) for name, size, weight in run["ingest"]["sources"]],
        journal=journal_of(folder),
        samples=samples,
        checkpoint=json.loads((newest / "state.json").read_text()),
        optimizer_steps=_optimizer_steps(newest),
        **found,
    )


@contextlib.contextmanager
def _copied(folder: Path) -> Iterator[redis.Redis]:
    """A client of a server that has read a copy of the folder's append-only file."""
    with tempfile.TemporaryDirectory(prefix="tandem-audit-") as place:
        copied = Path(place) / "redis"
        shutil.copytree(folder / "redis", copied)
        with _servers().running(copied) as server:
            client = server.client()
            yield client
            client.close()


def journal_of(folder: Path) -> list[dict[str, Any]]:
    """The journal's records that count, in order; while a run goes on, of whole lines.

    A later term's file begins with the place in an earlier one that it builds on; what stands
    behind that place, and in files that nobody builds on, is of learners that were overtaken.
    """
    files = {_term_of(path): path for path in folder.glob("journal*.jsonl")}
    segments: list[list[dict[str, Any]]] = []
    end: int | None = None
    wanted = ""
    for _, path in sorted(files.items(), reverse=True):
        if wanted and path.name != wanted:
            continue
        data = path.read_bytes()[:end]
        whole = data[: data.rfind(b"\n") + 1]
        records = [json.loads(line) for line in whole.split(b"\n")[:-1]]
        if not records and path.name != "journal.jsonl":
            continue
        assert end is None or len(whole) == end, f"{path} ends before byte {end}"
        segments.append(records)
        if path.name != "journal.jsonl":
            after = records[0]["after"]
            wanted, end = after["file"], after["bytes"]
    return [record for records in reversed(segments) for record in records]


def _term_of(path: Path) -> int:
    return int(path.stem.partition("-")[2] or 1)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _servers() -> Any:
    """``tests/redis_server.py``."""
    name = "tandem_tests_redis_server"
    if name not in sys.modules:
        path = Path(__file__).resolve().parent.parent / "redis_server.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def _optimizer_steps(checkpoint: Path) -> int:
    """How often the parameters have been moved: Adam counts it for its bias correction."""
    counts: set[int] = set()
    for path in sorted((checkpoint / "policy").glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            pieces = json.loads(file.metadata()["pieces"]).values()
        counts |= {int(piece["step"] or 0) for piece in pieces}
    assert len(counts) <= 1, f"{checkpoint}: parameters were moved unlike often: {sorted(counts)}"
    return max(counts, default=0)


def _read_redis(client: Any, prefix: str) -> dict[str, Any]:
    names = [name.decode().removeprefix(prefix) for name in client.scan_iter(f"{prefix}*")]

    def members(name: str) -> list[str]:
        return [member.decode() for member in client.zrange(prefix + name, 0, -1)]

    def fields(name: str) -> dict[str, str]:
        return {k.decode(): v.decode() for k, v in client.hgetall(prefix + name).items()}

    final = {}
    for name in names:
        if name.startswith("final:"):
            bucket = int(name.partition(":")[2])
            final |= {bucket * 256 + int(k): text for k, text in fields(name).items()}
    return {
        "evaluations": {
            "asked": sorted(fields("evaluations")),
            "open": members("evaluations_open"),
            "claimed": sorted(fields("evaluation_claims")),
            "failed": sorted(fields("evaluation_failures")),
        },
        "results": {id_: json.loads(text) for id_, text in fields("evaluation_results").items()},
        "meta": fields("meta"),
        "live": {name: members(name) for name in LIVE_SETS}
        | {"groups": sorted(name for name in names if name.startswith("group:"))},
        "final": final,
        "rows": {int(step): json.loads(text) for step, text in fields("rows").items()},
        "payloads": {
            name.removeprefix("payload:"): client.get(prefix + name)
            for name in names
            if name.startswith("payload:")
        },
    }


def examine(evidence: Evidence) -> Findings:
    """Judges what was gathered."""
    found = Findings()
    rows = _rows(evidence, found)
    _history(evidence, rows, found)
    _every_group(evidence, rows, found)
    _nothing_live(evidence, found)
    _staleness(evidence, rows, found)
    _episodes(evidence, found)
    _redis_agrees(evidence, rows, found)
    _evaluations(evidence, rows, found)
    return found


def digest_of(row: dict[str, Any]) -> str:
    """As the journal states it: xxh3-64 of the row's canonical JSON."""
    return xxhash.xxh3_64_hexdigest(json.dumps(row, sort_keys=True, separators=(",", ":")).encode())


def _rows(evidence: Evidence, found: Findings) -> dict[int, dict[str, Any]]:
    """The journal's rows: one a step, without gaps, each of the right size, no id twice."""
    say = found.breaches.append
    rows: dict[int, dict[str, Any]] = {}
    for record in evidence.journal:
        if record["kind"] != "row":
            continue
        step, row = record["step"], record["row"]
        if step in rows:
            say(f"step {step} has two rows in the journal")
        if row["step"] != step or digest_of(row) != record["digest"]:
            say(f"the row of step {step} isn't the one whose digest stands beside it")
        rows[step] = row
    if sorted(rows) != list(range(1, len(rows) + 1)):
        say(f"the journal's steps have gaps: {sorted(rows)}")
    where: dict[str, int] = {}
    size = evidence.config["replay"]["groups_per_step"]
    last = max(rows, default=0)
    for step, row in sorted(rows.items()):
        ids = [entry["id"] for entry in row["groups"]]
        short = bool(row["short"])
        if short and step != last:
            say(f"row {step} is marked short and isn't the last one")
        if (short and not 0 < len(ids) < size) or (not short and len(ids) != size):
            say(f"row {step} has {len(ids)} groups and should have {size}")
        for name in ids:
            if name in where:
                say(f"group {name} stands in row {where[name]} and in row {step}")
            where[name] = step
    found.figures["steps"] = len(rows)
    return rows


def _history(evidence: Evidence, rows: dict[int, dict[str, Any]], found: Findings) -> None:
    """Each row is applied once on the line of history that the final checkpoint has."""
    say = found.breaches.append
    applied: Counter[int] = Counter()
    term = trainer = 0
    again = lives = 0
    for record in evidence.journal:
        kind, step = record["kind"], record["step"]
        if record["term"] < term:
            say(f"term {record['term']} wrote to the journal after term {term}")
        term = max(term, record["term"])
        if kind == "resumed":
            lives += 1
            for later in [s for s in applied if s > step]:
                again += applied.pop(later)
        elif kind == "quarantined":
            say(f"step {step} was quarantined: {record['reason']}")
        elif kind == "applied":
            if step not in rows or record["digest"] != digest_of(rows[step]):
                say(f"step {step} was applied with another row than the journal's")
            if step != max(applied, default=0) + 1 and step not in applied:
                say(f"step {step} was applied after step {max(applied, default=0)}")
            applied[step] += 1
            trainer = record["term"]
    at = evidence.checkpoint["step"]
    for step in rows:
        if applied[step] != 1:
            say(f"row {step} is applied {applied[step]} times on the final line of history")
    if at != max(rows, default=0):
        say(f"the final checkpoint is at step {at}, the journal ends at {max(rows, default=0)}")
    # A learner that finds the last step in its checkpoint writes no other one.
    if not trainer <= evidence.checkpoint["term"] <= term:
        say(f"the final checkpoint is of term {evidence.checkpoint['term']}, not {trainer}")
    learner = evidence.config["learner"]
    # A mini-batch in which no group's rewards differ has no gradient, and moves nothing; a critic always has one.
    moving = learner.get("update_epochs", 1) * sum(
        learner["objective"]["name"] == "ppo" or any(_differ(group) for group in part)
        for step, groups in evidence.samples.items()
        for part in _split(list(groups.values()), learner["minibatches"])
        if step <= at
    )
    if evidence.optimizer_steps != moving:
        say(
            f"the optimizer has made {evidence.optimizer_steps} steps, and the mini-batches that can "
            f"move it are {moving}"
        )
    found.figures["steps trained again after a kill"] = again
    found.figures["learner's resumptions"] = lives


def _split(groups: list[Any], parts: int) -> list[list[Any]]:
    """The groups in consecutive parts, of which the first ones have one more where they differ."""
    size, more = divmod(len(groups), parts)
    starts = [part * size + min(part, more) for part in range(parts + 1)]
    return [groups[a:b] for a, b in itertools.pairwise(starts)]


def _differ(rows: list[dict[str, Any]]) -> bool:
    return len({row["reward"] for row in rows if row["reward"] is not None}) > 1


def _pass_length(sources: list[tuple[str, int, int]]) -> int:
    """Positions of a pass: whole cycles of all weights until every source is used up."""
    return max(-(-size // weight) for _, size, weight in sources) * sum(w for _, _, w in sources)


def _every_group(evidence: Evidence, rows: dict[int, dict[str, Any]], found: Findings) -> None:
    """Every position of the run is trained in a row, or rejected with a reason."""
    say = found.breaches.append
    length = _pass_length(evidence.sources)
    passes = evidence.config["run"]["passes"]
    places = {
        entry["id"]: (step, entry["attempt"])
        for step, row in rows.items()
        for entry in row["groups"]
    }
    rejected: Counter[str] = Counter()
    for serial in range(passes * length):
        name = f"{serial // length}-{serial % length}"
        letter, _, rest = evidence.final.get(serial, "").partition(":")
        place = places.pop(name, None)
        if letter == "D":
            step, attempt = map(int, rest.split(":"))
            if place != (step, attempt):
                say(
                    f"group {name}: Redis has it trained in ({step}, {attempt}), the journal: {place}"
                )
        elif letter == "R":
            reason = rest.split(":")[2]
            rejected[reason] += 1
            if place is not None:
                say(f"group {name} is rejected ({reason}) and stands in row {place[0]}")
        else:
            state = evidence.final.get(serial, "no final state")
            say(f"group {name} is neither trained nor rejected: {state}; the journal: {place}")
    for name, place in places.items():
        say(f"group {name} of row {place[0]} is none of the run's positions")
    total = passes * length
    count = sum(rejected.values())
    if count > MOST_REJECTED * total:
        say(f"{count} of {total} groups are rejected, more than {MOST_REJECTED:.0%}")
    for reason in NOT_BY_KILLS:
        if rejected[reason]:
            say(
                f"{rejected[reason]} group(s) are rejected for {reason}, which kills must not cause"
            )
    found.figures["groups of the run"] = total
    found.figures["groups trained"] = sum(text.startswith("D:") for text in evidence.final.values())
    found.figures["groups rejected"] = count
    for reason, number in sorted(rejected.items()):
        found.figures[f"  for {reason}"] = number


def _nothing_live(evidence: Evidence, found: Findings) -> None:
    """Nothing is leased, waits or is taken for ever."""
    for name, members in evidence.live.items():
        if members:
            found.breaches.append(f"{len(members)} left in {name} at the end: {members[:3]}")


def _staleness(evidence: Evidence, rows: dict[int, dict[str, Any]], found: Findings) -> None:
    """No token was older than the bound at the step that trained on it."""
    say = found.breaches.append
    bound = evidence.config["replay"]["max_staleness"]
    size = evidence.config["rollout"]["group_size"]
    after_grading = evidence.config.get("expert", {}).get("when") == "all_failed"
    worst = 0
    for step, row in sorted(rows.items()):
        for entry in row["groups"]:
            name = f"{entry['id']}:{entry['attempt']}:{entry['digest']}"
            versions: list[int] = []
            payload = evidence.payloads.get(name)
            if payload is not None:
                own = size - (0 if after_grading else len(entry["traces"]))
                versions += _spans(payload, name, entry["digest"], own, say)
                if after_grading:
                    _replaced(payload, entry, size, say)
            told = evidence.samples.get(step, {}).get(entry["id"])
            if told is None:
                say(f"samples.jsonl lacks group {entry['id']} of step {step}")
            for sample in told or ():
                if sample.get("source") == "expert":
                    continue
                # An episode that failed before it asked the model has nothing that was sampled.
                if not sample["versions"] and not sample.get("failure"):
                    say(f"group {entry['id']} has a sample of no version")
                versions += [int(version.partition(".")[2]) for version in sample["versions"]]
            for version in versions:
                age = step - 1 - version
                worst = max(worst, age)
                if not 0 <= age <= bound:
                    say(
                        f"group {entry['id']} has tokens of version step {version} in row {step}: "
                        f"age {age}, and the bound is {bound}"
                    )
                    break
    found.figures["greatest age of a token"] = worst


def _episodes(evidence: Evidence, found: Findings) -> None:
    """Groups of a run with environments are episodes, and those that failed have no reward."""
    if not evidence.config.get("environments", {}).get("use"):
        return
    failed: Counter[str] = Counter()
    episodes = 0
    for step, groups in evidence.samples.items():
        for name, rows in groups.items():
            for row in rows:
                if "environment" not in row:
                    found.breaches.append(f"group {name} of step {step} has a row of no episode")
                    continue
                episodes += 1
                if row["failure"] is not None:
                    failed[row["failure"]] += 1
                    if row["reward"] is not None:
                        found.breaches.append(
                            f"group {name} of step {step} has a reward for an episode that failed"
                        )
    found.figures["episodes"] = episodes
    for kind, count in sorted(failed.items()):
        found.figures[f"  {kind}"] = count


def _replaced(payload: bytes, entry: dict[str, Any], size: int, say: Any) -> None:
    """Traces are in the groups that all failed and in no others, and no group has too many rows."""
    group = wire.decode(payload, Group)
    verdicts = {place: sample.verdict for place, sample in enumerate(group.samples)}
    rows = {place for place, one in verdicts.items() if one and not one.leaves_baseline}
    traces, gone = tuple(entry["traces"]), entry.get("replaced", [])
    failed = Verdict.CORRECT not in verdicts.values()
    if traces != (group.trace_ids if failed else ()):
        say(f"group {group.group_id} has the traces {traces}, and its samples are {verdicts}")
    if not set(gone) <= rows or len(gone) != max(0, len(rows) + len(traces) - size):
        say(f"in group {group.group_id} the samples {gone} of {sorted(rows)} gave way to {traces}")


def _spans(payload: bytes, name: str, digest: str, size: int, say: Any) -> list[int]:
    """Steps of all versions in a stored group, which is checked on the way."""
    if xxhash.xxh3_64_hexdigest(payload) != digest:
        say(f"the payload {name} isn't what its digest says")
        return []
    group = wire.decode(payload, Group)
    if len(group.samples) != size:
        say(f"group {group.group_id} has {len(group.samples)} samples and should have {size}")
    steps = []
    for sample in group.samples:
        covered = np.zeros(len(sample.tokens), np.int64)
        for span in sample.spans:
            covered[span.start : span.end] += 1
        if not np.array_equal(covered, sample.source == Source.OWN):
            say(f"group {group.group_id} has tokens of no version, or versions of others' tokens")
        if sample.episode is not None:
            _episode(group.group_id, sample, say)
        steps += [span.step for span in sample.spans]
    return steps


def _episode(name: str, sample: Sample, say: Any) -> None:
    """Own tokens are those of the turns; an episode that failed is paid nothing, not even a zero."""
    episode = sample.episode
    assert episode is not None
    turns = np.zeros(len(sample.tokens), np.int64)
    for turn in episode.turns:
        turns[turn.start : turn.end] += 1
    if not np.array_equal(turns, sample.source == Source.OWN):
        say(f"group {name} has own tokens that aren't of one turn")
    if not np.array_equal(np.isnan(sample.logprobs), sample.source != Source.OWN):
        say(f"group {name} has log-probs of other tokens than its own")
    failed = episode.failure is not None
    if failed and (sample.reward is not None or sample.verdict is not episode.failure):
        say(f"group {name} has an episode that failed, and {sample.verdict} with {sample.reward}")
    if not failed and (sample.reward is None or not episode.turns):
        say(f"group {name} has an episode without a reward or a turn, and it hasn't failed")


def _redis_agrees(evidence: Evidence, rows: dict[int, dict[str, Any]], found: Findings) -> None:
    """What Redis still has of the rows is what the journal has."""
    say = found.breaches.append
    for step, row in evidence.rows.items():
        if rows.get(step) != row:
            say(f"row {step} in Redis isn't the journal's")
    if int(evidence.meta.get("journalled", -1)) != max(rows, default=0):
        say(f"Redis has {evidence.meta.get('journalled')} rows written, the journal {len(rows)}")
    kept = {
        f"{entry['id']}:{entry['attempt']}:{entry['digest']}"
        for row in evidence.rows.values()
        for entry in row["groups"]
    }
    lost = kept - evidence.payloads.keys()
    if lost:
        say(f"{len(lost)} payloads of kept rows are gone, such as {min(lost)}")
    found.figures["payloads beside the rows' own"] = len(evidence.payloads.keys() - kept)


def _evaluations(evidence: Evidence, rows: dict[int, dict[str, Any]], found: Findings) -> None:
    """Every evaluation that was due is made once and told once, as it was made."""
    say = found.breaches.append
    last = max(rows, default=0)
    due = {f"{name}@{step}": step for name in _sets(evidence) for step in _due(evidence, last)}
    told = Counter(str(record["eval/id"]) for record in evidence.told)
    for id_ in sorted(due.keys() - told.keys()):
        say(f"evaluation {id_} was due and is told nowhere")
    for id_, times in sorted(told.items()):
        if id_ not in due:
            say(f"evaluation {id_} is told and was not due")
        if times > 1:
            say(f"evaluation {id_} is told {times} times")
    for name, ids in evidence.evaluations.items():
        if name == "asked" and set(ids) != due.keys():
            say(f"evaluations that are asked for aren't those due: {sorted(set(ids) ^ due.keys())}")
        elif name != "asked" and ids:
            say(f"{len(ids)} evaluation(s) left that are {name}: {ids[:3]}")
    if evidence.results.keys() != due.keys():
        say(f"results in Redis aren't those due: {sorted(evidence.results.keys() ^ due.keys())}")
    terms = max((record["term"] for record in evidence.journal), default=1)
    later = 0
    for record in evidence.told:
        id_ = str(record["eval/id"])
        base = f"eval/{id_.rpartition('@')[0]}"
        result = evidence.results.get(id_, {})
        step, made = due.get(id_, 0), result.get("step")
        if record["step"] != made or record[f"{base}/accuracy"] != result.get("accuracy"):
            say(f"evaluation {id_} is told with other figures than Redis has")
        versions = [tuple(map(int, one.split("."))) for one in record["eval/version"].split()]
        if not versions or min(one[1] for one in versions) != record["step"]:
            say(f"evaluation {id_} of step {record['step']} measured {record['eval/version']!r}")
        if not all(1 <= term <= terms and step <= at <= last for term, at in versions):
            say(f"evaluation {id_} measured {record['eval/version']!r}, which can't be")
        later += record["step"] > step
    found.figures["evaluations due"] = len(due)
    found.figures["evaluations of later weights"] = later


def _sets(evidence: Evidence) -> list[str]:
    return [held["name"] for held in evidence.config.get("data", {}).get("evaluate", ())]


def _due(evidence: Evidence, last: int) -> set[int]:
    settings = evidence.config.get("evaluate", {})
    every = settings.get("every", 0)
    due = set(range(every, last, every)) if every else set()
    due |= {last} if settings.get("at_end") or (every and last % every == 0) else set()
    return due | ({0} if settings.get("at_start") else set())


def tampered(evidence: Evidence) -> Evidence:
    """A copy to plant a breach in."""
    return copy.deepcopy(evidence)


def main(arguments: list[str]) -> int:
    """``audit.py FOLDER``: prints the findings; 0 where there is no breach."""
    found = examine(gather(Path(arguments[0])))
    for name, value in found.figures.items():
        print(f"{name:<34}{value:>8}")
    for breach in found.breaches:
        print(f"BREACH: {breach}")
    return 1 if found.breaches else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
