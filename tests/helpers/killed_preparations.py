"""Preparations that are killed at random, done by other numbers of workers, in other orders: all
end with one's bytes.

    python -m tests.helpers.killed_preparations [--kills 20] [--seed 0] [--kinds all url text …]

Makes a small crawl and prepares it once for each kind of duplicate; prints what 1, 2 and 7 workers,
shuffled inputs, blocks of another size, a preparation that is killed again and again, and such a
one into moto's S3 server have made of it. The suite does it with few.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.moto_s3 import MotoS3
from tests.helpers.paths import ROOT
from tests.helpers.process import has_ended, wait_until
from tests.helpers.tiny_crawl import hash_files, make_crawl, read_public_files

REMOTE = "s3://crawl/data"

OFF: dict[str, Any] = {"exact": {"kind": "none"}, "minhash": {"kind": "none"}}
SMALL_RANGES = {"key_filter": {"kind": "sorted", "keys_per_task": 700}, "index": {"kind": "kept"}}
MINHASH = {"minhash": {"kind": "minhash", "buckets": 20, "hashes_per_bucket": 4}}
URL = {"url": {"kind": "url"}}
SUBSTRING = {"substring": {"kind": "substring", "min_characters": 60, "min_words": 20}}
BLOOM = {"key_filter": {"kind": "bloom", "keys_per_task": 700}}


def spans(kind: str, **more: int) -> dict[str, Any]:
    """The section of repeated paragraphs, lines or sentences."""
    return {"repeated_segments": {"kind": kind, "min_words": 20, **more}}


KINDS: dict[str, dict[str, Any]] = {
    "url": OFF | URL,
    "text": OFF | {"exact": {"kind": "text"}},
    "paragraphs": OFF | spans("paragraphs"),
    "lines": OFF | spans("lines"),
    "sentences": OFF | spans("sentences", sentences=3),
    "minhash": OFF | MINHASH,
    "substring": OFF | SUBSTRING,
    "bloom": OFF | URL | spans("paragraphs") | BLOOM,
    "against": URL | MINHASH,
    "all": URL | spans("sentences", sentences=2) | MINHASH | SUBSTRING,
}
AGAINST = ("against", "all")  # what is compared with an earlier dataset too


def count_files(folder: Path) -> int:
    """How far a preparation has come."""
    return sum(len(names) for _, _, names in os.walk(folder))


def start(
    folder: Path | str, inputs: Path | Sequence[str], workers: int, **data: Any
) -> subprocess.Popen[bytes]:
    """Prepare in a separate process; `data` are sections of the config."""
    given = [str(inputs)] if isinstance(inputs, Path) else list(inputs)
    executor = {"kind": "local", "workers": workers} | data.pop("executor", {})
    command = [sys.executable, "-m", "tests.helpers.tiny_crawl", str(folder), json.dumps(given)]
    command.append(json.dumps({"executor": executor, **data}))
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=ROOT)


def kill_again_and_again(
    folder: Path,
    inputs: Path | Sequence[str],
    undisturbed: Path,
    kills: int,
    seed: int,
    **data: Any,
) -> int:
    """Kill a preparation by two workers at random numbers of files, then let it end; return how
    often it was killed.

    The folder never shows a manifest with bytes other than those of the undisturbed one.
    """
    total, killed = count_files(undisturbed), 0
    expected = hash_files(undisturbed)
    for limit in sorted(random.Random(seed).choices(range(3, total - 2), k=kills)):
        process = start(folder, inputs, 2, **data)
        while process.poll() is None and count_files(folder) < limit:
            time.sleep(0.001)
        workers = (
            psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        )
        process.kill()
        killed += process.wait() == -signal.SIGKILL
        _wait_for_end(workers)
        assert not (folder / "manifest.json").exists() or hash_files(folder) == expected
    assert start(folder, inputs, 2, **data).wait() == 0
    return killed


def kill_remote(
    place: Path, inputs: Sequence[str], undisturbed: Path, kills: int, seed: int, **data: Any
) -> int:
    """Kill a preparation into object storage at random, then let it end; return how often it was
    killed.

    Manifest and objects are those of the undisturbed local one, or there is no manifest.
    """
    expected = read_public_files(undisturbed)

    def is_complete_or_absent() -> bool:
        objects = {key.removeprefix("data/"): content for key, content in s3.objects.items()}
        return (
            "manifest.json" not in objects
            or {name: objects.get(name) for name in expected} == expected
        )

    with MotoS3() as s3, pytest.MonkeyPatch.context() as patch:
        s3.connect(patch, place)
        killed, total = 0, count_files(undisturbed) + len(expected)
        for limit in sorted(random.Random(seed).choices(range(3, total - 2), k=kills)):
            process = start(REMOTE, inputs, 2, **data)
            while (
                process.poll() is None
                and count_files(place / "prepare") + s3.count_objects() < limit
            ):
                time.sleep(0.001)
            workers = (
                psutil.Process(process.pid).children(recursive=True)
                if process.poll() is None
                else []
            )
            process.kill()
            killed += process.wait() == -signal.SIGKILL
            _wait_for_end(workers)
            assert is_complete_or_absent()
        assert start(REMOTE, inputs, 2, **data).wait() == 0
        assert "data/manifest.json" in s3.objects
        assert is_complete_or_absent()
    return killed


def _wait_for_end(workers: Sequence[psutil.Process]) -> None:
    wait_until(
        lambda: all(has_ended(worker.pid) for worker in workers), "a worker outlived its parent"
    )


def read_kept_bytes(folder: Path) -> dict[str, Any]:
    """What a dataset promises whatever the blocks: all files but those of `work/`, and the
    index.
    """
    files = {
        name: digest for name, digest in hash_files(folder).items() if not name.startswith("work/")
    }
    index = (folder / "index").glob("*")
    return files | {path.name: path.read_bytes() for path in index}


def main() -> int:
    """Prepare, compare, and print a line for each kind."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20, help="of each kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        held = [
            _hold(Path(place), kind, arguments.kills, arguments.seed) for kind in arguments.kinds
        ]
    return 0 if all(held) else 1


