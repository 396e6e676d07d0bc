"""An OpenAI-compatible server on this machine that notes what it is asked."""

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TRIAL = "Reply with one word."
Reply = str | int
"""The text of a reply, or the status of a refusal."""


def tenths(text: str) -> Reply:
    """A score that depends on the message alone."""
    return f"It is so. Score: 0.{int(hashlib.sha256(text.encode()).hexdigest(), 16) % 10}"


class JudgeServer(ThreadingHTTPServer):
    """`reply`: from the text of a message and how often it has come, beside this time, to a reply."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply: Callable[[str, int], Reply] = lambda text, before: tenths(text)
        self.seconds = 0.0
        self.bodies = list[dict[str, Any]]()
        self.headers = list[dict[str, str]]()
        self.most_at_once = self._at_once = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    @property
    def counts(self) -> Counter[str]:
        """How often each message came, without trials."""
        texts = [body["messages"][0]["content"] for body in self.bodies]
        return Counter(text for text in texts if text != TRIAL)

    def answer(self, body: dict[str, Any], headers: dict[str, str]) -> Reply:
        text = body["messages"][0]["content"]
        with self._lock:
            before = self.counts[text]
            self.bodies.append(body)
            self.headers.append(headers)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            time.sleep(self.seconds)
            return self.reply(text, before)
        finally:
            with self._lock:
                self._at_once -= 1


class _Handler(BaseHTTPRequestHandler):
    server: JudgeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply = self.server.answer(body, dict(self.headers))
        if self.path != "/v1/chat/completions":
            reply = 404
        content: dict[str, Any] = {"choices": [{"message": {"role": "assistant", "content": reply}}]}
        if isinstance(reply, int):
            # Servers repeat the key that they refuse.
            content = {"error": {"message": f"refused {self.headers.get('Authorization')}"}}
        data = json.dumps(content).encode()
        self.send_response(reply if isinstance(reply, int) else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def judge_server() -> Iterator[JudgeServer]:
    server = JudgeServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
