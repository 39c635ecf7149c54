"""The way from crawl files to token shards, as stages over files: maps, and exchanges between maps.

    extract ─ judge ─ (deduplication) ─ collect ─ (cleaning) ┬ encode ┐
                                                             │         tokens ─ manifest
                                                             └ tokenizer (before encode)

Reads the `data` and `tokenizer` sections of a run, writes the dataset folder; pairs have a pipeline of their own, see
pairs/. Promises: the same bytes for any number of workers, any order of the inputs, and after any crash; a second run
does only what changed, and nothing when nothing did.
"""

from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from data_pipeline.cleaning import clean_documents, collected_names
from data_pipeline.copies import copy_final
from data_pipeline.deduplication import DEDUPLICATION_STAGES, Deduplication
from data_pipeline.extract.reference import extract_libraries
from data_pipeline.graph import Task, Workshop
from data_pipeline.inputs import find_inputs, input_identity, input_name, input_size, stamp
from data_pipeline.journal import Record, code_version, digest_of, remove_asides
from data_pipeline.language.profile import rules_by_language
from data_pipeline.left import Left
from data_pipeline.outcome import Outcome, build_manifest, funnel_stages, publish
from data_pipeline.pairs.outcome import pairs_manifest
from data_pipeline.pairs.pipeline import PairsPreparation
from data_pipeline.quarantine import not_quarantined, without_block, without_pages
from data_pipeline.readers.remote import is_remote
from data_pipeline.side_files import (
    digests_of,
    require_languages,
    require_side_files,
    rule_files,
    rule_libraries,
    url_files,
)
from data_pipeline.stages.collect import collect_shard
from data_pipeline.stages.extract import extract_file
from data_pipeline.stages.judge import judge_file
from data_pipeline.stages.survey import Block, blocks_of, survey_file
from data_pipeline.thresholds import find_borders
from data_pipeline.tokenize.copy import copy_task
from data_pipeline.tokenize.encode import encode_file
from data_pipeline.tokenize.layout import SPLITS, plan_files, write_token_file
from data_pipeline.tokenize.publish import SENTENCEPIECE_FILES
from data_pipeline.tokenize.train import train_sentencepiece
from llmsys.config.data import CrawlConfig
from llmsys.config.language_profile import read_language_rules
from llmsys.config.mixture import MixtureConfig
from llmsys.config.run import RunConfig
from llmsys.config.tokenizer import FileTokenizerConfig, TokenizerConfig
from llmsys.errors import ConfigError
from llmsys.lock import folder_lock
from llmsys.manifest import Manifest
from llmsys.tokenizer import load_tokenizer, model_file

Until = Literal["documents", "tokenizer", "tokens"]

