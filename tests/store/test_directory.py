"""Files: their bytes, who can read them, and what is not believed."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from rewake.errors import CorruptFile, DirectoryLocked, StoreError
from rewake.planes import PagePlanes
from rewake.quant import CODECS, PAGE_TOKENS, PageLayout
from rewake.store.base import BranchRecord, Commit, PageRecord, StoredFile
from rewake.store.crypto import Cipher
from rewake.store.directory import BLOCK, FORMAT, Directory
from rewake.store.files import Files
from rewake.store.index import VERSION

LAYOUT = PageLayout(2, 3, 64, 64, CODECS["q4"])
PLANES = PagePlanes.single(LAYOUT)


CIPHER = Cipher(bytes(range(32)))
both = pytest.mark.parametrize("cipher", [None, CIPHER], ids=["clear", "encrypted"])


def directory(path: Path, signature: bytes = b"sig", cipher: Cipher | None = None) -> Directory:
    return Directory(path, signature, PLANES, cipher=cipher)


def random_page(seed: int = 0, rows: int = PAGE_TOKENS) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, LAYOUT.with_rows(rows).page_bytes).astype(np.uint8)


def write(store: Directory, name: str = "pages/ab/x.safetensors", seed: int = 0) -> StoredFile:
    return store.write(name, [random_page(seed).data], 0, PAGE_TOKENS, {"key": "k", "namespace": "ns"})


def test_the_official_reader_opens_a_page_and_sees_its_bytes(tmp_path: Path) -> None:
    store = directory(tmp_path)
    page = random_page()
    write(store)
    with safe_open(tmp_path / "pages/ab/x.safetensors", framework="numpy") as opened:  # type: ignore[no-untyped-call]
        assert opened.metadata() == {"format": FORMAT, "key": "k", "namespace": "ns"}
        assert len(list(opened.keys())) == 2 * 6
        for layer, field, at in LAYOUT.arrays():
            if field.dtype == "U32":  # numpy has no bfloat16
                codes = opened.get_tensor(f"{layer}.{field.name}")
                assert codes.shape == (3, PAGE_TOKENS, field.width)
                assert codes.tobytes() == page[at : at + LAYOUT.field_bytes(field)].tobytes()
    store.close()


def test_the_file_is_a_padded_header_and_the_page(tmp_path: Path) -> None:
    store = directory(tmp_path)
    file = write(store)
    content = (tmp_path / file.name).read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert (8 + length) % BLOCK == 0 and file.offset == 8 + length
    header = json.loads(content[8 : 8 + length])
    assert header["0.k.codes"] == {"dtype": "U32", "shape": [3, 256, 8], "data_offsets": [0, 24576]}
    assert content[file.offset :] == random_page().tobytes()
    store.close()


@both
def test_what_was_written_is_read(tmp_path: Path, cipher: Cipher | None) -> None:
    store = directory(tmp_path, cipher=cipher)
    file = write(store)
    into = np.zeros(LAYOUT.page_bytes, np.uint8)
    store.read(file, into.data)
    assert (into == random_page()).all()
    store.close()


@both
@pytest.mark.parametrize("damage", ["flip first", "flip last", "truncate", "empty", "swap", "gone", "unreadable"])
def test_a_damaged_file_is_never_believed(tmp_path: Path, cipher: Cipher | None, damage: str) -> None:
    """W2, W3."""
    store = directory(tmp_path, cipher=cipher)
    file, other = write(store), write(store, "pages/cd/y.safetensors", seed=1)
    path = tmp_path / file.name
    content = bytearray(path.read_bytes())
    if damage.startswith("flip"):
        content[file.offset if damage == "flip first" else -1] ^= 1
        path.write_bytes(content)
    elif damage == "truncate":
        path.write_bytes(content[:-1])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "swap":
        os.replace(tmp_path / other.name, path)
    else:
        path.unlink()
        if damage == "unreadable":
            path.mkdir()
    with pytest.raises(CorruptFile, match=file.name):
        store.read(file, bytearray_of(LAYOUT.page_bytes))
    store.quarantine(file)
    assert not path.exists()
    store.close()


def bytearray_of(size: int) -> memoryview:
    return memoryview(bytearray(size))


@both
def test_only_what_was_committed_is_remembered(tmp_path: Path, cipher: Cipher | None) -> None:
    store = directory(tmp_path, cipher=cipher)
    file, orphan = write(store), write(store, "pages/cd/y.safetensors")
    page = PageRecord(b"k", b"", 1, "ns", b"tokens", (file,))
    child = PageRecord(b"a", b"k", 2, "ns", b"tokens", (StoredFile("pages/a", 0, 256, 4096, 10, b"sum"),))
    branch = BranchRecord("b1", "ns", "agent", b"k", b"more", (StoredFile("segments/s", 0, 5, 4096, 10, b"sum"),), 1.0, 2.0)
    store.commit(Commit(pages=(page, child), branches=(branch,)))
    store.close()
    (tmp_path / "pages/cd/notes.txt").write_text("mine")
    store = directory(tmp_path, cipher=cipher)
    assert store.load().pages == (page, child)  # parents first, whatever their keys
    assert store.load().branches == (branch,)
    assert not (tmp_path / orphan.name).exists()
    assert (tmp_path / "pages/cd/notes.txt").exists()  # L7
    store.commit(Commit(gone_pages=(b"a",), gone_branches=("b1",)))
    assert store.load().pages == (page,) and store.load().branches == ()
    store.close()


@both
def test_another_signature_sees_nothing_and_removes_nothing(tmp_path: Path, cipher: Cipher | None) -> None:
    store = directory(tmp_path, cipher=cipher)
    file = write(store)
    store.commit(Commit(pages=(PageRecord(b"k", b"", 1, "ns", b"t", (file,)),)))
    store.close()
    other = directory(tmp_path, b"other", cipher)
    assert other.load().pages == ()
    assert (tmp_path / file.name).exists()
    other.close()


@both
def test_a_lost_manifest_loses_no_files(tmp_path: Path, cipher: Cipher | None) -> None:
    store = directory(tmp_path, cipher=cipher)
    file = write(store)
    store.commit(Commit(pages=(PageRecord(b"k", b"", 1, "ns", b"t", (file,)),)))
    store.close()
    for path in tmp_path.glob("manifest.sqlite*"):
        path.unlink()
    store = directory(tmp_path, cipher=cipher)
    assert store.load().pages == ()
    assert (tmp_path / file.name).exists()
    store.close()


def test_one_process_owns_a_directory(tmp_path: Path) -> None:
    """D4."""
    store = directory(tmp_path)
    code = (
        "import sys; from pathlib import Path; from tests.store.test_directory import directory\n"
        "from rewake.errors import DirectoryLocked\n"
        "try: directory(Path(sys.argv[1]))\n"
        "except DirectoryLocked as error: print(error); sys.exit(7)"
    )
    found = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert found.returncode == 7 and "another rewake process" in found.stdout, found.stderr
    store.close()
    directory(tmp_path).close()


def test_in_one_process_too(tmp_path: Path) -> None:
    store = directory(tmp_path)
    with pytest.raises(DirectoryLocked):
        directory(tmp_path)
    store.close()


def test_newer_and_damaged_manifests_are_refused_with_advice(tmp_path: Path) -> None:
    import sqlite3

    directory(tmp_path / "a").close()
    with sqlite3.connect(tmp_path / "a/manifest.sqlite") as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    db.close()
    with pytest.raises(StoreError, match="newer version"):
        directory(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/manifest.sqlite").write_bytes(b"not a database, surely" * 100)
    with pytest.raises(StoreError, match="move the directory away"):
        directory(tmp_path / "b")


def test_what_cannot_be_a_directory_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match="choose another --data"):
            directory(path)


@pytest.mark.skipif(os.name == "nt", reason="modes are a POSIX matter")
def test_nobody_else_can_read_memories(tmp_path: Path) -> None:
    store = directory(tmp_path / "data")
    file = write(store)
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700
    for name in (file.name, "manifest.sqlite"):
        assert stat.S_IMODE((tmp_path / "data" / name).stat().st_mode) == 0o600
    store.close()


class Recording(Files):
    """Remembers which folders were synced; fails to sync or remove where it is told to."""

    def __init__(self) -> None:
        self.synced: list[Path] = []
        self.unsyncable: Path | None = None
        self.removes = True

    def sync_folder(self, folder: Path) -> None:
        if folder == self.unsyncable:
            raise OSError(errno.EIO, "Input/output error")
        super().sync_folder(folder)
        self.synced.append(folder)

    def remove(self, path: Path) -> None:
        if not self.removes:
            raise OSError(errno.EIO, "Input/output error")
        super().remove(path)


def test_every_folder_on_the_way_to_a_file_is_synced_before_it_is_promised(tmp_path: Path) -> None:
    """A power cut takes entries of folders that were not; the directory itself is an entry of its parent, in every process."""
    files, data = Recording(), tmp_path / "new" / "data"
    store = Directory(data, b"sig", PLANES, files=files)
    write(store)
    store.commit(Commit())
    assert {tmp_path, tmp_path / "new", data, data / "pages", data / "pages/ab"} <= set(files.synced)
    store.close()
    files.synced.clear()
    store = Directory(data, b"sig", PLANES, files=files)  # the one before may have been killed between mkdir and sync
    store.commit(Commit())
    assert {tmp_path / "new", data, data / "pages"} <= set(files.synced)
    store.close()


def test_a_folder_that_could_not_be_synced_is_synced_before_the_next_commit(tmp_path: Path) -> None:
    files = Recording()
    store = Directory(tmp_path, b"sig", PLANES, files=files)
    write(store)
    files.unsyncable = tmp_path / "pages"
    with pytest.raises(OSError, match="Input/output"):
        store.commit(Commit())
    files.unsyncable = None
    store.commit(Commit())
    assert {tmp_path / "pages", tmp_path / "pages/ab"} <= set(files.synced)
    store.close()


def test_what_cannot_be_removed_fails_neither_a_commit_nor_a_start(tmp_path: Path) -> None:
    files = Recording()
    files.removes = False
    store = Directory(tmp_path, b"sig", PLANES, files=files)
    kept, orphan = write(store), write(store, "pages/cd/y.safetensors")
    store.commit(Commit(pages=(PageRecord(b"k", b"", 1, "ns", b"t", (kept,)),)))  # the orphan is of a commit that failed
    store.remove([orphan])
    assert (tmp_path / orphan.name).exists()
    store.close()
    store = Directory(tmp_path, b"sig", PLANES, files=files)
    assert len(store.load().pages) == 1 and (tmp_path / orphan.name).exists()
    files.removes = True
    store.load()
    assert not (tmp_path / orphan.name).exists()
    store.close()
