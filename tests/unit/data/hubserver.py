"""A local HTTP server that speaks enough of the Hugging Face hub and of ModelScope."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """``files`` by path in the data set's repository; ``requests`` are the lines that came in.

    ``models`` holds the files of each model by its name.
    """

    def __init__(
        self, files: dict[str, bytes], models: dict[str, dict[str, bytes]] | None = None
    ) -> None:
        self.files = files
        self.models = models or {}
        self.requests: list[str] = []
        self.break_after: int | None = None
        """Cut the next download after so many bytes, once."""
        self.status = 200
        self.url = ""

    def hf_file(self, path: str) -> bytes | None:
        match = re.fullmatch(r"/datasets/openai/gsm8k/resolve/[^/]+/(.+)", path)
        return self.files.get(match.group(1)) if match else None

    def hf_model(self, path: str) -> bytes | dict[str, Any] | None:
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)", path)
        if match and match.group(1) in self.models:
            files = self.models[match.group(1)]
            listed = [{"rfilename": name, "size": len(body)} for name, body in files.items()]
            return {"id": match.group(1), "sha": COMMIT, "siblings": listed}
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        return self.models.get(match.group(1), {}).get(match.group(2)) if match else None

    def modelscope(self, path: str, query: dict[str, list[str]]) -> bytes | dict[str, Any] | None:
        base = "/api/v1/datasets/AI-ModelScope/gsm8k/repo"
        if path == f"{base}/tree":
            root = query["Root"][0]
            listed = [
                {
                    "Path": name,
                    "Name": name.rsplit("/", 1)[-1],
                    "Type": "blob",
                    "Size": len(body),
                    "Sha256": hashlib.sha256(body).hexdigest(),
                }
                for name, body in self.files.items()
                if name.startswith(f"{root}/")
            ]
            return {"Code": 200, "Success": True, "Data": {"Files": listed}}
        if path == base:
            return self.files.get(query["FilePath"][0])
        return None


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(send=False)

        def do_GET(self) -> None:
            self.answer(send=True)

        def answer(self, send: bool) -> None:
            parts = urlsplit(self.path)
            hub.requests.append(f"{self.command} {self.path}")
            found: Any = hub.hf_file(parts.path)
            if found is None:
                found = hub.hf_model(parts.path)
            if found is None:
                found = hub.modelscope(parts.path, parse_qs(parts.query))
            if hub.status != 200 or found is None:
                self.reply(hub.status if hub.status != 200 else 404, b"", {}, send)
                return
            body = json.dumps(found).encode() if isinstance(found, dict) else found
            headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
            start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            status = 200
            if start and send:
                first = int(start.group(1))
                headers["Content-Range"] = f"bytes {first}-{len(body) - 1}/{len(body)}"
                body, status = body[first:], 206
            self.reply(status, body, headers, send)

        def reply(self, status: int, body: bytes, headers: dict[str, str], send: bool) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if not send:
                return
            if hub.break_after is not None and len(body) > hub.break_after:
                body, hub.break_after = body[: hub.break_after], None
                self.close_connection = True
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
