"""What was sampled in a session, token by token, whatever a client makes of it: the state of an episode.

A session is a list of branches. A branch is a stream of tokens as the engine saw them: a first prompt, then turns
of the policy and, between them, what the client added. The prompt of a request is placed where it continues a
stream, so that nothing that was sampled is ever encoded from text again:

1. It begins with a whole stream: the branch goes on, and what is new is environment text.
2. It begins with a stream up to the end of an earlier turn: a new branch with a copy of these tokens. So it is when a
   client asks once more, or tries two ways.
3. Its text begins with the text of a stream, but the client has tokenised it another way: the recorded tokens stay,
   and the rest of the prompt is added. A client that has left an answer while it was sampled needs to have only the
   beginning of it, to which it is cut.
4. Otherwise it is a new branch. If it goes on behind a prompt that the session has answered, or holds an answer of
   the session's, a client has rendered this answer differently: it is counted as retokenised.

Which branch is trained on: the one with most own tokens, and of equals the last. Plain values, no I/O.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...common.errors import DataError, TandemError
from ...common.records import (
    FinishReason,
    Float32Array,
    Int32Array,
    Sample,
    SamplingParams,
    Source,
    Turn,
    UInt8Array,
    VersionSpan,
)

OPENING = 4
"""Number of tokens before an answer by which it is known; templates open an answer with about as many."""
Decode = Callable[[Sequence[int]], str]
"""Text of some tokens, special ones included."""


class NoRoomError(TandemError):
    """The session has no room for another turn: its tokens, turns or the engine's context are used up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """What bounds a session, and how its turns are sampled."""

    name: str
    """Keys the noise: turn n is the engine's group ``name/n``."""
    sampling: SamplingParams
    """The distribution of every turn; ``max_new_tokens`` bounds each one."""
    seed: int
    """The run's seed."""
    longest: int
    """Greatest number of tokens of a branch, its first prompt included."""
    max_turns: int
    """Greatest number of requests."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn."""
    attempt: int = 0
    """Earlier sessions of this name, whose turns may still be sampled. The noise is theirs."""


@dataclass(slots=True, kw_only=True)
class Answered:
    """One turn in a branch."""

    start: int
    """First token, counted in the branch."""
    end: int
    """One past its last token."""
    order: int
    """Number of its request in the session."""
    text: str
    """Text of the turn without special tokens."""
    ended: bool
    """Whether the policy ended it."""
    reason: FinishReason
    malformed: bool = False
    """Whether it holds a tool call that can't be parsed."""
    messages: int = 0
    """Number of the branch's messages up to it."""
    streamed: bool = False
    """Whether it was sent while it was sampled, so that its client may have gone with a part of it."""
    left: bool = False
    """Whether its client is known to have gone while it was sampled."""


@dataclass(slots=True, kw_only=True, eq=False)
class Branch:
    """One stream of tokens."""

    tokens: list[int]
    """All of them, the first prompt included."""
    prompt: int
    """Length of the first prompt."""
    source: list[int] = field(default_factory=list)
    """A :class:`Source` for each token behind the first prompt."""
    logprobs: list[float] = field(default_factory=list)
    """Nats, for the same tokens; NaN where they weren't sampled."""
    spans: list[VersionSpan] = field(default_factory=list)
    """Counted behind the first prompt."""
    turns: list[Answered] = field(default_factory=list)
    messages: list[Any] = field(default_factory=list)
    """The conversation up to its last answer, as :func:`.chat.plain_message` makes them; empty for requests of
    tokens or text."""
    tools: Any = None
    """The tools that were offered."""
    busy: bool = False
    """Whether a turn of it is being sampled."""
    left: bool = False
    """Whether this turn's client has gone with a part of it: the turn ends, and is recorded."""
    cut: bool = False
    """Whether it ended for want of room."""

    @property
    def own(self) -> int:
        """Number of own tokens."""
        return sum(turn.end - turn.start for turn in self.turns)

    def answered(self) -> Branch:
        """The branch, or a copy of it without its last turn, if that was aborted and so wasn't answered."""
        if not self.turns or self.turns[-1].reason is not FinishReason.ABORT:
            return self
        return self.until(self.turns[-2]) if len(self.turns) > 1 else Branch(tokens=[], prompt=0)

    def until(self, turn: Answered) -> Branch:
        """A copy that ends with one of its turns."""
        length = turn.end - self.prompt
        return Branch(
            tokens=self.tokens[: turn.end],
            prompt=self.prompt,
            source=self.source[:length],
            logprobs=self.logprobs[:length],
            spans=[span for span in self.spans if span.end <= length],
            turns=[replace(one) for one in self.turns if one.end <= turn.end],
            messages=self.messages[: turn.messages],
            tools=self.tools,
        )


