"""Where models come from: folders, GGUF files, the Hub (a local stub of it); and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rewake.errors import ModelError
from rewake.models import made_once, resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubStub(BaseHTTPRequestHandler):
    """As much of the Hub's protocol as a download needs, over one folder."""

    folder: Path

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/models/org/tiny/tree/"):
            tree = [{"type": "file", "path": p.name, "size": p.stat().st_size, "oid": "0" * 40} for p in sorted(self.folder.iterdir())]
            self.send(200, json.dumps(tree).encode(), "application/json", body)
        elif path.startswith("/api/models/org/tiny"):
            files = [{"rfilename": p.name} for p in sorted(self.folder.iterdir())]
            self.send(200, json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": files}).encode(), "application/json", body)
        elif path.startswith("/org/tiny/resolve/") and (file := self.folder / path.rsplit("/", 1)[-1]).is_file():
            self.send(200, file.read_bytes(), "application/octet-stream", body)
        else:
            self.send(404, b"{}", "application/json", body)

    def send(self, status: int, content: bytes, kind: str, body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub(tiny: Path) -> Iterator[str]:
    HubStub.folder = tiny
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubStub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def pull(name: str, endpoint: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "rewake", "pull", "--model", name]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_hub_repository_is_fetched(hub: str, tiny: Path, tmp_path: Path) -> None:
    pulled = pull("org/tiny", hub, tmp_path)
    assert pulled.returncode == 0, pulled.stderr
    folder = Path(pulled.stdout.strip())
    for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (tiny / name).read_bytes()


def test_a_repository_that_is_not_there_is_an_error_that_says_so(hub: str, tmp_path: Path) -> None:
    pulled = pull("org/none", hub, tmp_path)
    assert pulled.returncode == 1 and "'org/none' could not be fetched" in pulled.stderr
    nonsense = pull("not a model", hub, tmp_path)
    assert nonsense.returncode == 1 and "no model 'not a model'" in nonsense.stderr


def test_a_folder_is_used_as_it_is(tiny: Path) -> None:
    from rewake.config import Config
    from rewake.service import load_backend

    assert resolve(str(tiny)) == tiny
    backend = load_backend(Config(model=str(tiny), memory=2**20, threads=2), tiny)
    assert backend.spec.group.kv_heads == 2 and backend.spec.group.k_dim == 16


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither a .gguf file nor a folder with a config.json"):
        resolve(str(tmp_path))


def test_a_model_is_made_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWAKE_MODELS", str(tmp_path))

    def broken(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise ModelError("no")

    with pytest.raises(ModelError):
        made_once("m", broken)
    assert list(tmp_path.iterdir()) == []
    assert made_once("m", lambda folder: None).is_dir()
    assert made_once("m", broken).is_dir(), "made once"
