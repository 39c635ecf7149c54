"""The verbs of the `llmsys` command with their help and examples, and the errors of their
parsers.
"""

import argparse
import difflib
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple, NoReturn

from llmsys.errors import ConfigError


class CommandSpec(NamedTuple):
    """Help text of a verb. Its module is llmsys.launch.commands.NAME.

    A verb about folders takes no config (`takes_config=False`): its module names its own arguments.
    A verb that runs code of a config (`kind: python`, tasks of the harness) has --trust-code; the
    others run none.
    """

    summary: str
    example: str
    config_optional: bool = False
    takes_config: bool = True
    runs_code: bool = False


VERBS = {
    "init": CommandSpec(
        "write a commented config for a folder of crawl files, parquet, jsonl or text, or a "
        "Hugging Face model",
        "llmsys init tests/data/sample_crawl --output my.yaml",
        takes_config=False,
    ),
    "demo": CommandSpec(
        "run every step on a sample crawl, from web pages to a report: 4 to 7 minutes on two cores",
        "llmsys demo --folder demo --engine deepspeed",
        takes_config=False,
    ),
    "prepare": CommandSpec(
        "turn crawl shards into clean documents, a tokenizer and token shards",
        "llmsys prepare train/demo data.executor.workers=2",
        runs_code=True,
    ),
    "tokenizer": CommandSpec(
        "train the tokenizer on the documents that preparation kept",
        "llmsys tokenizer train/demo tokenizer.vocab_size=8_192",
        runs_code=True,
    ),
    "train": CommandSpec(
        "train on this machine, from the start or from the newest checkpoint",
        "llmsys train train/demo engine.kind=deepspeed run.folder=demo/deepspeed",
        runs_code=True,
    ),
    "preflight": CommandSpec(
        "check hosts before launch: ssh, versions, clocks, disks, network, layout, data",
        "llmsys preflight train/demo nodes=first:8,second:8",
        runs_code=True,
    ),
    "launch": CommandSpec(
        "train on several hosts or under Slurm, or print the commands",
        "llmsys launch train/demo nodes=127.0.0.1:2 --print",
        runs_code=True,
    ),
    "evaluate": CommandSpec(
        "measure the newest checkpoint on held-out documents",
        "llmsys evaluate train/demo evaluation.max_tokens=50_000 --json",
        runs_code=True,
    ),
    "generate": CommandSpec(
        "continue prompts with the newest checkpoint",
        "llmsys generate train/demo --prompt 'The kernel' generation.temperature=0.7",
        runs_code=True,
    ),
    "translate": CommandSpec(
        "translate lines with the newest checkpoint of an encoder-decoder",
        "llmsys translate train/multi30k --input sentences.txt generation.num_beams=5",
        runs_code=True,
    ),
    "estimate": CommandSpec(
        "estimate parameters, FLOPs, memory and, on a device, time and cost, before a run starts",
        "llmsys estimate train/demo batch.sequence_length=1024 --json",
        runs_code=True,
    ),
    "plan": CommandSpec(
        "find the fastest layouts that fit a cluster, and why the others do not",
        "llmsys plan model/llama3.1-8b gpus=64 device=h100-sxm batch.sequence_length=8192 "
        "batch.sequences=256",
        runs_code=True,
    ),
    "dryrun": CommandSpec(
        "run the training step of one rank of any cluster without a GPU: memory, collectives, "
        "waits, kernels",
        "llmsys dryrun train/llama-8b-64xh100 nodes=8:8 rank=17 device=h100-sxm",
        config_optional=True,
        runs_code=True,
    ),
    "scale": CommandSpec(
        "recommend model size and tokens for a compute budget, or fit a scaling law to your runs",
        "llmsys scale budget=1e21 unique_tokens=2e9",
        takes_config=False,
    ),
    "calibrate": CommandSpec(
        "measure this machine into a device profile for estimates",
        "llmsys calibrate --output mine.yaml --processes 2",
        takes_config=False,
    ),
    "reconcile": CommandSpec(
        "compare predicted with measured step time and memory; --update fits a device profile",
        "llmsys reconcile runs/a runs/b --update mine.yaml",
        takes_config=False,
    ),
    "inspect": CommandSpec(
        "verify a prepared dataset, decode samples of it, trace tokens to their pages, and show "
        "losses by host or column",
        "llmsys inspect demo/data --samples 100",
        takes_config=False,
        runs_code=True,
    ),
    "report": CommandSpec(
        "write one HTML page about a dataset and a run",
        "llmsys report train/demo --output demo/report.html",
    ),
    "compare": CommandSpec(
        "write one HTML page about several runs: curves, differing config keys, scores",
        "llmsys compare runs/a runs/b --output comparison.html",
        takes_config=False,
    ),
    "ablate": CommandSpec(
        "compare variants of a data config: prepare each from one extraction, train the same "
        "model on each with several seeds, evaluate all on the same held-out pages",
        "llmsys ablate ablations/sample-crawl ablations/no-rules ablations/exact-only --seeds 3",
        takes_config=False,
        runs_code=True,
    ),
    "watch": CommandSpec(
        "show a run in the terminal while it trains",
        "llmsys watch runs/mine",
        takes_config=False,
    ),
    "chat": CommandSpec(
        "talk to the newest checkpoint on a page of this machine, with sampling controls and "
        "token probabilities",
        "llmsys chat train/demo --port 8000",
        runs_code=True,
    ),
    "doctor": CommandSpec(
        "check on this machine that engines and layouts agree (parity), crashes lose nothing "
        "(crash), and devices compute right (device)",
        "llmsys doctor parity --processes 1,2",
        takes_config=False,
        runs_code=True,
    ),
    "trace": CommandSpec(
        "list the documents of a step, the steps and checkpoints that saw a document, or the "
        "documents with the highest loss",
        "llmsys trace train/demo step=100",
        runs_code=True,
    ),
    "replay": CommandSpec(
        "rerun one step from the nearest checkpoint and compare it with the recorded values",
        "llmsys replay train/demo step=100",
        runs_code=True,
    ),
    "convert": CommandSpec(
        "convert a Hugging Face folder to a run folder and back, or a dataset to the tokens of "
        "other trainers",
        "llmsys convert downloads/Qwen3-0.6B runs/qwen3",
        takes_config=False,
    ),
    "show": CommandSpec(
        "print the resolved config, and mark what differs from the defaults",
        "llmsys show train/demo optimizer.learning_rate=3e-4",
        config_optional=True,
    ),
    "list": CommandSpec(
        "list the configs, models, device profiles or rules that ship with llmsys",
        "llmsys list models",
        takes_config=False,
    ),
    "completion": CommandSpec(
        "print the completion script of a shell: verbs, options, configs and keys",
        "llmsys completion bash",
        takes_config=False,
    ),
}

