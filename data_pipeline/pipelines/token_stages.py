"""Last stages of a dataset: tokenizer, token ids of each document, token files."""

from functools import partial

from data_pipeline.core.journal import TaskRecord
from data_pipeline.core.staging import find_output, get_write_path
from data_pipeline.core.task import Stage, Task
from data_pipeline.graph.stage_runner import StageRunner
from data_pipeline.tokenize.encode_documents import encode_file
from data_pipeline.tokenize.publish_tokenizer import SENTENCEPIECE_FILES
from data_pipeline.tokenize.shuffle_documents import SPLITS, plan_files, write_token_file
from data_pipeline.tokenize.train_sentencepiece import train_sentencepiece
from llmsys.config.data import CrawlConfig
from llmsys.config.migration import to_recorded_names
from llmsys.config.tokenizer import FileTokenizerConfig, TokenizerConfig


def run_tokenizer_stage(
    data: CrawlConfig, config: TokenizerConfig, runner: StageRunner, stage: Stage, collected: list[TaskRecord]
) -> TaskRecord:
    """Copy the tokenizer that the config names, or train one on the documents. Return its record."""
    if isinstance(config, FileTokenizerConfig):
        from data_pipeline.pipelines.copy_tokenizer import build_copy_task

        return stage("tokenizer", [build_copy_task(runner, data.folder, config)], "file")[0]
    outputs = [f"tokenizer/{name}" for name in SENTENCEPIECE_FILES]
    folder = get_write_path(data.folder, "tokenizer")
    settings = to_recorded_names(config.model_dump(mode="json"), "tokenizer")
    split = data.split
    sources = [find_output(data.folder, record.outputs[0].name) for record in collected]
    job = partial(train_sentencepiece, sources=sources, folder=folder, config=config, split=split)
    depends_on = [settings, split.model_dump(mode="json"), [record.digests[0] for record in collected]]
    rows = sum(record.result["documents_rows"] for record in collected)
    return stage("tokenizer", [Task("tokenizer/model", depends_on, outputs, job, rows)], "document")[0]


def run_encoding_stage(
    data: CrawlConfig, stage: Stage, collected: list[TaskRecord], tokenizer: TaskRecord
) -> list[TaskRecord]:
    """Encode every document. Return one record per document file."""
    meaning = f"{tokenizer.result['fingerprint']} {tokenizer.result['eos_id']}"  # decides the token ids
    settings = data.model_dump(mode="json", include={"split": True, "tokens": {"seed"}})
    tasks = []
    for record in collected:
        source = find_output(data.folder, record.outputs[0].name)
        outputs = [f"work/encoded/{source.name}", f"work/encoded/{source.stem}.pieces.arrow"]
        job = partial(
            encode_file,
            source=source,
            output=data.folder / outputs[0],
            pieces=data.folder / outputs[1],
            model=find_output(data.folder, tokenizer.outputs[0].name),
            fingerprint=meaning,
            config=data,
        )
        depends_on = [record.digests[0], meaning, settings]
        tasks.append(Task(f"encode/{source.stem}", depends_on, outputs, job, record.result["text_bytes"]))
    return stage("encode", tasks, "B")


def run_token_stage(
    data: CrawlConfig, stage: Stage, encoded: list[TaskRecord], tokenizer: TaskRecord
) -> list[TaskRecord]:
    """Write the token files, in an order given by hashes. Return one record per file."""
    sources = [data.folder / record.outputs[0].name for record in encoded]
    # The first output holds the ids; the usage counts decide no token file.
    digests = [record.digests[:1] for record in encoded]
    tasks = []
    for split in SPLITS:
        for plan in plan_files(sources, split, data.tokens.shard_tokens):
            output = f"tokens/{plan.name}"
            job = partial(
                write_token_file,
                plan=plan,
                sources=sources,
                output=get_write_path(data.folder, output),
                vocab_size=tokenizer.result["vocab_size"],
                batch_tokens=data.tokens.batch_tokens,
            )
            depends_on = [digests, split, plan.first, plan.last, data.tokens.batch_tokens]
            tasks.append(Task(f"tokens/{plan.name}", depends_on, [output], job, plan.tokens))
    return stage("tokens", tasks, "tok")
