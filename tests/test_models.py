"""Where models come from: folders, GGUF files, the Hub (a local stub of it); what is refused; and what files are known to hold."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rewake import cache
from rewake.cache import file_digest, made_once
from rewake.cli import main
from rewake.errors import ModelError
from rewake.models import kept, label, resolve
from tests.hub import COMMITS, Hub, rewake

NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")


@pytest.fixture
def hub(tiny: Path, tmp_path: Path) -> Iterator[Hub]:
    copy = tmp_path / "tiny"
    shutil.copytree(tiny, copy)
    (copy / "README.md").write_text("not needed")
    (copy / "onnx").mkdir()
    (copy / "onnx" / "config.json").write_text("{}")
    made = Hub({"org/tiny": copy})
    yield made
    made.close()


@dataclass
class Pulled:
    code: int
    folder: Path
    errors: str


def pull(name: str, hub: Hub, models: Path, **more: str) -> Pulled:
    process = rewake("pull", name, hub=hub.endpoint, models=models, **more)
    out, errors = process.communicate(timeout=300)
    return Pulled(process.returncode, Path(out.strip()), errors)


def test_a_hub_repository_is_fetched_and_a_start_needs_no_network_then(
    hub: Hub, tiny: Path, tmp_path: Path, own_cache: None, capsys: pytest.CaptureFixture[str]
) -> None:
    pulled = pull("org/tiny", hub, tmp_path / "models")
    assert pulled.code == 0, pulled.errors
    for name in NEEDED:
        assert (pulled.folder / name).read_bytes() == (tiny / name).read_bytes()
    assert not (pulled.folder / "README.md").exists()
    asked = len(hub.ranges)
    assert resolve("org/tiny") == pulled.folder and label("org/tiny") == "org/tiny"
    assert len(hub.ranges) == asked
    assert kept() == [("org/tiny", pulled.folder)]
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    assert f"{pulled.folder}" in shown and "gemma3-270m" in shown and "not fetched yet" in shown


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model cache of `pull`, in this process."""
    monkeypatch.setenv("REWAKE_MODELS", str(tmp_path / "models"))


def test_only_pull_takes_a_newer_commit_and_of_it_only_what_has_changed(hub: Hub, tmp_path: Path, own_cache: None) -> None:
    old = pull("org/tiny", hub, tmp_path / "models").folder
    hub.commit = COMMITS[1]
    (hub.repositories["org/tiny"] / "chat_template.jinja").write_text("{{ messages }}")
    assert resolve("org/tiny") == old
    hub.ranges.clear()
    new = pull("org/tiny", hub, tmp_path / "models").folder
    assert new != old and (new / "chat_template.jinja").read_text() == "{{ messages }}" and resolve("org/tiny") == new
    assert [name for name, _ in hub.ranges] == ["chat_template.jinja"]


