"""Whatever a client asks, and in whatever order, a branch holds what the engine was given and what it returned."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from endpoint_calls import spec

from tandem.common.errors import DataError
from tandem.common.records import FinishReason, Sample, SamplingParams, Source, VersionSpan
from tandem.rollout.endpoint.sessions import Branch, NoRoomError, Recorded, Session, Ticket

WORDS = ["a", "b", "ab", "ba", "aba", "c"]
"""Tokens of which several write the same text, so that it can be tokenised in several ways."""


def decode(tokens: Sequence[int]) -> str:
    return "".join(WORDS[token] for token in tokens)


def session(**changes: Any) -> Session:
    return Session("key", "url", spec(**changes), 1000)


class Played:
    """A session, and an engine's own notes of what it was given and returned."""

    def __init__(self, **changes: Any) -> None:
        self.session = session(**changes)
        self.running: list[Ticket] = []
        self.returned: dict[int, tuple[list[int], list[int], list[float]]] = {}
        self.versions: dict[int, int] = {}

    def ask(self, prompt: Sequence[int]) -> Ticket | None:
        try:
            ticket = self.session.place(prompt, decode)
        except (NoRoomError, DataError):
            return None
        # The text that is sampled after is exactly the text that was asked.
        assert decode(ticket.context.tolist()) == decode(prompt)
        assert len(ticket.context) + ticket.room <= self.session.spec.longest
        self.running.append(ticket)
        return ticket

    def end(self, ticket: Ticket, tokens: list[int], step: int = 0) -> None:
        self.running.remove(ticket)
        tokens = tokens[: ticket.room]
        # Log-probs that say whose they are.
        logprobs = [-float(np.float32(ticket.order + n / 64)) for n in range(len(tokens))]
        self.returned[ticket.order] = (ticket.context.tolist(), tokens, logprobs)
        self.versions[ticket.order] = step
        self.session.record(ticket, sampled(tokens, logprobs, step))

    def drop(self, ticket: Ticket) -> None:
        self.running.remove(ticket)
        self.session.drop(ticket)

    def check(self) -> Recorded | None:
        """Every branch, and the one that is trained on, hold what the engine has noted."""
        for branch in self.session.branches:
            self._check(branch)
        found = self.session.recorded()
        if found is None:
            assert not any(tokens for _, tokens, _ in self.returned.values())
            return None
        own = found.source == Source.OWN
        whole = [*found.prompt_tokens.tolist(), *found.tokens.tolist()]
        for turn, order in zip(found.turns, found.order, strict=True):
            context, tokens, logprobs = self.returned[order]
            at = len(found.prompt_tokens) + turn.start
            assert whole[:at] == context
            assert found.tokens[turn.start : turn.end].tolist() == tokens
            assert found.logprobs[turn.start : turn.end].tolist() == logprobs
            assert own[turn.start : turn.end].all()
        assert int(own.sum()) == sum(turn.end - turn.start for turn in found.turns)
        assert np.isnan(found.logprobs[~own]).all()
        assert [(s.step, s.start, s.end) for s in found.spans] == [
            (self.versions[order], turn.start, turn.end)
            for turn, order in zip(found.turns, found.order, strict=True)
            if turn.end > turn.start
        ]
        return found

    def _check(self, branch: Branch) -> None:
        assert len(branch.tokens) == branch.prompt + len(branch.source)
        assert len(branch.source) == len(branch.logprobs)
        for turn in branch.turns:
            context, tokens, logprobs = self.returned[turn.order]
            at = turn.start - branch.prompt
            assert branch.tokens[: turn.start] == context
            assert branch.tokens[turn.start : turn.end] == tokens
            assert branch.logprobs[at : at + len(tokens)] == logprobs
        own = sum(source == Source.OWN for source in branch.source)
        assert own == branch.own
        assert sum(math.isnan(value) for value in branch.logprobs) == len(branch.source) - own


def sampled(tokens: list[int], logprobs: list[float], step: int = 0) -> Sample:
    spans = (VersionSpan(term=1, step=step, start=0, end=len(tokens)),) if tokens else ()
    return Sample(
        tokens=np.array(tokens, dtype=np.int32),
        source=np.zeros(len(tokens), dtype=np.uint8),
        logprobs=np.array(logprobs, dtype=np.float32),
        spans=spans,
        finish_reason=FinishReason.STOP,
        sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=24),
        text=decode(tokens),
        reward=None,
        verdict=None,
        components={},
        extracted=None,
        grader=None,
    )


