#!/usr/bin/env python3
"""Stands in for llama.cpp's server: answers prompts with the number of their tokens, streamed.

As there, a token that ends within a character has no event: here the second, and the last, of a
prompt that begins with 7. One that begins with 11 breaks off; one that begins with 13 is refused
with status 400.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Health, and completions."""

    def do_GET(self) -> None:
        self._start(200, "application/json")
        self.wfile.write(b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["prompt"][0] == 13:
            self._start(400, "application/json")
            self.wfile.write(b'{"error": "unlucky"}')
            return
        self._start(200, "text/event-stream")
        if body["prompt"][0] == 11:
            self._send({"error": {"message": "no room"}})
            return
        count = body["n_predict"]
        for i in range(1, count + 1):
            if body["prompt"][0] != 7 or i not in (2, count):
                told = {"tokens": [len(body["prompt"])], "tokens_predicted": i, "stop": False}
                self._send(told)
        self._send({"tokens": [], "tokens_predicted": count, "stop": True})

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def _start(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def _send(self, told: object) -> None:
        self.wfile.write(b"data: " + json.dumps(told).encode() + b"\n\n")


if __name__ == "__main__":
    if "--version" in sys.argv:
        print("version: 1 (fake)", file=sys.stderr)
    elif "--parallel" in sys.argv and "--cont-batching" in sys.argv:
        port = int(sys.argv[sys.argv.index("--port") + 1])
        ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
    else:
        sys.exit("fake: bad options")
