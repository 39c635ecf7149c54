"""Every command, config and example of README.md and docs/ works: it is run in its own folder,
or parsed.

Commands that cost much (training a real config, plans, other programs) are parsed by the parser of
their verb, and their configs are resolved. Commands of `RUN_PAGES` run on a tiny crawl with a tiny
model.
"""

import importlib
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

import llmsys.config.loading.load
from llmsys.calibrate.training_steps import StepRate
from llmsys.config.loading.load import load_run_config, read_config
from llmsys.config.run import RunConfig
from llmsys.config.section import list_fields, list_section_types
from llmsys.events import iter_events
from llmsys.launch.commands.verbs import VERBS
from llmsys.launch.main import build_parser, main
from tests.helpers.fake_s3 import FakeS3
from tests.helpers.harness_stand_in import install_stand_in
from tests.helpers.json_tokenizers import write as write_tokenizer_json
from tests.helpers.markdown_blocks import (
    Block,
    Command,
    iter_commands,
    list_blocks,
    list_inline_code,
    matches_output,
)
from tests.helpers.paths import ROOT
from tests.helpers.tiny_crawl import make_crawl
from tests.helpers.transformers_models import LLAMA
from tests.llmsys.calibrate.test_machine_probe import MEASURED
from tools.docs.event_reference import list_event_fields
from tools.recipe_chats import TEMPLATE, iter_chats, iter_questions

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Pages whose commands run, in this order: later ones use the files of earlier ones.
RUN_PAGES = (
    *(
        "your-crawl.md",
        "../README.md",
        "report.md",
        "scaling-out.md",
        "object-storage.md",
        "hugging-face.md",
    ),
    *("languages.md", "python.md", "tuning.md", "own-blocks.md"),
)
LANGUAGES = {"console", "yaml", "python", "text"}
# Verbs that print the same wherever they run; the page shows exactly what they print.
EXACT = {"show", "estimate", "scale"}
# Plans of more than 8 GPUs take 5 s of CPU time or more; test_plans.py holds what pages show of
# them.
# a chat ends with Ctrl-C
PARSED_ONLY = {"plan", "dryrun", "doctor", "launch", "preflight", "demo", "chat"}
# An export is compared with what transformers loads in tests/llmsys/convert.
# DuckDB, polars and datasets are tested in tests/data_pipeline/inspection/.
COMPILED_ONLY = (
    "import AutoModelForCausalLM",
    "import duckdb",
    "import polars",
    "import datasets",
)
# What a small run takes instead of what the pages say.
MINE = (
    "tokenizer.vocab_size=400 model.vocab_size=400 model.hidden_size=16 "
    "model.intermediate_size=24 model.num_hidden_layers=1 model.num_attention_heads=2 "
    "model.num_key_value_heads=1 batch.sequence_length=32 batch.sequences=2 "
    "schedule.warmup_tokens=64 schedule.decay_tokens=64 launch.processes=1 "
    "generation.max_new_tokens=2 data.executor.kind=inline data.split.heldout_fraction=0.2 "
    "train.precision=fp32"
)
TINY = {
    "my.yaml": f"{MINE} train.tokens=256",
    "sampled.yaml": MINE,
    "cooled.yaml": f"{MINE} train.tokens=384 train.branch_from=runs/mine@4",
    "chats.yaml": "model.vocab_size=400 model.hidden_size=16 model.intermediate_size=24 "
    "model.num_hidden_layers=1 model.num_attention_heads=2 model.num_key_value_heads=1 "
    "batch.sequence_length=32 batch.sequences=2 train.tokens=512 "
    "train.branch_from=runs/cool@6 schedule.warmup_tokens=64 schedule.decay_tokens=64 "
    "launch.processes=1 data.max_tokens=128 generation.max_new_tokens=2 "
    "data.executor.kind=inline train.precision=fp32",
    "continued.yaml": "batch.sequence_length=32 batch.sequences=2 train.tokens=128 "
    "schedule.warmup_tokens=64 launch.processes=1 data.executor.kind=inline "
    "data.split.heldout_fraction=0.2 train.precision=fp32",
    "languages.yaml": "tokenizer.vocab_size=400 model.vocab_size=400 data.executor.kind=inline "
    "data.split.heldout_fraction=0.2",
    "own.yaml": f"{MINE} train.tokens=128",
    # the tiny crawl has one German page, too few for two splits; another split, because equal
    # datasets are rejected
    "german.yaml": (
        "data.executor.kind=inline data.language.languages=[en] data.split.heldout_fraction=0.4"
    ),
    "mixed.yaml": (
        f"{MINE.replace(' data.executor.kind=inline data.split.heldout_fraction=0.2', '')} "
        "train.tokens=256"
    ),
    "tokens.yaml": "data.executor.kind=inline",
    "train/llama-1b-1xh200": f"{MINE.replace('schedule.decay_tokens=64', 'model.head_dim=8')} "
    "train.tokens=128 data.folder=runs/one-data run.folder=runs/one data.rules=[] "
    "batch.micro_sequences=1",
    "runs/cool/config.yaml": "",
    "runs/chats/config.yaml": "",
    "runs/start/config.yaml": "generation.max_new_tokens=2",
}
# What `llmsys init` writes, smaller; a verb whose options follow the config takes no overrides
# here.
SMALL = (
    "batch.sequence_length=32 batch.sequences=2 train.tokens=128 schedule.warmup_tokens=64 "
    "launch.processes=1 data.executor.kind=inline data.split.heldout_fraction=0.2 "
    "train.precision=fp32 generation.max_new_tokens=2"
)
FIRST_HOUR = {
    "my.yaml": f"{SMALL} tokenizer.vocab_size=400 model.vocab_size=400 model.hidden_size=16 "
    "model.intermediate_size=24 model.num_hidden_layers=1 model.num_attention_heads=2 "
    "model.num_key_value_heads=1",
    "qwen.yaml": SMALL,
}
REPLACED = {
    "train:12345": "train:5",
    "step=100": "step=1",
    "rule=gopher_quality": "rule=language",
    "gopher_quality.min_words=20,50,100": "gopher_quality.min_words=60,70",
}
# Configs over an imported model, and those that `llmsys init` writes.
LATER = ("continued.yaml", "qwen.yaml", "start.yaml", "first.yaml")
# Commands of other programs that need a network or an account.
ELSEWHERE = {
    "git clone https://example.org/llmsys && cd llmsys",
    ". .venv/bin/activate",
    "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B",
}