@dataclass(slots=True, kw_only=True)
class Ticket:
    """A turn that may be sampled: where it goes, and what the engine is given."""

    branch: Branch
    order: int
    """Number of the request in the session."""
    is_new: bool
    """Whether the branch was made for this turn."""
    added: list[int]
    """Tokens that the client has added to the branch."""
    context: Int32Array
    """``[P]`` everything before the turn."""
    room: int
    """Greatest number of tokens of the turn."""
    streamed: bool = False
    """Whether the turn is sent while it is sampled."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """The branch of a session that is trained on."""

    prompt_tokens: Int32Array
    """``[P]`` its first prompt."""
    tokens: Int32Array
    """``[L]`` everything behind it."""
    source: UInt8Array
    """``[L]`` own or environment."""
    logprobs: Float32Array
    """``[L]`` nats; NaN for environment tokens."""
    spans: tuple[VersionSpan, ...]
    """Counted in ``tokens``."""
    turns: tuple[Turn, ...]
    """Counted in ``tokens``; without rewards."""
    texts: tuple[str, ...]
    """Text of each turn."""
    order: tuple[int, ...]
    """For each turn, the number of its request in the session."""
    finish_reason: FinishReason
    """Why the last turn ended; ``length`` if the session ran out of room."""
    branches: int
    """Branches of the session beside this one."""
    retokenised: int
    """Branches of a client that rendered sampled text differently."""
    tool_calls: int
    malformed_calls: int
    model_seconds: float
    """Time in which the engine sampled for it."""


class Session:
    """One episode's tokens.

    Args:
        key: the secret by which its client is known.
        base_url: where the client asks, key included.
        spec: bounds and sampling.
        context: tokens of the engine's context.
    """

    def __init__(self, key: str, base_url: str, spec: SessionSpec, context: int) -> None:
        self.key = key
        self.base_url = base_url
        self.spec = spec
        self.branches: list[Branch] = []
        self.retokenised = 0
        self.tool_calls = 0
        self.malformed_calls = 0
        self.model_seconds = 0.0
        self.running: set[str] = set()
        """Group ids of the turns that the engine is sampling."""
        self.is_over = False
        """Whether no further request is answered."""
        self._context = context
        self._requests = 0
        self._began: dict[int, float] = {}

    @property
    def room(self) -> int:
        """Greatest number of tokens of a conversation, its last answer included."""
        return min(self.spec.longest, self._context)

    @property
    def is_left(self) -> bool:
        """Whether a turn is about to be recorded whose client may go on with it already."""
        return any(branch.busy and branch.left for branch in self.branches)

    # A turn begins.

    def place(
        self, prompt: Sequence[int], decode: Decode | None = None, *, repeats: bool = False
    ) -> Ticket:
        """Finds where a prompt of tokens continues the session; see the module's text.

        Args:
            prompt: all tokens of the request.
            decode: gives the text of tokens; None = compare tokens alone.
            repeats: whether the client's messages are known to hold an answer of the session's.

        Raises:
            NoRoomError: no token could be sampled after it.
        """
        prompt = list(prompt)
        if len(prompt) >= self.room:
            decode = None  # It is refused below, and its text could be millions of tokens long.
        for branch in reversed(self.branches):
            length = len(branch.tokens)
            if not branch.busy and length <= len(prompt) and prompt[:length] == branch.tokens:
                return self.extend(branch, prompt[length:])
        fork = self._fork(prompt)
        if fork is not None:
            return fork
        if decode is not None and any(branch.turns for branch in self.branches):
            text = decode(prompt)
            for branch in reversed(self.branches):
                if branch.busy or not branch.turns:
                    continue
                said = decode(branch.tokens)
                cut = _cut(prompt, said, decode) if text.startswith(said) else None
                if cut is not None:
                    return self.extend(branch, prompt[cut:])
                if branch.turns[-1].left:
                    size, cut = _read_of(branch, said, prompt, text, decode)
                    if cut is not None:
                        self._cut_last(
                            branch, size, decode(branch.tokens[branch.turns[-1].start :][:size])
                        )
                        return self.extend(branch, prompt[cut:])
            repeats = repeats or self._repeats(text, decode)
        ticket = self.begin(prompt)
        self.retokenised += repeats
        return ticket

    def check_characters(self, characters: int, a_token: int) -> None:
        """Refuses a text that can't fit, before anybody tokenises it.

        Args:
            characters: of the text.
            a_token: greatest number of them that a token is taken to have.

        Raises:
            NoRoomError: it has more characters than there is room for.
        """
        most = self.room * a_token
        if characters > most:
            raise self.no_room(
                f"the prompt has {characters:,} characters, and there is room for {most:,} at most"
            )

    def no_room(self, why: str, branch: Branch | None = None) -> NoRoomError:
        """The error for a request that there is no room for. The branch that it goes on from has ended for want of
        room; where none is known, every branch has."""
        for one in self.branches if branch is None else [branch]:
            one.cut = True
        return NoRoomError(why)

    def begin(self, prompt: Sequence[int]) -> Ticket:
        """A new branch.

        Raises:
            NoRoomError: no token could be sampled after it.
        """
        branch = Branch(tokens=list(prompt), prompt=len(prompt))
        return self._ticket(branch, [], None)

    def extend(self, branch: Branch, added: Sequence[int]) -> Ticket:
        """A branch goes on with some tokens of the client's; a busy one is copied.

        Raises:
            NoRoomError: no token could be sampled after them.
        """
        before = branch
        if branch.busy:
            branch = (
                branch.until(branch.turns[-1])
                if branch.turns
                else Branch(tokens=branch.tokens[: branch.prompt], prompt=branch.prompt)
            )
        return self._ticket(branch, list(added), before)

    def fork(self, branch: Branch, turn: Answered, added: Sequence[int]) -> Ticket:
        """A copy of a branch up to a turn goes on with some tokens of the client's.

        Raises:
            NoRoomError: no token could be sampled after them.
        """
        return self._ticket(branch.until(turn), list(added), branch)

    def _fork(self, prompt: list[int]) -> Ticket | None:
        """A copy of the longest beginning of a branch, up to the end of a turn, that the prompt begins with."""
        best: tuple[int, Branch, Answered] | None = None
        for branch in self.branches:
            for turn in reversed(branch.turns):
                if turn.end <= len(prompt) and prompt[: turn.end] == branch.tokens[: turn.end]:
                    if best is None or turn.end >= best[0]:
                        best = (turn.end, branch, turn)
                    break
        if best is None:
            return None
        end, branch, turn = best
        return self.fork(branch, turn, prompt[end:])

    def _repeats(self, text: str, decode: Decode) -> bool:
        """Whether a prompt's text goes on behind a prompt that was answered, or holds an answer."""
        for branch in self.branches:
            if not branch.turns:
                continue
            asked = decode(branch.tokens[: branch.turns[0].start])
            if len(text) > len(asked) and text.startswith(asked):
                return True
            for turn in branch.turns:
                # With the words before it, so that a short answer isn't found in any text that has it.
                before = decode(branch.tokens[max(0, turn.start - OPENING) : turn.start])
                if turn.text.strip() and before + turn.text.strip() in text:
                    return True
        return False

    def _ticket(self, branch: Branch, added: list[int], before: Branch | None) -> Ticket:
        """A turn of a branch, which may be a copy of what another one was before."""
        if self._requests >= self.spec.max_turns:
            raise self.no_room(f"the session has had its {self.spec.max_turns} turns")
        context = np.array(branch.tokens + added, dtype=np.int32)
        if not len(context):
            raise DataError("the prompt is empty")
        most = self.room
        if len(context) >= most:
            raise self.no_room(
                f"the conversation has {len(context):,} tokens, and there is room for {most:,} with "
                f"the answer",
                before,
            )
        is_new = branch not in self.branches
        if is_new:
            self.branches.append(branch)
        branch.busy, branch.cut = True, False
        order, self._requests = self._requests, self._requests + 1
        self._began[order] = time.monotonic()
        room = min(self.spec.sampling.max_new_tokens, most - len(context))
        return Ticket(
            branch=branch, is_new=is_new, order=order, added=added, context=context, room=room
        )

    # A turn ends.

    def record(self, ticket: Ticket, sample: Sample) -> Answered:
        """Adds the client's tokens and the turn that was sampled after them."""
        branch, left = ticket.branch, ticket.branch.left
        self._release(ticket)
        branch.tokens += ticket.added
        branch.source += [int(Source.ENVIRONMENT)] * len(ticket.added)
        branch.logprobs += [math.nan] * len(ticket.added)
        start = len(branch.tokens)
        place = start - branch.prompt
        branch.tokens += sample.tokens.tolist()
        branch.source += [int(Source.OWN)] * len(sample.tokens)
        branch.logprobs += sample.logprobs.tolist()
        branch.spans += [
            VersionSpan(term=s.term, step=s.step, start=place + s.start, end=place + s.end)
            for s in sample.spans
        ]
        turn = Answered(
            start=start,
            end=len(branch.tokens),
            order=ticket.order,
            text=sample.text,
            ended=sample.finish_reason is FinishReason.STOP,
            reason=sample.finish_reason,
            streamed=ticket.streamed,
            left=left,
        )
        branch.turns.append(turn)
        return turn

    def shorten(self, branch: Branch, text: str, decode: Decode) -> bool:
        """Cuts a branch's last turn to the tokens of a text that it begins with; False if no token ends there.

        Args:
            branch: no turn of it is being sampled.
            text: without special tokens.
            decode: gives such texts.
        """
        size = _cut(branch.tokens[branch.turns[-1].start :], text, decode)
        if not size:
            return False
        self._cut_last(branch, size, text)
        return True

    def _cut_last(self, branch: Branch, size: int, text: str) -> None:
        """Cuts a branch's last turn to its first tokens, which have this text."""
        turn = branch.turns[-1]
        turn.end, turn.text = turn.start + size, text
        # For the episode it ended there, as at a stop string.
        turn.ended, turn.reason = True, FinishReason.STOP
        length = turn.end - branch.prompt
        for values in (branch.source, branch.logprobs):
            del values[length:]
        del branch.tokens[turn.end :]
        branch.spans = [
            VersionSpan(term=s.term, step=s.step, start=s.start, end=min(s.end, length))
            for s in branch.spans
            if s.start < length
        ]

    def drop(self, ticket: Ticket) -> None:
        """Gives up a turn that wasn't sampled; its client may ask again."""
        if not ticket.branch.busy:
            return
        self._release(ticket)
        if ticket.is_new:
            self.branches.remove(ticket.branch)

    def _release(self, ticket: Ticket) -> None:
        ticket.branch.busy = ticket.branch.left = False
        self.model_seconds += time.monotonic() - self._began.pop(ticket.order)

    # The end.

    def recorded(self, *, was_cut: bool = True) -> Recorded | None:
        """The branch that is trained on, without an aborted turn unless the episode was cut there; None if nothing
        was sampled."""
        found = self.branches if was_cut else [branch.answered() for branch in self.branches]
        branches = [branch for branch in found if branch.own]
        if not branches:
            return None
        best = max(reversed(branches), key=lambda branch: branch.own)
        last = best.turns[-1]
        first = best.prompt
        # What a client added after the last turn teaches nothing, and isn't in the stream.
        reason = FinishReason.LENGTH if best.cut and last.ended else last.reason
        return Recorded(
            prompt_tokens=np.array(best.tokens[:first], dtype=np.int32),
            tokens=np.array(best.tokens[first:], dtype=np.int32),
            source=np.array(best.source, dtype=np.uint8),
            logprobs=np.array(best.logprobs, dtype=np.float32),
            spans=tuple(best.spans),
            turns=tuple(
                Turn(
                    start=turn.start - first,
                    end=turn.end - first,
                    reward=None,
                    malformed=turn.malformed,
                )
                for turn in best.turns
            ),
            texts=tuple(turn.text for turn in best.turns),
            order=tuple(turn.order for turn in best.turns),
            finish_reason=reason,
            branches=len(branches) - 1,
            retokenised=self.retokenised,
            tool_calls=self.tool_calls,
            malformed_calls=self.malformed_calls,
            model_seconds=self.model_seconds,
        )


