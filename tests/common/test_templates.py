"""Published templates byte for byte, and a user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.common import templates
from tandem.common.errors import ConfigError

BYTES = {
    "prime": 485,
    "qwen": 160,
    "r1_zero": 449,
    "simplerl": 190,
    "alpaca": 150,
    "question_only": 10,
}
"""Length of each text in UTF-8, {question} included: a reformatted file would change it."""


def test_every_published_template_says_where_it_is_from() -> None:
    for name, entry in templates._published().items():
        assert set(entry) <= {"origin", "licence", "text", "stop"}, name
        assert entry["origin"]
        assert entry["licence"]
        assert entry["text"].count(templates.QUESTION) == 1


def test_their_bytes_are_those_of_the_origin() -> None:
    lengths = {}
    for name in templates.names()[2:]:
        text = templates.named(name).text
        assert text is not None
        lengths[name] = len(text.encode())
    assert lengths == BYTES


def test_mistakes_of_the_origin_are_kept() -> None:
    assert "within\\boxed{{}}.<|im_end|>" in templates.named("simplerl").fill("Q")
    assert (
        templates.named("qwen")
        .fill("{Q}")
        .endswith("<|im_start|>user\n{Q}<|im_end|>\n<|im_start|>assistant\n")
    )


def test_alpaca_answers_begin_on_a_line_of_their_own() -> None:
    template = templates.named("alpaca")
    assert template.fill("Q?").endswith("the request.\n\n### Instruction:\nQ?\n\n### Response:\n")
    assert template.stop == ()


def test_r1_zero_opens_the_thoughts_and_stops_at_the_answer() -> None:
    template = templates.named("r1_zero")
    assert template.opener == "\nAssistant: <think>"
    assert template.stop == ("</answer>",)
    assert template.fill("Q?").startswith(
        "A conversation between User and Assistant. The User asks"
    )
    assert template.fill("Q?").endswith("</answer>.\nUser: Q?\nAssistant: <think>")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no place", "has {question} 0 times"),
        ("{question} and {question}", "has {question} 2 times"),
        ("\udce9{question}", "isn't UTF-8"),
        ("{question}" + "x" * (1 << 20), "more than"),
    ],
)
def test_a_file_that_is_no_template_is_refused(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "t.txt"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=said):
        templates.named(str(file))


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="own, none, qwen, simplerl, prime, r1_zero"):
        templates.named("r1zero")
    with pytest.raises(ConfigError, match="directory"):
        templates.named(str(tmp_path))
