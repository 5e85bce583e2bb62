"""Whatever happens in the middle of an update: all serve a whole version, the newest in the end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import fault_processes
import pytest
from raw_learner import RawLearner
from served import wait_served
from weight_processes import FlippedByte, as_bytes, config, model, specs_of

from tandem.common.adapters import base_of
from tandem.common.config import Config
from tandem.common.errors import WeightsError
from tandem.common.records import Version
from tandem.common.weights.gloo import Gloo
from tandem.common.weights.protocol import Ask, Meeting, Offer, Withdraw
from tandem.common.weights.shared_memory import StagedTensors
from tandem.common.weights.transfers import Transfers
from tandem.common.weights.ways import WAYS, Way

TRANSPORTS = ("gloo", "shared_memory")
BIG = specs_of(model(0, big=True))
DEADLINE = 30.0
"""For every wait, seconds; the run's own deadlines are shorter."""


def v(step: int, term: int = 1) -> Version:
    return Version(term=term, step=step)


def weights_of(step: int) -> dict[str, bytes]:
    """Every bit of the version that a step publishes."""
    return as_bytes(model(step, big=True))


class Setting:
    """A run by one transport, of whole models or of adapters for one base."""

    def __init__(self, run: Any, transport: str, *, lora: bool = False) -> None:
        self.run = run
        self.transport = transport
        self.lora = lora
        self.config = self.configured()

    def configured(self, **weights: Any) -> Config:
        """The run's config with these settings under ``weights``."""
        return config(lora=self.lora, transport=self.transport, **weights)

    def publisher(self, **more: Any) -> Any:
        """A learner in this process."""
        return self.run.publisher(**{"config": self.config, **more})

    def learner(self) -> Any:
        """A learner's process, which publishes as (step, seed) what it is told."""
        return self.run.learner(config=self.config, big=True)

    def worker(self, member: str = "rollout-0", **options: Any) -> Any:
        """A worker's process, which may stand still on its way."""
        base = base_of(self.config.model, self.config.learner.lora)
        values = {"config": self.config, "specs": BIG, "base": base, **options}
        return self.run._child(fault_processes.worker, member, values)


@pytest.fixture(
    params=[
        *TRANSPORTS,
        "shared_memory-lora",
        # CI has both parts of it.
        pytest.param("gloo-lora", marks=pytest.mark.byhand),
    ]
)
def setting(request: pytest.FixtureRequest, run: Any) -> Setting:
    """One for each transport and what travels."""
    transport, _, lora = request.param.partition("-")
    return Setting(run, transport, lora=bool(lora))


def publish(publisher: Any, *steps: int, others: tuple[Any, ...] = ()) -> None:
    """Publishes steps; these workers serve each of them, whole, before the next."""
    for step in steps:
        publisher.publish(v(step), model(step, big=True))
        for other in others:
            assert other.next(DEADLINE) == (v(step), weights_of(step))


def holds(worker: Any, place: str) -> None:
    """Waits until it stands still there."""
    assert worker.next(DEADLINE) == ("holds", place)


def ends_on(worker: Any, version: Version) -> bool:
    """Waits until it serves a version; all that it serves till then is whole.

    False where its process ended instead, because the engine may have held half of a version.
    """
    while True:
        try:
            served, found = worker.next(DEADLINE)
        except (EOFError, OSError):  # It may end in the middle of what it says.
            worker.process.join(DEADLINE)
            assert worker.process.exitcode == 70
            return False
        assert found == weights_of(served.step), f"a mix was served as {served}"
        if served == version:
            return True


def test_a_learner_killed_in_mid_bucket_leaves_the_old_version(setting: Setting) -> None:
    first = setting.learner()
    held, other = setting.worker(hold="bucket", after=1), setting.worker("rollout-1")
    first.pipe.send((1, 1))
    assert held.next() == other.next() == (v(1), weights_of(1))
    first.pipe.send((2, 2))
    holds(held, "bucket")
    first.kill()
    held.pipe.send("go on")
    second = setting.learner()
    second.pipe.send((1, 3))
    for child in (held, other):
        served = child.next(DEADLINE)
        # Of shared memory all bytes are there: the version may be whole, and loaded.
        if served == (v(2), weights_of(2)):
            served = child.next(DEADLINE)
        assert served == (v(1, term=2), weights_of(3))


