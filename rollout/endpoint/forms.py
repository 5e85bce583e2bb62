"""Answers of the endpoint in OpenAI's and vLLM's forms."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...common.plain import for_json
from ...common.records import FinishReason, Sample
from ..engine import Likeliest
from .chat import Answer
from .live import EventStream, LiveStream, chat_deltas
from .requests import Wanted
from .sessions import Ticket

if TYPE_CHECKING:
    from aiohttp import web

Decode = Callable[[Sequence[int]], str]
"""Text of some tokens, special ones included."""
Text = Callable[[int], str]
"""What log-probs call a token."""
Sent = Callable[[int], str | None]
"""What was sent already of an answer; None if nothing was."""


@dataclass(slots=True, kw_only=True, eq=False)
class Part:
    """One answer of a reply."""

    prompt: Sequence[int]
    """All tokens before it."""
    sample: Sample | None
    """The answer; None where only the prompt was asked about."""
    known: Likeliest | None = None
    """Log-probs of prompt and answer, and of other tokens; None if nobody has asked for them."""

    @property
    def own(self) -> list[int]:
        """Tokens of the answer."""
        return [] if self.sample is None else [int(token) for token in self.sample.tokens]


_ENDS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


def reply(body: Mapping[str, Any], status: int = 200) -> web.Response:
    """A JSON answer."""
    from aiohttp import web

    return web.Response(status=status, body=_json(body), content_type="application/json")


def _json(value: Mapping[str, Any]) -> bytes:
    """JSON with null for numbers that it can't write."""
    try:
        return json.dumps(value, allow_nan=False).encode()
    except ValueError:
        return json.dumps(for_json(value)).encode()


def error(status: int, message: str, code: str) -> web.Response:
    """An error in OpenAI's form."""
    kind = "authentication_error" if status == 401 else "invalid_request_error"
    kind = "not_found_error" if status == 404 else kind
    kind = "server_error" if status >= 500 else kind
    return reply({"error": {"message": message, "type": kind, "param": None, "code": code}}, status)


def models(model: str, context: int) -> web.Response:
    """The list of the one model."""
    about = {"id": model, "object": "model", "created": 0, "owned_by": "tandem"}
    return reply({"object": "list", "data": [{**about, "max_model_len": context}]})


def end_of(sample: Sample) -> str:
    """Why a turn ended, in OpenAI's words; one that was aborted was cut."""
    return _ENDS.get(sample.finish_reason, "length")


def usage(prompt: int, sampled: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _stamp(kind: str, model: str, prefix: str, parts: Sequence[Part]) -> dict[str, Any]:
    versions = {(s.term, s.step) for part in parts if part.sample for s in part.sample.spans}
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        # Which weights have answered.
        "system_fingerprint": " ".join(f"{t}.{s}" for t, s in sorted(versions)) or None,
    }


def _usage(parts: Sequence[Part], count: int) -> dict[str, int]:
    """Each prompt is counted once, whatever the number of its answers."""
    prompts = sum(len(part.prompt) for part in parts[::count])
    return usage(prompts, sum(len(part.own) for part in parts))


def _likeliest(part: Part, place: int, text: Text, count: int) -> list[tuple[str, float]] | None:
    """The most likely tokens at a place of prompt and answer, the likeliest first; None if they aren't known."""
    known = part.known
    if known is None or not 0 < place <= len(known.own):
        return None
    tokens, logprobs = known.tokens[place - 1, :count], known.logprobs[place - 1, :count]
    return [(text(int(one)), float(p)) for one, p in zip(tokens, logprobs, strict=True)]


def _by_text(part: Part, place: int, text: Text, count: int) -> dict[str, float] | None:
    """The same with the token that stands there; of tokens with one text the likeliest counts, so that none of them
    seems less likely than it is."""
    others = _likeliest(part, place, text, count)
    if part.known is None or others is None:
        return None
    own = text([*part.prompt, *part.own][place]), float(part.known.own[place - 1])
    found: dict[str, float] = {}
    for said, logprob in (own, *others):
        found[said] = max(logprob, found.get(said, logprob))
    return found


