"""Runs in object storage: what is uploaded is whole, one process owns a run, and another machine takes it up."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from entrypoint.core.errors import ExitCode, UserError
from tests.train.checkpoint.saved import model_of, save
from tests.train.object_storage import gateway, s3_server
from train.checkpoint.folder import best_checkpoint, list_newest_first
from train.checkpoint.store import LATEST, NOTHING, OWNER, RunStore, wanted_names
from train.checkpoint.tensor_files import CheckpointReader


@pytest.fixture
def machine(tmp_path: Path, url: str) -> Callable[[str], RunStore]:
    """Return a process's view of the runs, on a machine of this name."""
    return lambda name: RunStore(url, tmp_path / name, f"TRAIN_OUTPUT_DIR={url}")


def steps(folder: Path) -> list[str]:
    return [path.name[-2:] for path in list_newest_first(folder / "checkpoint")]


def started(store: RunStore, *saved: int) -> Path:
    """Own the run `a`, and save checkpoints there."""
    folder = store.copy / "a"
    folder.mkdir(parents=True, exist_ok=True)
    store.own("a", is_new=False)
    (folder / "settings.json").write_text("{}")
    for step in saved:
        save(folder / "checkpoint", step, keep=2, best=step == saved[0])
    return folder


class Killed(BaseException):
    """The end of a process."""


class Busy:
    """A file system in which something happens while the first tensor file is uploaded."""

    def __init__(self, files: Any, happens: Callable[[], object]) -> None:
        self.files, self.happens = files, happens

    def __getattr__(self, name: str) -> Any:
        return getattr(self.files, name)

    def put_file(self, *words: Any) -> None:
        happens, self.happens = self.happens, lambda: None
        happens()
        self.files.put_file(*words)


def test_another_machine_takes_up_what_was_uploaded(machine: Callable[[str], RunStore]) -> None:
    first, second = machine("first"), machine("second")
    folder = started(first, 10, 20, 30)
    (folder / "tensorboard").mkdir()
    (folder / "tensorboard/events").write_text("e")
    first.push(folder)
    save(folder / "checkpoint", 40, keep=2)
    (folder / ".hidden").write_text("h")
    (folder / "checkpoint/.step-000000050").mkdir()
    first.push(folder)
    assert second.run_to_open(None, "auto") == "a"
    second.read("a", tensors=False)
    copy = second.copy / "a"
    assert (steps(copy), (second.copy / LATEST).resolve()) == (["40", "30", "10"], copy)
    assert not list(copy.rglob("*.safetensors")), "a plan needs none"
    second.own("a", is_new=False)
    assert best_checkpoint(copy / "checkpoint").name == "step-000000010"
    for path in list_newest_first(copy / "checkpoint"):
        CheckpointReader(path).verify_files()
    assert model_of(copy / "checkpoint/step-000000040")["w"].eq(40).all()
    assert (copy / "tensorboard/events").read_text() == "e"
    assert sorted(path.name for path in copy.rglob(".*")) == [OWNER]


def test_newest_owner_alone_uploads(machine: Callable[[str], RunStore]) -> None:
    first, second, third = map(machine, ("first", "second", "third"))
    folder = started(first, 10)
    first.push(folder)
    others = started(second, 20)
    save(folder / "checkpoint", 30)
    with pytest.raises(UserError, match="another process owns this run now"):
        first.push(folder)
    assert first.is_lost
    second.push(others)
    assert steps(started(third)) == ["20", "10"]


@pytest.mark.parametrize("is_new", [False, True])
def test_two_processes_that_start_at_once_are_told_apart(machine: Callable[[str], RunStore], *, is_new: bool) -> None:
    stores = [machine(f"m{number}") for number in range(2)]
    before = stores[0].last_owner

    def then_the_other(run: str) -> tuple[int, str]:
        found = before(run)
        if not stores[1].owned:
            stores[1].own(run, is_new=is_new)
        return found

    stores[0].last_owner = then_the_other  # type: ignore[method-assign]
    for store in stores:
        (store.copy / "a").mkdir(parents=True)
    if is_new:
        with pytest.raises(UserError, match="another process begins this run"):
            stores[0].own("a", is_new=True)
    else:
        stores[0].own("a", is_new=False)
    assert [store.owned[-1:] for store in stores] == [["3", "2"], ["", "2"]][is_new], "what the next owner creates"


@pytest.mark.parametrize("ends", ["before", "after"])
def test_download_that_did_not_end_is_made_again(ends: str, machine: Callable[[str], RunStore], tmp_path: Path) -> None:
    first = machine("first")
    first.push(started(first, 10, 20))
    mine = started(machine("second"))  # an older copy, which is kept
    (mine / "own.txt").write_text("kept")
    first = machine("first")
    first.push(started(first, 30))
    for _ in range(2):
        second = machine("second")
        get = second.files.get

        def kill(*words: Any) -> None:
            if ends == "after":
                get(*words)  # noqa: B023
            raise Killed

        second.files.get = kill
        with pytest.raises(Killed):
            second.own("a", is_new=False)
        second.files.get = get
    assert steps(started(machine("second"))) == ["30", "20"]
    assert (tmp_path / "second/.a.old/own.txt").read_text() == "kept"


