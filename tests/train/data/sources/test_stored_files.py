"""Shards and lists in object storage: a node copies them once, and what is wrong is one line."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from entrypoint.core.errors import ExitCode
from entrypoint.core.setting_types import as_url
from tests.conftest import Entrypoint, needs_two_cores, refusal
from tests.train.data.shard_files import pack, samples, settings_for, write_tar
from tests.train.given import TWO_RANKS, imagefolder
from tests.train.object_storage import gateway, s3_server
from train.checkpoint.metadata import DataFingerprint
from train.checkpoint.store import RunStore
from train.data.dataset_info import inspect_dataset, list_files
from train.data.sources import stored_files
from train.data.sources.image_file import read_file
from train.engine.run_setup import exchange_fingerprints
from train.settings import TrainSettings

Listed = list[tuple[str, bytes, int]]


@pytest.fixture
def bucket() -> Iterator[str]:
    """The address of a real server with an empty bucket."""
    with s3_server("bucket") as address:
        yield address


@pytest.fixture
def csv_folder(image_folder: Path) -> Path:
    """Return a folder with train.csv and test.csv over the painted images, and what they do not name."""
    for split in ("train", "test"):
        paths = sorted((image_folder / split).rglob("*.*"))
        names = [f"{path.relative_to(image_folder)}" for path in paths]
        names[1] = names[1].replace("/", "\\")
        lines = [f"{name},{path.parent.name}" for name, path in zip(names, paths, strict=True)]
        (image_folder / f"{split}.csv").write_text("\n".join(["file,label", *lines]) + "\n")
    (image_folder / "other.bin").write_bytes(b"other")
    return image_folder


def put(folder: Path, url: str) -> None:
    """Upload a folder."""
    from fsspec.core import url_to_fs

    files, root = url_to_fs(url, use_listings_cache=False)
    files.auto_mkdir = True
    for path in folder.rglob("*.*"):
        if path.is_file():
            files.put_file(str(path), f"{root}/{path.relative_to(folder)}")


def stored(url: str, cache: Path, **more: Any) -> TrainSettings:
    return settings_for(None, **{"data_dir": Path(url), "cache_dir": cache, **more})


def listed(settings: TrainSettings) -> list[Listed]:
    """Return path, bytes and label of each image of train and test."""
    return [
        [
            (listing.files.relative(row), read_file(listing.files[row]), label)
            for row, label in enumerate(listing.labels)
        ]
        for listing in list_files(settings)
    ]


def copies(cache: Path) -> list[Path]:
    """Return the copies of objects, whole or not."""
    return [path for path in cache.glob("images-*/data-*/**/*") if path.is_file()]


@pytest.mark.parametrize("url", ["s3://bucket/a/b", "gs://b/x", "file:///tmp/x", "https://host:80/a", "abfs://c@d/e"])
def test_path_of_a_url_gives_it_back(url: str) -> None:
    assert as_url(Path(url)) == url
    assert as_url(Path(str(Path(url)))) == url
    assert [as_url(path) for path in (None, Path("a/b"), Path("/a:/b"), Path("a:b"), Path("C:/x"))] == [""] * 5


@pytest.mark.parametrize("kind", ["shards", "csv"])
def test_copies_are_what_the_folder_holds(packed: Path, csv_folder: Path, url: str, tmp_path: Path, kind: str) -> None:
    folder, cache = {"shards": packed, "csv": csv_folder}[kind], tmp_path / "cache"
    (packed / "README.md").write_text("not needed")
    put(folder, url)
    ours = listed(stored(url, cache, dataset=kind))
    assert ours == listed(settings_for(folder, dataset=kind))
    files = copies(cache)
    assert len(files) == {"shards": 6, "csv": 39}[kind], "of shards only what is needed"
    times = [path.stat().st_ctime_ns for path in files]
    assert listed(stored(url, cache, dataset=kind)) == ours
    assert times == [path.stat().st_ctime_ns for path in files]
    facts, local = (
        inspect_dataset(one) for one in (stored(url, cache, dataset=kind), settings_for(folder, dataset=kind))
    )
    assert facts == local


@pytest.mark.seconds
def test_web_server_that_lists_folders_is_read(packed: Path, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="needs aiohttp, which s3fs brings")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(packed.parent)))
    Thread(target=server.serve_forever, daemon=True).start()
    settings = stored(f"http://127.0.0.1:{server.server_port}/{packed.name}", tmp_path / "cache")
    assert listed(settings) == listed(settings_for(packed))
    server.shutdown()


def test_changed_object_is_another_copy(packed: Path, url: str, tmp_path: Path) -> None:
    put(packed, url)
    settings = stored(url, tmp_path / "cache")
    before = list_files(settings)
    kept = listed(settings)
    write_tar(packed / "train/train-000000.tar", samples([0, 1, 2] * 3 + [0]))
    put(packed, url)
    after = list_files(settings)
    assert before[0].folder != after[0].folder
    assert listed(settings) == listed(settings_for(packed)) != kept
    assert read_file(before[0].files[0]) == kept[0][0][1], "a run that began before reads what it listed"


def test_copy_that_is_gone_or_cut_is_made_again(packed: Path, url: str, tmp_path: Path) -> None:
    put(packed, url)
    settings = stored(url, tmp_path / "cache")
    before = listed(settings)
    first, second, *_ = sorted(copies(tmp_path / "cache"), key=lambda path: -path.stat().st_size)
    first.unlink()
    os.truncate(second, 700)
    assert listed(settings) == before


def test_copy_that_was_killed_goes_on(packed: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(packed, url)
    settings, asked, fails = stored(url, tmp_path / "cache"), list[str](), [True]
    init = RunStore.__init__

    def failing(store: RunStore, *words: Any) -> None:
        init(store, *words)
        get = store.files.get_file

        def once(path: str, to: str) -> None:
            asked.append(path)
            if len(asked) == 6 and fails.pop():
                raise ValueError("gone")
            get(path, to)

        if get.__name__ != "once":  # fsspec gives the same file system again
            monkeypatch.setattr(store.files, "get_file", once)

    monkeypatch.setattr(RunStore, "__init__", failing)
    monkeypatch.setattr(stored_files, "AT_ONCE", 1)
    refusal(list_files, settings, match=r"cannot be read \(gone\)", code=ExitCode.MACHINE)
    fails.append(False)
    assert listed(settings) == listed(settings_for(packed))
    assert len(asked) == 7, "what is whole is not copied again"


def test_object_that_changes_during_its_copy(
    packed: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(packed, url)
    find = stored_files.find_objects

    def then_change(store: RunStore, kind: str) -> object:
        objects = find(store, kind)
        other = bytearray((packed / "train/train-000000.tar").read_bytes())
        other[600] ^= 1
        store.files.pipe_file(f"{store.root}/train/train-000000.tar", bytes(other))
        return objects

    monkeypatch.setattr(stored_files, "find_objects", then_change)
    settings = stored(url, tmp_path / "cache")
    message = refusal(list_files, settings, match="an object was changed while it was copied", code=ExitCode.MACHINE)
    assert message.startswith(f"TRAIN_DATA_DIR={url}: cannot be read")


def list_alone(settings: TrainSettings) -> int:
    return len(list_files(settings)[0])


def test_processes_of_a_node_copy_once(packed: Path, bucket: str, tmp_path: Path) -> None:
    put(packed, "s3://bucket/stored")
    settings = stored("s3://bucket/stored", tmp_path / "cache")
    with gateway(bucket, lambda *_: "") as server, ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        assert set(pool.map(list_alone, [settings] * 4)) == {24}
        counts = [count for (method, path), count in server.seen.items() if method == "GET" and ".tar" in path]
    assert counts == [0] * 5, "each shard was asked for once"


def fault_of(kind: str, times: int) -> Callable[[str, str, int], str]:
    """Return what happens to the first requests for a shard."""
    return lambda method, path, before: kind if method == "GET" and ".tar" in path and before < times else ""


@pytest.mark.parametrize("kind", ["busy", "cut"])
def test_short_fault_costs_a_retry(packed: Path, bucket: str, tmp_path: Path, kind: str) -> None:
    put(packed, "s3://bucket/stored")
    with gateway(bucket, fault_of(kind, 1)):
        assert listed(stored("s3://bucket/stored", tmp_path / "cache")) == listed(settings_for(packed))


@pytest.mark.parametrize("kind", ["busy", "cut", "expired"])
def test_lasting_fault_is_one_line(packed: Path, bucket: str, tmp_path: Path, kind: str) -> None:
    put(packed, "s3://bucket/stored")
    with gateway(bucket, fault_of(kind, 99)):
        message = refusal(
            list_files, stored("s3://bucket/stored", tmp_path / "cache"), match="cannot be read", code=ExitCode.MACHINE
        )
    assert "hidden-key" not in message
    assert ("token has expired" in message) == (kind == "expired")
    assert listed(stored("s3://bucket/stored", tmp_path / "cache")) == listed(settings_for(packed))


def test_body_that_lacks_bytes_is_noticed(
    packed: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(packed, url)
    init = RunStore.__init__

    def with_less(store: RunStore, *words: Any) -> None:
        init(store, *words)
        monkeypatch.setattr(store.files, "get_file", lambda _, to: Path(to).write_bytes(bytes(100)))

    monkeypatch.setattr(RunStore, "__init__", with_less)
    refusal(list_files, stored(url, tmp_path / "cache"), match="came with 100 of ", code=ExitCode.MACHINE)


@pytest.mark.parametrize(
    ("address", "said", "code"),
    [
        ("s3://gone/data", "cannot be read (", 3),
        ("s3://bucket/none", "no shards is there. Name the folder that holds the data.", 2),
    ],
)
def test_place_that_is_not_there_is_one_line(bucket: str, tmp_path: Path, address: str, said: str, code: int) -> None:
    assert bucket
    assert said in refusal(list_files, stored(address, tmp_path / "cache"), code=code)


def test_faults_of_the_data_name_the_url(packed: Path, url: str, tmp_path: Path) -> None:
    os.truncate(packed / "train/train-000001.tar", 700)
    put(packed, url)
    message = refusal(list_files, stored(url, tmp_path / "cache"))
    assert message.startswith(f"{url}/train/train-000001.tar is cut short: 000010.jpg lacks")


def test_image_that_is_not_stored_is_named(csv_folder: Path, url: str, tmp_path: Path) -> None:
    (csv_folder / "train/class0/000.jpg").unlink()
    put(csv_folder, url)
    message = refusal(list_files, stored(url, tmp_path / "cache", dataset="csv"))
    assert message.startswith(f"{url}/train.csv, line 2: train/class0/000.jpg is not there")


def test_faults_of_a_list_name_the_url(csv_folder: Path, url: str, tmp_path: Path) -> None:
    (csv_folder / "test.csv").write_text("a,b\n1,2\n")
    put(csv_folder, url)
    message = refusal(list_files, stored(url, tmp_path / "cache", dataset="csv"))
    assert message.startswith(f"{url}/test.csv: has no column file, label")


@pytest.mark.parametrize("kind", ["shards", "csv"])
def test_place_without_data_says_what_it_needs(url: str, tmp_path: Path, kind: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/notes.txt").write_text("x")
    put(tmp_path / "in", url)
    message = refusal(list_files, stored(url, tmp_path / "cache", dataset=kind))
    assert message.startswith(f"TRAIN_DATA_DIR={url}: ")
    assert ("train.csv" if kind == "csv" else "no shards is there") in message


@pytest.mark.parametrize("names", [("a", "a"), ("a", "b")])
def test_ranks_compare_what_they_copied(names: tuple[str, str]) -> None:
    """The second rank has listed another state, or reads a folder of its own."""

    class Group:
        local_rank = 1

        def gather(self, value: object, _: object) -> list[object]:
            others = [DataFingerprint(classes=(), train_examples=1, test_examples=1), None]
            return [value, names[1]] if isinstance(value, str) else others

        def node_of(self, _: int) -> str:
            return ""

    listing = SimpleNamespace(folder=Path("cache", names[0]))
    given: Any = (SimpleNamespace(listings=(listing, listing)), stored("s3://b/c", Path()), Group())
    if names[0] == names[1]:
        exchange_fingerprints(*given)
    else:
        refusal(exchange_fingerprints, *given, match="s3://b/c: changed while the ranks began. Start the run again")


def test_names_that_are_no_files_are_refused(packed: Path, tmp_path: Path) -> None:
    url, cache = f"file://{tmp_path}/bucket", tmp_path / "cache"
    (packed / "train/.hidden.tar").write_bytes(b"x")
    put(packed, url)
    list_files(stored(url, cache))
    (packed / "train/a\nb.tar").write_bytes(b"x")
    put(packed, url)
    refusal(list_files, stored(url, cache), match=r"train/a\\nb\.tar is no name of a file")


def test_full_disk_is_said_before_the_copy(
    packed: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(packed, url)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    message = refusal(list_files, stored(url, tmp_path / "cache"), code=ExitCode.MACHINE)
    assert "needs 0.0 GiB in 6 objects in" in message
    assert "which has 0.0 GiB. Set TRAIN_CACHE_DIR to a larger disk." in message
    assert not copies(tmp_path / "cache")


def test_plan_copies_little(packed: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(packed, url)
    settings = stored(url, tmp_path / "cache")
    monkeypatch.setattr(stored_files, "MAX_PLAN_BYTES", 10)

    def plan() -> object:
        return inspect_dataset(settings, launches=False)

    refusal(plan, match=r"0\.0 GiB in 6 objects are not on this machine yet, and a plan", code=ExitCode.MACHINE)
    inspect_dataset(settings)
    plan()


def test_long_copy_says_how_far_it_is(
    packed: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(packed, url)
    monkeypatch.setattr(stored_files, "SILENT_S", -1.0)
    list_files(stored(url, tmp_path / "cache"))
    err = capsys.readouterr().err
    assert f"copying {url}: 0.0 of 0.0 GiB in 6 objects" in err


def test_storage_without_states_is_refused(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(packed, url := f"file://{tmp_path}/bucket")
    monkeypatch.setattr(stored_files, "STATES", ("ETag",))
    refusal(list_files, stored(url, tmp_path / "cache"), match="this storage gives no ETag or time of its objects")


def test_missing_library_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    message = refusal(list_files, stored("s3://bucket/x", tmp_path / "cache"), code=ExitCode.MACHINE)
    assert "pip install 'reference-training[storage]'" in message


def test_other_kinds_read_no_url(tmp_path: Path) -> None:
    for kind in ("imagefolder", "cifar10", "hf"):
        refusal(
            inspect_dataset, stored("s3://bucket/x", tmp_path, dataset=kind), match="only csv and shards are read from"
        )


@pytest.mark.launch
@needs_two_cores
@pytest.mark.parametrize("kind", ["shards", "csv"])
def test_run_is_that_of_a_local_folder(
    entrypoint: Entrypoint, image_folder: Path, csv_folder: Path, url: str, kind: str
) -> None:
    folder = pack(image_folder, entrypoint.folder / "packed") if kind == "shards" else csv_folder
    put(folder, url)
    env = imagefolder(folder, TRAIN_DATASET=kind, TRAIN_DATA_SOURCE="stream", LAUNCH_QUIET="1") | TWO_RANKS
    del env["TRAIN_EPOCHS"]
    env |= {"TRAIN_SCHEDULE": "constant", "TRAIN_WARMUP": "0", "TRAIN_STEPS": "8"}
    whole = entrypoint.train("--run-name=local", env=env)
    env |= {name: text for name, text in os.environ.items() if name.startswith("AWS_")}
    env |= {"TRAIN_DATA_DIR": url, "TRAIN_CACHE_DIR": str(entrypoint.folder / "cache")}
    entrypoint.train("--run-name=stored", "--steps=4", env=env)  # an epoch has three steps
    resumed = entrypoint.train("--run-name=stored", "--resume=auto", "--resume-allow-changed", env=env)
    assert (resumed["weights_sha256"], resumed["steps"]) == (whole["weights_sha256"], 8)
    keys = {name: text for name, text in env.items() if name.startswith(("AWS_", "LAUNCH_QUIET", "TRAIN_CACHE"))}
    result = entrypoint.succeed("evaluate", "runs/stored", env=keys)
    assert f"accuracy  {whole['test_accuracy']:.2f} %" in result.out


@pytest.mark.launch
def test_cut_list_is_evaluated_without_what_was_trained(
    entrypoint: Entrypoint, csv_folder: Path, tmp_path: Path
) -> None:
    (csv_folder / "test.csv").unlink()
    put(csv_folder, url := f"file://{tmp_path}/bucket")
    env = imagefolder(csv_folder, TRAIN_DATASET="csv", TRAIN_DATA_DIR=url, LAUNCH_QUIET="1", TRAIN_RUN_NAME="a")
    summary = entrypoint.train(env=env)
    for words in ((), ("--data-dir", url)):
        result = entrypoint.succeed("evaluate", "runs/a", *words, env={"LAUNCH_QUIET": "1"})
        assert f"accuracy  {summary['test_accuracy']:.2f} % of 3 images" in result.out
