"""A stub of the Hugging Face Hub: as much of its protocol as downloads need, over folders, and ways to misbehave."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMITS = ("0123456789abcdef0123456789abcdef01234567", "fedcba9876543210fedcba9876543210fedcba98")


class Hub:
    """Serves `org/NAME` for each of `repositories`. What a test changes is seen by the next request."""

    def __init__(self, repositories: dict[str, Path]) -> None:
        self.repositories = repositories
        self.commit = COMMITS[0]
        self.gated: set[str] = set()
        self.breaks: list[int] = []  # the next answers with a body end after so many bytes, though more was promised
        self.stalls = False  # they do not end, but nothing more comes
        self.wrong: set[str] = set()  # files that are sent with a byte flipped
        self.ranges: list[tuple[str, str]] = []  # (file, Range header) of what was asked for
        self.resumed = threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        parts = request.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self.tell_of(request, "/".join(parts[2:4]))
        elif "resolve" in parts:
            self.send_file(request, "/".join(parts[:2]), "/".join(parts[4:]))
        else:
            self.refuse(request, 404, "EntryNotFound")

    def tell_of(self, request: BaseHTTPRequestHandler, repository: str) -> None:
        folder = self.repositories.get(repository)
        if folder is None:
            self.refuse(request, 404, "RepoNotFound")
            return
        files = [about(p, folder) for p in sorted(folder.rglob("*")) if p.is_file()]
        body = json.dumps({"id": repository, "sha": self.commit, "siblings": files}).encode()
        self.send(request, 200, body, {"Content-Type": "application/json"})

    def send_file(self, request: BaseHTTPRequestHandler, repository: str, name: str) -> None:
        if repository in self.gated:
            self.refuse(request, 403, "GatedRepo")
            return
        content = bytearray((self.repositories[repository] / name).read_bytes())
        if name in self.wrong:
            content[len(content) // 2] ^= 1
        asked = request.headers.get("Range", "")
        self.ranges.append((name, asked))
        first = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
        headers = {"Content-Range": f"bytes {first}-{len(content) - 1}/{len(content)}"} if asked else {}
        self.send(request, 206 if asked else 200, bytes(content[first:]), headers)

    def refuse(self, request: BaseHTTPRequestHandler, status: int, code: str) -> None:
        self.send(request, status, b"{}", {"X-Error-Code": code})

    def send(self, request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        if self.breaks and len(body) > self.breaks[0] and status in (200, 206) and "Content-Type" not in headers:
            request.wfile.write(body[: self.breaks.pop(0)])
            request.wfile.flush()
            if self.stalls:
                self.resumed.wait(60)
            request.close_connection = True
        else:
            request.wfile.write(body)


def about(path: Path, folder: Path) -> dict[str, Any]:
    """As the Hub lists a file: large ones by their SHA-256, small ones by git's name for them."""
    content = path.read_bytes()
    listed = {"rfilename": path.relative_to(folder).as_posix(), "size": len(content)}
    if len(content) > 100_000:
        lfs = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        return {**listed, "blobId": "0" * 40, "lfs": lfs}
    return {**listed, "blobId": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()}


def rewake(*arguments: str, hub: str, models: Path, **more: str) -> subprocess.Popen[str]:
    """The command line in a process of its own, with a model cache and a Hub of its own."""
    own = {"HF_ENDPOINT": hub, "HF_HOME": str(models / "hf"), "REWAKE_MODELS": str(models), "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-m", "rewake", *arguments]
    return subprocess.Popen(command, env={**os.environ, **own, **more}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
