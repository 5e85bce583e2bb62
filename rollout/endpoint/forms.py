"""Answers of the endpoint in OpenAI's and vLLM's forms."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...common.records import FinishReason, Sample
from .chat import Answer
from .requests import Wanted
from .sessions import Ticket

if TYPE_CHECKING:
    from aiohttp import web

Text = Callable[[int], str]
"""The text of a token."""
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
        return json.dumps(finite(value)).encode()


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


def _stamp(kind: str, model: str, prefix: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def _content(sample: Sample, text: Text, top: bool) -> list[dict[str, Any]]:
    """Log-probs of a chat answer's tokens; with ``top``, each token is listed as its own only alternative."""
    found = []
    for token, logprob in zip(sample.tokens.tolist(), sample.logprobs.tolist(), strict=True):
        said = text(token)
        one = {"token": said, "logprob": logprob, "bytes": list(said.encode())}
        found.append({**one, "top_logprobs": [one] if top else []})
    return found


def chat(
    model: str, ticket: Ticket, sample: Sample, answer: Answer, want: Wanted, text: Text
) -> dict[str, Any]:
    """``chat.completion``. ``tandem`` in the choice says how many calls couldn't be parsed."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": answer.message,
        "finish_reason": answer.finish_reason,
        "logprobs": {"content": _content(sample, text, want.top)} if want.logprobs else None,
    }
    if answer.malformed:
        choice["tandem"] = {"malformed_tool_calls": answer.malformed}
    body = {
        **_stamp("chat.completion", model, "chatcmpl"),
        "choices": [choice],
        "usage": usage(len(ticket.context), len(sample.tokens)),
    }
    if want.token_ids:
        body["prompt_token_ids"] = ticket.context.tolist()
        choice["token_ids"] = sample.tokens.tolist()
    return body


def chat_chunks(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """An answer as ``chat.completion.chunk``: its role, its text, its calls, its end."""
    choice = body["choices"][0]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message.get("content"):
        deltas.append({"content": message["content"]})
    for number, call in enumerate(message.get("tool_calls") or ()):
        deltas.append({"tool_calls": [{"index": number, **call}]})
    head = {**{k: body[k] for k in ("id", "created", "model")}, "object": "chat.completion.chunk"}
    for delta in deltas:
        yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    more = {k: v for k, v in choice.items() if k not in ("index", "message")}
    yield {**head, "choices": [{"index": 0, "delta": {}, **more}]}


def completion(
    model: str,
    prompt: Sequence[int],
    sample: Sample | None,
    want: Wanted,
    scores: Sequence[float] | None,
    text: Text,
) -> dict[str, Any]:
    """``text_completion``; with ``echo`` the prompt is its beginning."""
    own = [] if sample is None else sample.tokens.tolist()
    known: list[float | None] = [] if sample is None else [*sample.logprobs.tolist()]
    tokens = [*prompt, *own] if want.echo else own
    said = "" if sample is None else sample.text
    if want.echo:
        said = "".join(map(text, prompt)) + said
    choice: dict[str, Any] = {
        "index": 0,
        "text": said,
        "finish_reason": "length" if sample is None else end_of(sample),
        "logprobs": None,
    }
    if want.logprobs:
        if want.echo:
            known = [None, *(scores or ()), *known]
        texts = [text(token) for token in tokens]
        offsets, place = [], 0
        for one in texts:
            offsets.append(place)
            place += len(one)
        choice["logprobs"] = {
            "tokens": texts,
            "token_logprobs": known,
            "top_logprobs": [
                None if p is None else {one: p} for one, p in zip(texts, known, strict=True)
            ],
            "text_offset": offsets,
        }
    if want.token_ids:
        choice["token_ids"] = own
        choice["prompt_token_ids"] = list(prompt)
    return {
        **_stamp("text_completion", model, "cmpl"),
        "choices": [choice],
        "usage": usage(len(prompt), len(own)),
    }


def completion_chunks(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """An answer as the one chunk of a stream."""
    yield {k: v for k, v in body.items() if k != "usage"}


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
    chunks: Callable[[Mapping[str, Any]], Iterator[dict[str, Any]]],
) -> web.StreamResponse:
    """Sends an answer whole, or as server-sent events."""
    from aiohttp import web

    if not want.stream:
        return reply(body)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for chunk in chunks(body):
        await response.write(b"data: " + _json(chunk) + b"\n\n")
    if want.usage:
        last = {k: v for k, v in body.items() if k not in ("choices", "object")}
        kind = body["object"] + (".chunk" if body["object"] == "chat.completion" else "")
        last |= {"object": kind, "choices": []}
        await response.write(b"data: " + _json(last) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def finite(value: Any) -> Any:
    """The same value with null for numbers that JSON can't write."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    return value
