"""The token endpoint: sessions of episodes over HTTP, in the forms of OpenAI and vLLM.

==============================  ================================================================
``GET /v1/models``              the model and its context
``POST /v1/chat/completions``   messages and tools
``POST /v1/completions``        a prompt as text or token ids
``POST /inference/v1/generate`` token ids in and out
==============================  ================================================================

All of them hang below ``/sessions/KEY`` as well. A session is known by its key there or as bearer token. The run's own
key samples without a session: nothing is recorded, and the request's sampling parameters count.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ...common.errors import DataError, TandemError
from ...common.records import FinishReason, Sample, SamplingParams
from ...common.sockets import bind_free, reachable
from ..engine import Engine, GroupRequest
from . import forms
from .chat import Chat
from .rendering import MOST_CHARACTERS
from .requests import Wanted, ids_of, may_call, messages_of, tools_of, wanted
from .sessions import NoRoomError, Recorded, Session, SessionSpec, Ticket
from .tools import MOST_CALLS

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger("tandem.rollout")

BODY_BYTES = 32 << 20
"""Longest request that is read."""
CLOSE_SECONDS = 2.0
"""How long open connections may take to end when the endpoint is closed."""
ABORT_SECONDS = 30.0
"""How long the engine may take to end a turn at its next token."""
LOOK_SECONDS = 0.005
"""Time between two looks whether it has."""
FINISHED_KEYS = 4096
"""Keys of finished sessions that are remembered, so that a late client learns that its session is over."""
OPEN_SESSION = 1 << 20
"""Requests of a session that isn't recorded, of which there is one a request."""

Handler = Callable[["web.Request"], Awaitable["web.StreamResponse"]]


class EngineError(TandemError):
    """The engine couldn't sample a turn."""


