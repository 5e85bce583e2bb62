"""A judge's HTTP server as a process of its own, whose behaviour the tests choose by the text that it judges.

Run as ``python judge_server.py PORT LOG``: it prints its port. The last word ``do:…`` of a prompt says what
it does with it; without one, it answers "Score: 8". Each request is a line of the log.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

ORDER = re.compile(r"do:([a-z_0-9]+)")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    log_path = ""
    seen: ClassVar[dict[str, int]] = {}
    lock = threading.Lock()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def note(self, body: Any) -> None:
        line = {
            "path": self.path,
            "body": body,
            "key": self.headers.get("Authorization"),
            "time": time.time(),
        }
        with self.lock, open(self.log_path, "a") as file:
            file.write(json.dumps(line) + "\n")

    def do_GET(self) -> None:
        self.note(None)
        if self.path == "/v1/models":
            if os.environ.get("JUDGE_KEY") and self.headers.get("Authorization") != (
                f"Bearer {os.environ['JUDGE_KEY']}"
            ):
                self.reply(401, {"error": "no key"})
                return
            self.reply(200, {"object": "list", "data": [{"id": "tiny"}]})
        else:
            self.reply(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.note(body)
        if self.path == "/v1/chat/completions":
            text = body["messages"][-1]["content"]
            self.obey(text, lambda said: {"choices": [{"message": {"content": said}}]})
        elif self.path in ("/classify", "/pooling"):
            self.classify(body)
        elif self.path == "/predict":
            self.reply(
                200,
                [
                    [{"label": "good", "score": len(t) / 100}, {"label": "bad", "score": 0.0}]
                    for (t,) in body["inputs"]
                ],
            )
        else:
            self.reply(404, {"detail": "Not Found"})

    def classify(self, body: Any) -> None:
        texts = body.get("input") or [body["messages"][-1]["content"]]
        if len(texts) > 1 and any("do:too_long" in text for text in texts):
            self.reply(400, {"error": "one of the inputs is too long"})
            return
        if any("do:too_long" in text for text in texts):
            self.reply(400, {"error": "too long"})
            return
        key = "probs" if self.path == "/classify" else "data"
        data = [{"index": i, key: [len(text) / 100]} for i, text in enumerate(texts)]
        self.reply(200, {"data": data[::-1]})

    def obey(self, text: str, answer: Any) -> None:
        orders = ORDER.findall(text)
        order = orders[-1] if orders else "score_8"
        with self.lock:
            self.seen[text] = self.seen.get(text, 0) + 1
            times = self.seen[text]
        if order.startswith("score_"):
            self.reply(200, answer(f"Score: 3 would be harsh.\n**Score:** {order[6:]}"))
        elif order.startswith("slow_"):
            time.sleep(int(order[5:]) / 1000)
            self.reply(200, answer("Score: 7"))
        elif order.startswith("flaky_"):
            # 500 until the time that the order names.
            if times < int(order[6:]):
                self.reply(500, {"error": "try again"})
            else:
                self.reply(200, answer("Score: 9"))
        elif order == "busy":
            if times < 2:
                self.reply(429, {"error": "slow down"}, {"Retry-After": "1"})
            else:
                self.reply(200, answer("Score: 6"))
        elif order == "html":
            self.raw(200, b"<html><body>Bad gateway</body></html>", "text/html")
        elif order == "no_score":
            self.reply(200, answer("I would rather not say."))
        elif order == "unfinished":
            choice = {
                "message": {"content": "I would say Score: 3, but"},
                "finish_reason": "length",
            }
            self.reply(200, {"choices": [choice]})
        elif order == "too_high":
            self.reply(200, answer("Score: 11"))
        elif order == "nan":
            self.raw(200, b'{"choices": [{"message": {"content": NaN}}]}')
        elif order == "wrong_json":
            self.reply(200, {"choices": []})
        elif order == "deep":
            self.raw(200, b"[" * 100_000)
        elif order == "huge":
            self.raw(200, b" " * 10_000_000)
        elif order == "endless":
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.close_connection = True
            try:
                while True:
                    self.wfile.write(b" ")
                    time.sleep(0.05)
            except OSError:
                pass
        elif order == "drip_headers":
            try:
                for number in range(2000):
                    self.wfile.write(b"HTTP/1.1 200 OK\r\n" if not number else b"X")
                    time.sleep(0.05)
            except OSError:
                pass
        elif order == "hang":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            self.wfile.flush()
            time.sleep(30)
        elif order == "cut":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            self.close_connection = True
        elif order == "reset":
            linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()
            raise ConnectionAbortedError
        elif order == "redirect":
            self.reply(307, {}, {"Location": "http://127.0.0.1:9/elsewhere"})
        elif order == "refuse":
            self.reply(400, {"error": "not like this"})
        elif order == "json":
            self.reply(200, answer('Here: ```json\n{"why": "fine", "score": 4}\n```'))
        else:
            self.reply(500, {"error": order})

    def reply(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        self.raw(status, json.dumps(body).encode(), "application/json", headers)

    def raw(
        self,
        status: int,
        body: bytes,
        kind: str = "application/json",
        headers: dict[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:
            pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


def main() -> None:
    Handler.log_path = sys.argv[2]
    server = Server(("127.0.0.1", int(sys.argv[1])), Handler)
    if len(sys.argv) > 3:
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(sys.argv[3], sys.argv[4])
        server.socket = context.wrap_socket(server.socket, server_side=True)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