def test_a_broken_connection_is_resumed_where_it_broke(hub: Hub, tiny: Path, tmp_path: Path) -> None:
    hub.breaks = [12_000_000]  # of 25: it is written in blocks of 10 MB
    pulled = pull("org/tiny", hub, tmp_path / "models")
    assert pulled.code == 0, pulled.errors
    assert (pulled.folder / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    resumed = [int(r.removeprefix("bytes=").rstrip("-")) for _, r in hub.ranges if r]
    assert len(resumed) == 1 and 10_000_000 <= resumed[0] <= 12_000_000


def test_a_download_that_was_killed_goes_on_where_it_was(hub: Hub, tiny: Path, tmp_path: Path) -> None:
    hub.breaks, hub.stalls = [12_000_000], True
    models = tmp_path / "models"
    process = rewake("pull", "org/tiny", hub=hub.endpoint, models=models)
    parts = models / "hub" / "parts"
    while not any(p.stat().st_size >= 2**20 for p in parts.glob("*model.safetensors")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.kill()
    process.communicate()
    hub.resumed.set()
    had = max(p.stat().st_size for p in parts.glob("*model.safetensors"))
    hub.ranges.clear()
    pulled = pull("org/tiny", hub, models)
    assert pulled.code == 0, pulled.errors
    assert ("model.safetensors", f"bytes={had}-") in hub.ranges
    assert (pulled.folder / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_what_does_not_have_the_hubs_checksum_is_refused_and_fetched_anew(hub: Hub, tmp_path: Path, name: str) -> None:
    """Large files have a SHA-256, small ones git's."""
    hub.wrong = {name}
    pulled = pull("org/tiny", hub, tmp_path / "models")
    assert pulled.code == 1 and f"{name} of 'org/tiny' is not what the Hub says" in pulled.errors
    assert not list((tmp_path / "models" / "hub").glob("org--tiny*"))
    hub.wrong = set()
    assert pull("org/tiny", hub, tmp_path / "models").code == 0


def test_what_cannot_be_fetched_is_an_error_that_says_what_to_do(hub: Hub, tmp_path: Path) -> None:
    def errors(name: str, **more: str) -> str:
        pulled = pull(name, hub, tmp_path / "models", **more)
        assert pulled.code == 1 and "Traceback" not in pulled.errors
        return pulled.errors

    assert "'org/none' could not be fetched: the Hub has no such repository" in errors("org/none")
    assert "no model 'not a model'" in errors("not a model")
    assert "Names that need no Hub: smollm2-135m" in errors("smolm2-135m")
    assert "'org/tiny' has no file 'x.gguf'; its GGUF files: none" in errors("org/tiny:x.gguf")
    assert "HF_HUB_OFFLINE is set" in errors("org/tiny", HF_HUB_OFFLINE="1")
    (hub.repositories["org/tiny"] / "model.safetensors").rename(hub.repositories["org/tiny"] / "tiny.gguf")
    assert "has no safetensors files: name one of org/tiny:tiny.gguf" in errors("org/tiny")
    hub.gated = {"org/tiny"}
    assert "is gated: accept its terms" in errors("org/tiny:tiny.gguf")


def test_a_gguf_file_in_a_repository_is_what_the_same_file_is_here(hub: Hub, tmp_path: Path, own_cache: None, gguf: Path) -> None:
    shutil.copy(gguf, hub.repositories["org/tiny"] / "small.gguf")
    pulled = pull("org/tiny:small.gguf", hub, tmp_path / "models")
    assert pulled.code == 0, pulled.errors
    assert not list((tmp_path / "models/hub/parts").glob("*.gguf")), "what it was made of is not kept"
    asked = len(hub.ranges)
    assert resolve("org/tiny:small.gguf") == pulled.folder
    local = tmp_path / "small.gguf"
    shutil.copy(gguf, local)
    assert resolve(str(local)) == pulled.folder, "by content, not by place"
    assert label(str(local)) == "small" and len(hub.ranges) == asked
    assert ("org/tiny:small.gguf", pulled.folder) in kept()


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of one layer as GGUF, with a byte-level vocabulary and a chat template of its own."""
    from tests.gguf import write_tiny_gguf

    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_tiny_gguf(path)
    return path


def test_a_gguf_file_has_its_tokenizer_and_its_chat_template(gguf: Path, own_cache: None) -> None:
    from rewake.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(resolve(str(gguf)))
    text = tokenizer.render([{"role": "user", "content": "Hi"}])
    assert text == "<|im_start|>user: Hi\n<|im_start|>assistant: "
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("keep", [0, 4, 200, -400], ids=["empty", "its first word", "no tensors", "its last ones"])
def test_what_is_no_whole_gguf_file_is_refused(gguf: Path, own_cache: None, tmp_path: Path, keep: int) -> None:
    """A download that broke off, most of all."""
    (cut := tmp_path / "cut.gguf").write_bytes(gguf.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"cut\.gguf cannot be converted: "):
        resolve(str(cut))


def test_a_gguf_file_with_other_content_is_another_model(gguf: Path, own_cache: None, tmp_path: Path) -> None:
    """Even one of the same name, size and times."""
    file = tmp_path / "m.gguf"
    shutil.copy2(gguf, file)
    first = resolve(str(file))
    content, stat = bytearray(file.read_bytes()), file.stat()
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert resolve(str(file)) != first


def test_a_folder_is_used_as_it_is(tiny: Path) -> None:
    from rewake.config import Config
    from rewake.service import load_backend

    assert resolve(str(tiny)) == tiny and label(str(tiny)) == tiny.name
    backend = load_backend(Config(model=str(tiny), memory=2**20, threads=2), tiny)
    assert backend.spec.group.kv_heads == 1 and backend.spec.group.k_dim == 32


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


class TestDigests:
    """SHA-256 of files, known from before."""

    @pytest.fixture
    def file(self, tmp_path: Path, own_cache: None) -> Path:
        path = tmp_path / "weights"
        path.write_bytes(b"a" * 1000)
        return path

    def grown_old(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cache, "YOUNG", -1)

    def note(self, tmp_path: Path) -> Path:
        (note,) = (tmp_path / "models" / "digests").iterdir()
        return note

    def test_it_is_computed_once(self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.grown_old(file, monkeypatch)
        assert file_digest(file) == file_digest(file)
        known = json.loads(self.note(tmp_path).read_text())
        self.note(tmp_path).write_text(json.dumps({**known, "sha256": "known"}))
        assert file_digest(file) == "known"

    def test_a_changed_file_is_read_again_even_with_its_old_times_and_size(
        self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.grown_old(file, monkeypatch)
        before, stat = file_digest(file), file.stat()
        other = tmp_path / "other"
        other.write_bytes(b"b" * 1000)
        os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        other.replace(file)
        assert file_digest(file) != before

    def test_what_could_still_change_unseen_is_not_noted(self, file: Path, tmp_path: Path) -> None:
        file_digest(file)
        assert not (tmp_path / "models" / "digests").exists()

    def test_a_damaged_note_is_none(self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.grown_old(file, monkeypatch)
        digest = file_digest(file)
        for damage in (b"", b"{", b"[]", b'{"stamp": 1}', b"\xff"):
            self.note(tmp_path).write_bytes(damage)
            assert file_digest(file) == digest
