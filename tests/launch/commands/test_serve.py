"""``tandem serve`` as a process, asked what lm-eval and Inspect ask (``harness_requests.json`` is as they sent it)."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.common.errors import ConfigError, DataError
from tandem.launch import cli
from tandem.launch.commands import serve

KEY = "what-clients-know"
RECORDED: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("harness_requests.json").read_text()
)
END = 1
"""The end token of the miniature."""


class Server:
    """The command, running."""

    def __init__(self, command: str, *arguments: str, key: str = "") -> None:
        self.process = subprocess.Popen(
            [command, "serve", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, serve.KEY: key},
        )
        assert self.process.stdout is not None
        self.said = ""
        for line in self.process.stdout:
            self.said += line
            if line.startswith("serving"):
                break
        assert "serving" in self.said, self.said
        self.url = self.said.split()[-1].removesuffix("/v1")

    def ask(
        self, method: str, path: str, body: Any, headers: dict[str, str]
    ) -> tuple[int, dict[str, Any]]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.url}{path}", data=data, method=method, headers=headers
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        code = self.process.wait(60)
        assert self.process.stdout is not None
        self.said += self.process.stdout.read()
        self.process.stdout.close()
        return code


@pytest.fixture(scope="module")
def server(tandem_command: str) -> Iterator[Server]:
    running = Server(tandem_command, "miniature", "--port", "0", "--engine", "torch", key=KEY)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()


def replayed(server: Server, path: str, which: str = "prompt") -> tuple[Any, dict[str, Any]]:
    """A recorded request's body and the answer to it, with the key in the place of the recorded one."""
    (asked,) = [
        one
        for one in RECORDED
        if one["path"] == path
        and (one["body"] is None or which in one["body"])
        and ("echo" in (one["body"] or {})) == (which == "echo")
    ]
    headers = {**asked["headers"], "Authorization": f"Bearer {KEY}"}
    status, answer = server.ask(asked["method"], path, asked["body"], headers)
    assert status == 200, answer
    return asked["body"], answer


@pytest.fixture(scope="module")
def model() -> Any:
    from tandem.common.models import load_model

    return load_model("miniature")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tandem.common.models import load_tokenizer

    return load_tokenizer("miniature")


def greedy(model: Any, tokenizer: Any, prompt: list[int], most: int) -> str:
    """What transformers alone makes of a prompt."""
    import torch

    tokens = list(prompt)
    with torch.no_grad():
        while len(tokens) < len(prompt) + most:
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            if tokens[-1] == END:
                break
    return str(tokenizer.decode(tokens[len(prompt) :], skip_special_tokens=True))


def test_lm_evals_generations_are_the_models_greedy_ones(
    server: Server, model: Any, tokenizer: Any
) -> None:
    body, answer = replayed(server, "/v1/completions")
    wanted = [greedy(model, tokenizer, one, body["max_tokens"]) for one in body["prompt"]]
    assert len(wanted) == 4
    texts: list[Any] = [None] * len(answer["choices"])
    for choice in answer["choices"]:
        texts[choice["index"]] = choice["text"]
    assert texts == wanted


def test_lm_evals_log_likelihoods_are_the_models(server: Server, model: Any) -> None:
    import torch

    body, answer = replayed(server, "/v1/completions", "echo")
    assert len(answer["choices"]) == len(body["prompt"]) == 4
    for row, choice in zip(body["prompt"], answer["choices"], strict=True):
        with torch.no_grad():
            known = model(torch.tensor([row])).logits[0, :-1].log_softmax(-1).numpy()
        own = known[np.arange(len(row) - 1), row[1:]]
        for context in (1, 13, len(row) - 1):
            # lm-eval leaves out the context's, and the one that was sampled after the row.
            told = choice["logprobs"]["token_logprobs"][context:-1]
            assert sum(told) == pytest.approx(float(own[context - 1 :].sum()), abs=1e-3)
            top = choice["logprobs"]["top_logprobs"][context:-1]
            is_greedy = all(
                one == max(others.values()) for one, others in zip(told, top, strict=True)
            )
            assert is_greedy == bool((known.argmax(-1) == row[1:])[context - 1 :].all())