@pytest.mark.parametrize("place", ["bucket", "staged", "commit"])
def test_a_killed_worker_costs_nobody_else_and_gets_the_version_anew(
    setting: Setting, place: str
) -> None:
    publisher = setting.publisher()
    dying, other = setting.worker(hold=place, after=1), setting.worker("rollout-1")
    publish(publisher, 1, others=(dying, other))
    publish(publisher, 2, others=(other,))
    holds(dying, place)
    dying.kill()
    publish(publisher, 3, 4, others=(other,))
    assert setting.worker().next(DEADLINE) == (v(4), weights_of(4))
    publish(publisher, 5, others=(other,))


@pytest.mark.parametrize(
    "setting", [pytest.param("gloo", marks=pytest.mark.byhand), "shared_memory"], indirect=True
)
@pytest.mark.parametrize("patient", [True, False], ids=["patient", "punctual"])
@pytest.mark.parametrize("place", ["bucket", "staged", "commit"])
def test_a_worker_stopped_beyond_the_deadline_ends_on_the_newest_version(
    setting: Setting, place: str, patient: bool
) -> None:
    seconds = 1 if patient else 2
    short = setting.configured(
        open_seconds=seconds,
        stage_seconds=seconds,
        commit_seconds=seconds,
    )
    publisher = setting.publisher(config=short)
    # Its own deadline may have passed, too, when it goes on; or it goes on as if nothing were.
    own = setting.config if patient else short
    stopped = setting.worker(hold=place, after=1, config=own)
    other = setting.worker("rollout-1")
    publish(publisher, 1, others=(stopped, other))
    publish(publisher, 2, others=(other,))
    holds(stopped, place)
    stopped.signal(signal.SIGSTOP)
    # Its buffer would be needed again while it stands still.
    publish(publisher, 3, 4, 5, others=(other,))
    setting.run.lines.wait_for("rollout-0 stays on 1.1, not 1.2", seconds=DEADLINE)
    publish(publisher, 6, 7, 8, others=(other,))
    stopped.pipe.send("go on")
    stopped.signal(signal.SIGCONT)
    if not ends_on(stopped, v(8)):
        # Half-loaded for longer than it may be: its supervisor starts it again.
        assert (place, patient) == ("commit", False)
        assert setting.worker().next(DEADLINE) == (v(8), weights_of(8))
    wait_served(publisher, v(8), DEADLINE, at_least=2)
    publish(publisher, 9, others=(other,))


@pytest.mark.parametrize("place", ["bucket", "commit"])
def test_a_worker_that_joins_in_mid_publish_gets_the_newest_version(
    setting: Setting, place: str
) -> None:
    publisher = setting.publisher()
    first = setting.worker(hold=place)
    publish(publisher, 1)
    holds(first, place)
    joiner = setting.worker("rollout-1")
    assert joiner.next(DEADLINE) == (v(1), weights_of(1))
    publish(publisher, 2, 3, others=(joiner,))
    first.pipe.send("go on")
    assert ends_on(first, v(3))
    wait_served(publisher, v(3), DEADLINE, at_least=2)


def test_a_flipped_byte_is_refused_and_the_next_version_arrives(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FlippedByte, "damaged", 0)
    over_wire = setting.transport == "gloo"
    monkeypatch.setitem(WAYS, "gloo", Way(channel=FlippedByte))
    publisher = setting.publisher()
    held = setting.worker(hold="bucket", after=0)
    publish(publisher, 1)
    holds(held, "bucket")
    if not over_wire:
        # The worker has read the first of its buckets, and the last one not yet.
        publisher._slots._newest.slot.staged.buffer[-1] ^= 1
    held.pipe.send("go on")
    complaint = "rollout-0 stays on no version", "refused at verify", "was damaged"
    setting.run.lines.wait_for(*complaint)
    publish(publisher, 2)
    assert ends_on(held, v(2))
    publish(publisher, 3, 4, others=(held,))