def _content(part: Part, text: Text, top: int) -> list[dict[str, Any]]:
    """Log-probs of a chat answer's tokens, each with ``top`` alternatives; if their log-probs aren't known, with
    itself as the only one."""
    sample = part.sample
    if sample is None:
        return []
    found = []
    pairs = zip(sample.tokens.tolist(), sample.logprobs.tolist(), strict=True)
    for place, (token, logprob) in enumerate(pairs, len(part.prompt)):
        one = _told(text(token), logprob)
        others = _likeliest(part, place, text, top)
        likeliest = [one][:top] if others is None else [_told(*other) for other in others]
        found.append({**one, "top_logprobs": likeliest})
    return found


def _names(want: Wanted, decode: Decode) -> Text:
    """What an answer's log-probs call a token."""
    return "token_id:{}".format if want.ids_as_texts else lambda token: decode([token])


def _told(said: str, logprob: float) -> dict[str, Any]:
    return {"token": said, "logprob": logprob, "bytes": list(said.encode())}


def chat(
    model: str, parts: Sequence[Part], answers: Sequence[Answer], want: Wanted, decode: Decode
) -> dict[str, Any]:
    """``chat.completion``. ``tandem`` in a choice says how many calls couldn't be parsed."""
    choices = []
    name = _names(want, decode)
    for number, (part, answer) in enumerate(zip(parts, answers, strict=True)):
        choice: dict[str, Any] = {
            "index": number,
            "message": answer.message,
            "finish_reason": answer.finish_reason,
            "logprobs": {"content": _content(part, name, want.top)} if want.logprobs else None,
        }
        if answer.malformed:
            choice["tandem"] = {"malformed_tool_calls": answer.malformed}
        if want.token_ids:
            choice["token_ids"] = part.own
        choices.append(choice)
    body = {
        **_stamp("chat.completion", model, "chatcmpl", parts),
        "choices": choices,
        "usage": _usage(parts, want.count),
    }
    if want.token_ids:
        body["prompt_token_ids"] = list(parts[0].prompt)
    return body


def chat_chunks(body: Mapping[str, Any], sent: Sent) -> Iterator[dict[str, Any]]:
    """Answers as ``chat.completion.chunk``: of each its role, its text, its calls, its end, without what was sent."""
    head = {**{k: body[k] for k in ("id", "created", "model")}, "object": "chat.completion.chunk"}
    for choice in body["choices"]:
        message, index = choice["message"], choice["index"]
        rest = _unsent(message.get("content") or "", sent(index))
        for delta in chat_deltas(index, rest, sent(index) is None):
            yield {**head, "choices": [delta]}
        for number, call in enumerate(message.get("tool_calls") or ()):
            called = {"tool_calls": [{"index": number, **call}]}
            yield {**head, "choices": [{"index": index, "delta": called, "finish_reason": None}]}
        more = {k: v for k, v in choice.items() if k not in ("index", "message")}
        yield {**head, "choices": [{"index": index, "delta": {}, **more}]}


def _unsent(text: str, sent: str | None) -> str:
    if not sent:
        return text
    # A text that has become another one can't be taken back.
    return text[len(sent) :] if text.startswith(sent) else ""


def completion(model: str, parts: Sequence[Part], want: Wanted, decode: Decode) -> dict[str, Any]:
    """``text_completion``, the answers to a prompt after one another; with ``echo`` it is their beginning."""
    choices = []
    for number, part in enumerate(parts):
        sample = part.sample
        said = "" if sample is None else want.said(sample.text, end_of(sample) == "stop")
        choice: dict[str, Any] = {
            "index": number,
            "text": decode(part.prompt) + said if want.echo else said,
            "finish_reason": "length" if sample is None else end_of(sample),
            "logprobs": _of_completion(part, want, decode) if want.logprobs else None,
        }
        if want.token_ids:
            choice["token_ids"] = part.own
            choice["prompt_token_ids"] = list(part.prompt)
        choices.append(choice)
    return {
        **_stamp("text_completion", model, "cmpl", parts),
        "choices": choices,
        "usage": _usage(parts, want.count),
    }