# What each stage's outputs depend on besides configuration and inputs: our source, and the libraries that do the work.
_COMMON = ("data_pipeline/document.py", "data_pipeline/waiting.py", "llmsys/shard_file.py")
_TOKENIZER = ("tokenize/train.py", "tokenize/sample.py", "tokenize/copy.py", "tokenize/publish.py")
_ENCODE = tuple(
    f"tokenize/{name}.py" for name in ("encode", "columns", "cuts", "byte_level", "memo", "model", "usage", "check")
)
_URL = ("rules/url.py", "rules/entry_list.py", "rules/word_pattern.py")
_SIMPLE = ("decontaminate/words.py", "dedup/simplify.py")
_CONTAMINATION = ("decontaminate", "dedup/simplify.py", "rules/characters.py", "stages/decontaminate.py")
_COMPARING = ("sign", "same", "link", "keep_index", "leave_out", "take_out", "strings")
_DEDUPLICATION = (
    ("dedup", "rules", *(f"stages/{name}.py" for name in _COMPARING)),
    ("pyarrow", "numpy", "spacy", "xxhash", "scipy"),
)
_CODE = {
    "survey": (("readers/survey.py", "stages/survey.py"), ("xxhash",)),
    "extract": (
        ("readers", "extract", "stages/extract.py", "stages/refuse.py", *_URL),
        ("pyarrow", "fastwarc", "resiliparse", "selectolax", "zstandard", "tldextract"),
    ),
    "judge": (
        ("language", "rules", "unicode", "classify", *_SIMPLE, "funnel.py", "stages/judge.py", "stages/partition.py"),
        ("pyarrow", "numpy", "py3langid", "pycld2", "scipy", "regex", "spacy", "ftfy"),
    ),
    **dict.fromkeys(DEDUPLICATION_STAGES, _DEDUPLICATION),
    "collect": (("funnel.py", "stages/collect.py", "stages/leave_out.py", "dedup/naming.py"), ("pyarrow", "numpy")),
    "copies": (("stages/copy.py",), ("pyarrow", "zstandard")),
    "thresholds": (("inspect/borders.py", "inspect/nearest.py", "funnel.py", "rules"), ("pyarrow", "numpy")),
    "index": (_CONTAMINATION, ("numpy", "pyarrow", "xxhash")),
    "contamination": (_CONTAMINATION, ("numpy", "pyarrow", "xxhash")),
    "matches": (("stages/decontaminate.py",), ("numpy", "pyarrow")),
    "clean": (("decontaminate", "pii", "funnel.py", "stages/clean.py"), ("numpy", "pyarrow")),
    "tokenizer": (_TOKENIZER, ("sentencepiece", "tokenizers")),
    "encode": ((*_ENCODE, "rules/growing.py"), ("pyarrow", "numpy", "sentencepiece", "tokenizers", "xxhash")),
    "tokens": (("tokenize/layout.py", "tokenize/encode.py"), ("pyarrow", "numpy", "xxhash")),
}


def prepare(config: RunConfig, until: str = "tokens") -> Manifest:
    """Make the dataset of a run, up to its documents, its tokenizer or its tokens, and return its manifest.

    DataError when there is no input, a task fails for good, or another process writes the folder; ConfigError for a
    mixture, whose sources have configs of their own.
    """
    data = config.data
    if isinstance(data, MixtureConfig):
        folders = ", ".join(str(source.folder) for source in data.sources)
        raise ConfigError(
            f"data.kind=mixture names datasets that are prepared already: {folders}. "
            f"Run llmsys prepare with the config of each, all with the same tokenizer."
        )
    inputs = find_inputs(data.inputs) if isinstance(data, CrawlConfig) else []
    if isinstance(data, CrawlConfig):
        require_side_files(data)
    if until != "documents" and isinstance(config.tokenizer, FileTokenizerConfig):
        load_tokenizer(
            config.tokenizer.path, config.tokenizer.eos_token
        )  # what is missing is said before the crawl is read, not hours later
    with folder_lock(data.folder) as lock:
        remove_asides(data.folder)  # the lock is free only when no writer lives
        workshop = Workshop(data.folder, data.executor, lock)
        try:
            manifest = _make(config, workshop, inputs, cast(Until, until))
        finally:
            workshop.close()
        return publish(workshop, manifest)


def _make(config: RunConfig, workshop: Workshop, inputs: list[str], until: Until) -> Manifest:
    """Do the stages that this kind of data has, and say what they made."""
    data, tokenizer = config.data, config.tokenizer
    if isinstance(data, CrawlConfig):
        return build_manifest(data, tokenizer, _Preparation(data, tokenizer, workshop).run(inputs, until))
    assert not isinstance(data, MixtureConfig)  # refused by prepare
    return pairs_manifest(data, tokenizer, PairsPreparation(data, tokenizer, workshop).run(until))


def train_tokenizer(config: RunConfig) -> Path:
    """Make the dataset up to its tokenizer and return the path of its file."""
    prepare(config, until="tokenizer")
    return model_file(config.data.folder / "tokenizer")