CONFIG_HELP = (
    "path of a YAML file or config.json, folder of a model, run or dataset, or a name under "
    "configs/ such as train/demo"
)
TRUST_HELP = (
    "run Python code and harness tasks that the config names and that you have not yet consented "
    "to, and record their sha256; read them first"
)
OVERRIDE_HELP = "a value of the config, such as batch.sequence_length=1024"


# Options and words of verbs, by names that users of other programs give them.
_OTHER_WORDS = {
    "nodes": ("hosts", "hostfile", "nnodes", "num_nodes", "num_machines", "nodelist"),
    "gpus": ("gpu", "num_gpus", "n_gpus", "devices", "world_size"),
    "device": ("gpu_type", "accelerator", "hardware", "gpu"),
    "output": ("out", "output_dir", "output_file", "o"),
    "price-per-hour": ("price", "cost", "cost_per_hour"),
    "step": ("steps", "checkpoint", "ckpt"),
    "sbatch": (
        "partition", "time", "account", "qos", "mem", "gres", "constraint", "exclusive", "job_name",
        "cpus_per_task", "mail_user", "reservation",
    ),
}  # fmt: skip
# The verb that a word of another program means.
_OTHER_VERBS = {
    "convert": ("export", "import", "quantize", "gguf"),
    "train": ("fit", "run", "finetune", "fine-tune", "pretrain", "sft", "start", "resume"),
    "chat": ("serve", "server", "ui", "web"),
    "prepare": ("preprocess", "data", "dedup", "crawl", "process"),
    "tokenizer": ("tokenize", "tokenise", "vocab"),
    "evaluate": ("eval", "test", "validate", "lm-eval", "lm_eval"),
    "generate": ("sample", "complete", "infer", "inference", "predict"),
    "calibrate": ("benchmark", "bench", "profile"),
    "show": ("config", "print", "cat", "view"),
    "list": ("ls", "models", "devices"),
    "doctor": ("check", "diagnose", "env"),
    "estimate": ("price", "cost", "memory", "flops"),
    "init": ("new", "create", "setup", "download"),
    "watch": ("monitor", "status", "tail", "logs"),
    "ablate": ("ablation", "ablations", "experiment"),
    "launch": ("torchrun", "deepspeed", "accelerate", "submit", "sbatch", "mpirun"),
}


def suggest_verb(word: str) -> str | None:
    """Return the verb that an unknown one means: by another name, or spelled alike.

    Args:
        word: The unknown verb.

    Returns:
        One of `VERBS`; None if nothing is close.
    """
    lower = word.lower()
    named = [verb for verb, others in _OTHER_VERBS.items() if lower in others]
    return next(iter([*named, *difflib.get_close_matches(lower, VERBS, n=1)]), None)


