"""Batches of stored traces: the same for a step whoever asks, every trace once a pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from msgspec.structs import replace

from tandem.common.errors import DataError, StoreError
from tandem.common.records import Verdict, Version
from tandem.learner.metrics.reports import describe, text_of
from tandem.learner.resume.journal import Journal
from tandem.learner.rows.sources import LedgerSource, OfflineSource
from tandem.replay.ledger_records import Waiting


@pytest.fixture
def run(server: Any, made_up: ModuleType, tmp_path: Path) -> Iterator[Any]:
    config = made_up.config_of(expert={"per_group": 1})
    made = made_up.Run(server.join(), config, tmp_path)
    yield made
    made.close()


def offline(stored: Any, made_up: ModuleType, **sections: Any) -> OfflineSource:
    config = made_up.config_of(learner={"source": "offline"}, **sections)
    return OfflineSource(config, stored.runs)


def test_every_pass_has_every_trace_once_in_an_order_of_its_own(
    run: Any, made_up: ModuleType
) -> None:
    source = offline(run, made_up, run={"steps": 30})
    names = [name for step in range(1, 31) for name in source.names(step)]
    passes = [tuple(names[start : start + 3]) for start in range(0, 60, 3)]
    assert all(len(set(one)) == 3 for one in passes)
    assert len(set(passes)) > 3
    # Asked for out of order, a step is the same.
    assert source.names(7) == offline(run, made_up, run={"steps": 30}).names(7)
    assert names != [
        n
        for step in range(1, 31)
        for n in offline(run, made_up, run={"steps": 30, "seed": 4}).names(step)
    ]


def test_passes_end_with_a_short_step(run: Any, made_up: ModuleType) -> None:
    source = offline(run, made_up, run={"steps": None, "passes": 1})
    assert source.total_steps == 2
    fetch = source.take(2, 1)
    assert not isinstance(fetch, Waiting)
    last = fetch()
    assert last.row["short"]
    assert len(last.groups) == 1
    assert source.take(3, 1).ended  # type: ignore[union-attr]


def test_a_ledger_without_traces_is_refused(
    run: Any, made_up: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run.runs, "all_trace_ids", list)
    with pytest.raises(DataError, match="no expert trace: name a source with a target column"):
        offline(run, made_up)


def test_a_row_of_the_ledger_comes_with_its_traces(run: Any) -> None:
    source = LedgerSource(run.ledger, run.runs)
    assert source.total_steps == 6
    term = run.ledger.new_term()
    assert isinstance(source.take(1, term), Waiting)
    run.work()
    fetch = source.take(1, term)
    while isinstance(fetch, Waiting):
        fetch = source.take(1, term)
    again = source.take(1, term)
    assert not isinstance(again, Waiting)
    batch = fetch()
    assert batch.row == again().row
    used = [trace for mixed in batch.groups for trace in mixed.traces]
    assert [t.trace_id for t in used] == [
        name for mixed in batch.groups for name in mixed.group.trace_ids
    ]

    told = describe(1, batch.groups)
    assert told["replay/groups"] == 2
    assert told["replay/expert_rows"] == len(used)
    assert 0 < told["reward/mean"] < 1
    assert told["reward/accuracy"] == told["reward/mean"]
    assert told["reward/zero_variance"] == 0
    assert told["rollout/truncated"] == 0
    assert told["replay/staleness_max"] == 0
    first = text_of(1, batch.groups[0])
    assert first["group_id"] == "0-0"
    assert {"prompt", "gold", "rows", "problem_id", "worker"} <= first.keys()


def test_successes_that_redis_lost_are_left_out_and_told(
    run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A trace of the data isn't: it can be put again."""
    term = run.ledger.new_term()
    run.work()
    fetch = LedgerSource(run.ledger, run.runs, replays_from=2.0).take(1, term)
    while isinstance(fetch, Waiting):
        fetch = LedgerSource(run.ledger, run.runs, replays_from=2.0).take(1, term)
    own = LedgerSource(run.ledger, run.runs).take(1, term)
    assert not isinstance(own, Waiting)
    names = [name for mixed in fetch().groups for name in mixed.group.trace_ids]
    assert names
    store = run.ledger.store
    store.redis.hdel(store.key("traces"), names[0])
    again = LedgerSource(run.ledger, run.runs, replays_from=2.0).take(1, term)
    assert not isinstance(again, Waiting)
    used = [trace.trace_id for mixed in again().groups for trace in mixed.traces]
    assert used == names[1:]
    assert f"do without: {names[0]}" in caplog.text
    with pytest.raises(StoreError, match="1 traces aren't in Redis"):
        own()


