"""``environments``: where episodes of many turns are played, and their bounds."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, field_validator, model_validator

from ..import_path import is_import_path
from .section import NonNegative, Positive, Seconds, Section


def _target(path: str) -> str:
    if is_import_path(path):
        return path
    raise ValueError("should be an import path, package.module:name")


Target = Annotated[str, AfterValidator(_target)]


MOST_NAME_BYTES = 200
"""Longest name of an environment, in UTF-8; a slash or a percent sign counts as three (:func:`file_name`)."""
RENDERERS = "renderers:"
"""Begins the name of a family of the package renderers."""


def file_name(name: str) -> str:
    """An environment's name as that of a file, which no other environment's is: its own may have slashes, as those of
    verifiers' hub have.

    >>> file_name("primeintellect/wordle")
    'primeintellect%2Fwordle'
    """
    return name.replace("%", "%25").replace("/", "%2F")


def _tools(name: str) -> str:
    if name in ("auto", "hermes", "llama", "json") or (
        name.startswith(RENDERERS) and name != RENDERERS
    ):
        return name
    raise ValueError("should be auto, hermes, llama, json, or renderers:NAME")


Tools = Annotated[str, AfterValidator(_tools)]


class _Environment(Section):
    """What all forms have in common."""

    form: str
    """How the environment is written; the docs have an example of each."""


class ToolsEnvironment(_Environment):
    """A class whose public methods are tools, with ``reset(**row)`` and, if it pays, ``get_reward()``: TRL's form."""

    form: Literal["tools"] = "tools"
    """A class whose public methods are tools."""
    target: Target
    """Import path of the class, or of a callable without arguments that makes an instance."""
    params: Mapping[str, Any] = Field(default_factory=dict)
    """Keyword arguments with which it is called."""


class AgentEnvironment(_Environment):
    """A function ``run(task, base_url, api_key)`` that plays an episode with any OpenAI client and returns its reward."""

    form: Literal["agent"] = "agent"
    """A function that plays whole episodes."""
    target: Target
    """Import path of the function; it may be a coroutine."""
    params: Mapping[str, Any] = Field(default_factory=dict)
    """Further keyword arguments."""


class TextEnvironment(_Environment):
    """A class with ``reset(row)``, which returns an observation, and ``step(text)``, which returns an observation, a
    reward and whether the episode is over."""

    form: Literal["text"] = "text"
    """A class with ``reset`` and ``step``."""
    target: Target
    """Import path of the class."""
    params: Mapping[str, Any] = Field(default_factory=dict)
    """Keyword arguments with which it is made."""


class VerifiersEnvironment(_Environment):
    """A taskset of the package verifiers, in a virtual environment of its own."""

    form: Literal["verifiers"] = "verifiers"
    """A taskset of verifiers."""
    python: str
    """Path of that environment's Python."""
    config: Mapping[str, Any]
    """``config_data`` of verifiers' ``serve_env``: taskset, harness, runtime, turns."""
    client: Mapping[str, Any] = Field(default_factory=dict)
    """Fields of verifiers' client config. Its ``type`` is ``eval`` (messages are sent, and the endpoint makes
    tokens of them) unless it says ``train`` (verifiers' renderers make them, and send token ids)."""
    path: tuple[str, ...] = ()
    """Folders from which its Python imports besides that environment's own."""
    variables: tuple[str, ...] = ()
    """Names of variables of ours that it gets, such as a judge's key; it gets few others."""
    start_seconds: Seconds = 120.0
    """Deadline for its server to answer."""


class AppWorldEnvironment(_Environment):
    """AppWorld's environment server, one process for each episode that is under way."""

    form: Literal["appworld"] = "appworld"
    """AppWorld's server."""
    command: str
    """Command that starts a server; ``{port}`` is replaced."""
    root: str | None = None
    """Folder with AppWorld's ``data``; null = the working directory."""
    max_interactions: Positive = 30
    """Greatest number of answers in an episode, each with a block of code that is run."""
    single_turn: bool = False
    """Whether an episode is a single answer with all of the code, which is evaluated in any case."""
    suffix: str = ""
    """What the message with the task ends in, such as `` /no_think``, by which Qwen3 answers without thoughts."""

    @field_validator("command")
    @classmethod
    def _command(cls, command: str) -> str:
        if not shlex.split(command):
            raise ValueError("it names no program")
        return command


