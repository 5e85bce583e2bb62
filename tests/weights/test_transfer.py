"""Weights travel from a publisher to worker processes over real sockets and real gloo."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from typing import Any

import pytest
from raw_worker import RawWorker
from served import wait_served
from weight_processes import FlippedByte, as_bytes, config, listening, model, specs_of

from tandem.common.errors import WeightsError
from tandem.common.records import Version
from tandem.common.sockets import new_keys
from tandem.common.weights import transfers
from tandem.common.weights.manifest import ScoredRows
from tandem.common.weights.protocol import Offer, Open
from tandem.common.weights.ways import WAYS, Way


def v(step: int, term: int = 1) -> Version:
    return Version(term=term, step=step)


def test_every_version_arrives_bit_for_bit(run: Any) -> None:
    publisher = run.publisher()
    worker = run.worker()
    for step in range(4):
        publisher.publish(v(step), model(step))
        assert worker.next() == (v(step), as_bytes(model(step)))
    wait_served(publisher, v(3), 10)
    assert publisher.stats()["members"] == {"rollout-0": [1, 3]}


def test_several_buckets_arrive_bit_for_bit(run: Any) -> None:
    publisher = run.publisher()
    worker = run.worker(specs=specs_of(model(0, big=True)))
    publisher.publish(v(1), model(1, big=True))
    assert worker.next() == (v(1), as_bytes(model(1, big=True)))


def test_a_gather_may_reuse_its_memory_for_the_next_parameter(run: Any) -> None:
    publisher = run.publisher()
    worker = run.worker()

    def gathered(seed: int) -> Any:
        for name, tensor in model(seed):
            lent = tensor.clone()
            yield name, lent
            lent.fill_(float("nan"))

    for step in range(2):
        publisher.publish(v(step), gathered(step))
        assert worker.next() == (v(step), as_bytes(model(step)))


def test_training_may_change_the_model_as_soon_as_publish_returns(run: Any) -> None:
    publisher = run.publisher()
    named = model(1)
    expected = as_bytes(named)
    publisher.publish(v(1), named)
    for _, tensor in named:
        tensor.zero_()
    assert run.worker().next() == (v(1), expected)


def test_a_joiner_gets_the_newest_version_without_a_new_publication(run: Any) -> None:
    publisher = run.publisher()
    for step in range(5):
        publisher.publish(v(step), model(step))
    assert run.worker().next() == (v(4), as_bytes(model(4)))
    assert publisher.stats()["superseded"] == 4
    assert run.worker("rollout-1").next() == (v(4), as_bytes(model(4)))


def test_latest_wins_while_a_worker_is_busy_committing(run: Any) -> None:
    publisher = run.publisher()
    worker = run.worker(gate=True)
    publisher.publish(v(1), model(1))
    assert worker.next()[0] == v(1)
    for step in (2, 3, 4):
        publisher.publish(v(step), model(step))
    worker.pipe.send("go on")
    assert worker.next() == (v(4), as_bytes(model(4)))
    worker.pipe.send("go on")
    wait_served(publisher, v(4), 10)
    assert publisher.stats()["superseded"] == 2


def test_a_restamp_sends_no_bytes_to_who_holds_them(run: Any) -> None:
    publisher = run.publisher()
    worker = run.worker()
    publisher.publish(v(1), model(1))
    assert worker.next() == (v(1), as_bytes(model(1)))
    wait_served(publisher, v(1), 10)
    sent = publisher.stats()["bytes"]
    publisher.restamp(v(2))
    assert worker.next() == (v(2), {})
    wait_served(publisher, v(2), 10)
    assert publisher.stats()["bytes"] == sent
    assert run.worker("rollout-1").next() == (v(2), as_bytes(model(1)))


def test_a_flipped_byte_is_refused_and_the_version_is_sent_again(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FlippedByte, "damaged", 0)
    monkeypatch.setitem(WAYS, "gloo", Way(channel=FlippedByte))
    publisher = run.publisher()
    worker = run.worker()
    publisher.publish(v(1), model(1))
    run.lines.wait_for("rollout-0 stays on no version", "refused at verify", "was damaged")
    assert worker.next() == (v(1), as_bytes(model(1)))


def test_a_wrong_shape_is_refused_by_name(run: Any) -> None:
    publisher = run.publisher()
    specs = [(n, (5, 12) if n == "head.weight" else s, d) for n, s, d in specs_of(model(0))]
    run.worker(specs=specs)
    publisher.publish(v(1), model(1))
    run.lines.wait_for("head.weight has shape [5, 12] in the engine and [5, 11] in the manifest")
    assert publisher.stats()["members"] == {"rollout-0": None}


def test_a_missing_parameter_is_refused_by_name(run: Any) -> None:
    publisher = run.publisher()
    run.worker(specs=[*specs_of(model(0)), ("lm_head.bias", (7,), "float32")])
    publisher.publish(v(1), model(1))
    run.lines.wait_for("lm_head.bias is missing: the engine has it")
    assert publisher.stats()["members"] == {"rollout-0": None}


def test_a_term_that_is_over_is_refused_at_commit(run: Any) -> None:
    publisher = run.publisher(term=run.new_term())
    run.new_term()
    run.worker()
    publisher.publish(v(1), model(1))
    run.lines.wait_for("refused at load", "is of term 1, which is over: term 2 has begun")
    assert publisher.stats()["committed"] == 0


def test_a_newer_term_takes_over_a_running_worker(run: Any) -> None:
    first = run.publisher()
    worker = run.worker()
    first.publish(v(50), model(50))
    assert worker.next()[0] == v(50)
    second = run.publisher()
    second.publish(v(40, term=2), model(40))
    assert worker.next() == (v(40, term=2), as_bytes(model(40)))


def test_killing_a_worker_in_mid_round_costs_only_its_own_round(run: Any) -> None:
    publisher = run.publisher()
    specs = specs_of(model(0, big=True))
    dying = run.worker("rollout-0", half=True, specs=specs)
    other = run.worker("rollout-1", specs=specs)
    publisher.publish(v(1), model(1, big=True))
    assert other.next() == (v(1), as_bytes(model(1, big=True)))
    assert dying.next() == "half"
    dying.kill()
    for step in (2, 3):
        publisher.publish(v(step), model(step, big=True))
        assert other.next() == (v(step), as_bytes(model(step, big=True)))
    again = run.worker("rollout-0", specs=specs)
    assert again.next() == (v(3), as_bytes(model(3, big=True)))


def test_killing_the_learner_in_mid_round_leaves_the_old_version_until_a_new_term(run: Any) -> None:
    specs = specs_of(model(0, big=True))
    first = run.learner(big=True)
    worker = run.worker(specs=specs)
    first.pipe.send((1, 1))
    assert worker.next() == (v(1), as_bytes(model(1, big=True)))
    first.kill()
    second = run.learner(big=True, half=True)
    second.pipe.send((2, 2))
    assert second.next() == "half"
    second.kill()
    # Its fetch has failed, and no newer term has begun yet.
    assert not worker.pipe.poll(2.0)
    third = run.learner(big=True)
    third.pipe.send((1, 3))
    # The worker says what it commits; nothing of term 2 is among it.
    assert worker.next() == (v(1, term=3), as_bytes(model(3, big=True)))


def test_publishing_goes_on_while_a_worker_is_stopped_and_the_log_names_it(run: Any) -> None:
    publisher = run.publisher(config=config(open_seconds=1, stage_seconds=2))
    stopped = run.worker("rollout-0")
    other = run.worker("rollout-1")
    publisher.publish(v(1), model(1))
    wait_served(publisher, v(1), 30, at_least=2)
    assert stopped.next()[0] == other.next()[0] == v(1)
    stopped.signal(signal.SIGSTOP)
    for step in range(2, 8):
        publisher.publish(v(step), model(step))
        assert other.next() == (v(step), as_bytes(model(step)))
    # For its answer to the offer, or, if it was stopped before it asked for one, for a sign of life.
    run.lines.wait_for("waiting for rollout-0 to ")
    ends = "didn't acknowledge version 1.2 within 1.0 s", "rollout-0: silent for 10.0 s"
    with run.lines.more:
        assert run.lines.more.wait_for(
            lambda: any(end in line for line in run.lines.seen for end in ends), 20.0
        ), run.lines.seen
    stopped.signal(signal.SIGCONT)
    wait_served(publisher, v(7), 30, at_least=2)


def test_a_worker_stopped_inside_its_channel_pins_one_buffer_and_no_more(run: Any) -> None:
    publisher = run.publisher()
    specs = specs_of(model(0, big=True))
    stopped = run.worker("rollout-0", half=True, specs=specs)
    other = run.worker("rollout-1", specs=specs)
    publisher.publish(v(1), model(1, big=True))
    assert stopped.next() == "half"
    stopped.signal(signal.SIGSTOP)
    assert other.next()[0] == v(1)
    for step in range(2, 8):
        publisher.publish(v(step), model(step, big=True))
        assert other.next() == (v(step), as_bytes(model(step, big=True)))
    assert publisher.stats()["buffers"] <= 3


def test_a_silent_worker_is_given_up_by_name(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "SILENT_SECONDS", 2.5)
    publisher = run.publisher()
    worker = run.worker()
    publisher.publish(v(1), model(1))
    wait_served(publisher, v(1), 30)
    worker.signal(signal.SIGSTOP)
    run.lines.wait_for("rollout-0: silent for 2.5 s (stopped or dead)")
    assert publisher.stats()["members"] == {}
    worker.signal(signal.SIGCONT)
    publisher.publish(v(2), model(2))
    wait_served(publisher, v(2), 30)


def test_a_worker_whose_engine_fails_while_loading_ends_itself(run: Any) -> None:
    publisher = run.publisher()
    # An end by the deadline of a commit would come later than the test waits.
    worker = run.worker(broken=True, config=config(commit_seconds=300))
    publisher.publish(v(1), model(1))
    worker.process.join(30)
    assert worker.process.exitcode == 70


def test_every_socket_listens_on_loopback_only(run: Any) -> None:
    learner = run.learner(big=True)
    # It stands still in the middle of a transfer, while the channel is open.
    worker = run.worker(half=True, specs=specs_of(model(0, big=True)))
    learner.pipe.send((1, 1))
    assert worker.next() == "half"
    # The learner's: control socket, meeting point, gloo; the worker's: gloo.
    found = {"learner": listening(learner.pid), "worker": listening(worker.pid)}
    assert len(found["learner"]) == 3, found
    assert len(found["worker"]) == 1, found
    for address in found["learner"] + found["worker"]:
        assert address.startswith("0100007F:"), found


def test_a_channel_listens_only_while_a_version_is_sent(run: Any) -> None:
    learner = run.learner()
    worker = run.worker()
    for step in range(3):
        learner.pipe.send((step, step))
        assert worker.next()[0] == v(step)
    # The control socket is left.
    until = time.monotonic() + 20
    while len(listening(learner.pid)) > 1 or listening(worker.pid):
        assert time.monotonic() < until, (listening(learner.pid), listening(worker.pid))
        time.sleep(0.02)


def test_without_a_port_for_a_channel_the_learner_lives_and_tries_again(run: Any) -> None:
    with socket.socket() as router, socket.socket() as other:
        router.bind(("127.0.0.1", 0))
        port = router.getsockname()[1]
        other.bind(("127.0.0.1", port + 1))
        other.listen()
        router.close()
        settings = config()
        # The first port of the range is Redis'.
        launch = settings.launch.model_copy(update={"ports": f"{port - 1}-{port + 1}"})
        settings = settings.model_copy(update={"launch": launch})
        publisher = run.publisher(config=settings)
        worker = run.worker()
        publisher.publish(v(1), model(1))
        run.lines.wait_for("the weight channel can't be created")
        other.close()
        assert worker.next() == (v(1), as_bytes(model(1)))


def test_a_channel_opens_only_to_a_worker_of_the_run_that_has_accepted_an_offer(run: Any) -> None:
    publisher = run.publisher()
    publisher.publish(v(1), model(1))
    before = set(listening(os.getpid()))
    with (
        contextlib.closing(RawWorker(run, "stranger", keys=new_keys())) as stranger,
        contextlib.closing(RawWorker(run)) as worker,
    ):
        assert not stranger.ask()
        assert worker.ask()
        offer = worker.heard(20.0)
        assert isinstance(offer, Offer)
        # Neither where to meet nor anything that listens, as long as it doesn't accept.
        assert worker.heard(1.0) is None
        assert set(listening(os.getpid())) == before
        assert worker.ask(offer.round, busy=True)
        meet = worker.heard(20.0)
        assert isinstance(meet, Open)
        assert meet.round == offer.round
        assert set(listening(os.getpid())) > before
    assert publisher.stats()["members"] == {"rollout-0": None}


def test_versions_only_go_up(run: Any) -> None:
    publisher = run.publisher()
    publisher.publish(v(2), model(2))
    with pytest.raises(WeightsError, match=r"1\.2 isn't newer than 1\.2"):
        publisher.publish(v(2), model(2))


def test_another_layout_is_refused_by_name(run: Any) -> None:
    publisher = run.publisher()
    publisher.publish(v(1), model(1))
    with pytest.raises(WeightsError, match=r"parameter 0 is layer\.bias"):
        publisher.publish(v(2), model(2)[1:])
    with pytest.raises(WeightsError, match=r"head\.weight is missing"):
        publisher.publish(v(2), model(2)[:-1])
    publisher.publish(v(2), model(2))
    assert run.worker().next() == (v(2), as_bytes(model(2)))


def test_what_the_learner_scored_goes_with_a_version_and_with_its_restamps(run: Any) -> None:
    publisher = run.publisher()
    scored_at = [
        ScoredRows(rows=((3, 1, 2),), logprobs=((-0.5, -float(step)),)) for step in range(3)
    ]

    def offered() -> tuple[Version, ScoredRows | None]:
        """To a worker that joins now."""
        published = publisher._slots.pin()
        manifest = publisher._slots.manifest(published)
        publisher._slots.release(published.slot)
        return manifest.version, manifest.scored

    publisher.publish(v(1), model(1), scored_at[1])
    assert offered() == (v(1), scored_at[1])
    publisher.restamp(v(2))
    assert offered() == (v(2), scored_at[1])
    publisher.publish(v(3), model(3), scored_at[2])
    assert offered() == (v(3), scored_at[2])
    # Its buffer had another version's before.
    publisher.publish(v(4), model(4))
    assert offered() == (v(4), None)
