"""Environments that behave, and one for each way not to. They are imported by the processes under test."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal


class Guess:
    """A text environment: guess a number in steps, each paid."""

    def __init__(self, bonus: float = 0.0) -> None:
        self.bonus = bonus
        self.episodes = 0

    def reset(self, row: dict[str, Any]) -> str:
        self.number, self.tries = row["number"], 0
        self.episodes += 1
        return f"I think of a number. Episode {self.episodes} of process {os.getpid()}."

    def step(self, text: str) -> tuple[str, float | None, bool]:
        self.tries += 1
        guess = int(text)
        if guess == self.number:
            return "right", 1.0 + self.bonus, True
        return (
            ("higher" if guess < self.number else "lower"),
            (0.25 if self.tries > 1 else None),
            False,
        )


class Talks:
    """A text environment whose observations are messages, and which starts from the row's prompt."""

    async def reset(self, row: dict[str, Any]) -> None:
        return None

    async def step(self, text: str) -> tuple[list[dict[str, str]], None, bool]:
        return [{"role": "system", "content": f"you said {text}"}], None, text == "bye"


class Calculator:
    """TRL's form."""

    made = 0

    def __init__(self) -> None:
        Calculator.made += 1

    def reset(self, prompt: Any, answer: int, **row: Any) -> str:
        self.answer, self.results, self.prompt = answer, [], prompt
        return f" (you are calculator {self.made})"

    def add(self, a: int, b: int = 1) -> int:
        """Adds two numbers.

        Args:
            a: the first number,
                which comes first.
            b: the second.

        Returns:
            their sum.
        """
        self.results.append(a + b)
        return a + b

    async def look_up(self, word: Literal["pi", "e"], digits: int | None = None) -> dict[str, Any]:
        """Looks a constant up."""
        return {"word": word, "digits": digits}

    def breaks(self) -> None:
        """Always fails."""
        raise RuntimeError("the abacus has lost a bead")

    def _hidden(self) -> None:
        """No tool."""

    def get_reward(self) -> float | None:
        return float(self.answer in self.results) if self.results else None


class Unpaid:
    """TRL's form without a reward."""

    def reset(self, **row: Any) -> None:
        self.row = row

    def shout(self, text: str) -> str:
        """Returns a text in capitals."""
        return text.upper()


async def agent(task: dict[str, Any], base_url: str, api_key: str, *, bonus: float = 0.0) -> Any:
    """An agent that uses an OpenAI client."""
    import openai

    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        answer = await client.chat.completions.create(
            model="tandem", messages=[{"role": "user", "content": task["question"]}]
        )
    right = answer.choices[0].message.content == task["answer"]
    return {"reward": float(right) + bonus, "metrics": {"length": len(task["question"])}}


def plain_agent(task: dict[str, Any], base_url: str, api_key: str) -> Any:
    """An agent that does what its row says."""
    if "metrics" in task:
        return {"reward": 1.0, "metrics": {f"m{n}": n for n in range(task["metrics"])}}
    return _misbehave(task)


class Misbehaves:
    """Does what its row says, in ``reset`` or in ``step``."""

    def reset(self, row: dict[str, Any]) -> str:
        self.row = row
        if row.get("where") == "reset":
            _misbehave(row)
        return "go on"

    def step(self, text: str) -> Any:
        found = _misbehave(self.row)
        return ("", found, True) if self.row.get("what") != "shape" else ("only", "two")


def _fork_away(path: str, count: int) -> None:
    """Starts processes that are nobody's children, in sessions of their own, and writes their ids down."""
    program = (
        "import os, sys, time\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        "open(sys.argv[1], 'a').write(f'{os.getpid()}\\n')\n"
        "time.sleep(600)\n"
    )
    for _ in range(count):
        subprocess.run([sys.executable, "-S", "-c", program, path], check=True)
    while len(Path(path).read_text().splitlines()) < count:
        time.sleep(0.01)


def _misbehave(row: dict[str, Any]) -> Any:
    match row.get("what"):
        case "hang":
            time.sleep(600)
        case "loop":
            while True:
                pass
        case "exit":
            os._exit(3)
        case "sys.exit":
            sys.exit("no more")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise ValueError(f"the world \x1b[2J has {row['number']} ends")
        case "nan":
            return float("nan")
        case "text":
            return "1.0"
        case "flood":
            while True:
                os.write(1, b"spam " * 10_000)
        case "print":
            print("a line of its own", flush=True)
            raise ValueError("after a line")
        case "garbage":
            for descriptor in range(3, 64):
                try:
                    os.write(descriptor, b"\x08\x00\x00\x00garbage!")
                except OSError:
                    continue
            time.sleep(600)
        case "false reward":
            import msgspec

            said = msgspec.msgpack.encode(["done", float("inf"), [], {}, "done"])
            for descriptor in range(3, 64):
                try:
                    os.write(descriptor, len(said).to_bytes(4, "little") + said)
                except OSError:
                    continue
            time.sleep(600)
        case "memory":
            held = bytearray(2 << 30)  # At once, since touching so many pages may take long.
            return float(len(held))
        case "fork":
            _fork_away(row["path"], 5)
            if row.get("then") == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if row.get("then") == "hang":
                time.sleep(600)
        case "file":
            with open("large", "wb") as file:
                file.truncate(1 << 30)
        case "wait":
            # Says that it has begun, and goes on when it is let.
            with open(row["begun"], "a") as file:
                file.write(f"{os.getpid()} {os.getppid()}\n")
            while not os.path.exists(row["go"]):
                time.sleep(0.01)
        case "tell":
            with open("/proc/self/limits") as file:
                limits = file.read()
            found = {
                "environment": dict(os.environ),
                "folder": os.getcwd(),
                "limits": limits,
                "descriptors": [
                    os.readlink(f"/proc/self/fd/{one}")
                    for one in os.listdir("/proc/self/fd")
                    if os.path.lexists(f"/proc/self/fd/{one}")
                ],
                "session": os.getsid(0) == os.getpid(),
                "memory": resource.getrlimit(resource.RLIMIT_AS)[0],
                "user": os.geteuid(),
                "modules": sorted(sys.modules),
            }
            Path(row["path"]).write_text(json.dumps(found))
            raise ValueError("told")
    return 1.0