def test_disk_without_links_uploads_copies(machine: Callable[[str], RunStore], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    first = machine("first")
    first.push(started(first, 10))
    assert steps(started(machine("second"))) == ["10"]
    monkeypatch.setattr("shutil.copy2", refuse)
    with pytest.raises(UserError, match="cannot be written"):
        first.push(first.copy / "a")


def test_best_checkpoint_is_one_that_is_there(machine: Callable[[str], RunStore]) -> None:
    first = machine("first")
    folder = started(first, 10)
    first.push(folder)
    save(folder / "checkpoint", 20, keep=1, best=True)
    first.files = Busy(first.files, lambda: save(folder / "checkpoint", 30, keep=1, best=True))
    first.push(folder)
    copy = started(machine("second")) / "checkpoint"
    assert best_checkpoint(copy) == copy.resolve() / "step-000000020"


def test_machine_that_owned_a_run_last_keeps_its_copy(machine: Callable[[str], RunStore], tmp_path: Path) -> None:
    """What could not be uploaded before the end of a process is still there, also if all else is lost."""
    first = machine("first")
    folder = started(first, 10)
    again = machine("first")
    again.read("b", tensors=False)
    assert steps(started(again)) == ["10"]
    again.push(folder)
    save(folder / "checkpoint", 20)
    started(machine("second"))
    assert steps(started(machine("first"))) == ["10"], "another machine was the owner"
    assert steps(tmp_path / "first/.a.old") == ["20", "10"], "what it had is kept"
    first.files.rm(first.root, recursive=True)
    assert steps(started(machine("first"))) == ["10"], "a copy of what storage has lost"


def test_answer_that_is_lost_costs_no_copy(machine: Callable[[str], RunStore]) -> None:
    folder = started(machine("first"), 10)
    again = machine("first")
    create = again.files.pipe_file

    def lose_answer(*words: Any, **more: Any) -> None:
        create(*words, **more)
        again.files.pipe_file = create
        raise FileExistsError  # as a client's second try is answered

    again.files.pipe_file = lose_answer
    again.own("a", is_new=False)
    assert (steps(folder), again.owned[-1]) == (["10"], "3")


def test_checkpoint_that_was_saved_again_replaces_the_old(machine: Callable[[str], RunStore]) -> None:
    store = machine("first")
    folder = started(store, 10)
    store.push(folder)
    save(folder / "checkpoint", 10, seconds=9.0)
    store.push(folder)
    copy = started(machine("second")) / "checkpoint/step-000000010"
    assert CheckpointReader(copy).metadata.seconds == 9.0
    CheckpointReader(copy).verify_files()


def test_owner_that_comes_during_an_upload_loses_nothing(machine: Callable[[str], RunStore]) -> None:
    first, second = machine("first"), machine("second")
    folder = started(first, 10)
    first.push(folder)
    save(folder / "checkpoint", 20, keep=1, best=True)
    first.files = Busy(first.files, lambda: second.push(started(second, 30)))
    with pytest.raises(UserError, match="another process owns this run now"):
        first.push(folder)
    assert steps(started(machine("third"))) == ["30", "10"], "it adds and removes no more"


def test_checkpoint_that_goes_during_its_upload_is_whole(machine: Callable[[str], RunStore]) -> None:
    first = machine("first")
    folder = started(first, 10)
    first.push(folder)
    save(folder / "checkpoint", 20, keep=1, best=True)

    def go_on() -> None:
        for step in (30, 40):
            save(folder / "checkpoint", step, keep=1, best=True)

    def newest_there(name: str) -> Path:
        reader = machine(name)
        reader.read("a", tensors=True)
        (path,) = list_newest_first(reader.copy / "a/checkpoint")
        CheckpointReader(path).verify_files()
        return path

    first.files = Busy(first.files, go_on)
    first.push(folder)
    assert newest_there("second").name.endswith("20"), "and the one before went once it was whole"
    first.push(folder)
    assert newest_there("third").name.endswith("40"), "what is newest comes next"


def test_checkpoint_that_is_removed_during_a_download(machine: Callable[[str], RunStore]) -> None:
    first = machine("first")
    first.push(started(first, 10, 20))
    second = machine("second")
    find = second.files.find

    def find_and_remove(*words: Any, **more: Any) -> Any:
        listed = find(*words, **more)
        second.files.find = find
        first.files.rm([path for path in listed if "step-000000010" in path])
        return listed

    second.files.find = find_and_remove
    second.copy_files("a", NOTHING)
    newest, *others = list_newest_first(second.copy / "a/checkpoint")
    CheckpointReader(newest).verify_files()
    assert (newest.name[-2:], [(path / "SHA256SUMS").exists() for path in others]) in (("20", []), ("20", [False]))


def save_in_parts(first: RunStore, second: RunStore, step: int) -> Path:
    """Save a checkpoint of whose files the first machine lacks one, which the second uploads; return its path."""
    path = first.copy / f"a/checkpoint/step-{step:09d}"
    first.in_parts, second.owned = path.name, first.owned
    save(path.parent, step)
    there = second.copy / path.relative_to(first.copy)
    there.mkdir(parents=True, exist_ok=True)
    part = path.rename(path.with_name("taken")) / "model.safetensors"
    part.rename(there / part.name)
    part.parent.rename(path)
    second.push_part(there / part.name, there)
    assert not list(there.iterdir())
    return path


def is_whole(path: Path) -> bool:
    CheckpointReader(path).verify_files()
    return True


def test_checkpoint_in_parts_is_whole_once_all_are_there(machine: Callable[[str], RunStore]) -> None:
    first, second, third = map(machine, ("first", "second", "third"))
    folder = started(first, 10)
    first.push(folder)
    path = save_in_parts(first, second, 20)
    assert steps(started(machine("early"))) == ["10"], "its checksums come last"
    first = machine("first")
    assert steps(started(first)) == ["10"], "another machine was the owner"
    path = save_in_parts(first, second, 20)
    first.push(folder)
    again = machine("first")
    started(again)
    assert is_whole(path)
    third.complete(third.copy / path.relative_to(first.copy))
    assert is_whole(third.copy / path.relative_to(first.copy))


def test_checkpoint_that_this_machine_alone_knows_is_published(machine: Callable[[str], RunStore]) -> None:
    """All were killed after rank 0 had the parts of the others, and before it uploaded its own."""
    first, second = machine("first"), machine("second")
    folder = started(first, 10)
    first.push(folder)
    path = save_in_parts(first, second, 20)
    again = machine("first")
    assert steps(started(again)) == ["20", "10"]
    again.publish(path)
    second.complete(second.copy / path.relative_to(first.copy))
    assert is_whole(second.copy / path.relative_to(first.copy))
    assert steps(started(machine("third"))) == ["20", "10"]


def test_part_whose_download_did_not_end_is_not_taken(machine: Callable[[str], RunStore]) -> None:
    first, second = machine("first"), machine("second")
    path = save_in_parts(first, second, 20) if started(first, 10) else Path()
    first.push(first.copy / "a")
    again = machine("first")
    get = again.files.get

    def get_half(there: list[str], here: list[str]) -> None:
        get(there, here)
        for file in map(Path, here):
            file.write_bytes(file.read_bytes()[:-9])
        raise Killed

    again.files.get = get_half
    with pytest.raises(Killed):
        again.complete(path)
    again.files.get = get
    again.complete(path)
    assert is_whole(path)


def test_parts_of_a_second_save_leave_the_first_one_whole(machine: Callable[[str], RunStore]) -> None:
    first, second = machine("first"), machine("second")
    started(first, 10)
    first.push(first.copy / "a")
    saved = first.copy / "a/checkpoint/step-000000010"
    (second.copy / "a/checkpoint").mkdir(parents=True)
    part = second.copy / "a/checkpoint/rank-00001-of-00002-5eed.safetensors"
    part.write_text("of another save of this step")
    second.owned = first.owned
    second.push_part(part, second.copy / saved.relative_to(first.copy))
    assert is_whole(started(machine("third")) / "checkpoint/step-000000010")


def test_checkpoint_without_a_part_is_no_checkpoint(machine: Callable[[str], RunStore]) -> None:
    first, second = machine("first"), machine("second")
    started(first, 10)
    first.push(first.copy / "a")
    path = save_in_parts(first, second, 20)
    first.files.rm_file(f"{first.root}/a/checkpoint/{path.name}/model.safetensors")
    with pytest.raises(UserError, match="cannot be written"):
        first.push(first.copy / "a")
    assert steps(started(machine("third"))) == ["10"]
    with pytest.raises(UserError, match="another process owns this run now"):
        second.push_part(path / "optimizer.safetensors", path)


def test_parts_that_come_during_an_upload_stay(machine: Callable[[str], RunStore]) -> None:
    first, second = machine("first"), machine("second")
    folder = started(first, 10)
    find = first.files.find

    def find_after(*words: Any, **more: Any) -> Any:
        first.files.find = find
        save_in_parts(first, second, 20)
        save_in_parts(first, second, 30)
        return find(*words, **more)

    first.files.find = find_after
    first.push(folder)
    first.push(folder)
    assert steps(started(machine("third"))) == ["30", "10"]


class Dying:
    """A file system whose process is killed at its n-th change."""

    def __init__(self, files: Any, changes: int) -> None:
        self.files, self.left = files, changes

    def __getattr__(self, name: str) -> Any:
        if name not in ("pipe_file", "put_file", "rm_file"):
            return getattr(self.files, name)
        self.left -= 1
        if self.left < 0:
            raise Killed
        return getattr(self.files, name)


@pytest.mark.launch
def test_kill_at_any_moment_of_an_upload_loses_nothing(tmp_path: Path) -> None:
    """At each change: a fresh machine finds a whole checkpoint, the old or the new one, and half of none."""
    newest = []
    for changes in range(40):
        url = f"file://{tmp_path}/{changes}/bucket"
        first, second = (RunStore(url, tmp_path / f"{changes}/{name}", url) for name in ("first", "second"))
        folder = started(first, 10)
        first.push(folder)
        save(folder / "checkpoint", 10, keep=1, best=True, seconds=9.0)
        save(folder / "checkpoint", 20, keep=1, best=True)
        first.files = Dying(first.files, changes)
        try:
            first.push(folder)
            ended = True
        except Killed:
            ended = False
        copy = started(second)
        for path in list_newest_first(copy / "checkpoint"):
            CheckpointReader(path).verify_files()
        newest.append(steps(copy)[0])
        if ended:
            break
    assert ended
    assert newest == sorted(newest), "once uploaded, it stays"
    assert set(newest) == {"10", "20"}


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("nosuch://x/y", "Protocol not known: nosuch"),
        ("file:///proc/none/x", "cannot be written"),
        ("s3://", "names no bucket"),
        ("simplecache::s3://bucket/x", "names no bucket"),
    ],
)
def test_storage_that_cannot_be_used_is_one_line(url: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=problem) as raised:
        started(RunStore(url, tmp_path, f"TRAIN_OUTPUT_DIR={url}"))
    assert str(raised.value).startswith(f"TRAIN_OUTPUT_DIR={url}: ")
    assert raised.value.code == (ExitCode.USAGE if "names" in problem else ExitCode.MACHINE)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/x", "a\\..\x01", "x" * 256, "é" * 128, "x/" + "é" * 128])
