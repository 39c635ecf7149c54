"""Laws of local files: URLs are refused where a path is meant, locks name a way out, and private
modes hold.
"""

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from llmsys.config.loading.load import load_run_config
from llmsys.config.run import RunConfig
from llmsys.config.section import Section, list_section_types
from llmsys.errors import ConfigError, DataError
from llmsys.launch.main import main
from llmsys.storage.local_files import (
    PRIVATE,
    find_folder_url,
    find_url_violation,
    format_folder,
    lock_folder,
    write_bytes_atomically,
)
from llmsys.storage.mount import find_mount


@pytest.mark.parametrize(
    "url",
    ["s3://b/run", "gs://b/run", "s3:/b/run", "hf://x/y", "https://h/x", "simplecache::s3://b/c"],
)
def test_urls_are_refused_with_what_to_do(url: str) -> None:
    said = find_url_violation(url)
    assert said is not None
    assert "is a URL, but a local path is needed. Copy the file, or mount the storage" in said
    assert find_url_violation(Path(url)) is not None


def test_the_path_in_a_file_url_is_named() -> None:
    assert "Write it as /data/x" in str(find_url_violation("file:///data/x"))


@pytest.mark.parametrize(
    "path", ["runs/a", "/abs/s3:/x", "../x", "a:b", "C:/x", "runs//x", "./s3", "host:8", "3://x"]
)
def test_paths_are_paths(path: str) -> None:
    assert find_url_violation(path) is None


def path_fields(
    section: type[BaseModel], seen: set[type[BaseModel]]
) -> Iterator[tuple[type[BaseModel], str]]:
    """Every field that holds a path, in a section and those inside it."""
    if section in seen:
        return
    seen.add(section)
    for name, field in section.model_fields.items():
        if field.annotation is Path or Path in flat_types(field.annotation):
            yield section, name
        for inner in list_section_types(field.annotation):
            yield from path_fields(inner, seen)


def flat_types(annotation: Any) -> set[Any]:
    return {annotation}.union(
        *(flat_types(one) for one in get_args(annotation) if not isinstance(one, str)), set()
    )


def test_no_field_of_a_config_takes_a_url_for_a_path() -> None:
    found = list(path_fields(RunConfig, set()))
    assert len(found) > 15
    for section, name in found:
        field = section.model_fields[name]
        adapter: TypeAdapter[Any] = TypeAdapter(field.rebuild_annotation())
        # Folders of runs and datasets may lie in S3, and in no other storage.
        value: Any = ["s3://b/x"] if "tuple" in str(field.annotation) else "gs://b/x"
        with pytest.raises(ValidationError, match="is a URL, but a local path is needed"):
            adapter.validate_python(value)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("run.folder=gs://b/run", "run.folder"),
        ("data.folder=gs://b/data", "data.folder"),
        ("train.init_from=s3://b/run", "train.init_from"),
        ("tokenizer={kind: file, path: s3://b/t.json}", "tokenizer.path"),
        ("evaluation.tasks=[{kind: pairs, path: s3://b/p.jsonl}]", "evaluation.tasks.0.path"),
        ("data.deduplicate.earlier_datasets=[s3://b/d]", "data.deduplicate.earlier_datasets.0"),
    ],
)
def test_the_message_names_the_key(override: str, key: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"command line: {key}: (s3|gs)://b/\S+ is a URL, but a local path"
    ):
        load_run_config("train/demo", [override])


def test_a_remote_folder_is_named_by_the_place_of_its_copies_and_written_as_its_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMSYS_CACHE", str(tmp_path))
    config = load_run_config(
        "train/demo", ["run.folder=s3://bucket/some/run/", "data.folder=s3://bucket/d"]
    )
    assert config.run.folder == tmp_path / "s3" / "bucket" / "some" / "run"
    assert format_folder(config.run.folder / "events.jsonl") == "s3://bucket/some/run/events.jsonl"
    assert json.loads(config.model_dump_json())["run"]["folder"] == "s3://bucket/some/run"
    assert RunConfig.model_validate(json.loads(config.model_dump_json())) == config
    monkeypatch.setenv("LLMSYS_CACHE", str(tmp_path / "other"))
    assert find_folder_url(config.run.folder) is None
    for url in (
        "s3://bucket",
        "s3://bucket/../x",
        "s3://bucket/.lock",
        "s3://bucket/a?x=1",
        "S3://bucket/x",
    ):
        with pytest.raises(ConfigError, match="is a URL, but a local path is needed"):
            load_run_config("train/demo", [f"run.folder={url}"])


