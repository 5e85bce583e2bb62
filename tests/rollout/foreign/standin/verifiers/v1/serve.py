"""Stands in for verifiers' server: speaks its frames, and answers a run with what the real one has answered.

The task's name says what is done with a run; what it says of itself, it writes into ``$HOME``'s folder ``seen``.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

RECORDED = json.loads((Path(__file__).parents[3] / "verifiers_frames.json").read_text())


class Server:
    """One server."""

    def __init__(self, address: str, config: dict[str, Any]) -> None:
        self.config = config
        self.router = zmq.Context.instance().socket(zmq.ROUTER)
        self.router.bind(address)
        self.hanging: dict[bytes, bytes] = {}

    def answer(self, client: bytes, request: bytes, kind: bytes, data: bytes) -> None:
        self.router.send_multipart([client, request, kind, data])

    def replay(self, client: bytes, request: bytes, name: str) -> None:
        for kind, data in RECORDED[name]:
            self.answer(client, request, kind.encode(), base64.b64decode(data))

    def run(self, client: bytes, request: bytes, body: dict[str, Any]) -> None:
        task = body["task_data"]
        match task["name"]:
            case "hangs":
                self.hanging[request] = client
            case "is deaf":
                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
                print("deaf now", flush=True)
                time.sleep(600)
            case "dies":
                os._exit(7)
            case "loses a delta":
                *_, reply = RECORDED["played"]
                self.answer(client, request, b"reply", base64.b64decode(reply[1]))
            case "garbage":
                self.answer(client, request, b"delta", b"\xc1\xc1\xc1")
            case "not a number":
                *deltas, reply = [base64.b64decode(data) for _, data in RECORDED["played"]]
                for data in deltas:
                    delta = msgspec.msgpack.decode(data)
                    if delta.get("set", {}).get("rewards"):
                        delta["set"]["rewards"]["game_reward"]["score"] = float("nan")
                    self.answer(client, request, b"delta", msgspec.msgpack.encode(delta))
                self.answer(client, request, b"reply", reply)
            case "unlucky":
                # The model's provider breaks, and the taskset takes the end for the end of the game.
                for kind, data in RECORDED["full"]:
                    found = base64.b64decode(data).replace(
                        b"context_length_exceeded", b"internal_server_error!!"
                    )
                    self.answer(client, request, kind.encode(), found)
            case "tells":
                told = {"body": body, "environment": dict(os.environ), "config": self.config}
                (Path(os.environ["HOME"]) / "told.json").write_text(json.dumps(told))
                self.replay(client, request, "played")
            case name:
                self.replay(client, request, name)

    def serve(self) -> None:
        while True:
            client, request, method, data = self.router.recv_multipart()
            match method:
                case b"run":
                    self.run(client, request, msgspec.msgpack.decode(data))
                case b"cancel":
                    self.replay(client, request, "cancel")
                    name = msgspec.msgpack.decode(data)["request_id"].encode()
                    if name in self.hanging:
                        self.replay(self.hanging.pop(name), name, "cancelled")
                case b"health" if self.config.get("is_old"):
                    self.router.send_multipart([client, request, msgspec.msgpack.encode({})])
                case b"health":
                    self.replay(client, request, "health")
                case _:
                    self.replay(client, request, "unknown")


def serve_env(
    *, max_workers: int, address: str, config_data: dict[str, Any], log_setup: Any
) -> None:
    """The function that the launcher calls."""
    log_setup()
    assert max_workers == 1
    if config_data.get("is_broken"):
        raise ValueError("no such taskset")
    if config_data.get("is_silent"):
        time.sleep(600)
    print("x" * config_data.get("prints", 0), flush=True)
    Server(address, config_data).serve()
