"""Each form of environment, played by a real server in real processes against an endpoint that stands in."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
from standin_endpoint import calling

from tandem.common.records import Verdict
from tandem.rollout.environments.forms.agent import AgentEpisodes, is_too_long
from tandem.rollout.environments.forms.asking import CONTEXT_CODE
from tandem.rollout.environments.forms.schemas import schema_of
from tandem.rollout.environments.forms.values import bounded_messages

PlayOne = Callable[..., Any]


def scripted(*turns: Any) -> Callable[[Any], Any]:
    """A model that says one thing after another."""
    left = list(turns)
    return lambda _: left.pop(0)


class TestText:
    def test_rewards_of_steps_are_those_of_turns_and_their_sum_is_the_episodes(
        self, play_one: PlayOne
    ) -> None:
        played, asked = play_one("guess", {"number": 7}, scripted("3", "9", "7"))
        assert played.failure is None, played.detail
        assert (played.reward, played.turn_rewards) == (1.75, (None, 0.25, 1.5))
        assert played.detail == "done"
        said = [message["content"] for message in asked[-1]["messages"]]
        assert said[1:] == ["3", "higher", "9", "lower"]
        assert [m["role"] for m in asked[-1]["messages"]][:3] == ["user", "assistant", "user"]

    def test_a_process_plays_one_clean_episode_after_another(self, play: Any) -> None:
        async def body(playing: Any) -> list[str]:
            await playing.play("guess", {"number": 1}, scripted("1"))
            await playing.play("guess", {"number": 1}, scripted("1"))
            asked = playing.endpoint.requests[-2:]
            return [body["messages"][0]["content"] for _, body in asked]

        first, second = play(body)
        assert first.split()[-1] == second.split()[-1]
        assert int(second.split("Episode ")[1].split()[0]) == (
            int(first.split("Episode ")[1].split()[0]) + 1
        )

    def test_an_episode_without_rewards_has_none_and_the_prompt_is_the_rows(
        self, play_one: PlayOne
    ) -> None:
        prompt = [{"role": "user", "content": "hello"}]
        played, asked = play_one("talks", {"prompt": prompt}, scripted("hi", "bye"))
        assert (played.reward, played.failure) == (None, None)
        assert [m["content"] for m in asked[1]["messages"]] == ["hello", "hi", "you said hi"]
        assert asked[1]["messages"][2]["role"] == "system"

    def test_the_greatest_number_of_turns_ends_it_with_what_it_has(self, play_one: PlayOne) -> None:
        played, asked = play_one("guess", {"number": 7}, lambda _: "3", turns=3)
        assert (played.reward, played.detail, len(asked)) == (0.5, "max_turns", 3)

    def test_a_session_without_room_ends_it_and_is_no_failure(self, play_one: PlayOne) -> None:
        played, _ = play_one("guess", {"number": 7}, scripted("3", "3", None))
        assert (played.failure, played.detail) == (None, "context_length")
        assert played.turn_rewards == (None, 0.25)

    def test_a_long_observation_is_cut_in_the_middle(self, play_one: PlayOne) -> None:
        said = "a" * 100_000 + "z"
        _, asked = play_one("talks", {"prompt": "x"}, scripted(said, "bye"), observation_tokens=50)
        content = asked[1]["messages"][2]["content"]
        assert len(content) < 1_000
        assert content.startswith("you said aaa")
        assert content.endswith("z")
        assert "characters left out" in content


@pytest.mark.parametrize("environment", ["talks", "calculator"])
def test_a_rows_own_prompt_is_no_observation_and_stays_whole(
    play_one: PlayOne, environment: str
) -> None:
    prompt = "a" * 100_000
    row = {"prompt": prompt, "answer": 0}
    _, asked = play_one(environment, row, scripted("bye"), observation_tokens=50)
    assert asked[0]["messages"][0]["content"].startswith(prompt)


@pytest.mark.parametrize(
    "content",
    [
        "z" * 100_000,
        [{"type": "text", "text": "z" * 100_000}],
        ["z" * 100_000],
        [{"type": "text", "text": "z" * 500}] * 1_000,
    ],
)
def test_an_observation_is_bounded_whatever_its_spelling(content: Any) -> None:
    (message,) = bounded_messages([{"role": "user", "content": content}], 50)
    assert len(json.dumps(message)) < 1_000
    assert "characters left out" in json.dumps(message)
    short = {"role": "user", "content": [{"type": "text", "text": "z"}] * 9}
    assert bounded_messages([short], 50) == [short]


class TestTools:
    def test_tools_run_in_order_and_the_reward_is_the_environments(self, play_one: PlayOne) -> None:
        calls = [calling("add", {"a": 1, "b": 2}, 1), calling("add", {"a": 40}, 2)]
        played, asked = play_one(
            "calculator", {"prompt": "add", "answer": 41}, scripted({"tool_calls": calls}, "41")
        )
        assert (played.reward, played.failure, played.detail) == (1.0, None, "done")
        assert [
            (m["role"], m.get("tool_call_id"), m["content"]) for m in asked[1]["messages"][2:]
        ] == [
            ("tool", "call-1", "3"),
            ("tool", "call-2", "41"),
        ]
        assert asked[0]["messages"][0]["content"].startswith("add (you are calculator")

    def test_schemas_come_from_signatures_hints_and_docstrings(self, play_one: PlayOne) -> None:
        _, asked = play_one("calculator", {"prompt": "add", "answer": 0}, scripted("no"))
        tools = {tool["function"]["name"]: tool["function"] for tool in asked[0]["tools"]}
        assert list(tools) == ["add", "look_up", "breaks"]
        assert tools["add"] == {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {
                        "type": "integer",
                        "description": "the first number, which comes first.",
                    },
                    "b": {"type": "integer", "description": "the second."},
                },
                "required": ["a"],
            },
        }
        look_up = tools["look_up"]["parameters"]["properties"]
        assert look_up["word"] == {"type": "string", "enum": ["pi", "e"]}
        assert look_up["digits"] == {"type": ["integer", "null"]}

    def test_a_function_of_c_can_be_a_tool(self) -> None:
        parameters = schema_of(math.isclose, "isclose")["function"]["parameters"]
        assert parameters["required"] == ["a", "b"]

    def test_a_hint_that_only_a_type_checker_knows_leaves_the_others_as_they_are(self) -> None:
        def tool(self: Any, a: int, b: Unknown, c: str | None = None) -> Unknown:  # type: ignore[name-defined]  # noqa: F821
            """Of a module that imports Unknown under TYPE_CHECKING."""

        parameters = schema_of(tool, "tool")["function"]["parameters"]
        assert parameters["properties"] == {
            "a": {"type": "integer"},
            "b": {},
            "c": {"type": ["string", "null"]},
        }

    def test_a_coroutine_is_awaited_and_its_result_is_json(self, play_one: PlayOne) -> None:
        calls = [calling("look_up", {"word": "pi"})]
        _, asked = play_one(
            "calculator", {"prompt": "x", "answer": 0}, scripted({"tool_calls": calls}, "")
        )
        assert asked[1]["messages"][-1]["content"] == '{"word": "pi", "digits": null}'

    def test_what_goes_wrong_with_a_call_is_told_to_the_model(self, play_one: PlayOne) -> None:
        calls = [
            calling("breaks", {}),
            calling("fly", {}),
            calling("add", "{not json"),
            calling("add", {"c": 1}),
            calling("_hidden", {}),
            # Python reads numbers of so many digits, and doesn't write their sum.
            calling("add", {"a": int("9" * 4300), "b": int("9" * 4300)}),
        ]
        played, asked = play_one(
            "calculator", {"prompt": "x", "answer": 0}, scripted({"tool_calls": calls}, ""), calls=9
        )
        assert played.failure is None
        told = [m["content"] for m in asked[1]["messages"][2:]]
        assert told[0] == '{"error": "the abacus has lost a bead"}'
        assert "no tool 'fly'" in told[1]
        assert "aren't JSON" in told[2]
        assert "unexpected keyword argument" in told[3]
        assert "no tool '_hidden'" in told[4]
        assert "Exceeds the limit (4300 digits)" in told[5]

    def test_a_call_that_could_not_be_parsed_is_told_back_as_text(self, play_one: PlayOne) -> None:
        said = {"content": "<tool_call>{", "tandem": {"malformed_tool_calls": 1}}
        played, asked = play_one("calculator", {"prompt": "x", "answer": 0}, scripted(said, ""))
        assert played.failure is None
        last = asked[1]["messages"][-1]
        assert (last["role"], "1 tool call" in last["content"]) == ("user", True)
        assert asked[1]["messages"][-2]["content"] == "<tool_call>{"

    def test_no_reward_yet_is_no_zero(self, play_one: PlayOne) -> None:
        played, _ = play_one("calculator", {"prompt": "x", "answer": 0}, scripted("I give up"))
        assert (played.reward, played.failure) == (None, None)

    def test_a_class_without_get_reward_has_no_reward(self, play_one: PlayOne) -> None:
        calls = [calling("shout", {"text": "hey"})]
        played, asked = play_one("unpaid", {"prompt": "x"}, scripted({"tool_calls": calls}, "done"))
        assert (played.reward, played.failure) == (None, None)
        assert asked[1]["messages"][-1]["content"] == "HEY"

    def test_the_greatest_number_of_calls_ends_it(self, play_one: PlayOne) -> None:
        call = {"tool_calls": [calling("add", {"a": 1})] * 2}
        played, asked = play_one(
            "calculator", {"prompt": "x", "answer": 2}, lambda _: call, calls=3
        )
        assert (played.detail, len(asked), played.reward) == ("max_calls", 2, 1.0)


class TestAgent:
    @pytest.mark.skipif(find_spec("openai") is None, reason="the package openai isn't installed")
    def test_an_openai_client_plays_it_and_returns_reward_and_figures(
        self, play_one: PlayOne
    ) -> None:
        played, asked = play_one("agent", {"question": "6*7?", "answer": "42"}, scripted("42"))
        assert played.failure is None, played.detail
        assert (played.reward, dict(played.metrics)) == (1.5, {"length": 4.0})
        assert asked[0]["messages"] == [{"role": "user", "content": "6*7?"}]

    @pytest.mark.skipif(find_spec("openai") is None, reason="the package openai isn't installed")
    def test_an_agent_whose_session_is_full_has_no_reward_and_has_not_failed(
        self, play_one: PlayOne
    ) -> None:
        played, _ = play_one("agent", {"question": "6*7?", "answer": "42"}, lambda _: None)
        assert (played.reward, played.failure, played.detail) == (None, None, "context_length")

    @pytest.mark.parametrize("function", [lambda task, url, key: 1.0, lambda task, base_url: 1.0])
    def test_one_that_can_not_be_called_is_refused_before_it_plays(self, function: Any) -> None:
        with pytest.raises(TypeError, match=r"can't be called with a task, base_url=, api_key="):
            AgentEpisodes(function, {})
        with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
            AgentEpisodes(lambda task, base_url, api_key: 1.0, {"nonsense": 3})

    def test_a_full_session_is_known_within_a_group_of_exceptions(self) -> None:
        full = RuntimeError("no more room")
        full.code = CONTEXT_CODE  # type: ignore[attr-defined]
        assert is_too_long(ExceptionGroup("tasks", [ValueError(), ExceptionGroup("more", [full])]))
        assert not is_too_long(ExceptionGroup("tasks", [ValueError()]))

    def test_an_exception_is_a_failure_with_its_last_line(self, play_one: PlayOne) -> None:
        played, _ = play_one("plain", {"what": "raise", "number": 3})
        assert played.failure is Verdict.ENV_FAILED
        assert played.detail.startswith(
            "ValueError: the world \\u001b[2J has 3 ends (played_worlds.py"
        )


def test_an_environment_that_no_server_has_is_a_failure_that_names_it(play: Any) -> None:
    async def body(playing: Any) -> Any:
        assert not playing.client.knows("chess")
        assert playing.client.knows("guess")
        async with asyncio.timeout(20):
            while playing.client.slots("guess") != 4:  # Others' episodes are counted once a second.
                await asyncio.sleep(0.02)
        return await playing.play("chess", {})

    played = play(body, deadline=0.2, grace=0.1)
    assert played.failure is Verdict.ENV_FAILED
    assert "chess" in played.detail


def test_the_first_64_figures_of_an_agent_are_kept(play_one: PlayOne) -> None:
    played, _ = play_one("plain", {"metrics": 100})
    assert (played.reward, played.failure) == (1.0, None), played.detail
    assert list(played.metrics) == [f"m{number}" for number in range(64)]
