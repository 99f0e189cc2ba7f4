"""Entries of the cache: built once, whole or absent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from vringlab.cachedir import Store, there
from vringlab.errors import InfrastructureError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "things")


def silent(_: str) -> None:
    pass


def read(folder: Path) -> str | None:
    path = folder / "content"
    return path.read_text() if path.is_file() else None


def writing(text: str, built: list[str]) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        built.append(text)
        (folder / "content").write_text(text)

    return build


def test_an_entry_is_built_once_and_then_found(store: Store) -> None:
    built: list[str] = []
    for text in ("first", "second"):
        assert store.ensure("a", read, writing(text, built), on_step=silent) == "first"
    assert built == ["first"]
    assert store.ensure("b", read, writing("other", built), on_step=silent) == "other"


def test_who_comes_second_waits_and_takes_what_the_first_has_built(store: Store) -> None:
    begun, go_on = threading.Event(), threading.Event()
    built: list[str] = []
    told: list[str] = []
    results: list[str] = []

    def slow(folder: Path) -> None:
        begun.set()
        assert go_on.wait(20)
        writing("first", built)(folder)

    def ask(build: Callable[[Path], None]) -> None:
        results.append(store.ensure("a", read, build, on_step=told.append))

    first = threading.Thread(target=ask, args=(slow,))
    first.start()
    assert begun.wait(20)
    second = threading.Thread(target=ask, args=(writing("second", built),))
    second.start()
    while not told and second.is_alive():
        second.join(0.01)
    go_on.set()
    for thread in (first, second):
        thread.join(20)
    assert results == ["first", "first"]
    assert built == ["first"]
    assert told == ["another process builds the same; waiting for it"]


def test_a_build_that_fails_leaves_nothing_unless_it_is_to_be_kept(store: Store) -> None:
    def fail(folder: Path) -> None:
        (folder / "content").write_text("half")
        raise InfrastructureError("no compiler")

    with pytest.raises(InfrastructureError, match="no compiler"):
        store.ensure("a", read, fail, on_step=silent)
    assert [path.name for path in store.folder.iterdir()] == ["a.lock"]
    with pytest.raises(InfrastructureError, match="no compiler"):
        store.ensure("a", read, fail, on_step=silent, keep_failed=True)
    assert (store.failed("a") / "content").read_text() == "half"
    assert store.ensure("a", read, writing("whole", []), on_step=silent) == "whole"
    assert not store.failed("a").exists()


def test_what_is_not_whole_is_built_anew(store: Store) -> None:
    store.entry("a").mkdir(parents=True)
    assert there(store.entry("a")) is not None
    assert store.ensure("a", read, writing("whole", []), on_step=silent) == "whole"


def test_an_entry_that_is_gone_at_once_is_an_error_that_says_so(store: Store) -> None:
    with pytest.raises(InfrastructureError, match="disappeared while it was made") as caught:
        store.ensure("a", read, lambda _: None, on_step=silent)
    assert "clean the cache" in caught.value.remedy


def test_a_full_disk_is_told_before_anything_is_built(store: Store) -> None:
    built: list[str] = []
    with pytest.raises(InfrastructureError, match="not enough disk space"):
        store.ensure("a", read, writing("x", built), on_step=silent, space_gb=1e9)
    assert built == []
