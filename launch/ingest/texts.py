"""Stands in for a tokenizer where texts are all that is wanted: every character is a token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np


class Characters:
    """Counts characters."""

    eos_token_id = 0
    eos_token = ""
    chat_template: str | None = None

    def get_vocab(self) -> dict[str, int]:
        return {"x": 0}

    def encode(self, text: str, add_special_tokens: bool = False) -> np.ndarray:
        return np.ones(len(text), np.int32)


class Texts(Characters):
    """For a server with a chat template of its own: a conversation becomes JSON of its messages."""

    chat_template = "the server's"

    def encode(self, text: str, add_special_tokens: bool = False) -> np.ndarray:
        # The characters themselves, by which equal prompts are told from others.
        return np.frombuffer(text.encode("utf-32-le"), np.int32)

    def apply_chat_template(
        self,
        conversations: Sequence[Sequence[Mapping[str, str]]],
        add_generation_prompt: bool,
        tokenize: bool,
    ) -> list[str]:
        return [json.dumps(list(turns), ensure_ascii=False) for turns in conversations]
