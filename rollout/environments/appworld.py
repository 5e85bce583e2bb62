"""AppWorld: tasks of daily life in nine apps, which the policy solves by writing Python (Trivedi et al., 2024).

An episode has a server of AppWorld's to itself, because one holds a single world and replaces it without a
word. The server is a child of the process that plays the episode, so it has that process's limits and ends
with it; it is used again after an episode without faults. Its answer to any misuse is a bare 500, after
which nobody can know in which state it is: the episode has then failed, and both processes are ended.

This module is imported by the process that plays episodes, so it needs the standard library only. AppWorld itself
lives in a virtual environment of its own, which the command that starts the server names.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

START_SECONDS = 50.0
"""Deadline of a server to answer; the reset's own deadline is usually the shorter one."""
ANSWER_SECONDS = 300.0
"""Longest wait for an answer; a step's own deadline is usually the shorter one."""
LOOK_SECONDS = 0.05
MOST_CLAIMS = 100
"""Ports that are tried until one is no other episode's."""
MOST_BYTES = 32 << 20
"""Longest answer that is read."""
OPENING, CLOSING = "<code>", "</code>"
FENCE = re.compile(r"```[ \t]*(?:[Pp]ython|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
THINKING, THOUGHT = "<think>", "</think>"

SYSTEM = """\
You act for a person whose apps and accounts you can use through Python. Solve the task by writing code, \
which runs in one lasting session: variables stay, and whatever the code prints is shown to you."""

RULES = """\
How to find out what there is:
- print(apis.api_docs.show_app_descriptions()) lists the apps.
- print(apis.api_docs.show_api_descriptions(app_name='spotify')) lists the calls of an app.
- print(apis.api_docs.show_api_doc(app_name='spotify', api_name='login')) describes a call.

Rules:
1. Answer with {what} between <code> and </code>. Only what you print can be seen.
2. Look a call up before you use it; never guess its name, its arguments or what it returns.
3. Passwords and the like are in apis.supervisor. Accounts belong to the person you act for.
4. Lists come in pages: ask for all of them.
5. Friends and relatives are people in the phone's contacts. Files are in the app file_system.
6. Times are those of the task, never of the computer: ask the phone for the date.
7. Change nothing that the task doesn't ask for.
8. At the end call apis.supervisor.complete_task(), with answer=... if the task asks a question. The answer \
is a bare value, such as a number or a name."""

STEPS = "one short block of code"
WHOLE = "a single block of code, which must do all of the task: there is no second one"
NO_CODE = "No code was found: write it between <code> and </code>."


class AppWorldError(Exception):
    """The server is gone, or answered with an error."""


class AppWorld:
    """The environment, in the form ``reset(row)``, ``step(text)``.

    ``reset`` shows the task. ``step`` runs the code in an answer and shows what it printed. The reward is 0 until
    the code has called ``apis.supervisor.complete_task``; then the task's own tests are run, and it is 1 if all
    pass, else the share that does.

    Args:
        command: starts a server; ``{port}`` is replaced.
        root: folder with AppWorld's ``data``; None = the working directory.
        max_interactions: greatest number of answers.
        single_turn: whether the first answer is the only one; it is evaluated in any case.
        suffix: what the message with the task ends in.
        outputs: folder for what its servers write, which must be in ``experiments/outputs`` below the root; None = one
            with a name of its own.
    """

    def __init__(
        self,
        command: str,
        root: str | None = None,
        max_interactions: int = 30,
        single_turn: bool = False,
        suffix: str = "",
        outputs: str | None = None,
    ) -> None:
        self._command = shlex.split(command)
        self._root = Path(root or ".").absolute()
        self._most = 1 if single_turn else max_interactions
        self._single = single_turn
        self._suffix = suffix
        self._server: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._claim: socket.socket | None = None
        # Each server writes what it does into a folder of that name: two episodes of a task must not share one.
        own = f"tandem-{os.getpid()}-{secrets.token_hex(4)}"
        self._experiment = Path(outputs or own).name
        self._task = ""
        self._steps = 0

    def reset(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        """Opens the task that the row names in ``task_id``, or in ``task: {task_id: …}``."""
        task = row.get("task")
        name = task.get("task_id") if isinstance(task, Mapping) else row.get("task_id")
        if not isinstance(name, str) or not name:
            raise ValueError("the row has no task_id: `tandem tasks appworld` writes such rows")
        if self._server is None or self._server.poll() is not None:
            self._start()
        elif self._task:
            self.ask("close", task_id=self._task)
        shutil.rmtree(self._root / "experiments/outputs" / self._experiment, ignore_errors=True)
        found = self.ask(
            "initialize",
            task_id=name,
            experiment_name=self._experiment,
            # The server's own limit is an error; ours is the end of the episode.
            max_interactions=self._most + 1,
        )
        if not isinstance(found, Mapping):
            raise AppWorldError(f"AppWorld opened {name} with {found!r:.200}")
        self._task, self._steps = name, 0
        return opening(found, self._single, self._suffix)

    def step(self, text: str) -> tuple[str, float, bool]:
        """Runs the code in an answer."""
        self._steps += 1
        code = code_of(text)
        output = NO_CODE
        if code is not None:
            output = str(self.ask("execute", task_id=self._task, code=code))
        is_complete = code is not None and self.ask("task_completed", task_id=self._task) is True
        if is_complete or self._single:
            return output, self.evaluate(), True
        return output, 0.0, self._steps >= self._most

    def evaluate(self) -> float:
        """The share of the task's tests that pass."""
        found = self.ask("evaluate", task_id=self._task, suppress_errors=True, report=False)
        return share_passed(found)

    def ask(self, route: str, **body: Any) -> Any:
        """The ``output`` of a request.

        Raises:
            AppWorldError: there is none; the server is ended.
        """
        try:
            status, data = self._request("POST", f"/{route}", body)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise AppWorldError(f"AppWorld's server didn't answer /{route}: {error!r}") from None
        if status != 200:
            self.close()
            raise AppWorldError(f"AppWorld's server answered /{route} with {status}")
        try:
            return json.loads(data)["output"]
        except (ValueError, RecursionError, KeyError, TypeError):
            self.close()
            raise AppWorldError(
                f"AppWorld's server answered /{route} with {data[:200]!r}"
            ) from None

    def close(self) -> None:
        """Ends the server."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None
        if self._claim is not None:
            self._claim.close()
            self._claim = None
        self._task = ""

    def _start(self) -> None:
        self.close()
        self._port, self._claim = claimed_port()
        command = [part.replace("{port}", str(self._port)) for part in self._command]
        self._server = subprocess.Popen(command, cwd=self._root, stdin=subprocess.DEVNULL)
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self._server.poll() is not None:
                raise AppWorldError(f"AppWorld's server exited with {self._server.returncode}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._request("GET", "/", None)[0] == 200:
                    return
            time.sleep(LOOK_SECONDS)
        self.close()
        raise AppWorldError(f"AppWorld's server didn't answer within {START_SECONDS:.0f} s")

    def _request(self, method: str, path: str, body: Any) -> tuple[int, bytes]:
        connected = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_SECONDS)
        try:
            data = None if body is None else json.dumps(body)
            connected.request(method, path, data, {"Content-Type": "application/json"})
            answer = connected.getresponse()
            read = answer.read(MOST_BYTES + 1)
        finally:
            connected.close()
        if len(read) > MOST_BYTES:
            raise OSError(f"it answered with more than {MOST_BYTES >> 20} MiB")
        return answer.status, read


def claimed_port() -> tuple[int, socket.socket | None]:
    """A port of loopback that no other episode of this host takes while the socket that comes with it is open.

    A server needs seconds to listen. Meanwhile the kernel may give its port to another episode, whose own server
    then can't listen, and which would play in this one's world. The claim is the name of an abstract Unix socket, which
    is known wherever loopback is the same, and is free again once its process has ended. Only Linux has such names:
    elsewhere there is no claim.

    Raises:
        AppWorldError: every port that was tried is another episode's.
    """
    for _ in range(MOST_CLAIMS):
        port = free_port()
        if sys.platform != "linux":
            return port, None
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0tandem-appworld-{port}")
        except OSError as error:
            claim.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return port, claim
    raise AppWorldError(f"{MOST_CLAIMS} free ports in a row were those of other episodes")


def free_port() -> int:
    """A port of loopback on which nothing listens now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found: int = free.getsockname()[1]
        return found


def opening(
    found: Mapping[str, Any], single: bool = False, suffix: str = ""
) -> list[dict[str, str]]:
    """The messages with which an episode begins, from the answer to ``initialize``."""
    person = found.get("supervisor")
    person = person if isinstance(person, Mapping) else {}
    facts = [
        f"{' '.join(str(person.get(k, '')) for k in ('first_name', 'last_name')).strip()}",
        f"email {person.get('email', '')}",
        f"phone {person.get('phone_number', '')}",
    ]
    task = (
        f"You act for {', '.join(facts)}.\n"
        f"It is {found.get('datetime', 'a date that the phone knows')}.\n\n"
        f"{RULES.format(what=WHOLE if single else STEPS)}\n\n"
        f"Task: {found.get('instruction', '')}{suffix}"
    )
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]


def code_of(text: str) -> str | None:
    """The code of an answer: the first in ``<code>`` tags, else the first between fences; None without any.

    What was thought before doesn't count, nor does what begins in a thought that was cut off.
    """
    said = text.rpartition(THOUGHT)[2]
    sure = said.find(THINKING) if THINKING in said else len(said)
    start, fenced = said.find(OPENING), FENCE.search(said)
    if 0 <= start < sure:
        end = said.find(CLOSING, start)
        end = len(said) if end < 0 else end
        # An answer may speak of the tag before it uses it, at the beginning of a line.
        used = start == 0 or said[start - 1] == "\n"
        start = start if used else max(start, said.rfind("\n" + OPENING, start, end) + 1)
        code = said[start + len(OPENING) : end].strip()
        fenced = FENCE.fullmatch(code)
        return (fenced[1].strip() if fenced else code) or None
    return fenced[1].strip() or None if fenced and fenced.start() < sure else None


def share_passed(found: Any) -> float:
    """The reward that an evaluation stands for.

    Raises:
        AppWorldError: it isn't an evaluation.
    """
    if isinstance(found, Mapping):
        if found.get("success") is True:
            return 1.0
        tests, passes = found.get("num_tests"), found.get("passes")
        if type(tests) is int and tests > 0 and isinstance(passes, list) and len(passes) <= tests:
            return len(passes) / tests
    raise AppWorldError(f"AppWorld evaluated the task as {found!r:.200}")