class VerbParser(argparse.ArgumentParser):
    """A parser whose errors are ours: the mistake, the closest option, and where to look."""

    # names of the verb's own words, such as nodes in nodes=2
    own_names: Collection[str] = ()

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing the usage and leaving Python."""
        hint = ""
        if unknown := re.search(r"unrecognized arguments: (--?[\w.-]+)(.*)", message, re.DOTALL):
            given = unknown[2].lstrip("= ").split()
            is_value = bool(given) and (unknown[2][0] == "=" or not given[0].startswith("--"))
            hint = f" {self._suggest_option(unknown[1], given[0] if is_value else None)}"
        elif wrong := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            choice = _find_choice(wrong[1], re.findall(r"[\w-]+", wrong[2]))
            hint = f" Did you mean {choice}?" if choice else " Use one of these."
        elif number := re.search(r"invalid (int|float) value", message):
            hint = f" Use digits, such as {8 if number[1] == 'int' else 0.5}."
        elif "expected one argument" in message:
            hint = " Give it a value."
        elif "are required" in message:
            hint = " Give what is missing."
        example = (self.epilog or "").strip().splitlines()[-1]
        raise ConfigError(
            f"{self.prog}: {message.rstrip('.')}.{hint} {example}. See: {self.prog} --help"
        )

    def check_overrides(self, overrides: Sequence[str]) -> None:
        """Check that no override is an option without its dashes, or a misspelled word of the verb.

        Args:
            overrides: Words of the command line such as KEY=VALUE. Keys with a dot are not checked
                here: the loader knows the config.

        Raises:
            ConfigError: One is; the message has the spelling that was meant.
        """
        options = [word for action in self._actions for word in action.option_strings]
        for override in overrides:
            name, _, value = override.partition("=")
            if "." in name or name in self.own_names or override.startswith("-"):
                continue
            option = f"--{name.replace('_', '-')}"
            if option in options:
                is_switch = next(one for one in self._actions if option in one.option_strings)
                meant = option if is_switch.nargs == 0 else f"{option} {value or '…'}"
            elif _is_no_section(name) and (word := self._find_own_name(name, value)) is not None:
                meant = f"{word}={value or '…'}"
            else:
                continue
            raise ConfigError(
                f"{self.prog}: {override} is no key of the config. Did you mean {meant}? See: "
                f"{self.prog} --help"
            )

    def _suggest_option(self, option: str, value: str | None) -> str:
        """Return what an unknown option means: a word of the verb, a key, or another option."""
        name = option.lstrip("-").replace("-", "_")
        known = [word for action in self._actions for word in action.option_strings]
        # --step is no misspelled --help
        others = [word for word in known if word not in ("--help", "-h")]
        if (own := self._find_own_name(name, value)) is not None:
            return f"Did you mean {own}={value or '…'}? It has no dashes."
        for ours, theirs in _OTHER_WORDS.items():
            is_other = ours == "gpus" and not (value or "").isdigit()
            if f"--{ours}" in known and name in theirs and not is_other:
                meant = f"--sbatch={option}={value or '…'}" if ours == "sbatch" else f"--{ours}"
                return f"Did you mean {meant}?"
        # --tokens is a key of the config and no misspelled --documents
        if close := difflib.get_close_matches(option, others, n=1, cutoff=0.8):
            return f"Did you mean {close[0]}?"
        if (override := self._suggest_override(name, value)) is not None:
            return override
        begun = [word for word in others if word.startswith(option)]
        alike = begun or difflib.get_close_matches(option, others, n=1, cutoff=0.7)
        return f"Did you mean {alike[0]}?" if alike else f"Known: {', '.join(sorted(known))}."

    def _find_own_name(self, name: str, value: str | None) -> str | None:
        """Return the word of the verb that a name means."""
        for own in self.own_names:
            is_count = own == "gpus" and not (value or "").isdigit()
            if name == own or (name in _OTHER_WORDS.get(own, ()) and not is_count):
                return own
        close = difflib.get_close_matches(name, self.own_names, n=1, cutoff=0.8)
        return close[0] if close else None

    def _suggest_override(self, name: str, value: str | None) -> str | None:
        """Return the override that an unknown option such as `--temperature 0.5` means; None
        without one.
        """
        if not any(action.dest == "overrides" for action in self._actions):
            return None
        from llmsys.config.loading.common_names import suggest_override
        from llmsys.config.loading.validation_errors import find_config_key
        from llmsys.config.run import RunConfig

        if (meant := suggest_override(name, value)) is not None:
            dashes = " Keys of the config have no dashes." if "=" in meant.partition("?")[0] else ""
            return f"{meant}{dashes}"
        if (key := find_config_key(name, RunConfig)) is None:
            return None
        return f"Did you mean {key}={value or '…'}? Keys of the config have no dashes."


def _is_no_section(name: str) -> bool:
    from llmsys.config.run import RunConfig

    return name not in RunConfig.model_fields


def _find_choice(word: str, choices: list[str]) -> str | None:
    """Return the choice that a wrong word means: spelled alike, or by another name."""
    other = {
        "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32",
        "float": "float32", "srun": "slurm", "sbatch": "slurm", "ssh": "torchrun",
        "mpirun": "torchrun", "mpi": "torchrun",
    }.get(word.lower())  # fmt: skip
    if other in choices:
        return other
    same = [choice for choice in choices if choice.lower() == word.lower()]
    return next(iter([*same, *difflib.get_close_matches(word, choices, n=1)]), None)