def test_inputs_may_lie_elsewhere() -> None:
    config = load_run_config("train/demo", ["data.inputs=[s3://b/a.warc.gz, gs://b/*.gz]"])
    assert config.data.kind == "crawl"
    assert config.data.inputs == ("s3://b/a.warc.gz", "gs://b/*.gz")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("train s3://b/config.yaml", "CONFIG"),
        ("prepare train/demo data.folder=gs://b/d", "data.folder"),
        ("convert s3://b/hf out", "SOURCE"),
        ("convert . s3://b/out", "DESTINATION"),
        ("calibrate --output s3://b/mine.yaml", "--output"),
        ("calibrate --output x.yaml --base s3://b/mine.yaml", "device"),
        ("estimate train/demo --device s3://b/d.yaml", "device"),
        ("estimate train/demo --cluster s3://b/c.yaml", "--cluster"),
        ("plan model/llama3.1-8b cluster=s3://b/c.yaml", "cluster"),
        ("plan model/llama3.1-8b gpus=8 device=h100-sxm --output s3://b/best.yaml", "--output"),
        ("inspect s3://b/data", "DATASET"),
        ("reconcile s3://b/run", "RUN"),
        ("reconcile . --update s3://b/mine.yaml", "--update"),
        ("report train/demo --output s3://b/report.html", "--output"),
        ("scale fit s3://b/run", "llmsys scale fit"),
        ("scale fit . --output s3://b/s.html", "--output"),
        ("translate train/multi30k --input s3://b/lines.txt", "--input"),
        ("translate train/multi30k --output s3://b/lines.txt", "--output"),
        ("launch train/demo nodes=s3://b/hostfile", "nodes"),
    ],
)
def test_verbs_refuse_urls_by_the_name_of_the_argument(
    words: str,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        status = main(words.split())
    except SystemExit as ended:
        status = int(ended.code or 0)
    said = capsys.readouterr().err
    assert status == 2
    assert "is a URL, but a local path is needed" in said
    assert named in said
    assert list(tmp_path.iterdir()) == []


def test_a_base_that_is_a_url_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: s3://b/common.yaml\n")
    with pytest.raises(
        ConfigError, match=r"a.yaml:1: s3://b/common.yaml is a URL, but a local path"
    ):
        load_run_config(str(tmp_path / "a.yaml"))


def test_a_section_keeps_its_paths_when_it_is_written_and_read_again(tmp_path: Path) -> None:
    config = load_run_config("train/demo", [f"run.folder={tmp_path}/a b"])
    again = RunConfig.model_validate(json.loads(config.model_dump_json()))
    assert again == config
    assert issubclass(RunConfig, Section)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_flock_is_named_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    message = (
        rf"{tmp_path} lies on \S+ mounted at /.*, where flock does not work "
        rf"\({os.strerror(number)}\)"
    )
    with pytest.raises(DataError, match=message) as said, lock_folder(tmp_path):
        pass
    assert "Mount it with locks (Lustre: -o flock; NFS: version 4" in str(said.value)
    assert "or name a folder on another file system (run.folder, data.folder)" in str(said.value)


def test_the_mount_of_a_folder_is_the_innermost_and_latest(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/a / ext4 rw 0 0\nx /data autofs rw 0 0\nx:/y /data nfs rw 0 0\nz /data/my\\040own "
        "lustre rw 0 0\n"
    )
    assert find_mount(Path("/data/run"), mounts) == ("nfs", "/data")
    assert find_mount(Path("/data/my own/run"), mounts) == ("lustre", "/data/my own")
    assert find_mount(Path("/database"), mounts) == ("ext4", "/")
    assert find_mount(Path("/data"), tmp_path / "none") == ("a file system", "an unknown place")


def test_private_files_are_never_readable_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    replace = os.replace

    def look(source: Path, target: Path) -> None:
        seen.append(os.stat(source).st_mode & 0o777)
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    path = tmp_path / "environment.sh"
    path.write_text("old")
    write_bytes_atomically(path, b"new", PRIVATE)
    assert (seen, path.stat().st_mode & 0o777, path.read_bytes()) == ([0o600], 0o600, b"new")
