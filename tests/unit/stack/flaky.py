"""A real HTTP server with a package index on it, and every bad habit of a bad line."""

from __future__ import annotations

import hashlib
import io
import json
import threading
import zipfile
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote

from verl_p40.stack.http import RetryPolicy

QUICK = RetryPolicy(attempts=3, first_wait=0.01, longest_wait=0.02, read_timeout=5.0)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Resource:
    """A path of the site and what goes wrong with it, one entry used up a request."""

    body: bytes
    content_type: str = "application/octet-stream"
    statuses: list[int] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    """Close the connection after so many bytes of the answer."""
    ignores_range: bool = False
    wrong_range: bool = False


class Site:
    """``with Site() as site``: serves ``resources`` until the block ends; ``log`` is what was asked."""

    def __init__(self) -> None:
        self.resources: dict[str, Resource] = {}
        self.log: list[tuple[str, str | None]] = []
        self.html_only = False
        self._projects: dict[str, list[tuple[str, str]]] = {}
        site = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                site._answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> Site:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def index(self) -> str:
        return f"{self.root}/simple"

    def publish(self, project: str, filename: str, body: bytes, sha: str | None = None) -> Resource:
        """Put a file on the index; ``sha`` is what the index claims, by default the truth."""
        resource = Resource(body)
        self.resources[f"/files/{filename}"] = resource
        self._projects.setdefault(project, []).append((filename, sha or sha256(body)))
        return resource

    def asked(self, path: str) -> list[str | None]:
        """The Range headers of the requests for a path, in order."""
        return [given for name, given in self.log if name == path]

    def _page(self, project: str, accept: str) -> Resource | None:
        files = self._projects.get(project)
        if files is None:
            return None
        if "json" in accept and not self.html_only:
            entries = [
                {
                    "filename": name,
                    "url": f"../../files/{quote(name)}",
                    "hashes": {"sha256": sha},
                    "size": len(self.resources[f"/files/{name}"].body),
                }
                for name, sha in files
            ]
            body = json.dumps({"meta": {"api-version": "1.1"}, "files": entries}).encode()
            return Resource(body, "application/vnd.pypi.simple.v1+json")
        links = "".join(
            f'<a href="../../files/{quote(name)}#sha256={sha}" data-x="1">{name}</a><br/>'
            for name, sha in files
        )
        return Resource(f"<!DOCTYPE html><body>{links}</body>".encode(), "text/html")

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(request.path)
        wanted = request.headers.get("Range")
        self.log.append((path, wanted))
        resource = self.resources.get(path)
        if resource is None and path.startswith("/simple/"):
            resource = self._page(path.split("/")[2], request.headers.get("Accept", ""))
        if resource is None:
            request.send_error(404)
            return
        if resource.statuses and (status := resource.statuses.pop(0)) >= 400:
            request.send_error(status)
            return
        body, start = resource.body, 0
        if wanted and not resource.ignores_range:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(body):
                request.send_response(416)
                request.send_header("Content-Range", f"bytes */{len(body)}")
                request.send_header("Content-Length", "0")
                request.end_headers()
                return
            if resource.wrong_range:
                start += 1
            request.send_response(206)
            request.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            request.send_response(200)
        request.send_header("Content-Type", resource.content_type)
        request.send_header("Content-Length", str(len(body) - start))
        request.end_headers()
        piece = body[start:]
        if resource.cuts:
            piece = piece[: resource.cuts.pop(0)]
            request.close_connection = True
        request.wfile.write(piece)


def wheel(project: str, version: str, requires: tuple[str, ...] = ()) -> tuple[str, bytes]:
    """A real, installable wheel with one module; its file name and bytes."""
    name = project.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    metadata = [
        "Metadata-Version: 2.1",
        f"Name: {project}",
        f"Version: {version}",
        *(f"Requires-Dist: {item}" for item in requires),
        "",
    ]
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": "\n".join(metadata),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(path), text)
    return f"{name}-{version}-py3-none-any.whl", buffer.getvalue()
