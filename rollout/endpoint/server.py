"""The token endpoint: sessions of episodes over HTTP, in the forms of OpenAI and vLLM.

==============================  ================================================================
``GET /v1/models``              the model and its context
``POST /v1/chat/completions``   messages and tools
``POST /v1/completions``        a prompt as text or token ids
``POST /inference/v1/generate`` token ids in and out
==============================  ================================================================

All of them hang below ``/sessions/KEY`` as well. A session is known by its key there or as bearer token. The endpoint's own
key (of a worker, the run's) samples without a session: nothing is recorded, the request's sampling parameters count, and it
may ask for several answers, for a prompt's log-probs (:mod:`.plain`), and of the tokenizer (:mod:`.tokenizing`).
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...common.errors import DataError, TandemError
from ...common.sockets import free_listener, reachable
from ..engine import Engine
from . import forms, tokenizing
from .chat import Chat
from .forms import Part
from .live import LiveStream
from .plain import BusyError, EngineError, Limits, Plain, Vouch, add_logprobs
from .rendering import MOST_CHARACTERS
from .requests import (
    Wanted,
    body_of,
    ids_of,
    key_of,
    may_call,
    messages_of,
    prompts_of,
    tools_of,
    wanted,
)
from .sessions import NoRoomError, Recorded, Session, SessionSpec, Ticket
from .turns import ABORT_SECONDS, LOOK_SECONDS, Turns, settled

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger("tandem.rollout")

BODY_BYTES = 32 << 20
"""Longest request that is read."""
CLOSE_SECONDS = 2.0
"""How long open connections may take to end when the endpoint is closed."""
FINISHED_KEYS = 4096
"""Keys of finished sessions that are remembered, so that a late client learns that its session is over."""
IN_ANY_CASE = ("logprobs", "n", "skip_special_tokens")
"""Parameters that change nothing where tokens are generated."""

Handler = Callable[["web.Request"], Awaitable["web.StreamResponse"]]


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
        port_setting: what names the port, for errors.
        peer: host and port of the run's Redis; where ``host`` is a wildcard, sessions' URLs have the address of
            this host as it is seen from there.
        key: the endpoint's own key; empty = sessions only, unless ``anyone`` may ask.
        anyone: whether requests need no key.
        limits: bounds of requests without a session.
        vouch: does such a request's work, again if the engine's weights turn out to have been wrong.
        tools: how calls are written (``environments.tools``).
        observation_tokens: longer observations are cut in the middle.
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
        port_setting: str = "environments.port",
        peer: tuple[str, int] | None = None,
        key: str = "",
        anyone: bool = False,
        limits: Limits | None = None,
        vouch: Vouch | None = None,
        tools: str = "auto",
        observation_tokens: int = 2048,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._vocabulary = len(tokenizer)
        self._chat = Chat(tokenizer, tools, observation_tokens)
        self._context = context
        self.model = model
        """The name of the model in answers."""
        self._host, self._port, self._ports, self._peer = host, port, ports, peer
        self._port_setting = port_setting
        self._key, self._anyone = key, anyone
        self._plain = Plain(limits or Limits(), context)
        self._turns = Turns(engine, self._chat.renderer, tokenizer.eos_token, self._plain, vouch)
        self._sessions: dict[str, Session] = {}
        self._finished: dict[str, None] = {}
        self._runner: web.AppRunner | None = None
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

    async def finish(self, session: Session, *, was_cut: bool = True) -> Recorded | None:
        """Ends a session; returns what is trained on, or None if nothing was sampled.

        Args:
            session: it may have turns that are being sampled, which end.
            was_cut: whether the episode is ended from outside, so that these turns are its last ones. An
                episode that has ended by itself didn't wait for them, and nothing came of them.
        """
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
        await settled(session)
        return session.recorded(was_cut=was_cut)

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
        tokenizing.add_routes(app, self._tokenizer, self._chat.renderer, self._context)
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
                f"set {self._port_setting} to 0 or to a free port"
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
        return web.SockSite(runner, free_listener(self._host, self._ports))

    async def close(self) -> None:
        """Ends all connections."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _middleware(self) -> Any:
        from aiohttp import web

        @web.middleware
        async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
            answer = await self._answered(request, handler)
            live: LiveStream | None = request.get("live")
            if live is not None and live.has_begun and isinstance(answer, web.Response):
                assert isinstance(answer.body, bytes)
                # Too late for a status: the stream says why it ends.
                return await live.end(answer.body)
            return answer

        return answered

    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The handler's answer, or its error in OpenAI's form."""
        from aiohttp import web

        key = key_of(request)
        session = self._session(key)
        if session is None and key in self._finished:
            return forms.error(404, "the session is over", "session_over")
        if session is None:
            return forms.error(401, "no session or run has this key", "invalid_api_key")
        request["session"] = session
        seconds = None if session.key else self._plain.limits.seconds
        try:
            async with asyncio.timeout(seconds):
                return await handler(request)
        except TimeoutError as error:
            if seconds is None:
                return _failed(error)
            return forms.error(504, f"no answer within {seconds:g} s", "deadline_exceeded")
        except BusyError as error:
            return forms.error(429, str(error), "too_many_requests")
        except web.HTTPException as refused:
            return forms.error(refused.status, refused.reason, "invalid_request_error")
        except (NoRoomError, DataError) as error:
            is_long = isinstance(error, NoRoomError)
            code = "context_length_exceeded" if is_long else "invalid_request_error"
            return forms.error(400, str(error), code)
        except EngineError as error:
            log.warning(f"{session.spec.name}: {error}")
            return forms.error(500, str(error), "engine_error")
        except ConnectionError:
            # Nobody is left to be told.
            raise
        except Exception as error:  # noqa: BLE001 - told to the client, and logged
            return _failed(error)

    def _session(self, key: str) -> Session | None:
        """The session of a key; a new one that isn't recorded for the endpoint's own key; None without either."""
        session = self._sessions.get(key)
        if session is not None:
            if session.is_over:
                self._finished[key] = None
                return None
            return session
        own = self._key and hmac.compare_digest(_bytes(key), _bytes(self._key))
        return self._plain.session() if own or self._anyone else None

    # Requests.

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return forms.models(self.model, self._context)

    async def _body(self, request: web.Request) -> Mapping[str, Any]:
        body = await body_of(request)
        await settled(request["session"])
        return body

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        want, messages, tools = wanted(body), messages_of(body), tools_of(body)
        want.check_tokens()
        session: Session = request["session"]
        if session.key:
            want.check_session()
        # A call is known as one when its text is whole.
        live = self._live(request, want, "chat.completion.chunk", apart=may_call(body))
        ticket = await self._chat.place(session, messages, tools)
        turns = [(session, ticket)]
        for _ in range(1, want.count):
            other = self._plain.session()
            turns.append((other, other.begin(ticket.context.tolist())))
        samples = await self._turns.sample(turns, want, live)
        answers = [
            self._chat.answer(one, placed, sample, messages, tools, want, may_call=may_call(body))
            for (one, placed), sample in zip(turns, samples, strict=True)
        ]
        prompt = ticket.context.tolist()
        parts = [Part(prompt=prompt, sample=sample) for sample in samples]
        await add_logprobs(self._engine, parts, want, self._context, self._turns.vouched)
        reply = forms.chat(self.model, parts, answers, want, self._chat.renderer.decode)
        return await forms.send(request, reply, want, forms.chat_chunks, live)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        want = wanted(body)
        prompts = prompts_of(body, want.count)
        session: Session = request["session"]
        if session.key:
            want.check_session(len(prompts))
        if not want.echo:
            want.check_tokens()
        live = self._live(request, want, "text_completion", apart=want.echo)
        rows = [self._row(session, one) for one in prompts for _ in range(want.count)]
        if want.max_tokens == 0:
            parts = [Part(prompt=self._given(row), sample=None) for row in rows]
        else:
            sessions = [session, *(self._plain.session() for _ in rows[1:])]
            turns = [(one, self._place(one, row)) for one, row in zip(sessions, rows, strict=True)]
            samples = await self._turns.sample(turns, want, live)
            for (one, ticket), sample in zip(turns, samples, strict=True):
                one.record(ticket, sample)
            parts = [
                Part(prompt=ticket.context.tolist(), sample=sample)
                for (_, ticket), sample in zip(turns, samples, strict=True)
            ]
        await add_logprobs(self._engine, parts, want, self._context, self._turns.vouched)
        reply = forms.completion(self.model, parts, want, self._chat.renderer.decode)
        return await forms.send(request, reply, want, forms.completion_chunks, live)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        params = body.get("sampling_params")
        if params is not None and not isinstance(params, Mapping):
            raise DataError("sampling_params should be an object")
        if body.get("stream"):
            raise DataError("stream isn't supported where tokens are generated: leave it out")
        # Clients set them to what they read in any case.
        known = {k: v for k, v in (params or {}).items() if k not in IN_ANY_CASE}
        want = wanted({**known, "return_token_ids": body.get("return_token_ids")})
        want.check_tokens()
        session: Session = request["session"]
        ticket = self._place(session, ids_of(body.get("token_ids"), "token_ids"))
        (sample,) = await self._turns.sample([(session, ticket)], want, None)
        session.record(ticket, sample)
        return forms.generated(ticket, sample, want)

    def _row(self, session: Session, prompt: str | list[int]) -> list[int]:
        """Tokens of a completion's prompt.

        Raises:
            NoRoomError: it is a text that can't fit.
        """
        if not isinstance(prompt, str):
            return prompt
        session.check_characters(len(prompt), MOST_CHARACTERS)
        return self._chat.renderer.encode(prompt)

    def _place(self, session: Session, tokens: list[int]) -> Ticket:
        """Places a prompt of tokens.

        Raises:
            DataError: the client has added one that the model hasn't got, which would end the engine. What was
                sampled may be one that the tokenizer has no text for.
        """
        ticket = session.place(tokens, self._chat.renderer.decode)
        added = ticket.added if ticket.branch.turns else ticket.context.tolist()
        try:
            self._check_ids(added)
        except DataError:
            session.drop(ticket)
            raise
        return ticket

    def _check_ids(self, tokens: Sequence[int]) -> None:
        unknown = max(tokens, default=0)
        if unknown >= self._vocabulary:
            raise DataError(f"token id {unknown} isn't one of the model's {self._vocabulary:,}")

    def _given(self, tokens: list[int]) -> list[int]:
        """A prompt that is only scored.

        Raises:
            DataError: it is empty, or has tokens that the model hasn't got.
            NoRoomError: it is too long.
        """
        if not tokens:
            raise DataError("the prompt is empty")
        self._check_ids(tokens)
        if len(tokens) >= self._context:
            raise NoRoomError(f"the prompt has {len(tokens):,} tokens of {self._context:,}")
        return tokens

    def _live(
        self, request: web.Request, want: Wanted, kind: str, *, apart: bool
    ) -> LiveStream | None:
        """Sends answers as they are sampled; None where they are only known as a whole: ``apart``, with log-probs,
        and where somebody has to vouch for them."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if not want.stream or apart or want.logprobs or self._turns.vouch or backend is None:
            return None
        stops = (*want.stop, *self._chat.renderer.special_texts(want.stop_tokens))
        request["live"] = live = LiveStream(request, kind, self.model, backend, stops)
        return live


def _failed(error: Exception) -> web.Response:
    """What a client is told of an error that nobody has foreseen."""
    log.error("a request has failed", exc_info=error)
    return forms.error(500, f"{type(error).__name__}: {error}", "internal_error")


def _bytes(key: str) -> bytes:
    """A key as it was sent, bytes that are no text included."""
    return key.encode("utf-8", "surrogatepass")