@pytest.mark.parametrize(
    ("specs", "complaint"),
    [
        (
            [(n, (5, 12) if n == "head.weight" else s, d) for n, s, d in BIG],
            "head.weight has shape [5, 12] in the engine and [5, 11] in the manifest",
        ),
        ([*BIG, ("lm_head.bias", (7,), "float32")], "lm_head.bias is missing: the engine has it"),
        (BIG[:-1], "layer.weight is unknown to the engine"),
    ],
    ids=["wrong shape", "name missing", "name too many"],
)
def test_weights_that_do_not_fit_one_worker_are_served_to_the_others(
    setting: Setting, specs: list[Any], complaint: str
) -> None:
    publisher = setting.publisher()
    other = setting.worker("rollout-1")
    unfit = setting.worker(specs=specs)
    publish(publisher, 1, others=(other,))
    setting.run.lines.wait_for("rollout-0 stays on no version", "refused at offer", complaint)
    publish(publisher, 2, 3, others=(other,))
    assert not unfit.pipe.poll()
    wait_served(publisher, v(3), 20)
    assert publisher.stats()["members"] == {"rollout-0": None, "rollout-1": [1, 3]}


def test_a_way_that_never_fails_twice_in_a_row_is_kept(run: Any) -> None:
    setting = Setting(run, "auto")
    publisher = setting.publisher()
    worker = setting.worker(broken=(1, 2, 3))
    for step in (1, 2, 3):
        publish(publisher, step, others=(worker,))
        wait_served(publisher, v(step), DEADLINE)
        stats = publisher.stats()
        assert stats["failed"] == step
        assert stats["transfers"]["rollout-0"]["transport"] == "shared_memory"


class BreaksOff(Gloo):
    """The learner's end of a channel that fails while ``on`` is set."""

    on = False

    def send(self, staged: StagedTensors, at: Meeting) -> None:
        if BreaksOff.on:
            raise WeightsError("the channel broke off")
        super().send(staged, at)


def test_a_transfer_that_fails_costs_no_other_worker_its_own(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BreaksOff, "on", False)
    over_wire = setting.transport == "gloo"
    monkeypatch.setitem(WAYS, "gloo", Way(channel=BreaksOff))
    publisher = setting.publisher()
    other = setting.worker("rollout-1", hold="bucket")
    publish(publisher, 1)
    holds(other, "bucket")
    # Meanwhile one worker refuses, and another one's channel breaks off.
    BreaksOff.on = True
    setting.worker("rollout-2", specs=BIG[:-1])
    setting.run.lines.wait_for("rollout-2 stays on no version", "refused at offer")
    if over_wire:
        setting.worker("rollout-3")
        setting.run.lines.wait_for("rollout-3 stays on no version", "the channel broke off")
    other.pipe.send("go on")
    assert other.next(DEADLINE) == (v(1), weights_of(1))
    wait_served(publisher, v(1), DEADLINE)
    assert not [line for line in setting.run.lines.seen if "rollout-1 stays on" in line]


def test_an_engine_that_takes_nothing_keeps_its_version_and_takes_the_next(
    setting: Setting,
) -> None:
    publisher = setting.publisher()
    worker = setting.worker(broken=(2,))
    publish(publisher, 1, others=(worker,))
    publisher.publish(v(2), model(2, big=True))
    setting.run.lines.wait_for("rollout-0 stays on 1.1", "the engine takes nothing at first")
    assert worker.process.is_alive()
    # It asks for the same version again.
    assert worker.next(DEADLINE) == (v(2), weights_of(2))
    publish(publisher, 3, others=(worker,))


