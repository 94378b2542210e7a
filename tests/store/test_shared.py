"""One directory for several models of one process: each has its own memories there, and a budget of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rewake.errors import DirectoryLocked, DiskFull, StoreError, StoreLost
from rewake.quant import PAGE_TOKENS
from rewake.store.base import BranchRecord, Commit, PageRecord, StoredFile
from rewake.store.crypto import Cipher
from rewake.store.directory import UNLIMITED, Directory
from rewake.store.files import Files
from rewake.store.shared import Shared
from tests.faults import make_version_1, make_version_2
from tests.store.test_directory import CIPHER, PLANES, random_page

both = pytest.mark.parametrize("cipher", [None, CIPHER], ids=["clear", "encrypted"])


def opened(shared: Shared, model: str, budget: int = UNLIMITED, cipher: Cipher | None = None, files: Files | None = None) -> Directory:
    signature = f"signature of {model}".encode()
    return Directory(shared.path, signature, PLANES, budget=budget, free_floor=0, files=files, cipher=cipher, shared=shared, model=model)


def write(store: Directory, name: str) -> StoredFile:
    return store.write(f"pages/ab/{name}.safetensors", [random_page(len(name)).data], 0, PAGE_TOKENS, {"key": name, "namespace": "ns"})


def commit(store: Directory, name: str, file: StoredFile) -> None:
    page = PageRecord(name.encode(), b"", 1, "ns", b"tokens", (file,))
    store.commit(Commit(pages=(page,), branches=(BranchRecord(name, "ns", "agent", page.key, b"", (), 1.0, 2.0),)))


def save(store: Directory, name: str) -> StoredFile:
    file = write(store, name)
    commit(store, name, file)
    return file


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    return Shared(tmp_path / "data", ["a", "b"])


@both
def test_each_model_sees_its_own_memories(shared: Shared, cipher: Cipher | None) -> None:
    a, b = opened(shared, "a", cipher=cipher), opened(shared, "b", cipher=cipher)
    of_a, of_b = save(a, "x"), save(b, "y")
    assert [p.files for p in a.load().pages] == [(of_a,)] and [p.files for p in b.load().pages] == [(of_b,)]
    assert (a.used, b.used) == (of_a.file_bytes, of_b.file_bytes)
    a.close()
    again = opened(shared, "a", cipher=cipher)
    assert [p.files for p in again.load().pages] == [(of_a,)] and again.used == of_a.file_bytes
    again.close()
    b.close()


def test_a_directory_of_one_model_is_taken_over_and_back(tmp_path: Path) -> None:
    alone = Directory(tmp_path / "data", b"signature of a", PLANES)
    of_a = save(alone, "x")
    alone.close()
    shared = Shared(tmp_path / "data", ["a", "b"])
    a, b = opened(shared, "a"), opened(shared, "b")
    assert [p.files for p in a.load().pages] == [(of_a,)] and b.load().pages == ()
    of_b = save(b, "y")
    a.close()
    b.close()
    alone = Directory(tmp_path / "data", b"signature of b", PLANES)
    assert [p.files for p in alone.load().pages] == [(of_b,)]
    assert alone.reclaimable == of_a.file_bytes, "nobody says that the other one is served"
    alone.close()


@pytest.mark.parametrize("make", [make_version_1, make_version_2, lambda _: None], ids=["1", "2", "3"])
@pytest.mark.parametrize("is_noted", [False, True], ids=["of one model", "of several"])
def test_a_directory_of_an_older_format_is_taken_over_by_several_models(
    tmp_path: Path, make: Callable[[Path], None], is_noted: bool
) -> None:
    """Whether or not it says what was served beside others."""
    names = ["a", "b"] if is_noted else []
    old = Shared(tmp_path / "data", names)
    a, b = opened(old, "a"), Directory(old.path, b"signature of b", PLANES, free_floor=0, shared=old, model="b")
    of_a, of_b = save(a, "x"), save(b, "y")
    a.close()
    b.close()
    make(tmp_path / "data")
    shared = Shared(tmp_path / "data", ["a", "b"])
    a = opened(shared, "a")
    assert a.reclaimable == (0 if is_noted else of_b.file_bytes), "what is served is nobody's room, once it is known to be"
    b = opened(shared, "b")
    assert [p.files for p in a.load().pages] == [(of_a,)] and [p.files for p in b.load().pages] == [(of_b,)]
    for store in (a, b):
        store.reclaim(10**9)
    assert a.holds(of_a) and a.holds(of_b)
    a.close()
    b.close()
    alone = Directory(tmp_path / "data", b"signature of a", PLANES, free_floor=0)
    assert [p.files for p in alone.load().pages] == [(of_a,)]
    alone.close()


def test_the_lock_is_the_processs_and_one_model_is_not_served_twice(shared: Shared) -> None:
    """D4."""
    code = "import sys; from pathlib import Path; from tests.store.test_directory import directory; directory(Path(sys.argv[1]))"

    def another_process() -> str:
        return subprocess.run([sys.executable, "-c", code, str(shared.path)], capture_output=True, text=True, check=False).stderr

    a, b = opened(shared, "a"), opened(shared, "b")
    with pytest.raises(StoreError, match="are the same"):
        opened(shared, "a")
    with pytest.raises(DirectoryLocked):
        opened(Shared(shared.path), "c")
    a.close()
    assert "DirectoryLocked" in another_process()
    shared.is_kept = True
    b.close()
    assert "DirectoryLocked" in another_process(), "between two models, too"
    shared.close()
    assert another_process() == ""


def test_collecting_garbage_leaves_what_another_is_writing(shared: Shared) -> None:
    opened(Shared(shared.path), "a").close()  # where there was no manifest, nothing is removed
    a, b = opened(shared, "a"), opened(shared, "b")
    pending = write(a, "pending")
    b.load()
    assert a.holds(pending)
    commit(a, "pending", pending)
    b.load()
    assert a.holds(pending)
    orphan = write(a, "orphan")
    a.load()  # it begins again: nobody will name that file
    assert not a.holds(orphan)
    a.close()
    b.close()


@both
def test_what_is_served_is_no_room_for_others_and_what_is_not_goes_first(shared: Shared, cipher: Cipher | None) -> None:
    """L2; whether the other model is loaded, or was when the server ran last."""
    old = Shared(shared.path)
    stranger = opened(old, "stranger", cipher=cipher)
    foreign = save(stranger, "z")
    stranger.close()
    b = opened(shared, "b", cipher=cipher)
    of_b = save(b, "y")
    b.close()
    again = Shared(shared.path, shared.models)
    a = opened(again, "a", cipher=cipher)
    assert a.used == a.reclaimable == foreign.file_bytes
    b = opened(again, "b", cipher=cipher)
    for store in (a, b):
        store.reclaim(10**9)
    assert not a.holds(foreign) and a.holds(of_b)
    assert (a.used, a.reclaimable, b.used) == (0, 0, of_b.file_bytes)
    a.close()
    b.close()


def test_each_has_a_budget_and_together_they_keep_theirs(shared: Shared) -> None:
    size = Directory(shared.path, b"x", PLANES)
    page = size.file_bytes(PAGE_TOKENS)
    size.close()
    a, b = (opened(shared, m, budget=2 * page) for m in "ab")
    for store in (a, b):
        for name in "12":
            save(store, f"{store.signature!r}{name}"[-4:].strip("'"))
        with pytest.raises(DiskFull):
            write(store, "3")
    assert sum(p.stat().st_size for p in shared.path.glob("pages/*/*")) <= 4 * page
    a.close()
    b.close()


def test_a_damaged_file_takes_room_from_all_until_it_goes(shared: Shared) -> None:
    a, b = opened(shared, "a"), opened(shared, "b")
    file = save(a, "x")
    a.quarantine(file)
    assert a.used == b.used == b.reclaimable == file.file_bytes
    b.reclaim(1)
    assert a.used == b.used == 0 and not list(shared.path.glob("quarantine/*"))
    a.close()
    b.close()


def test_a_directory_that_is_deleted_is_begun_anew_by_all(shared: Shared) -> None:
    """L5."""
    a, b = opened(shared, "a"), opened(shared, "b")
    save(a, "x")
    save(b, "y")
    shutil.rmtree(shared.path)
    for store in (a, b):
        with pytest.raises(StoreLost):
            store.commit(Commit())
    of_a, of_b = save(a, "x2"), save(b, "y2")
    with pytest.raises(DirectoryLocked):
        Directory(shared.path, b"other", PLANES)
    assert [p.files for p in a.load().pages] == [(of_a,)] and [p.files for p in b.load().pages] == [(of_b,)]
    a.close()
    b.close()
    Directory(shared.path, b"other", PLANES).close()


@both
def test_two_models_write_forget_and_begin_again_at_once_and_lose_nothing(shared: Shared, cipher: Cipher | None) -> None:
    """Of what was committed all is there, and nothing else."""
    opened(Shared(shared.path), "a", cipher=cipher).close()
    failures: list[BaseException] = []
    kept: dict[str, set[bytes]] = {}

    def live(model: str) -> None:
        try:
            store = opened(shared, model, cipher=cipher)
            kept[model] = set()
            for i in range(30):
                name = f"{model}{i}"
                save(store, name)
                kept[model].add(name.encode())
                if i % 5 == 4:
                    gone = f"{model}{i - 2}"
                    file = next(p.files[0] for p in store.load().pages if p.key == gone.encode())
                    store.commit(Commit(gone_pages=(gone.encode(),), gone_branches=(gone,)))
                    store.remove([file])
                    kept[model].discard(gone.encode())
                if i % 7 == 6:
                    write(store, f"{name}-orphan")
                    store.load()
            assert store.used == sum(p.files[0].file_bytes for p in store.load().pages)
            store.close()
        except BaseException as error:  # noqa: BLE001 (of another thread)
            failures.append(error)

    threads = [threading.Thread(target=live, args=(model,)) for model in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for model in "ab":
        store = opened(shared, model, cipher=cipher)
        pages = store.load().pages
        assert {p.key for p in pages} == kept[model]
        for page in pages:
            store.read(page.files[0], memoryview(bytearray(page.files[0].size)))
        store.close()
    assert len(list(shared.path.glob("pages/*/*"))) == sum(map(len, kept.values()))


def test_a_store_is_opened_while_another_writes(tmp_path: Path) -> None:
    """Files get their names, or go, between being listed and being looked at."""
    shared = Shared(tmp_path, ("a", "b"))
    a = opened(shared, "a")
    a.load()
    done = threading.Event()

    def work() -> None:
        for number in range(150):
            commit(a, f"page{number}", write(a, f"page{number}"))
        done.set()

    writer = threading.Thread(target=work)
    writer.start()
    while not done.is_set():
        b = opened(shared, "b")
        b.load()
        b.close()
    writer.join()
    a.close()
