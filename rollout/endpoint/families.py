"""Tool calls in the ways of model families that the package renderers knows: XML of Qwen3.5 and GLM, Kimi's, gpt-oss's, …

The package is optional (``pip install 'tandem-rl[renderers]'``). A family is named as there (``environments.tools=
renderers:qwen3.5``); ``auto`` goes by the model's published name, which must be the very one that renderers has,
since a fine-tuned model may have another template. Only answers are read by it: prompts are rendered by the model's
own chat template (:mod:`.rendering`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from ...common.config.environments import RENDERERS
from ...common.errors import ConfigError
from ...common.plain import one_line
from .tools import Call, Parsed, can_be_sent

OK, NO_SUCH_TOOL = "ok", "unknown_tool"
"""Statuses of calls that can be parsed. Whether there is such a tool is for the environment to say."""


class FamilyParser:
    """Reads the answers of one family.

    Args:
        renderer: renderers' own.
        opener: the token that begins a message, where a turn is read with what its prompt holds of this message:
            the chat template of gpt-oss leaves the end of its header to the policy, and renderers reads no half one.
    """

    def __init__(self, renderer: Any, opener: int | None = None) -> None:
        self._renderer = renderer
        self._opener = opener

    def parse(
        self,
        tokens: Sequence[int],
        text: str,
        *,
        prompt: Sequence[int],
        tools: Sequence[Mapping[str, Any]],
        most: int,
    ) -> Parsed:
        """Finds the calls in a turn.

        Args:
            tokens: the turn's.
            text: its text.
            prompt: everything before it.
            tools: the tools that are offered, whose schemas say what arguments are texts.
            most: calls that are read.
        """
        turn = [*self._begun(prompt), *tokens]
        try:
            found = self._renderer.parse_response(turn, tools=list(tools), prompt_ids=list(prompt))
            calls = found.tool_calls[:most]
            malformed = sum(not _is_read(call) for call in calls)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return Parsed(content=text, calls=(), malformed=1)
        if malformed or not calls:
            return Parsed(content=text, calls=(), malformed=malformed)
        return Parsed(
            content=found.content or "",
            calls=tuple(
                Call(name=call.name, arguments=call.arguments, id=call.id) for call in calls
            ),
            malformed=0,
            reasoning=found.reasoning_content or "",
        )

    def _begun(self, prompt: Sequence[int]) -> Sequence[int]:
        """What the prompt holds of the message that the turn goes on with."""
        if self._opener is None or self._opener not in prompt:
            return []
        return prompt[len(prompt) - 1 - prompt[::-1].index(self._opener) :]


def _is_read(call: Any) -> bool:
    return (
        str(call.status) in (OK, NO_SUCH_TOOL)
        and isinstance(call.name, str)
        and isinstance(call.arguments, dict)
        and can_be_sent([call.name, call.arguments])
    )


def family_of(tokenizer: Any, tools: str) -> FamilyParser | None:
    """The parser that ``environments.tools`` names, or with ``auto`` the one for the model's own name; None if calls
    are read without renderers.

    Raises:
        ConfigError: there is no such family, it doesn't fit the tokenizer, or renderers isn't installed.
    """
    if tools != "auto" and not tools.startswith(RENDERERS):
        return None
    name = tools.removeprefix(RENDERERS)
    if tools == "auto":
        if importlib.util.find_spec("renderers") is None:
            return None
        from renderers.base import MODEL_RENDERER_MAP

        name = MODEL_RENDERER_MAP.get(str(getattr(tokenizer, "name_or_path", "")), "")
        if not name:
            return None
    config = config_of(name)
    from renderers import create_renderer

    try:
        opener = tokenizer.convert_tokens_to_ids("<|start|>") if name == "gpt-oss" else None
        return FamilyParser(create_renderer(tokenizer, config), opener)
    except Exception as error:  # noqa: BLE001 - it asserts what a tokenizer has
        raise ConfigError(
            f"environments.tools={tools}: the family {name} of renderers doesn't fit this model's tokenizer "
            f"({one_line(error)}): name another one, or set hermes, llama or json"
        ) from None


def config_of(name: str) -> Any:
    """renderers' config of a family.

    Raises:
        ConfigError: renderers isn't installed, or has no such family.
    """
    if importlib.util.find_spec("renderers") is None:
        raise ConfigError(
            f"environments.tools={RENDERERS}{name} needs the package renderers, which isn't installed: install the "
            f"extra tandem-rl[renderers]"
        )
    from renderers.base import MODEL_RENDERER_MAP
    from renderers.configs import config_from_name

    try:
        config = config_from_name(name)
    except ValueError:
        config = None
    if config is None:
        known = ", ".join(sorted(set(MODEL_RENDERER_MAP.values())))
        raise ConfigError(
            f"environments.tools={RENDERERS}{name}: renderers has no such family; it has {known}"
        )
    return config
