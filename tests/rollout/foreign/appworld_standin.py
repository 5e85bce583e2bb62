"""Stands in for AppWorld's environment server: its routes, bodies and answers, and one task that needs no data.

``python appworld_standin.py PORT``. The "code" that it is sent is read as a list of known lines, never run.
As the real one it holds one world, answers every misuse with a bare 500, and shows an error of the code as text.
"""

from __future__ import annotations

import json
import os
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SUPERVISOR = {
    "first_name": "Ann",
    "last_name": "Lee",
    "email": "ann@example.com",
    "phone_number": "5550100",
}
TASKS = {"sum_1": ("What is 19 + 23?", "42"), "sum_2": ("What is 2 + 2?", "4")}
FIELDS = {
    "/initialize": ("task_id",),
    "/execute": ("task_id", "code"),
    "/task_completed": ("task_id",),
    "/evaluate": ("task_id",),
    "/close": ("task_id",),
}


class World:
    """The one world of a server."""

    def __init__(self) -> None:
        self.task = ""
        self.answer: str | None = None
        self.is_complete = False
        self.left = 0

    def do(self, path: str, body: dict[str, Any]) -> Any:
        if any(name not in body for name in FIELDS[path]):
            raise LookupError("a field is missing")
        task = body["task_id"]
        if path == "/initialize":
            self.__init__()  # type: ignore[misc]
            # The real one keeps a folder for each task that was opened.
            os.makedirs(f"experiments/outputs/{body['experiment_name']}/tasks/{task}")
            self.task, self.left = task, body.get("max_interactions", 1000)
            return {
                "task_id": task,
                "instruction": TASKS[task][0],
                "supervisor": SUPERVISOR,
                "datetime": "2023-05-18T12:00:00",
            }
        if task != self.task:
            raise LookupError("AppWorld has not been initialized.")
        if path == "/execute":
            self.left -= 1
            if self.left < 0:
                raise LookupError("too many interactions")
            return self.execute(body["code"])
        if path == "/task_completed":
            return self.is_complete
        if path == "/evaluate":
            tests = [self.is_complete, self.answer == TASKS[task][1]]
            passes = [{"requirement": str(n)} for n, ok in enumerate(tests) if ok]
            failures = [{"requirement": str(n)} for n, ok in enumerate(tests) if not ok]
            return {
                "success": all(tests),
                "difficulty": 1,
                "num_tests": len(tests),
                "passes": passes,
                "failures": failures,
            }
        self.task = ""
        return None

    def execute(self, code: str) -> str:
        if code == "crash":
            raise LookupError("an unforeseen error")
        if code == "die":
            os._exit(3)
        if found := re.fullmatch(r"apis\.supervisor\.complete_task\(answer='?(.*?)'?\)", code):
            self.answer, self.is_complete = found[1], True
            return "Execution successful."
        if found := re.fullmatch(r"print\('(.*)'\)", code):
            return found[1] + "\n"
        return "Execution failed. Traceback:\n  NameError: not a known line"


class Handler(BaseHTTPRequestHandler):
    world = World()

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._send(200, b'{"message": "Welcome to AppWorld Server!"}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            output = self.world.do(self.path, body)
        except LookupError:
            self._send(500, b"Internal Server Error")
        else:
            self._send(200, json.dumps({"output": output}).encode())

    def log_message(self, *_: Any) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