def _hold(place: Path, kind: str, kills: int, seed: int) -> bool:
    names = [
        str(path)
        for part in range(2)
        for path in sorted(make_crawl(place / f"c{part}", 3, 10, part).iterdir())
    ]
    shared: dict[str, Any] = {"name": "spring", "deduplicate": SMALL_RANGES | KINDS[kind]}
    earlier = place / "spring"
    if kind in AGAINST:
        assert start(earlier, names[:2], 1, **shared).wait() == 0
        shared["deduplicate"] |= {"earlier_datasets": [str(earlier)]}
    shared["name"] = kind
    shuffled = random.Random(seed).sample(names, len(names))
    runs: Mapping[str, tuple[Sequence[str], int, dict[str, Any]]] = {
        "1 worker": (names, 1, {}),
        "2 workers": (names, 2, {}),
        "7 workers": (names, 7, {}),
        "shuffled": (shuffled, 2, {}),
        "other blocks": (names, 2, {"executor": {"block_bytes": 2_500}}),
    }
    outcome, whole = [], place / "1 worker"
    for name, (inputs, workers, data) in runs.items():
        same = start(place / name, inputs, workers, **shared, **data).wait() == 0
        same = same and read_kept_bytes(place / name) == read_kept_bytes(whole)
        outcome.append(f"{name}: {'same bytes' if same else 'OTHER BYTES'}")
    killed = kill_again_and_again(place / "killed", names, whole, kills, seed, **shared)
    same = hash_files(place / "killed") == hash_files(whole) and read_kept_bytes(
        place / "killed"
    ) == read_kept_bytes(whole)
    outcome.append(f"{killed} of {kills} killed: {'same bytes' if same else 'OTHER BYTES'}")
    killed = kill_remote(place / "cache", names, whole, kills, seed, **shared)
    outcome.append(f"{killed} of {kills} killed on an S3 server: same bytes")
    kept = json.loads((whole / "manifest.json").read_text())["funnel"][-1]
    print(
        f"{kind}: {', '.join(outcome)} ({kept['stage']} left {kept['documents_out']} documents)",
        flush=True,
    )
    for path in place.iterdir():
        shutil.rmtree(path)
    return "OTHER" not in " ".join(outcome)


if __name__ == "__main__":
    sys.exit(main())