def test_lm_eval_finds_the_tokenizer(server: Server, tokenizer: Any) -> None:
    _, info = replayed(server, "/tokenizer_info")
    assert info["eos_token"] == tokenizer.eos_token
    body, answer = replayed(server, "/tokenize")
    assert answer["tokens"] == tokenizer.encode(body["prompt"], add_special_tokens=False)


def test_inspects_conversations_are_the_same_prompts(
    server: Server, model: Any, tokenizer: Any
) -> None:
    body, answer = replayed(server, "/v1/chat/completions", "messages")
    (message,) = body["messages"]
    (choice,) = answer["choices"]
    prompt = tokenizer.encode(message["content"])
    assert choice["message"]["content"] == greedy(model, tokenizer, prompt, body["max_tokens"])


def test_clients_need_the_key(server: Server) -> None:
    for headers in ({}, {"Authorization": "Bearer another"}):
        status, answer = server.ask("GET", "/v1/models", None, headers)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert KEY not in server.said
    host = server.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=30)
    connection.request("POST", "/v1/completions", "{", {"Authorization": f"Bearer {KEY}"})
    assert connection.getresponse().status == 400
    connection.close()


def test_an_address_that_can_not_be_listened_on_is_told_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} .*set --port to 0"):
            cli.dispatch(["serve", "miniature", "--port", port])
    with pytest.raises(ConfigError, match=r"192.0.2.1:0 .*--host to an address of this"):
        cli.dispatch(["serve", "miniature", "--port", "0", "--host", "192.0.2.1"])


def test_it_ends_cleanly_when_it_is_asked_to(server: Server) -> None:
    """The last test of the server that the others share."""
    assert server.end(signal.SIGINT) == 0
    assert server.said.splitlines() == [f"serving miniature at {server.url}/v1"]
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(server.url.rpartition(":")[2]))) != 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name one model"),
        (["a", "b"], "name one model"),
        (["no/such/folder/here"], "no/such/folder/here"),
        (["miniature", "--context", "300"], "context of 256"),
        (["miniature", "--context", "1"], "--context 1"),
        (["miniature", "--freeze"], "--freeze"),
        (["miniature", "--run", "x"], "miniature beside a run"),
        (["--run", "x"], "x isn't a run's folder"),
        (["miniature", "--port", "70000"], "--port 70000"),
        (["miniature", "--engine", "vlm"], "rollout.engine"),
        (["miniature", "--answers", "0"], "--answers"),
    ],
)
def test_what_can_not_be_served_is_told_in_a_line(words: list[str], said: str) -> None:
    given = [] if "--port" in words else ["--port", "0"]
    with pytest.raises((ConfigError, DataError), match=re.escape(said)):
        cli.dispatch(["serve", *words, *given])


def test_a_runs_folder_is_refused_with_what_to_name(finished_run: Path) -> None:
    with pytest.raises(DataError, match="once it has ended"):
        cli.dispatch(["serve", "--port", "0", str(finished_run)])
    with pytest.raises(DataError, match="isn't going on"):
        cli.dispatch(["serve", "--port", "0", "--run", str(finished_run)])


@pytest.mark.parametrize(
    ("host", "given", "environment", "wanted"),
    [
        ("127.0.0.1", None, "", ("", False)),
        ("::1", None, "", ("", False)),
        ("localhost", None, "", ("", False)),
        ("127.0.0.1", "mine", "", ("mine", False)),
        ("0.0.0.0", None, "mine", ("mine", False)),
        ("0.0.0.0", "first", "second", ("first", False)),
        ("0.0.0.0", None, "", None),
        ("some.host", None, "", None),
    ],
)
def test_whoever_listens_elsewhere_has_a_key(
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    given: str | None,
    environment: str,
    wanted: tuple[str, bool] | None,
) -> None:
    monkeypatch.setenv(serve.KEY, environment)
    key, made = serve._key(argparse.Namespace(host=host, api_key=given))
    if wanted is not None:
        assert (key, made) == wanted
        return
    assert made
    assert len(key) > 20
    assert key != serve._key(argparse.Namespace(host=host, api_key=given))[0]