def is_exact(words: Sequence[str]) -> bool:
    """Return whether a page shows exactly what a command of llmsys prints, wherever it runs."""
    return words[0] in EXACT or {"launch", "--print"} <= {*words} or {"plan", "gpus=8"} <= {*words}


def list_page_commands(path: Path) -> list[Command]:
    return [
        command
        for block in list_blocks(path)
        if block.language == "console"
        for command in iter_commands(block)
    ]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_block_is_of_a_kind_that_is_checked(path: Path) -> None:
    for block in list_blocks(path):
        assert block.language in LANGUAGES, f"{block.place}: {block.language or 'no language'}"
        if block.language == "text":
            assert not re.search(r"^\s*(\$ |llmsys |make |pip )", block.text, re.MULTILINE), (
                block.place
            )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with a crawl and every config that a page shows, and a bucket; one
    rank trains in here.
    """
    folder = tmp_path_factory.mktemp("docs")
    make_crawl(folder / "crawl", files=1)
    write_chats_and_tasks(folder)
    with pytest.MonkeyPatch.context() as patch, FakeS3() as s3:
        s3.connect(patch, folder / "cache")
        patch.chdir(folder)
        patch.setattr("llmsys.launch.launchers.local.run_local_ranks", train_in_this_process)
        for path in PAGES:
            for block in list_blocks(path):
                if block.language == "yaml":
                    write_config(block)
        yield folder


def write_chats_and_tasks(folder: Path) -> None:
    """Write what `python tools/recipe_chats.py chats` writes, but fewer chats, and the files
    that the page shows.
    """
    [template] = list_blocks_of_kind("tuning.md", "{% for m in messages %}")
    [task] = list_blocks_of_kind("tuning.md", "# tasks/")
    assert template.text == TEMPLATE
    rows = {
        "train": iter_chats(40, 0, is_heldout=False),
        "heldout": iter_chats(8, 1, is_heldout=True),
        "questions": iter_questions(4, 2),
    }
    files = {
        f"chats/{name}.jsonl": "".join(json.dumps(row) + "\n" for row in lines)
        for name, lines in rows.items()
    }
    files |= {
        "chats/chat.jinja": template.text,
        task.text.split("\n", 1)[0].removeprefix("# "): task.text,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def list_blocks_of_kind(page: str, opening: str) -> list[Block]:
    return [block for block in list_blocks(ROOT / "docs" / page) if block.text.startswith(opening)]


def train_in_this_process(config: RunConfig, words: Sequence[str]) -> None:
    import llmsys.launch.train

    assert config.launch.processes == 1
    assert llmsys.launch.train.main(list(words)) == 0


def write_config(block: Block) -> None:
    """Write a config under the name of its first line; pages may repeat one only as it is."""
    name = re.match(r"# (\S+\.yaml)\n", block.text)
    assert name, f"{block.place}: the first line of a config is `# NAME.yaml`"
    if Path(name[1]).exists():
        assert Path(name[1]).read_text() == block.text, (
            f"{block.place} differs from {name[1]} on another page"
        )
    Path(name[1]).write_text(block.text)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_commands_parse_and_their_configs_resolve(path: Path, folder: Path) -> None:
    for command in list_page_commands(path):
        if command.text not in ELSEWHERE:
            for part in command.text.partition(" #")[0].split(" && "):
                check_command(command, shlex.split(part))


def check_command(command: Command, words: list[str]) -> None:
    match words:
        case ["llmsys", "--help" | "--version"]:
            pass
        case ["llmsys", verb, *rest]:
            check_verb(command, verb, rest)
        case ["make", *rest]:
            makefile = (ROOT / "Makefile").read_text()
            for word in rest:
                name, is_variable, _ = word.partition("=")
                assert re.search(
                    rf"^{name} ?[?:]?=" if is_variable else rf"^{name}:", makefile, re.MULTILINE
                ), command
        case ["pip" | "uv", *rest]:
            check_install(command, rest)
        case ["python", script, *_]:
            assert (ROOT / script).is_file(), command
        case ["docker" | "apptainer", *rest]:
            files = [word for word in rest if word.startswith("containers/")]
            assert rest[0] in ("build", "run"), command
            assert (rest[0] == "build") == bool(files), command
            assert all((ROOT / file).is_file() for file in files), command
        case ["torchrun" | "deepspeed" | "accelerate" | "srun", *rest]:
            config, *overrides = rest[rest.index("launch/train.py") + 1 :]
            read_config(config, overrides)
        case _:
            pytest.fail(f"{command.place}: `{command.text}` is neither run nor checked")


def check_verb(command: Command, verb: str, words: list[str]) -> None:
    assert verb in VERBS, command
    try:
        arguments = build_parser(verb).parse_intermixed_args(words)
    except SystemExit:
        pytest.fail(f"{command.place}: `{command.text}` is rejected by its parser")
    is_error = any(line.startswith("llmsys: error") for line in command.output)
    # a run folder is there once the commands before have run
    if (
        VERBS[verb].takes_config
        and arguments.config
        and not is_error
        and not arguments.config.startswith(("runs/", "s3://"))
    ):
        own = getattr(importlib.import_module(f"llmsys.launch.commands.{verb}"), "OWN_NAMES", ())
        if arguments.config not in LATER:
            read_config(
                arguments.config,
                [word for word in arguments.overrides if word.partition("=")[0] not in own],
            )


def check_install(command: Command, words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for extra in re.findall(r"\[([a-z0-9,]+)\]", " ".join(words)):
        assert set(extra.split(",")) <= extras.keys(), command
    for after, word in pairwise(words):
        assert after != "-c" or (ROOT / word).is_file(), command


def test_the_commands_of_the_tutorials_run_in_order(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prepares four times and trains three times in this process: about fifteen seconds of CPU
    time.
    """

    def load_tiny_config(config: str, overrides: Sequence[str] = ()) -> RunConfig:
        return load_run_config(config, [*TINY.get(config, "").split(), *overrides])

    # for the examples in Python
    monkeypatch.setattr(llmsys.config.loading.load, "load_run_config", load_tiny_config)
    # a page shows where consent to code is needed
    monkeypatch.delenv("LLMSYS_TRUST_CODE")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    if find_spec("lm_eval") is None:  # an optional package
        install_stand_in(monkeypatch)
    for name in RUN_PAGES:
        variables: dict[str, object] = {}
        for block in list_blocks(ROOT / "docs" / name):
            if block.language == "console":
                for command in iter_commands(block):
                    run_command(command, capfd)
            elif block.language == "python" and not any(
                text in block.text for text in COMPILED_ONLY
            ):
                exec(compile(block.text, block.place, "exec"), variables)
    check_events(folder)


