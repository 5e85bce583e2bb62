"""A tokenizer over HTTP, in vLLM's forms: clients that count tokens need no copy of it.

==========================  ====================================================================
``GET /tokenizer_info``     its special tokens and its chat template
``POST /tokenize``          token ids of a text (``prompt``) or of a conversation (``messages``)
``POST /detokenize``        the text of token ids, special ones included
==========================  ====================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...common.errors import DataError
from . import forms
from .rendering import Renderer
from .requests import body_of, ids_of, messages_of, tools_of

if TYPE_CHECKING:
    from aiohttp import web

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def add_routes(app: web.Application, tokenizer: Any, renderer: Renderer, context: int) -> None:
    """Adds them to a server."""

    async def tell(request: web.Request) -> web.StreamResponse:
        return forms.reply(info(tokenizer))

    async def to_ids(request: web.Request) -> web.StreamResponse:
        return forms.reply(tokenize(renderer, await body_of(request), context))

    async def to_text(request: web.Request) -> web.StreamResponse:
        return forms.reply(detokenize(renderer, await body_of(request)))

    app.router.add_get("/tokenizer_info", tell)
    app.router.add_post("/tokenize", to_ids)
    app.router.add_post("/detokenize", to_text)


def info(tokenizer: Any) -> dict[str, Any]:
    """What a client must know to write prompts; a token that the tokenizer lacks is null."""
    names = {name: getattr(tokenizer, name, None) for name in SPECIAL}
    return {
        "tokenizer_class": type(tokenizer).__name__,
        **{name: None if one is None else str(one) for name, one in names.items()},
        "chat_template": getattr(tokenizer, "chat_template", None),
    }


def tokenize(renderer: Renderer, body: Mapping[str, Any], context: int) -> dict[str, Any]:
    """Token ids of a text or a conversation. No special token is added to a text.

    Raises:
        DataError: the request has neither, or it can't be rendered.
    """
    if body.get("messages") is not None:
        opened = body.get("add_generation_prompt") is not False
        tokens = renderer.render(messages_of(body), tools_of(body), opened=opened, plain=True)
    else:
        text = body.get("prompt")
        if not isinstance(text, str):
            raise DataError("prompt should be a text, or messages a conversation")
        tokens = renderer.encode(text)
    return {"count": len(tokens), "max_model_len": context, "tokens": tokens}


def detokenize(renderer: Renderer, body: Mapping[str, Any]) -> dict[str, Any]:
    """The text of token ids.

    Raises:
        DataError: they aren't a list of token ids.
    """
    tokens = body.get("tokens")
    return {"prompt": renderer.decode(ids_of(tokens, "tokens")) if tokens != [] else ""}