@pytest.mark.parametrize(
    ("place", "hasty", "complaint"),
    [
        ("bucket", "learner", "rollout-0 didn't fetch, check and load version 1.1 within 2.0 s"),
        ("bucket", "worker", "refused at wait: learner-0 didn't send version 1.1 within 1.0 s"),
        ("staged", "worker", "the ledger didn't say which term has begun within 1.0 s"),
    ],
)
def test_a_wait_ends_at_its_deadline_and_names_who_was_waited_for(
    run: Any, place: str, hasty: str, complaint: str
) -> None:
    patient = config(transport="shared_memory", stage_seconds=300, commit_seconds=300)
    short = config(transport="shared_memory", stage_seconds=1, commit_seconds=1)
    publisher = run.publisher(config=short if hasty == "learner" else patient)
    # It says all the while that it is alive.
    held = Setting(run, "shared_memory").worker(
        hold=place, config=short if hasty == "worker" else patient
    )
    publish(publisher, 1)
    holds(held, place)
    run.lines.wait_for("rollout-0 stays on no version", complaint)
    held.pipe.send("go on")
    assert ends_on(held, v(1))


def test_a_worker_whose_engine_loads_for_too_long_ends_itself(run: Any) -> None:
    publisher = run.publisher()
    stuck = Setting(run, "shared_memory").worker(
        hold="commit", config=config(transport="shared_memory", commit_seconds=1)
    )
    publish(publisher, 1)
    holds(stuck, "commit")
    stuck.process.join(DEADLINE)
    assert stuck.process.exitcode == 70


def test_an_engine_that_writes_into_what_it_is_given_harms_nobody(setting: Setting) -> None:
    publisher = setting.publisher()
    workers = setting.worker(writes=True), setting.worker("rollout-1")
    # More versions than there are buffers: each is used again.
    publish(publisher, *range(1, 8), others=workers)
    assert publisher.stats()["failed"] == 0


def test_a_learner_does_not_go_back(setting: Setting) -> None:
    publisher = setting.publisher()
    worker = setting.worker()
    publish(publisher, 2, others=(worker,))
    for older in (1, 2):
        with pytest.raises(WeightsError, match=rf"1\.{older} isn't newer than 1\.2"):
            publisher.publish(v(older), model(older, big=True))
    publish(publisher, 3, others=(worker,))


@pytest.fixture
def raw(run: Any) -> Iterator[RawLearner]:
    """A learner that keeps to no rules."""
    learner = RawLearner(run)
    yield learner
    learner.close()


def loaded(raw: RawLearner, worker: Any, name: str, version: Version) -> None:
    """A whole round, as it should be."""
    raw.offer(name, version)
    assert worker.next(DEADLINE) == (version, weights_of(version.step))
    raw.until(name, lambda ask: ask.version == version)


def test_an_offer_that_goes_back_is_refused(run: Any, raw: RawLearner) -> None:
    worker = Setting(run, "shared_memory").worker()
    raw.ask()
    loaded(raw, worker, "a", v(3))
    for name, version in (("b", v(2)), ("c", v(3)), ("d", v(9, term=0))):
        raw.offer(name, version)
        refused = raw.refusal(name)
        assert refused.problem.startswith("offer: ")
        assert "not newer than 1.3" in refused.problem or "which is over" in refused.problem
        assert refused.version == v(3)
    loaded(raw, worker, "e", v(4))


@pytest.mark.parametrize(
    ("changes", "stage", "complaint"),
    [
        ({"run_id": "another"}, "offer: ", "belongs to run another"),
        ({"checksums": (1, 2, 3)}, "verify: ", "bucket 0 of version 1.1"),
    ],
    ids=["of another run", "checksums of other bytes"],
)
def test_an_offer_that_is_not_what_it_says_is_refused(
    run: Any, raw: RawLearner, changes: dict[str, Any], stage: str, complaint: str
) -> None:
    worker = Setting(run, "shared_memory").worker()
    raw.ask()
    raw.offer("a", v(1), changes)
    refused = raw.refusal("a")
    assert refused.problem.startswith(stage)
    assert complaint in refused.problem
    assert refused.version is None
    loaded(raw, worker, "b", v(1))


def test_nothing_is_loaded_before_the_last_bucket_is_checked(run: Any, raw: RawLearner) -> None:
    worker = Setting(run, "shared_memory").worker(hold="bucket")
    raw.ask()
    raw.offer("a", v(1))
    holds(worker, "bucket")
    for _ in range(2):
        ask = raw.ask()
    assert (ask.round, ask.busy, ask.version) == ("a", True, None)
    assert not worker.pipe.poll()
    worker.pipe.send("go on")
    assert worker.next(DEADLINE) == (v(1), weights_of(1))