def test_the_five_commands_of_both_ways_run_on_other_data(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prepares twice and trains twice in this process: about eight seconds of CPU time."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("llmsys.launch.launchers.local.run_local_ranks", train_in_this_process)
    make_crawl(Path("crawl"), files=1)
    config = transformers.Qwen3Config(**LLAMA | {"vocab_size": 400, "head_dim": 8})
    transformers.Qwen3ForCausalLM(config).save_pretrained("Qwen3-0.6B")
    write_tokenizer_json("gpt2", Path("Qwen3-0.6B"))
    for command in list_page_commands(ROOT / "docs" / "first-hour.md"):
        if command.words[0] == "llmsys" and command.words[1] not in ("--help", "demo"):
            run_command(command, capfd, FIRST_HOUR)
    assert (tmp_path / "Qwen3-0.6B-exported" / "model.safetensors").is_file()


def test_the_way_to_a_model_in_given_minutes_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prepares and trains once in this process, on a machine whose steps take five minutes, so that
    the model and its number of steps are small.
    """
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    rates = {dtype: rate / 1000 for dtype, rate in MEASURED.peak_flops.items()}
    slow = MEASURED.model_copy(update={"peak_flops": rates})
    monkeypatch.setattr("llmsys.launch.launchers.local.run_local_ranks", train_in_this_process)
    monkeypatch.setattr("llmsys.calibrate.machine_probe.get_machine_profile", lambda renew: slow)
    monkeypatch.setattr(
        "llmsys.calibrate.training_steps.measure_fastest_rate",
        lambda *_: StepRate(300.0, 0.0, 4, 1),
    )
    make_crawl(Path("crawl"), files=3)
    small = "data.executor.kind=inline data.split.heldout_fraction=0.2 generation.max_new_tokens=2"
    for command in list_page_commands(ROOT / "docs" / "first-model.md"):
        run_command(command, capfd, {"first.yaml": small})
    assert (tmp_path / "first-model" / "model.safetensors").is_file()
    printed = capfd.readouterr().out
    assert re.search(r"promised .* minutes: .*, OUTSIDE of the interval", printed)


def check_events(folder: Path) -> None:
    """The reference of events has every field that a run and a preparation wrote."""
    fields = list_event_fields()
    for path in folder.rglob("events.jsonl"):
        for event in iter_events(path):
            known = fields[event["event"]][0] | {"time", "event", "step"}
            assert event.keys() <= known, f"{path}: {event['event']} has {event.keys() - known}"


def run_command(
    command: Command, capfd: pytest.CaptureFixture[str], tiny: dict[str, str] = TINY
) -> None:
    program, verb, *words = command.words
    if (
        program != "llmsys"
        or verb in EXACT | PARSED_ONLY
        or ("gguf" in words and find_spec("gguf") is None)
    ):
        return
    config = next((word for word in words if word in tiny), "")
    words = [REPLACED.get(word, word) for word in words]
    if "--explain" in words:
        words[words.index("--explain") + 1] = "https://example-0.org/3"
    status = main(
        [verb, *words, *(tiny.get(config, "").split() if VERBS[verb].takes_config else ())]
    )
    assert status == 0, (
        f"{command.place}: `{command.text}` ended with status {status}: {capfd.readouterr().err}"
    )


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_show_what_commands_print(
    path: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for command in list_page_commands(path):
        program, *words = command.words
        if program != "llmsys" or not is_exact(words) or words[1:2] == ["continued.yaml"]:
            continue
        capfd.readouterr()
        status = main(words)
        output, errors = capfd.readouterr()
        is_error = any(line.startswith("llmsys: error") for line in command.output)
        assert status == (2 if is_error else 0), f"{command.place}: {errors}"
        if command.output:
            assert matches_output(command.output, errors if is_error else output), (
                f"{command.place}: now {output}"
            )


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_verbs_options_and_keys_in_the_text_exist(path: Path) -> None:
    for code in list_inline_code(path):
        if found := re.match(r"llmsys ([a-z]+)\b", code):
            assert found[1] in VERBS, f"{path.name}: {code}"
            options = {
                name for action in build_parser(found[1])._actions for name in action.option_strings
            }
            assert set(re.findall(r"(?<=\s)--[a-z-]+", code)) <= options, f"{path.name}: {code}"
        elif (found := re.match(r"([a-z_]+)((?:\.[a-z_]+)+)(?=[:=\s]|$)", code)) and found[
            1
        ] in RunConfig.model_fields:
            assert has_key(found[0].split(".")), f"{path.name}: no key {found[0]}"


def has_key(keys: list[str]) -> bool:
    members = [RunConfig]
    for key in keys:
        fields = list_fields(members, key) if key != "kind" else members[:1]
        if not fields:
            return False
        members = (
            []
            if key == "kind"
            else [one for field in fields for one in list_section_types(field.annotation)]
        )
    return True


def test_yaml_blocks_are_configs(folder: Path) -> None:
    """A cluster's costs are no run; a config over an imported model resolves after its import
    (the run above).
    """
    from llmsys.estimate.cluster_costs import load_cluster_costs

    for path in PAGES:
        for block in (one for one in list_blocks(path) if one.language == "yaml"):
            name = block.text.split("\n", 1)[0].removeprefix("# ")
            if name == "cluster.yaml":
                load_cluster_costs(Path(name))
            elif name not in ("wrong.yaml", "continued.yaml"):
                assert yaml.safe_load(block.text), block.place
                read_config(name)