class _Preparation:
    """The stages of one dataset, in order; each method is one stage."""

    def __init__(self, data: CrawlConfig, tokenizer: TokenizerConfig, workshop: Workshop) -> None:
        self.data, self.tokenizer, self.workshop = data, tokenizer, workshop
        self.folder = data.folder

    def run(self, inputs: list[str], until: Until) -> Outcome:
        blocks = self._survey(inputs)
        outcome = Outcome(inputs=inputs, extracted=self._extract(blocks))
        extracted, names = not_quarantined(outcome.extracted, [block.name for block in blocks])
        outcome.judged = self._judge(extracted, names)
        read = [record for record, judged in zip(extracted, outcome.judged, strict=True) if judged.outputs]
        judged, names = not_quarantined(outcome.judged, names)
        left = Deduplication(self.data, self.workshop, self._stage).run(judged, names)
        outcome.thinned = left.changed
        outcome.collected = self._collect(left.with_unread(read))
        outcome.collected = clean_documents(self.data, self.workshop, self._stage, outcome.collected)
        outcome.require_documents()
        outcome.copies = copy_final(self.data, self._stage, outcome.collected)
        outcome.borders = find_borders(self.data, self._stage, outcome.collected, funnel_stages(self.data))
        if until == "documents":
            return outcome
        outcome.tokenizer = self._tokenizer(outcome.collected)
        if until == "tokenizer":
            return outcome
        outcome.encoded = self._encode(outcome.collected, outcome.tokenizer)
        outcome.tokens = self._tokens(outcome.encoded, outcome.tokenizer)
        return outcome

    def _stage(self, name: str, tasks: list[Task], unit: str) -> list[Record]:
        rooms, packages = _CODE[name]
        code = code_version([*_COMMON, *(f"data_pipeline/{room}" for room in rooms)], packages)
        return self.workshop.stage(name, tasks, unit=unit, code=code)

    def _survey(self, inputs: list[str]) -> list[Block]:
        """Cut long files into blocks; a file elsewhere is one, known by its tag or time."""
        names = [f"{input_name(path)}-{digest_of(path)[:8]}" for path in inputs]
        here = [(path, name) for path, name in zip(inputs, names, strict=True) if not is_remote(path)]
        size = self.data.executor.block_bytes
        tasks = []
        for path, name in here:
            job = partial(survey_file, source=path, block_bytes=size)
            tasks.append(Task(f"survey/{name}", [path, stamp(path), size], [], job, input_size(path)))
        records = self._stage("survey", tasks, "B") if tasks else []
        found = {path: record.result for (path, _), record in zip(here, records, strict=True)}
        blocks = []
        for path, name in zip(inputs, names, strict=True):
            identity = "" if path in found else input_identity(self.workshop.journal, path)
            result = found.get(path) or {"blocks": [[0, input_size(path), identity]]}
            blocks += blocks_of(path, name, result)
        return blocks

    def _extract(self, blocks: list[Block]) -> list[Record]:
        config, read = self.data.extract, self.data.read
        part: list[Any] = [part.model_dump(mode="json") for part in (config, read, self.data.url)]
        lists = digests_of(self.workshop.journal, url_files(self.data))
        part += extract_libraries(config)
        tasks = []
        for block in blocks:
            outputs = [f"work/extracted/{block.name}.arrow", f"work/unread/{block.name}.arrow"]
            job = partial(
                extract_file,
                source=block.source,
                start=block.start,
                stop=block.stop,
                output=self.folder / outputs[0],
                unread=self.folder / outputs[1],
                config=config,
                read=read,
                urls=self.data.url,
                lists=tuple(lists),
            )
            decides = [block.source, block.digest, block.start, part, lists]
            without = partial(without_block, block)
            tasks.append(Task(f"extract/{block.name}", decides, outputs, job, block.size, without))
        return self._stage("extract", tasks, "B")

    def _judge(self, extracted: list[Record], names: list[str]) -> list[Record]:
        rules = rules_by_language(self.data)
        require_languages(self.data, read_language_rules(rules))
        part = self.data.model_dump(mode="json", include={"unicode", "language", "documents"}) | {"rules": rules}
        part["documents"].pop("copies")
        files = digests_of(self.workshop.journal, rule_files(self.data)) + rule_libraries(self.data)
        part["files"] = files
        tasks = []
        for record, name in zip(extracted, names, strict=True):
            outputs = [f"work/judged/{name}.arrow", f"work/judged/{name}.dropped.arrow"]
            job = partial(
                judge_file,
                source=self.folder / record.outputs[0].name,
                kept=self.folder / outputs[0],
                dropped=self.folder / outputs[1],
                config=self.data,
                rules=rules,
                files=tuple(files),
            )
            without = partial(without_pages, record.result["pages"], record.result["html_bytes"])
            decides = [record.digests[:1], part]
            tasks.append(Task(f"judge/{name}", decides, outputs, job, record.result["pages"], without))
        return self._stage("judge", tasks, "page")

    def _collect(self, left: Left) -> list[Record]:
        sources = left.sources(self.folder)
        decisions = [self.folder / record.outputs[0].name for record in left.decisions]
        decides = [left.digests, self.data.documents.batch_bytes]
        tasks = []
        for shard in range(self.data.documents.shards):
            outputs = collected_names(self.data, shard)
            job = partial(
                collect_shard,
                shard=shard,
                sources=sources,
                decisions=decisions,
                rules=left.rules,
                documents=self.folder / outputs[0],
                dropped=self.folder / outputs[1],
                batch_bytes=self.data.documents.batch_bytes,
            )
            rows = sum(rows for source in sources for owner, rows in source.kept_batches if owner == shard)
            tasks.append(Task(f"collect/part-{shard:05d}", [shard, decides, outputs], outputs, job, rows))
        return self._stage("collect", tasks, "document")

    def _tokenizer(self, collected: list[Record]) -> Record:
        if isinstance(self.tokenizer, FileTokenizerConfig):
            return self._stage("tokenizer", [copy_task(self.workshop, self.folder, self.tokenizer)], "file")[0]
        outputs = [f"tokenizer/{name}" for name in SENTENCEPIECE_FILES]
        folder, config = self.folder / "tokenizer", self.tokenizer
        part = config.model_dump(mode="json")
        split = self.data.split
        sources = [self.folder / record.outputs[0].name for record in collected]
        job = partial(train_sentencepiece, sources=sources, folder=folder, config=config, split=split)
        decides = [part, split.model_dump(mode="json"), [record.digests[0] for record in collected]]
        rows = sum(record.result["documents_rows"] for record in collected)
        return self._stage("tokenizer", [Task("tokenizer/model", decides, outputs, job, rows)], "document")[0]

    def _encode(self, collected: list[Record], tokenizer: Record) -> list[Record]:
        means = f"{tokenizer.result['fingerprint']} {tokenizer.result['eos_id']}"  # what the ids of the tokens say
        part = self.data.model_dump(mode="json", include={"split": True, "tokens": {"seed"}})
        tasks = []
        for record in collected:
            source = self.folder / record.outputs[0].name
            outputs = [f"work/encoded/{source.name}", f"work/encoded/{source.stem}.pieces.arrow"]
            job = partial(
                encode_file,
                source=source,
                output=self.folder / outputs[0],
                pieces=self.folder / outputs[1],
                model=self.folder / tokenizer.outputs[0].name,
                fingerprint=means,
                config=self.data,
            )
            decides = [record.digests[0], means, part]
            tasks.append(Task(f"encode/{source.stem}", decides, outputs, job, record.result["text_bytes"]))
        return self._stage("encode", tasks, "B")

    def _tokens(self, encoded: list[Record], tokenizer: Record) -> list[Record]:
        sources = [self.folder / record.outputs[0].name for record in encoded]
        digests = [record.digests[:1] for record in encoded]
        tasks = []
        for split in SPLITS:
            for plan in plan_files(sources, split, self.data.tokens.shard_tokens):
                output = f"tokens/{plan.name}"
                job = partial(
                    write_token_file,
                    plan=plan,
                    sources=sources,
                    output=self.folder / output,
                    vocab_size=tokenizer.result["vocab_size"],
                    batch_tokens=self.data.tokens.batch_tokens,
                )
                decides = [digests, split, plan.first, plan.last, self.data.tokens.batch_tokens]
                tasks.append(Task(f"tokens/{plan.name}", decides, [output], job, plan.tokens))
        return self._stage("tokens", tasks, "tok")