def test_objects_with_names_that_no_file_can_have_stay(name: str) -> None:
    found = [f"/runs/a/{name}", "/runs/a/settings.json", "/runs/ab/settings.json"]
    assert wanted_names(found, "/runs/a", NOTHING) == ["settings.json"]


def test_runs_and_files_with_the_longest_names_are_taken_up(machine: Callable[[str], RunStore]) -> None:
    first, second, run, file = machine("first"), machine("second"), "r" * 200, f"tensorboard/{'e' * 253}é"
    (first.copy / run / "tensorboard").mkdir(parents=True)
    first.own(run, is_new=True)
    (first.copy / run / file).write_text("e")
    first.push(first.copy / run)
    assert second.run_to_open(None, "auto") == run
    (second.copy / run).mkdir()
    second.own(run, is_new=False)
    assert (second.copy / run / file).read_text() == "e"


def test_busy_server_is_asked_again_and_cut_answers_are_errors(tmp_path: Path) -> None:
    with s3_server("bucket") as address:
        store = RunStore("s3://bucket/stored", tmp_path / "first", "TRAIN_OUTPUT_DIR=s3://bucket/stored")
        store.push(started(store, 10))
        with gateway(address, lambda _method, _path, before: "" if before else "busy"):
            copy = started(RunStore("s3://bucket/stored", tmp_path / "second", "X"))
            CheckpointReader(copy / "checkpoint/step-000000010").verify_files()
            owner = RunStore("s3://bucket/stored", tmp_path / "second", "X")
            save(started(owner) / "checkpoint", 20)
            owner.push(copy)
        assert steps(started(RunStore("s3://bucket/stored", tmp_path / "again", "X"))) == ["20", "10"]
        cut = gateway(address, lambda method, path, _: "cut" if method == "GET" and "model" in path else "")
        with cut, pytest.raises(UserError, match="cannot be written"):
            started(RunStore("s3://bucket/stored", tmp_path / "third", "X"))
        expired = gateway(address, lambda method, *_: "expired" if method == "GET" else "")  # HEAD has no words
        with expired, pytest.raises(UserError, match="token has expired") as raised:
            started(RunStore("s3://bucket/stored", tmp_path / "fourth", "X"))
        assert "hidden-key" not in str(raised.value)
        gone = RunStore("s3://gone/runs", tmp_path / "fifth", "X")
        for use in (started, lambda store: store.run_to_open(None, "off")):  # a run, and the plan of one without a name
            with pytest.raises(UserError, match="bucket does not exist"):
                use(gone)
    assert "hidden-key" not in "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*.json"))