AnyEnvironment = Annotated[
    ToolsEnvironment
    | AgentEnvironment
    | TextEnvironment
    | VerifiersEnvironment
    | AppWorldEnvironment,
    Field(discriminator="form"),
]
FORMS: Mapping[str, type[Section]] = {
    one.model_fields["form"].default: one for one in get_args(get_args(AnyEnvironment)[0])
}
"""The class of each form."""


class EnvironmentsConfig(Section):
    """Environments, the servers that play episodes in them, and what bounds an episode."""

    use: Mapping[str, AnyEnvironment] = Field(default_factory=dict)
    """Environments by name; without any, prompts are answered once, as ever."""
    default: str | None = None
    """The environment of rows that name none; null = the only one in ``use``, else such rows are refused."""
    column: str = "environment"
    """Column of the data in which a row names its environment."""
    servers: NonNegative = 1
    """Number of environment servers that ``start_all.sh`` starts."""
    episodes: Positive = 32
    """Greatest number of episodes that one server plays at a time, each in a process of its own."""
    reset_seconds: Seconds = 60.0
    """Deadline for an environment to be reset."""
    step_seconds: Seconds = 60.0
    """Deadline of a step or a tool call; waiting for the model doesn't count."""
    episode_seconds: Seconds = 600.0
    """Deadline of an episode, the model's time included."""
    retries: NonNegative = 1
    """How often an episode whose server was lost is played again."""
    max_turns: Annotated[int, Field(gt=0, le=10_000)] = 16
    """Greatest number of the policy's turns in an episode."""
    max_calls: Positive = 64
    """Greatest number of tool calls in an episode."""
    observation_tokens: Positive = 2048
    """Longer observations and results of tools are cut in the middle, at this many tokens."""
    memory_mb: Positive = 2048
    """Address-space limit of an episode's process, MiB."""
    tools: Tools = "auto"
    """How the model writes tool calls: ``hermes``, ``llama``, ``json``, or ``renderers:NAME`` as a family of the
    package renderers does; ``auto`` goes by the tokenizer's response template, the chat template, or the model's name."""
    mask_malformed: bool = False
    """Whether turns with a tool call that can't be parsed are left out of the loss; denominators keep them."""
    port: NonNegative = 0
    """Port of a worker's token endpoint; 0 takes a free one."""

    @property
    def is_on(self) -> bool:
        """Whether any problem can be played in an environment."""
        return bool(self.use)

    def named(self, name: str | None) -> str | None:
        """The environment of a row that names ``name``; None if the row is a prompt like any other.

        Raises:
            ValueError: there is no such environment, or several and the row names none.
        """
        if not self.use:
            return None
        chosen = name or self.default or (next(iter(self.use)) if len(self.use) == 1 else None)
        if chosen is None:
            raise ValueError(
                f"the row names no environment in {self.column!r}, and there are {', '.join(self.use)}: "
                f"name one, or set environments.default"
            )
        if chosen not in self.use:
            raise ValueError(
                f"environment {chosen!r} isn't one of environments.use: {', '.join(self.use)}"
            )
        return chosen

    @model_validator(mode="after")
    def _names(self) -> EnvironmentsConfig:
        for name in self.use:
            # Names of files are made of them, which have at most 255 bytes.
            length = len(file_name(name).encode())
            if not 0 < length <= MOST_NAME_BYTES:
                raise ValueError(
                    f"environments.use has an environment with the name {name[:40]!r} of {length} bytes (three for a slash or %): "
                    f"give it one of 1 to {MOST_NAME_BYTES}"
                )
        return self

    @model_validator(mode="after")
    def _known_default(self) -> EnvironmentsConfig:
        if self.default is not None and self.default not in self.use:
            raise ValueError(
                f"environments.default={self.default} isn't one of environments.use: "
                f"{', '.join(self.use) or 'which is empty'}"
            )
        return self