class Endpoint:
    """Serves one engine; for use in one loop.

    Args:
        engine: an engine that has been started.
        tokenizer: the model's, with a chat template for requests with messages.
        context: greatest number of tokens of prompt and answer.
        model: the model's name in answers.
        host: address that is listened on.
        port: port; 0 takes a free one,
        ports: of this range (``launch.ports``) if there is one.
        peer: host and port of the run's Redis; where ``host`` is a wildcard, sessions' URLs have the address of
            this host as it is seen from there.
        key: the run's own key; empty = sessions only.
        tools: how calls are written (``environments.tools``).
        observation_tokens: longer observations are cut in the middle.
        max_calls: tool calls of one turn that are read.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        *,
        context: int,
        model: str,
        host: str = "127.0.0.1",
        port: int = 0,
        ports: range | None = None,
        peer: tuple[str, int] | None = None,
        key: str = "",
        tools: str = "auto",
        observation_tokens: int = 2048,
        max_calls: int = MOST_CALLS,
    ) -> None:
        self._engine = engine
        self._vocabulary = len(tokenizer)
        self._chat = Chat(tokenizer, tools, observation_tokens, max_calls)
        self._context = context
        self.model = model
        """The name of the model in answers."""
        self._host, self._port, self._ports, self._peer = host, port, ports, peer
        self._key = key
        self._sessions: dict[str, Session] = {}
        self._finished: dict[str, None] = {}
        self._runner: web.AppRunner | None = None
        self._overridden = False
        self._number = 0
        self.url = ""
        """``http://host:port`` once it has been started."""

    # Sessions.

    def open(self, spec: SessionSpec) -> Session:
        """A new session, which any client that knows its key or URL may use."""
        key = secrets.token_urlsafe(24)
        session = Session(key, f"{self.url}/sessions/{key}/v1", spec, self._context)
        self._sessions[key] = session
        return session

    async def abort(self, session: Session) -> None:
        """Ends what is being sampled at the next token, with what it has; nothing more is answered."""
        session.is_over = True
        await self._engine.abort(list(session.running))

    async def finish(self, session: Session) -> Recorded | None:
        """Ends a session; returns what is trained on, or None if nothing was sampled."""
        self._sessions.pop(session.key, None)
        self._finished[session.key] = None
        if len(self._finished) > FINISHED_KEYS:
            del self._finished[next(iter(self._finished))]
        session.is_over = True
        if session.running:
            await self.abort(session)
            end = time.monotonic() + ABORT_SECONDS
            # What is aborted comes back within a token step, and is recorded by whoever asked for it.
            while session.running and time.monotonic() < end:
                await asyncio.sleep(LOOK_SECONDS)
        return session.recorded()

    # The life of the server.

    async def start(self) -> None:
        """Begins to listen.

        Raises:
            TandemError: the address can't be listened on.
        """
        from aiohttp import web

        app = web.Application(client_max_size=BODY_BYTES, middlewares=[self._middleware()])
        routes = {
            ("GET", "/v1/models"): self._models,
            ("POST", "/v1/chat/completions"): self._chat_completions,
            ("POST", "/v1/completions"): self._completions,
            ("POST", "/inference/v1/generate"): self._generate,
        }
        for (method, path), handler in routes.items():
            app.router.add_route(method, path, handler)
            app.router.add_route(method, "/sessions/{key}" + path, handler)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=CLOSE_SECONDS
        )
        await self._runner.setup()
        try:
            await self._site(self._runner).start()
        except OSError as error:
            await self._runner.cleanup()
            raise TandemError(
                f"the token endpoint can't listen on {self._host}:{self._port} ({error.strerror}): "
                f"set environments.port to 0 or to a free port"
            ) from None
        host, port = self._runner.addresses[0][:2]
        place = f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
        if self._peer is not None:
            place = reachable(place, *self._peer)
        self.url = place.replace("tcp", "http", 1)

    def _site(self, runner: web.AppRunner) -> web.BaseSite:
        from aiohttp import web

        if self._port or self._ports is None:
            return web.TCPSite(runner, self._host, self._port)
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bind_free(listener, self._host, self._ports)
        except BaseException:
            listener.close()
            raise
        return web.SockSite(runner, listener)

    async def close(self) -> None:
        """Ends all connections."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _middleware(self) -> Any:
        from aiohttp import web

        @web.middleware
        async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
            key = _key_of(request)
            session = self._session(key)
            if session is None and key in self._finished:
                return forms.error(404, "the session is over", "session_over")
            if session is None:
                return forms.error(401, "no session or run has this key", "invalid_api_key")
            request["session"] = session
            try:
                return await handler(request)
            except web.HTTPException as refused:
                return forms.error(refused.status, refused.reason, "invalid_request_error")
            except NoRoomError as error:
                return forms.error(400, str(error), "context_length_exceeded")
            except DataError as error:
                return forms.error(400, str(error), "invalid_request_error")
            except EngineError as error:
                log.warning(f"a turn of session {session.spec.name}: {error}")
                return forms.error(500, str(error), "engine_error")

        return answered

    def _session(self, key: str) -> Session | None:
        """The session of a key; a new one that isn't recorded for the run's own key; None without either."""
        session = self._sessions.get(key)
        if session is not None:
            if session.is_over:
                self._finished[key] = None
                return None
            return session
        if self._key and hmac.compare_digest(_bytes(key), _bytes(self._key)):
            self._number += 1
            spec = SessionSpec(
                name=f"open/{self._number}",
                sampling=SamplingParams(
                    temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=self._context
                ),
                seed=self._number,
                longest=self._context,
                max_turns=OPEN_SESSION,
            )
            return Session("", "", spec, self._context)
        return None

    # Requests.

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return forms.models(self.model, self._context)

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        want, messages, tools = wanted(body), messages_of(body), tools_of(body)
        if want.max_tokens == 0:
            raise DataError("max_tokens=0 leaves nothing to sample: set 1 or more")
        session: Session = request["session"]
        ticket = await self._chat.place(session, messages, tools)
        sample = await self._sample(session, ticket, want)
        answer = self._chat.answer(
            session, ticket, sample, messages, tools, want, may_call=may_call(body)
        )
        reply = forms.chat(self.model, ticket, sample, answer, want, self._token)
        return await forms.send(request, reply, want, forms.chat_chunks)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        want, prompt = wanted(body), body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        session: Session = request["session"]
        if isinstance(prompt, str):
            session.check_characters(len(prompt), MOST_CHARACTERS)
            tokens = self._chat.renderer.encode(prompt)
        else:
            tokens = ids_of(prompt, "prompt")
        if want.echo and session.key:
            raise DataError("echo isn't supported within a session: leave it out")
        if want.max_tokens == 0 and not want.echo:
            raise DataError("max_tokens=0 leaves nothing to sample: set 1 or more")
        scores = await self._scores(tokens) if want.echo and want.logprobs else None
        ticket, sample = None, None
        if want.max_tokens != 0:
            ticket = self._place(session, tokens)
            sample = await self._sample(session, ticket, want)
            session.record(ticket, sample)
            tokens = ticket.context.tolist()
        reply = forms.completion(self.model, tokens, sample, want, scores, self._token)
        return await forms.send(request, reply, want, forms.completion_chunks)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        params = body.get("sampling_params")
        if params is not None and not isinstance(params, Mapping):
            raise DataError("sampling_params should be an object")
        # Clients set these two to what they read in any case.
        known = {k: v for k, v in (params or {}).items() if k not in ("logprobs", "n")}
        want = wanted({**known, "return_token_ids": body.get("return_token_ids")})
        if want.max_tokens == 0:
            raise DataError("max_tokens=0 leaves nothing to sample: set 1 or more")
        session: Session = request["session"]
        ticket = self._place(session, ids_of(body.get("token_ids"), "token_ids"))
        sample = await self._sample(session, ticket, want)
        session.record(ticket, sample)
        return forms.generated(ticket, sample, want)

    def _texts(self, tokens: Sequence[int]) -> list[str]:
        """The texts of special tokens at which a client wants an answer to end.

        Raises:
            DataError: one is a token that isn't special.
        """
        found = []
        for token in tokens:
            text = self._chat.renderer.special(token)
            if text is None:
                raise DataError(
                    f"stop_token_ids: {token} isn't a special token: name its text in stop instead"
                )
            found.append(text)
        return found

    def _place(self, session: Session, tokens: list[int]) -> Ticket:
        """Places a prompt of tokens.

        Raises:
            DataError: the client has added one that the model hasn't got, which would end the engine. What was
                sampled may be one that the tokenizer has no text for.
        """
        ticket = session.place(tokens, self._chat.renderer.decode)
        added = ticket.added if ticket.branch.turns else ticket.context.tolist()
        unknown = max(added, default=0)
        if unknown >= self._vocabulary:
            session.drop(ticket)
            raise DataError(f"token id {unknown} isn't one of the model's {self._vocabulary:,}")
        return ticket

    async def _scores(self, tokens: list[int]) -> list[float]:
        """Log-probs of all tokens of a prompt but the first."""
        import numpy as np

        score = getattr(self._engine, "score", None)
        if score is None:
            raise DataError("this engine can't score prompts: leave echo or logprobs out")
        if len(tokens) < 2:
            return []
        if len(tokens) >= self._context:
            raise NoRoomError(f"the prompt has {len(tokens):,} tokens of {self._context:,}")
        found: list[float] = (await score([np.array(tokens, dtype=np.int32)]))[0].tolist()
        return found

    async def _sample(self, session: Session, ticket: Ticket, want: Wanted) -> Sample:
        """Samples one turn.

        Raises:
            EngineError: the engine couldn't.
        """
        spec = session.spec
        sampling, room = spec.sampling, ticket.room
        if session.key and want.sampling and not self._overridden:
            self._overridden = True
            log.info(
                f"requests in sessions ask for {dict(want.sampling)}; the run's own sampling counts"
            )
        if want.max_tokens is not None:
            room = min(room, want.max_tokens)
        name = f"{spec.name}/{ticket.order}"
        session.running.add(name)
        sample: Sample | None = None
        error: str | None = None
        try:
            if session.is_over:
                raise NoRoomError("the session is over")
            if not session.key:
                sampling = _of_request(sampling, want)
            request = GroupRequest(
                group_id=name,
                prompt_tokens=ticket.context,
                count=1,
                sampling=replace(sampling, max_new_tokens=room),
                seed=spec.seed,
                stop=(*spec.stop, *want.stop, *self._texts(want.stop_tokens)),
            )
            async for group in self._engine.generate([request]):
                error = group.error
                sample = group.samples[0] if group.samples else None
        except ValueError as refused:
            error = str(refused)
        finally:
            session.running.discard(name)
            if sample is None:
                session.drop(ticket)
        if sample is None:
            raise EngineError(error or "the engine gave no answer")
        if sample.finish_reason is FinishReason.ABORT and not len(sample.tokens):
            session.drop(ticket)
            raise NoRoomError("the session was ended before the first token")
        return sample

    def _token(self, token: int) -> str:
        """The text of one token."""
        return self._chat.renderer.decode([token])


def _of_request(sampling: SamplingParams, want: Wanted) -> SamplingParams:
    """The distribution that a request outside of sessions asks for.

    Raises:
        DataError: no engine can draw from it.
    """
    given = dict(want.sampling)
    for name in ("presence_penalty", "frequency_penalty", "min_p"):
        if given.pop(name, 0.0):
            raise DataError(f"{name} isn't supported: leave it out")
    try:
        return replace(
            sampling,
            temperature=given.get("temperature", sampling.temperature),
            top_p=given.get("top_p", sampling.top_p),
            top_k=max(0, int(given.get("top_k", sampling.top_k))),
        )
    except ValueError as error:
        raise DataError(str(error)) from None


def _key_of(request: web.Request) -> str:
    """The key in a request's path, else in its header; empty without one."""
    key = request.match_info.get("key")
    if key is not None:
        return key
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _bytes(key: str) -> bytes:
    """A key as it was sent, bytes that are no text included."""
    return key.encode("utf-8", "surrogatepass")


async def _body(request: web.Request) -> Mapping[str, Any]:
    """The request's JSON object.

    Raises:
        DataError: it isn't one.
    """
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError):
        raise DataError("the request's body isn't JSON") from None
    if not isinstance(body, dict):
        raise DataError("the request's body should be a JSON object")
    return body