def again(text: str, draw: Any) -> list[int]:
    """A text in tokens, in any way."""
    tokens: list[int] = []
    while text:
        token = draw(st.sampled_from([n for n, word in enumerate(WORDS) if text.startswith(word)]))
        tokens.append(token)
        text = text[len(WORDS[token]) :]
    return tokens


tokens_of = st.lists(st.integers(0, len(WORDS) - 1), max_size=5)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_is_asked_a_branch_holds_what_the_engine_saw_and_returned(data: Any) -> None:
    played = Played(longest=data.draw(st.sampled_from([25, 500])), max_turns=20)
    for _ in range(data.draw(st.integers(1, 14))):
        move = data.draw(st.sampled_from(["ask", "end", "end", "drop"]))
        if move == "ask" or not played.running:
            streams = [[]] + [branch.tokens for branch in played.session.branches]
            stream = data.draw(st.sampled_from(streams))
            # All of a stream, or a part of it.
            kept = stream[: data.draw(st.sampled_from([len(stream), len(stream) // 2]))]
            if data.draw(st.booleans()):
                kept = again(decode(kept), data.draw)
            played.ask([*kept, *data.draw(tokens_of)])
        elif move == "end":
            ticket = data.draw(st.sampled_from(played.running))
            played.end(ticket, data.draw(tokens_of), data.draw(st.integers(0, 2)))
        else:
            played.drop(data.draw(st.sampled_from(played.running)))
        played.check()
    for ticket in [*played.running]:
        played.end(ticket, [0])
    played.check()
    assert not any(branch.busy for branch in played.session.branches)


def one_turn(played: Played, prompt: list[int], said: list[int]) -> list[int]:
    ticket = played.ask(prompt)
    assert ticket is not None
    played.end(ticket, said)
    return ticket.branch.tokens


def test_a_prompt_that_begins_with_the_whole_stream_goes_on_in_it() -> None:
    played = Played()
    stream = one_turn(played, [5, 5], [0, 1])
    one_turn(played, [*stream, 5], [2])
    found = played.check()
    assert found is not None
    assert found.tokens.tolist() == [0, 1, 5, 2]
    assert found.source.tolist() == [Source.OWN, Source.OWN, Source.ENVIRONMENT, Source.OWN]
    assert (found.branches, found.retokenised, found.order) == (0, 0, (0, 1))


def test_an_earlier_turn_that_is_gone_on_from_is_a_branch_with_the_same_log_probs() -> None:
    played = Played()
    first = list(one_turn(played, [5], [0, 1]))
    one_turn(played, [*first, 5], [2, 2, 2])
    one_turn(played, [*first, 4], [3])
    one, two = played.session.branches
    assert two.tokens == [5, 0, 1, 4, 3]
    assert two.logprobs[:2] == one.logprobs[:2]
    found = played.check()
    assert found is not None
    assert (found.order, found.branches, found.retokenised) == ((0, 1), 1, 0)


def test_of_branches_with_as_many_own_tokens_the_later_one_is_trained() -> None:
    played = Played()
    one_turn(played, [5], [0, 1])
    one_turn(played, [5], [1, 0])
    found = played.check()
    assert found is not None
    assert found.order == (1,)


def test_other_tokens_of_the_same_text_leave_the_recorded_ones() -> None:
    played = Played()
    one_turn(played, [5], [0, 1])  # "c" + "a" "b"
    one_turn(played, [5, 2, 5, 0], [1])  # "c" "ab" + "ca"
    found = played.check()
    assert found is not None
    assert found.tokens.tolist() == [0, 1, 5, 0, 1]
    assert (found.branches, found.retokenised) == (0, 0)


def test_a_token_across_the_end_of_the_recorded_text_is_a_retokenised_branch() -> None:
    played = Played()
    one_turn(played, [5], [0, 1, 5, 0])  # "c" + "abca"
    one_turn(played, [5, 0, 1, 5, 2, 5], [1])  # … "ab" across the end
    found = played.check()
    assert found is not None
    assert (found.order, found.branches, found.retokenised) == ((0,), 1, 1)


def test_an_answer_that_was_changed_is_retokenised_and_a_new_question_isnt() -> None:
    played = Played()
    one_turn(played, [5, 0], [1, 1])
    one_turn(played, [5, 0, 1, 0, 5], [1])
    assert played.session.retokenised == 1
    one_turn(played, [5, 5], [1])
    assert (played.session.retokenised, len(played.session.branches)) == (1, 3)


def test_an_answer_behind_another_beginning_is_retokenised() -> None:
    played = Played()
    one_turn(played, [5, 0, 5, 1, 1], [4, 4])
    one_turn(played, [0, 5, 0, 5, 1, 1, 4, 4, 5], [1])
    assert played.session.retokenised == 1


def test_two_requests_that_go_on_in_one_branch_at_once_are_two_branches() -> None:
    played = Played()
    stream = list(one_turn(played, [5], [0]))
    one, two = played.ask([*stream, 5]), played.ask([*stream, 5])
    assert one is not None
    assert two is not None
    assert one.branch is not two.branch
    played.end(two, [1, 1, 1])
    played.end(one, [2])
    found = played.check()
    assert found is not None
    assert (found.order, found.tokens.tolist()) == ((0, 2), [0, 5, 1, 1, 1])


def test_a_turn_that_is_given_up_leaves_no_copy_behind() -> None:
    played = Played()
    first = list(one_turn(played, [5], [0]))
    one_turn(played, [*first, 5], [1])
    fork = played.ask([*first, 4])
    assert fork is not None
    played.drop(fork)
    assert len(played.session.branches) == 1
    going_on = played.ask([*played.session.branches[0].tokens, 5])
    assert going_on is not None
    played.drop(going_on)
    assert len(played.session.branches[0].turns) == 2


@pytest.mark.parametrize(
    "bound", [{"longest": 6}, {"max_turns": 1}, {"context": 6}], ids=["tokens", "turns", "context"]
)
def test_a_session_without_room_refuses_and_its_branch_ended_by_length(bound: Any) -> None:
    played = Played(**{k: v for k, v in bound.items() if k != "context"})
    if "context" in bound:
        played.session = Session("key", "url", spec(), bound["context"])
    stream = one_turn(played, [5, 5], [0, 1])
    with pytest.raises(NoRoomError):
        played.session.place([*stream, 5, 5], decode)
    found = played.session.recorded()
    assert found is not None
    assert found.finish_reason is FinishReason.LENGTH
    assert len(found.turns) == 1


@pytest.mark.parametrize(
    "refused",
    [
        lambda one, stream: one.place([*stream[:4], *[4] * 5], decode),
        lambda one, stream: one.place([4] * 9, decode),
        lambda one, stream: one.check_characters(1001, 100),
    ],
    ids=["fork", "another beginning", "text"],
)
def test_whatever_is_refused_for_want_of_room_the_episode_ended_by_length(refused: Any) -> None:
    played = Played(longest=8)
    stream = list(one_turn(played, [5, 5], [0, 1]))
    stream = list(one_turn(played, [*stream, 5], [2]))
    with pytest.raises(NoRoomError):
        refused(played.session, stream)
    found = played.check()
    assert found is not None
    assert (found.finish_reason, found.branches) == (FinishReason.LENGTH, 0)
    # A client that has asked for less goes on.
    one_turn(played, [*stream, 5], [])
    found = played.check()
    assert found is not None
    assert found.finish_reason is FinishReason.STOP


def test_an_empty_prompt_is_no_conversation_that_is_too_long() -> None:
    with pytest.raises(DataError, match="empty"):
        session().place([], decode)


def test_tokens_that_cant_fit_are_refused_before_they_are_decoded() -> None:
    played = Played()
    one_turn(played, [5, 5], [0, 1])

    def never(tokens: Sequence[int]) -> str:
        raise AssertionError(f"{len(tokens):,} tokens were decoded")

    with pytest.raises(NoRoomError, match="1,000 tokens"):
        played.session.place([2] * 1000, never)


def test_a_text_that_cant_fit_is_refused_before_it_is_tokenised() -> None:
    with pytest.raises(NoRoomError, match="characters"):
        session(longest=10).check_characters(1001, 100)
    session(longest=10).check_characters(1000, 100)