def _of_completion(part: Part, want: Wanted, decode: Decode) -> dict[str, Any]:
    """Log-probs of an answer's tokens, with ``echo`` of its prompt's too. The first token of all has none."""
    tokens, start = part.own, len(part.prompt)
    logprobs: list[float | None] = [] if part.sample is None else [*part.sample.logprobs.tolist()]
    if want.echo:
        given = [] if part.known is None else part.known.own[: start - 1].tolist()
        tokens, logprobs, start = [*part.prompt, *tokens], [None, *given, *logprobs], 0
    name = _names(want, decode)
    texts = [decode([token]) for token in tokens]
    names = [name(token) for token in tokens] if want.ids_as_texts else texts
    top: list[dict[str, float] | None] = []
    offsets, offset = [], 0
    for place, (text, said, logprob) in enumerate(zip(texts, names, logprobs, strict=True), start):
        offsets.append(offset)
        offset += len(text)
        alone = None if logprob is None else {said: logprob}
        top.append(_by_text(part, place, name, want.top) or alone)
    return {
        "tokens": names,
        "token_logprobs": logprobs,
        "top_logprobs": top,
        "text_offset": offsets,
    }


def completion_chunks(body: Mapping[str, Any], sent: Sent) -> Iterator[dict[str, Any]]:
    """Answers as the last event of a stream, without what was sent."""
    choices = [{**c, "text": _unsent(c["text"], sent(c["index"]))} for c in body["choices"]]
    yield {k: v for k, v in body.items() if k != "usage"} | {"choices": choices}


def generated(ticket: Ticket, sample: Sample, want: Wanted) -> web.Response:
    """vLLM's answer of tokens. Each entry spells its token in both ways, since clients refuse the other one."""
    content = [
        {
            "token": f"token_id:{token}",
            "token_id": token,
            "logprob": logprob,
            "rank": None,
            "top_logprobs": [],
        }
        for token, logprob in zip(sample.tokens.tolist(), sample.logprobs.tolist(), strict=True)
    ]
    body: dict[str, Any] = {
        "request_id": uuid.uuid4().hex,
        "choices": [
            {
                "index": 0,
                "token_ids": sample.tokens.tolist(),
                "finish_reason": end_of(sample),
                "stop_reason": None,
                "logprobs": {"content": content},
                "weight_versions": [
                    {"version": f"{s.term}.{s.step}", "start": s.start, "end": s.end}
                    for s in sample.spans
                ],
                "routed_experts": None,
                "sampling_mask": None,
            }
        ],
        "usage": usage(len(ticket.context), len(sample.tokens)),
    }
    if want.token_ids:
        body["prompt_token_ids"] = ticket.context.tolist()
    return reply(body)


async def send(
    request: web.Request,
    body: dict[str, Any],
    want: Wanted,
    chunks: Callable[[Mapping[str, Any], Sent], Iterator[dict[str, Any]]],
    live: LiveStream | None,
) -> web.StreamResponse:
    """Sends an answer whole, or as server-sent events: what wasn't sent while it was sampled."""
    if not want.stream:
        return reply(body)
    stream: EventStream
    sent: Sent
    if live is None:
        stream, sent = EventStream(request), lambda number: None
    else:
        stream, sent = live, live.sent
        body |= live.stamp
    for chunk in chunks(body, sent):
        await stream.write(_json(chunk))
    if not want.usage:
        return await stream.end()
    last = {k: v for k, v in body.items() if k not in ("choices", "object")}
    kind = body["object"] + (".chunk" if body["object"] == "chat.completion" else "")
    return await stream.end(_json({**last, "object": kind, "choices": []}))