def test_where_all_failed_a_trace_takes_the_place_of_an_own_sample(
    server: Any, made_up: ModuleType, tmp_path: Path
) -> None:
    """Groups 0 and 1 failed, 2 has a right sample; the problem of group 1 may have no trace."""
    config = made_up.config_of(
        expert={"per_group": 1, "when": "all_failed"}, replay={"groups_per_step": 3}
    )
    run = made_up.Run(server.join(), config, tmp_path)
    size = config.rollout.group_size
    term = run.ledger.new_term()
    (*leases,) = run.ledger.lease(Version(term=term, step=0), 3).leases
    committed = {}
    for number, lease in enumerate(leases):
        group = run.answer(lease, Version(term=term, step=0))
        samples = made_up.samples_of(lease, Version(term=term, step=0), size)
        if number < 2:
            samples = tuple(replace(s, verdict=Verdict.WRONG, reward=0.0) for s in samples)
        committed[lease.group_id] = replace(group, samples=samples)
        run.ledger.commit(committed[lease.group_id])
    fetch = LedgerSource(run.ledger, run.runs).take(1, term)
    assert not isinstance(fetch, Waiting)
    batch = fetch()
    entries = {entry["id"]: entry for entry in batch.row["groups"]}
    expected = set()
    for number, mixed in enumerate(batch.groups):
        group = mixed.group
        whole = committed[group.group_id]
        enters = number < 2 and bool(whole.trace_ids)
        assert [t.trace_id for t in mixed.traces] == list(whole.trace_ids if enters else ())
        gone = entries[group.group_id].get("replaced", [])
        assert len(gone) == enters
        kept = [s for place, s in enumerate(whole.samples) if place not in gone]
        assert [s.tokens.tolist() for s in group.samples] == [s.tokens.tolist() for s in kept]
        if enters:
            expected.add(group.group_id)
            (out,) = mixed.replaced
            assert out.tokens.tolist() == whole.samples[gone[0]].tokens.tolist()
        assert len(group.samples) + len(mixed.traces) == size
    assert expected
    assert {m.group.group_id for m in batch.groups if m.replaced} == expected

    told = describe(1, batch.groups)
    assert told["replay/replaced_groups"] == pytest.approx(len(expected) / 3)
    assert told["replay/expert_rows"] == len(expected)
    # What was sampled is told of, whether it is trained on or not.
    assert told["reward/accuracy"] == pytest.approx(size // 2 / (3 * size))
    for mixed in batch.groups:
        record = text_of(1, mixed)
        rows = record["rows"]
        marked = [row for row in rows if row.get("replaced")]
        assert len(marked) == (record["group_id"] in expected)
        assert len([row for row in rows if row["source"] == "own"]) == size
    run.close()


def test_steps_of_the_checkpoint_that_redis_lost_are_settled_from_the_journal(
    run: Any, tmp_path: Path
) -> None:
    """After a crash of the host nobody trains them again, and a checkpoint must become durable."""
    source = LedgerSource(run.ledger, run.runs)
    term = run.ledger.new_term()
    journal = Journal(tmp_path / "journal.jsonl")
    run.work()
    for step in (1, 2):
        fetch = source.take(step, term)
        while isinstance(fetch, Waiting):
            fetch = source.take(step, term)
        journal.row(term, step, fetch().row)()
    # Their outcomes are on disk, and Redis doesn't know of them.
    journal.applied(term, 1)()
    journal.quarantined(term, 2, "loss is nan")()

    term = run.ledger.new_term(journal.last_term)
    assert source.begin(term, journal, 2) == 2
    source.durable(2, term)
    counts = run.ledger.counts()
    assert (counts["trained"], counts["rejected:quarantined"], counts["taken"]) == (2, 2, 0)
    journal.close()


def test_a_step_above_the_checkpoint_is_not_settled_before_it_is_trained_again(
    run: Any, tmp_path: Path
) -> None:
    source = LedgerSource(run.ledger, run.runs)
    term = run.ledger.new_term()
    journal = Journal(tmp_path / "journal.jsonl")
    run.work()
    fetch = source.take(1, term)
    while isinstance(fetch, Waiting):
        fetch = source.take(1, term)
    journal.row(term, 1, fetch().row)()
    journal.applied(term, 1)()
    source.begin(term, journal, 0)
    assert run.ledger.counts()["taken"] == 2
    journal.close()


def test_a_full_redis_advises_no_checkpoint_where_quarantined_samples_fill_it(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = LedgerSource(run.ledger, run.runs)
    term = run.ledger.new_term()
    run.work()
    while isinstance(source.take(1, term), Waiting):
        pass
    monkeypatch.setattr(run.ledger, "is_full", lambda: True)
    assert "lower learner.checkpoint_every" in source.waiting_for()
    source.quarantine(1, term, "loss is nan", 0)
    said = source.waiting_for()
    assert "the samples of 1 quarantined step(s)" in said
    assert "raise replay.maxmemory_mb" in said
    assert "checkpoint" not in said


def test_a_full_redis_keeps_no_successes_which_is_told_once_and_ends_no_step(
    own_server: Any, made_up: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = made_up.Run(own_server.join(), made_up.config_of(), tmp_path / "run")
    term = run.ledger.new_term()
    source = LedgerSource(run.ledger, run.runs, replays_from=0.0)
    run.work()
    fetch = source.take(1, term)
    while isinstance(fetch, Waiting):
        fetch = source.take(1, term)
    run.rest()
    store = run.store
    store.redis.config_set("maxmemory", 1)
    for _ in range(2):
        assert [mixed.group.group_id for mixed in fetch().groups] == ["0-0", "0-1"]
    assert caplog.text.count("past successes can't be kept while Redis is full") == 1
    assert store.redis.exists(store.key("experience")) == 0
    source.confirm(1, term)
    source.durable(1, term)
    assert run.ledger.open_steps() == []
    # Another step's are kept, once there is memory.
    store.redis.config_set("maxmemory", 0)
    run.work()
    fetch = source.take(2, term)
    while isinstance(fetch, Waiting):
        fetch = source.take(2, term)
    fetch()
    assert store.redis.hget(store.key("experience"), "") == b"2"
    run.close()