@pytest.mark.parametrize("place", ["bucket", "staged"])
def test_the_term_is_asked_of_redis_once_all_is_checked(
    run: Any, raw: RawLearner, place: str
) -> None:
    worker = Setting(run, "shared_memory").worker(hold=place)
    raw.ask()
    raw.offer("a", v(1))
    holds(worker, place)
    # Its bytes have arrived, and every bucket is checked or will be; now another learner begins.
    run.new_term()
    worker.pipe.send("go on")
    refused = raw.refusal("a")
    assert refused.problem.startswith("load: ")
    assert "is of term 1, which is over: term 2 has begun" in refused.problem
    assert not worker.pipe.poll()


def test_a_channel_that_the_learner_does_not_open_is_given_up(run: Any, raw: RawLearner) -> None:
    short = config(transport="shared_memory", open_seconds=1)
    worker = Setting(run, "shared_memory").worker(config=short)
    raw.ask()
    raw.offer("a", v(1), way="gloo")
    refused = raw.refusal("a")
    assert refused.problem == "wait: learner-0 didn't open a weight channel within 1.0 s"
    loaded(raw, worker, "b", v(1))


def test_a_restamp_of_other_weights_than_the_engine_holds_is_refused(
    run: Any, raw: RawLearner
) -> None:
    worker = Setting(run, "shared_memory").worker()
    raw.ask()
    loaded(raw, worker, "a", v(1))
    raw.offer("b", v(2), way="none")
    refused = raw.refusal("b")
    assert refused.problem == "offer: a re-stamp of weights that this worker doesn't hold"
    loaded(raw, worker, "c", v(3))


def test_a_round_that_is_withdrawn_is_not_loaded(run: Any, raw: RawLearner) -> None:
    worker = Setting(run, "shared_memory").worker(hold="bucket")
    raw.ask()
    raw.offer("a", v(1))
    holds(worker, "bucket")
    raw.send(Withdraw(round="a", reason="the test says so"))
    while raw.ask().busy:
        pass
    worker.pipe.send("go on")
    # It tells of every load: there was none of 1.1.
    loaded(raw, worker, "b", v(2))


LOST: dict[str, Callable[[Any], bool]] = {
    "an offer": lambda message: isinstance(message, Offer),
    "an Ask that takes an offer up": lambda message: isinstance(message, Ask) and message.busy,
    "an Ask of a loaded version": lambda message: (
        isinstance(message, Ask) and message.version is not None
    ),
    "an Ask that refuses": lambda message: isinstance(message, Ask) and bool(message.problem),
}


@pytest.mark.parametrize("lost", LOST)
def test_a_message_that_is_lost_costs_seconds_and_not_a_deadline(
    run: Any, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    # Only a channel waits for the worker's answer to an offer.
    way = "gloo" if "takes" in lost else "shared_memory"
    patient = config(transport=way, open_seconds=300, stage_seconds=300, commit_seconds=300)
    gone = []
    send, arrive = Transfers._send, Transfers._on_message

    def sending(self: Any, peer: Any, message: Any) -> None:
        if LOST[lost](message) and not gone:
            gone.append(message)
        else:
            send(self, peer, message)

    def arriving(self: Any, identity: bytes, message: Any) -> None:
        if LOST[lost](message) and not gone:
            gone.append(message)
        else:
            arrive(self, identity, message)

    monkeypatch.setattr(Transfers, "_send", sending)
    monkeypatch.setattr(Transfers, "_on_message", arriving)
    publisher = run.publisher(config=patient)
    options = {"broken": (1,)} if "refuses" in lost else {}
    worker = Setting(run, way).worker(config=patient, **options)
    publish(publisher, 1, others=(worker,))
    wait_served(publisher, v(1), DEADLINE)
    assert len(gone) == 1
    publish(publisher, 2, others=(worker,))
    wait_served(publisher, v(2), DEADLINE)
