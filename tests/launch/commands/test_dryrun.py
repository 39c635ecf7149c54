"""Laws of `llmsys dryrun`: what it prints and writes, and its exit status."""

import json
import shlex
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from llmsys.config.loading.config_files import list_config_names
from llmsys.config.loading.load import read_config
from llmsys.dryrun import dry_run
from llmsys.dryrun.config_table import BEGIN, END
from llmsys.dryrun.dry_run_request import DryRunRequest
from llmsys.dryrun.page import write_dry_run
from llmsys.errors import ConfigError
from llmsys.estimate.device_profile import FOLDER
from llmsys.launch.commands.dryrun import build_request, parse_cluster
from llmsys.launch.main import build_parser, main
from llmsys.report.estimate_page import NUM_CATEGORIES
from tests.helpers.browser import MAX_PAGE_BYTES, needs_chromium, open_in_both_looks
from tests.helpers.dry_runs import RANKS, run_tiny, write_tiny_config

VOID = {"meta", "link", "input", "br"}


class Balance(HTMLParser):
    """Open elements, and the text outside of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


def write_small_device(folder: Path) -> Path:
    path = folder / "small.yaml"
    path.write_text((FOLDER / "h100-sxm.yaml").read_text().replace("84.9e9", "1.0e9"))
    return path


def test_a_rank_that_does_not_fit_is_printed_written_and_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    words = [
        "dryrun",
        str(write_tiny_config()),
        f"nodes=1:{RANKS}",
        "rank=3",
        f"device={write_small_device(tmp_path)}",
    ]
    assert main([*words, "--output", str(output)]) == 1
    printed = capsys.readouterr().out
    assert "rank 3 of 8 does not fit: 1.0 of 0.9 GiB on H100 SXM 80GB" in printed
    assert "compared with llmsys estimate" in printed
    [result] = json.loads((output / "dryrun.json").read_text())["ranks"]
    assert result["needed_bytes"] > result["capacity_bytes"] == 1_000_000_000
    page = Balance()
    page.feed((output / "dryrun.html").read_text())
    assert page.open == []
    text = " ".join(page.text)
    assert f"{result['parameters']['own']:,}" in text
    assert all(wait["line"] in text for wait in result["waits"])
    written = (output / "dryrun.html").read_text()
    assert "memory-over-time" in written
    assert "Phases of the run" in written
    assert len(written) < MAX_PAGE_BYTES


def test_a_wrong_collective_is_named_and_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = "missing: all_reduce over tensor (2 ranks: 0, 1), float32, 256 bytes"
    check = {"num_messages": 9, "differences": [found], "unchecked": ["the optimizer muon"]}
    result = run_tiny() | {"collective_check": check, "is_proven": False}
    monkeypatch.setattr(dry_run, "iter_dry_runs", lambda request, all_kinds: iter([result]))
    words = ["dryrun", str(write_tiny_config()), f"nodes=1:{RANKS}", "device=h100-sxm"]
    output = tmp_path / "out"
    assert main([*words, "--output", str(output)]) == 1
    printed = capsys.readouterr().out
    assert (
        f"1 differences from the collectives and shards that the layout asks for:\n  {found}"
        in (printed)
    )
    assert "collectives of the optimizer muon are not checked" in printed
    page = (output / "dryrun.html").read_text()
    assert found in page
    assert "not checked: the optimizer muon" in page


def test_all_configs_run_each_on_its_cluster_and_name_those_that_are_refuted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}

    def answer(request: DryRunRequest, *, all_kinds: bool) -> Iterator[dict[str, Any]]:
        assert all_kinds
        asked[request.config] = request.nodes, request.node_devices, request.device
        yield run_tiny()
        if request.config == "train/decoder-tiny":
            yield run_tiny() | {"rank": 7, "is_proven": False}
        if request.config == "train/t5-tiny":
            raise ConfigError("no such thing. Use another.")

    monkeypatch.setattr(dry_run, "iter_dry_runs", answer)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\n\n| old |\n\n{END}\nafter\n")
    words = ["dryrun", "--all-configs", "--output", str(tmp_path), "--table", str(page)]
    assert main(words) == 1
    printed = capsys.readouterr().out
    shipped = [name for name in list_config_names() if name.startswith("train/")]
    assert sorted(asked) == shipped
    assert asked["train/llama-8b-64xh100"] == (8, 8, "h100-sxm")
    assert asked["train/olmoe-1b-7b-1xh200"] == (1, 1, "h200")
    assert asked["train/decoder-tiny"] == (1, 2, "h100-sxm")
    assert "no such thing. Use another." in printed
    rows = [line for line in printed.splitlines() if line.startswith("| train/")]
    assert len(rows) == len(shipped)
    assert rows[shipped.index("train/decoder-tiny")].startswith(
        "| train/decoder-tiny | 8 | 0, 7 | "
    )
    assert rows[shipped.index("train/decoder-tiny")].endswith(" | refuted |  |")
    assert rows[shipped.index("train/t5-tiny")].endswith(" | no such thing. Use another. |  |")
    assert printed.splitlines()[-4:-1] == [
        f"{len(shipped) - 2} of {len(shipped)} configs are proven",
        "  train/decoder-tiny",
        "  train/t5-tiny",
    ]
    assert (tmp_path / "train" / "decoder-tiny" / "dryrun.html").is_file()
    head, rule = "| config | ranks | run | calls | GiB | verdict | not checked |", "|" + "---|" * 7
    table = "\n".join([head, rule, *rows])
    assert page.read_text() == f"before\n{BEGIN}\n\n{table}\n\n{END}\nafter\n"


def test_a_page_without_a_place_for_the_table_is_refused_before_any_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "iter_dry_runs", None)
    page = tmp_path / "page.md"
    for text in (f"{END} {BEGIN}", BEGIN, f"{BEGIN}{BEGIN}{END}", f"{BEGIN}{END}{END}"):
        page.write_text(text)
        assert main(["dryrun", "--all-configs", "--table", str(page)]) == 2
        assert "has no place for the table" in capsys.readouterr().err
        assert page.read_text() == text
    words = ["dryrun", "train/demo", "nodes=1:2", "device=h100-sxm", "--table", str(page)]
    assert main(words) == 2
    assert "is for the table of all configs" in capsys.readouterr().err


def test_the_documented_table_has_proven_training_configs_in_their_order(
    repository: Path,
) -> None:
    page = repository / "docs" / "measurements" / "dryrun.md"
    _, _, rest = page.read_text().partition(BEGIN)
    lines = rest.partition(END)[0].splitlines()
    # A cell for each of 256 positions is too many operations; the page says so.
    assert [line.split()[1] for line in lines if "not run to the end" in line] == [
        "train/lstm-multi30k"
    ]
    rows = [line.split(" | ") for line in lines if "not run to the end" not in line]
    found = {row[0].removeprefix("| "): row[5] for row in rows if row[0].startswith("| train/")}
    shipped = [name for name in list_config_names() if name.startswith("train/")]
    assert list(found) == [name for name in shipped if name in found]
    assert "train/demo" in found
    assert set(found.values()) == {"proven"}


@needs_chromium
@pytest.mark.browser
def test_the_page_of_two_ranks_is_drawn_and_nothing_is_cut(tmp_path: Path) -> None:
    result = run_tiny()
    page, _ = write_dry_run([result | {"fits": False}, result | {"rank": 1}], tmp_path)
    *_, opened = open_in_both_looks(page)
    categories = {name for point in result["memory"]["timeline"] for name in point["bytes"]}
    assert opened.marks() == {"memory-over-time": min(len(categories), NUM_CATEGORIES + 1)}
    assert opened.dom.count("does not fit") >= 2


def test_a_timeline_ends_where_the_peak_of_its_phases_says() -> None:
    memory = run_tiny()["memory"]
    assert max(phase["peak_bytes"] for phase in memory["phases"]) == memory["peak_bytes"]
    assert max(sum(point["bytes"].values()) for point in memory["timeline"]) == memory["peak_bytes"]


def test_the_page_is_written_below_runs_which_git_ignores(repository: Path) -> None:
    default = build_parser("dryrun").parse_intermixed_args(["train/demo"]).output
    assert f"{default.parts[0]}/" in (repository / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--all-configs"], "is given too. Leave one of them out."),
        (["device=h100-sxm"], "A dry run needs a cluster, and nodes is not given. Give nodes=8:8"),
        (["nodes=8:8"], "and device is not given"),
        (
            ["nodes=8:8", "device=h100-sxm", "rank=x"],
            "rank=x is not a rank. Use rank=0 to rank=63.",
        ),
        (
            ["nodes=8:8", "device=tpu-v4"],
            "has no compute_capability, and a dry run pretends CUDA devices only",
        ),
    ],
)
def test_a_command_line_that_cannot_run_names_the_next_step(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dryrun", str(write_tiny_config()), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["8", "a:8", "8:0", ":8"])
def test_a_cluster_is_machines_times_devices(text: str) -> None:
    assert parse_cluster("512:8") == (512, 8)
    with pytest.raises(ConfigError, match=f"nodes={text} is not a cluster"):
        parse_cluster(text)


def test_the_command_that_a_plan_prints_names_its_layout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "model/llama3.2-1b",
        "gpus=16",
        "device=h100-sxm",
        "batch.sequence_length=2048",
        "batch.sequences=64",
    ]
    assert main(["plan", *words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    fastest = next(one for one in plan["best"] if one["engine"]["kind"] == "torch")
    program, verb, *arguments = shlex.split(plan["dryrun"])
    assert (program, verb) == ("llmsys", "dryrun")
    request = build_request(build_parser("dryrun").parse_intermixed_args(arguments))
    assert (request.nodes, request.node_devices, request.device) == (2, 8, "h100-sxm")
    config = read_config(request.config, list(request.overrides)).run
    assert config.layout.to_settings() == fastest["layout"]
    assert config.batch.micro_sequences == fastest["micro_sequences"]