def _cut(prompt: list[int], said: str, decode: Decode) -> int | None:
    """How many of the prompt's tokens decode to exactly this text; None if a token goes across its end."""
    low, high = 0, len(prompt)
    # The text of more tokens is at least as long.
    while low < high:
        middle = (low + high) // 2
        if len(decode(prompt[:middle])) < len(said):
            low = middle + 1
        else:
            high = middle
    return low if decode(prompt[:low]) == said else None


def _read_of(
    branch: Branch, said: str, prompt: list[int], text: str, decode: Decode
) -> tuple[int, int | None]:
    """How much of a branch's last turn a prompt goes on from.

    Args:
        branch: its client has left its last turn.
        said: the branch's text.
        prompt: tokens of a request.
        text: theirs.
        decode: gives the text of tokens.

    Returns:
        Number of the turn's first tokens that the prompt's text holds, and of the prompt's tokens up to there; None
        if there are none, or if a token of the prompt goes across.
    """
    turn = branch.turns[-1]
    pairs = enumerate(zip(said, text, strict=False))
    alike = next((place for place, (a, b) in pairs if a != b), min(len(said), len(text)))
    low, high = turn.start, turn.end
    # The last token whose text ends before they differ. The text of more tokens is at least as long.
    while low < high:
        middle = (low + high + 1) // 2
        if len(decode(branch.tokens[:middle])) <= alike:
            low = middle
        else:
            high = middle - 1
    read = decode(branch.tokens[:low])
    if low == turn.start or not text.startswith(read):
        return 0, None
    return low - turn.start, _cut(prompt, read, decode)
