"""Plausible mistakes: each answer names the value, the rule and a remedy, and the remedy works."""

import re
import shlex
from collections.abc import Iterator

import pytest

from llmsys.launch.main import main
from tests.helpers.mistaken_folders import build_mistaken_folders

# Phrases of pydantic and argparse that are no sentence for a user.
RAW = re.compile(
    r"Input should|should be a valid|should have at least|validation error|Extra inputs|"
    r"pydantic|Traceback"
)
REMEDY = re.compile(
    r"\b(Use|Give|Set|Write|Did you mean|Add|Remove|remove it|Leave|Make|Choose|Correct|[Rr]un|"
    r"Install|Name|Known|Sort|List|Keep|Raise|Prepare|Train|See|Start|Measure|Copy|Shorten|"
    r"Close|Put|renamed|write one|write a config)\b"
)

# (overrides of train/demo, what the answer says, overrides that follow the answer)
OVERRIDES = [
    ("batch.sequence_length=long", "'long' is not a whole number. Use digits, such as 8",
        "batch.sequence_length=8"),
    ("batch.sequence_length=0", "0 is too small: the minimum is 1. Use 1 or more",
        "batch.sequence_length=1"),
    ("batch.sequence_length=512.5", "512.5 is not a whole number", "batch.sequence_length=8"),
    ("batch.sequence_length=99999", "99999 positions are more than model.max_position_embeddings=",
        ""),
    ("batch.sequence_lenght=512", "unknown key. Did you mean sequence_length?",
        "batch.sequence_length=512"),
    ("batch.batch_size=8", "unknown key. Did you mean batch.sequences?", "batch.sequences=8"),
    ("batch.tokens=1000", "1000 and sequences=4 of 512 tokens disagree", "batch.tokens=2048"),
    ("batch.sequences=0", "0 is too small: the minimum is 1", "batch.sequences=1"),
    ("batch.micro_sequences=most", "'most' is not auto", "batch.micro_sequences=auto"),
    ("batch.attention_scope=documents", "Did you mean document?", "batch.attention_scope=document"),
    ("sequence_length=512", "Did you mean batch.sequence_length or", "batch.sequence_length=512"),
    ("seq_len=512", "unknown key. Did you mean batch.sequence_length?",
        "batch.sequence_length=512"),
    ("learning_rate=1e-3", "unknown key. Did you mean optimizer.learning_rate?",
        "optimizer.learning_rate=1e-3"),
    ("lr=1e-3", "unknown key. Did you mean optimizer.learning_rate?",
        "optimizer.learning_rate=1e-3"),
    ("epochs=3", "unknown key. Did you mean train.tokens?", "train.tokens=1_000_000"),
    ("optimizer.lr=1e-3", "unknown key. Did you mean optimizer.learning_rate?",
        "optimizer.learning_rate=1e-3"),
    ("optimizer.learning_rate=fast", "'fast' is not a number", "optimizer.learning_rate=8"),
    ("optimizer.learning_rate=-1", "-1 is too small: it must be above 0",
        "optimizer.learning_rate=1"),
    ("optimizer.learning_rate=.inf", "inf should be a finite number", ""),
    ("optimizer.learning_rate=1,5", "'1,5' is not a number. Use 1.5",
        "optimizer.learning_rate=1.5"),
    ("optimizer.learning_rate=0,001", "'0,001' is not a number. Use 0.001",
        "optimizer.learning_rate=0.001"),
    ("optimizer.learning_rate=1e3", "1000.0 is too large: the maximum is 10. Use 10 or less",
        "optimizer.learning_rate=10"),
    ("train.device=cuda", "unknown key; it is not needed: a run takes the accelerators", ""),
    ("device=cuda", "unknown key; it is not needed: a run takes the accelerators", ""),
    ("tokens=5", "unknown key. Did you mean train.tokens?", "train.tokens=1_000_000"),
    ("schedule.warmup_tokens=10%", "'10%' is not a whole number. Use digits, such as 8",
        "schedule.warmup_tokens=8"),
    ("'data.rules=[{kind: python, path: own.py}]'", "'own.py' is not FILE.py:Class", ""),
    ("'optimizer={kind: python}'", "optimizer.path: is missing. FILE.py:Class", ""),
    ("'optimizer={kind: python, path: a.py:A, num_moment: 2}'", "Did you mean num_moments?", ""),
    ("'optimizer={kind: python, path: a.py:A, elementwise: false}'", "false needs whole parameters",
        ""),
    ("'evaluation.metrics={kind: python, path: a.py:A}'", "is not a list. Use [{kind: python, "
    "path: 'a.py:A'}]", ""),
    ("'data.inputs=[{path: a, reader: a.py:A}]'", "is not a section. Use its keys, such as "
    "data.inputs.0.reader", ""),
    ("tokenizer.kind=tiktoken", "'tiktoken' is not sentencepiece, wordpiece, file, python or "
    "none. Did you mean file?", ""),
    ("optimizer.kind=adamW", "'adamW' is not adamw, adam", "optimizer.kind=adamw"),
    ("optimizer.kind=sgd", "Did you mean adamw?", "optimizer.kind=adamw"),
    ("optimizer=muon", "'muon' is not a section. Use optimizer.kind=muon", "optimizer.kind=muon"),
    ("optimizer.betas=0.9", "0.9 is not a list. Use [0.9]", ""),
    ("optimizer.betas=[0.9]", "optimizer.betas.1: is missing. Give 2 or more values",
        "optimizer.betas=[0.9,0.99]"),
    ("optimizer.betas=[0.9,1.5]", "1.5 is too large: it must be below 1",
        "optimizer.betas=[0.9,0.99]"),
    ("optimizer.betas=[0.9,0.99,0.999]",
     "[0.9, 0.99, 0.999] has too many entries. Give at most 2", "optimizer.betas=[0.9,0.99]"),
    ("optimizer.betas=0.9,0.95", "'0.9,0.95' is not a list. Use [0.9,0.95]",
        "optimizer.betas=[0.9,0.95]"),
    ("optimizer.lr_schedule=cosine", "unknown key. Did you mean schedule.kind?",
        "schedule.kind=cosine"),
    ("optimizer.learning_rate=3e-4.0", "'3e-4.0' is not a number", "optimizer.learning_rate=8"),
    ("optimizer.weight_decay=-0.1", "-0.1 is too small: the minimum is 0",
        "optimizer.weight_decay=0"),
    ("optimizer.grad_clip=1", "Did you mean optimizer.max_grad_norm?", "optimizer.max_grad_norm=1"),
    ("optimizer.moments=8bit", "'8bit' is not fp32, bf16 or int8", "optimizer.moments=int8"),
    ("schedule.kind=cosin", "Did you mean cosine?", "schedule.kind=cosine"),
    ('schedule.kind=cosine schedule.decay_tokens=5',
     'it belongs to kind wsd', 'schedule.kind=wsd schedule.decay_tokens=5'),
    ('schedule.kind=inverse_sqrt',
     'schedule.warmup_tokens: is missing', 'schedule.kind=inverse_sqrt schedule.warmup_tokens=5'),
    ("schedule.warmup_tokens=10_000_000", "10425000 tokens, more than train.tokens=850000",
        "schedule.warmup_tokens=0"),
    ('schedule.warmup_steps=10',
     'it belongs to kind noam. Set schedule.kind=noam', 'schedule.kind=noam '
     'schedule.warmup_steps=10'),
    ("schedule.kind=wsd schedule.decay_tokens=0.1", "0.1 is not a whole number. Use digits, such "
    "as 8",
     "schedule.kind=wsd schedule.decay_tokens=8"),
    ("schedule.min_lr_factor=10", "10 is too large: the maximum is 1", "schedule.min_lr_factor=1"),
    ("engine.kind=fsdp", "'fsdp' is not torch, deepspeed or accelerate. Did you mean torch?",
        "engine.kind=torch"),
    ("engine=deepspeed", "'deepspeed' is not a section. Use engine.kind=deepspeed",
        "engine.kind=deepspeed"),
    ("engine.zero_stage=1", "it belongs to kind deepspeed", "engine.kind=deepspeed "
    "engine.zero_stage=1"),
    ("engine.kind=deepspeed layout.tensor=2", "does not shard matrices", "engine.kind=torch "
    "layout.tensor=2"),
    ('engine.kind=deepspeed optimizer.kind=soap',
     'soap is not built by engine.kind=deepspeed', 'engine.kind=torch optimizer.kind=soap'),
    ("layout.expert=3", "8 experts cannot be split over expert=3. Use expert=1, 2, 4 or 8",
        "layout.expert=4"),
    ("layout.experts=2", "unknown key. Did you mean expert?", "layout.expert=2"),
    ("layout.tp=2", "unknown key. Did you mean layout.tensor?", "layout.tensor=2"),
    ("layout.dp=2", "unknown key. Did you mean layout.replicate?", "layout.replicate=2"),
    ("layout.replicate=auto", "'auto' is not a whole number", "layout.replicate=8 "
    "batch.sequences=8"),
    ("layout.pipeline=5", "5 stages cannot share 4 layers: each needs one. Use pipeline=1, 2, 3 "
    "or 4",
     "layout.pipeline=2"),
    ("layout.tensor=3", "4 attention heads cannot be divided", "layout.tensor=2"),
    ("engine.kind=deepspeed layout.pipeline=2", "deepspeed runs no stages",
        "engine.kind=torch layout.pipeline=2"),
    ("launch.processes=two", "'two' is not a whole number", "launch.processes=8"),
    ("launch.processes=-1", "-1 is too small: the minimum is 0", "launch.processes=0"),
    ("launch.gpus=2", "unknown key. Did you mean launch.processes?", "launch.processes=2"),
    ("launch.nodes=2", "unknown key; it is for several hosts. Run llmsys launch", ""),
    ("launch.num_gpus=8", "Did you mean launch.processes?", "launch.processes=8"),
    ("train.steps=1000", "unknown key. Did you mean train.tokens?", "train.tokens=2_048_000"),
    ("train.num_epochs=3", "unknown key. Did you mean train.tokens?", "train.tokens=1_000_000"),
    ("train.dtype=bf16", "unknown key. Did you mean train.precision?", "train.precision=bf16"),
    ("train.precision=fp8", "'fp8' is not auto, bf16, fp16 or fp32", "train.precision=bf16"),
    ("train.tokens=0", "0 is too small: the minimum is 1", ""),
    ("train.tokens=100", "100 tokens are fewer than one step of 2048", ""),
    ("train.tokens=1B", "'1B' is not a whole number. Use 1_000_000_000",
        "train.tokens=1_000_000_000"),
    ("train.precision=float16", "Did you mean fp16?", "train.precision=fp16"),
    ("train.precision=bfloat16", "Did you mean bf16?", "train.precision=bf16"),
    ("train.compile=yes", "'yes' is not auto, none or block. Did you mean block?",
        "train.compile=block"),
    ("train.activation_checkpoint=all", "'all' is not", ""),
    ('train.spike_detection.max_loss_ratio=0.5',
     '0.5 times the median would skip ordinary steps', 'train.spike_detection.max_loss_ratio=0'),
    ("train.on_bad_step=ignore", "'ignore' is not skip, rewind or stop", "train.on_bad_step=skip"),
    ("train.reproducibility=exact", "'exact' is not", "train.reproducibility=fast"),
    ("train.reproducibility=bitwise engine.kind=deepspeed", "deepspeed sums gradients in its own "
    "order. Use torch", ""),
    ("train.hang_timeout_seconds=soon", "'soon' is not a", "train.hang_timeout_seconds=1_000"),
    ("train.init_from=s3://bucket/run", "s3://bucket/run is a URL, but a local path is needed", ""),
    ("checkpoint.every_steps=never", "'never' is not a whole number", "checkpoint.every_steps=0"),
    ("checkpoint.every_steps=1k", "'1k' is not a whole number. Use 1_000",
        "checkpoint.every_steps=1_000"),
    ("checkpoint.keep_last=0", "0 is too small: the minimum is 1", "checkpoint.keep_last=1"),
    ("checkpoint.mode=background", "'background' is not sync or async. Did you mean async?",
        "checkpoint.mode=async"),
    ("checkpoint.folder=x", "unknown key. Did you mean run.folder?", "run.folder=x"),
    ("checkpoint.save_steps=5", "Did you mean checkpoint.every_steps?", "checkpoint.every_steps=5"),
    ("model.hidden_size=190", "4 does not divide hidden_size=190", "model.hidden_size=192"),
    ("model.num_attention_heads=7", "7 does not divide hidden_size=256. Use 4 or 8",
        "model.num_attention_heads=8"),
    ("model.num_key_value_heads=3", "3 does not divide num_attention_heads=4",
        "model.num_key_value_heads=4"),
    ("model.vocab_size=100", "8192 pieces exceed the 100 rows of model.vocab_size",
        "model.vocab_size=8192"),
    ("model.rope_theta=1e4", "unknown key. Did you mean model.position.theta?",
        "model.position.theta=1e4"),
    ("model.activation=gelu", "unknown key. Did you mean model.feed_forward.kind?",
        "model.feed_forward.kind=gelu"),
    ("model.num_experts=8", "unknown key. Did you mean model.moe.num_experts?",
        "model.moe.num_experts=8"),
    ("model.moe.top_k=2", "Did you mean model.moe.num_experts_per_tok?",
        "model.moe.num_experts_per_tok=2"),
    ("model.tie_word_embeddings=maybe", "'maybe' is not true or false",
        "model.tie_word_embeddings=true"),
    ("model.d_model=64", "unknown key. Did you mean model.hidden_size?", "model.hidden_size=64"),
    ("model.n_layer=2", "unknown key. Did you mean model.num_hidden_layers?",
        "model.num_hidden_layers=2"),
    ('model.moe.num_experts_per_tok=9',
     '9 of 8 experts cannot be chosen. Use at most 8', 'model.moe.num_experts_per_tok=8'),
    ("model.moe=true", "True is not a section. Use its keys", ""),
    ("model.attention.kind=flash", "Did you mean multi_head?", "model.attention.kind=multi_head"),
    ("model.norm.kind=rms", "'rms' is not rmsnorm or layernorm. Did you mean rmsnorm?",
        "model.norm.kind=rmsnorm"),
    ('model.norm=layernorm',
     "'layernorm' is not a section. Use model.norm.kind=layernorm", 'model.norm.kind=layernorm'),
    ("model.position.kind=rotary", "Did you mean rope?", "model.position.kind=rope"),
    ("model=llama-7b", "'llama-7b' is not a section. Use model.base=model/llama-7b", ""),
    ("model.base=model/demo-mo", "Did you mean model/demo-moe?", "model.base=model/demo-moe"),
    ("model.base=train/demo", "train/demo has a section model, so it is a whole run", ""),
    ('model.base=3',
     'base: 3 is not a name or path of a config. Write, say, base: model/demo-moe',
     'model.base=model/demo-moe'),
    ("tokenizer.vocab_size=100", "100 is too small: the minimum is 300",
        "tokenizer.vocab_size=300"),
    ("tokenizer.vocab_size=8k", "'8k' is not a whole number. Use 8_000",
        "tokenizer.vocab_size=8_000"),
    ('tokenizer.vocab_size=20000',
     '20000 pieces exceed the 8192 rows of model.vocab_size', 'tokenizer.vocab_size=8192'),
    ('tokenizer.kind=bpe',
     "Did you mean sentencepiece?", 'tokenizer.kind=sentencepiece'),
    ('tokenizer.kind=file',
     'tokenizer.path: is missing. A tokenizer.json', 'tokenizer.kind=file '
     'tokenizer.path=tokenizer.json'),
    ("tokenizer.model_type=wordpiece", "'wordpiece' is not bpe or unigram",
        "tokenizer.model_type=unigram"),
    ("tokenizer=tokenizer.json", "'tokenizer.json' is not a section. Use "
    "tokenizer.kind=sentencepiece", ""),
    ('data.inputs=crawl/*.warc.gz',
     "'crawl/*.warc.gz' is not a list. Use [crawl/*.warc.gz]", 'data.inputs=[crawl/*.warc.gz]'),
    ("data.folder=gs://bucket/data", "gs://bucket/data is a URL, but a local path is needed. Copy",
        ""),
    ("data.path=crawl", "unknown key. Did you mean data.inputs?", "data.inputs=[crawl]"),
    ("data.inputs=[1]", '1 is not text. Use "1"', ""),
    ("data.languages=[en]", "Did you mean data.language.languages?",
        "data.language.languages=[en]"),
    ("data.split.heldout_files=[a]", "Did you mean data.heldout_inputs?",
        "data.heldout_inputs=[a]"),
    ("data.rules=none", "'none' is not a list. Use []", "data.rules=[]"),
    ("data.rules.first.min_words=1", "is not a list", ""),
    ("data.kind=text", "Did you mean crawl?", "data.kind=crawl"),
    ("data.rules.9.kind=c4", "the list has 3 entries, counted from 0. Use 0 to 2", ""),
    ("data.rules.0.kind=gofer_repetition", "Did you mean gopher_repetition?",
        "data.rules.0.kind=gopher_repetition"),
    ("data.rules.1.min_word=50", "unknown key. Did you mean min_words?",
        "data.rules.1.min_words=50"),
    ("data.rules.1.max_hash_ratio=lots", "'lots' is not a number", "data.rules.1.max_hash_ratio=8"),
    ("data.rules.1.max_hash_ratio=10%", "'10%' is not a number. Use 0.1",
        "data.rules.1.max_hash_ratio=0.1"),
    ("'data.rules=[{kind: bad_words, word_lists: [casino]}]'", "'casino' is not a section. Use "
    "{entries: [casino]}",
     "'data.rules=[{kind: bad_words, word_lists: [{entries: [casino]}]}]'"),
    ("'data.rules=[{kind: bad_words, words: [casino]}]'",
        "data.rules.0.words: unknown key. Did you mean word_lists?", ""),
    ("'data.rules=[{kind: bad_words, word_lists: []}]'", "[] has too few entries. Give at least 1",
        ""),
    ("data.rules=[gopher_quality]", "'gopher_quality' is not a section. Use "
    "data.rules.0.kind=gopher_quality", ""),
    ("data.rules=gopher_quality", "'gopher_quality' is not a list. Use [gopher_quality]", ""),
    ("'data.rules=[{min_words: 5}]'", "data.rules.0.kind: is missing. Use gopher_repetition", ""),
    ("'data.rules=[{kind: c4}, {kind: c4}]'",
     'c4 is already the name of rules.0', "'data.rules=[{kind: c4}, {kind: c4, name: c4_2}]'"),
    ("data.language.languages=en", "'en' is not a list. Use [en]", "data.language.languages=[en]"),
    ("data.language.languages=[english]", "data.language.languages.0: 'english' is no code of a "
     "language that data.language.kind=combined identifies. Use en, English",
        "data.language.languages=[en]"),
    ("data.language.min_score=65", "65 is too large: the maximum is 1",
        "data.language.min_score=1"),
    ("data.language.min_score=65%", "'65%' is not a number. Use 0.65",
        "data.language.min_score=0.65"),
    ('data.deduplicate.exact=text',
     "'text' is not a section. Use data.deduplicate.exact.kind=text",
     'data.deduplicate.exact.kind=text'),
    ("data.deduplicate.minhash.buckets=0", "0 is too small: the minimum is 1",
        "data.deduplicate.minhash.buckets=1"),
    ("data.deduplicate.semantic.kind=semantic", "'semantic' is not embeddings or none", ""),
    ("data.executor.workers=many", "'many' is not a whole number", "data.executor.workers=8"),
    ("data.executor.kind=multiprocessing", "Did you mean local?", "data.executor.kind=local"),
    ("data.split.heldout_fraction=5", "5 is too large: the maximum is 0.5",
        "data.split.heldout_fraction=0.5"),
    ("data.split.heldout_fraction=5%", "'5%' is not a number. Use 0.05",
        "data.split.heldout_fraction=0.05"),
    ("data.pii.kind=mask", "'mask' is not none or replace. Did you mean replace?",
        "data.pii.kind=replace"),
    ("data.extract.kind=readability", "Did you mean article?", "data.extract.kind=article"),
    ('data.documents.export_formats=parquet',
     "'parquet' is not a list. Use [parquet]", 'data.documents.export_formats=[parquet]'),
    ("data.documents.export_formats=[csv]", "'csv' is not parquet or jsonl.zst", ""),
    ("evaluation.every_steps=x", "'x' is not a whole number", "evaluation.every_steps=8"),
    ("evaluation.tasks=hellaswag", "'hellaswag' is not a list", ""),
    ("'evaluation.tasks=[hellaswag]'", "'hellaswag' is not a section. Use "
    "evaluation.tasks.0.kind=choices", ""),
    ("generation.prompts=Hello", "'Hello' is not a list. Use [Hello]",
        "generation.prompts=[Hello]"),
    ("generation.temperature=hot", "'hot' is not a number", "generation.temperature=8"),
    ("generation.temperature=-1", "-1 is too small: the minimum is 0", "generation.temperature=0"),
    ("generation.top_p=2", "2 is too large: the maximum is 1", "generation.top_p=1"),
    ("generation.max_tokens=10", "unknown key. Did you mean generation.max_new_tokens?",
        "generation.max_new_tokens=10"),
    ("generation.beams=4", "unknown key. Did you mean generation.num_beams?",
        "generation.num_beams=4"),
    ("objective.kind=translation", "translation needs family=encoder_decoder with head=lm", ""),
    ("run.seed=abc", "'abc' is not a whole number", "run.seed=8"),
    ("run.seed=99999999999999999999", "99999999999999999999 is too large for a whole number: "
    "the maximum has 18 digits. Use less", ""),
    ("run.seed=-1", "-1 is too small: the minimum is 0", "run.seed=0"),
    ("run.name=", "None is not text. Give a text", "run.name=a"),
    ("run.name=3", '3 is not text. Use "3"', "'run.name=\"3\"'"),
    ("run.output_dir=x", "Did you mean run.folder?", "run.folder=x"),
    ("run=demo", "'demo' is not a section. Use its keys, such as run.name", "run.name=demo"),
    ("seed", "'seed' is not section.key=value. Write, say, batch.sequence_length=1024",
        "batch.sequence_length=1024"),
    ("batch.sequences:4", "is not section.key=value. Write, say, batch.sequences=4",
        "batch.sequences=4"),
    ("batch.sequences=8 4", "'4' is not section.key=value", "batch.sequences=8"),
    ("--batch.sequences=8", "Did you mean batch.sequences=8? Keys of the config have no dashes",
        "batch.sequences=8"),
    ("--learning-rate 1e-4", "Did you mean optimizer.learning_rate=1e-4?",
        "optimizer.learning_rate=1e-4"),
    ("--gpus 2", "Did you mean launch.processes=2?", "launch.processes=2"),
    ("=3", "'=3' is not section.key=value", "batch.sequence_length=1024"),
    ("a..b=3", "'a..b=3' is not section.key=value", "batch.sequence_length=1024"),
    ("'data.inputs=[a, b'", "command line, data.inputs:1: not YAML", ""),
    ('factors.weight_decay=[[5,1],[1,0]]',
     'the points are at 5, 1 tokens. Sort them', 'factors.weight_decay=[[1,0],[5,1]]'),
]  # fmt: skip


# (command, what the answer says, command that follows the answer)
COMMANDS = [
    ("shw train/demo", "'shw' is not a verb. Did you mean show?", "show train/demo"),
    ("show", "No config was given. Give a CONFIG such as train/demo", "show train/demo"),
    ("show nowhere", "config 'nowhere' was not found", "list configs"),
    ("show train/dmo", "Did you mean train/demo?", "show train/demo"),
    ("show demo.yml", "Did you mean", ""),
    ("show brackets.yaml", "brackets.yaml:2: not YAML", ""),
    ("show tabs.yaml", "tabs.yaml:2: this line is indented with a tab, but YAML allows only "
    "spaces. Use two", ""),
    ("show twice.yaml", "twice.yaml:2: run is given twice (first on line 1). Keep one", ""),
    ("show list.yaml", "list.yaml holds a list, not a mapping. Write `section:`", ""),
    ("show word.yaml", "word.yaml holds text, not a mapping. Write `section:`", ""),
    ("show nothing.yaml", "nothing.yaml is empty. Write at least one section", ""),
    ("show bytes.yaml", "bytes.yaml cannot be read", ""),
    ("show empty", "empty is a folder without a config", ""),
    ("show parquets", "To write a config for the files in it: llmsys init parquets",
        "init parquets --output a.yaml"),
    ("show run/checkpoints/step-00000050", "Give its run folder: run", "show run"),
    ("show s3://bucket/config.yaml", "is a URL, but a local path is needed", ""),
    ('show train/demo --kernel',
     'unrecognized arguments: --kernel. Did you mean --kernels?', 'show train/demo --kernels'),
    ("show train/demo --kernels device=h100", "Did you mean h100-pcie or h100-sxm",
        "show train/demo --kernels device=h100-sxm"),
    ("estimate", "the following arguments are required: CONFIG", "estimate train/demo"),
    ("estimate train/demo --device h100", "'h100' has no device profile",
        "estimate train/demo --device h100-sxm"),
    ('estimate train/demo --device A100',
     'Did you mean a100-40gb or a100-80gb?', 'estimate train/demo --device a100-80gb'),
    ("estimate train/demo --device 4090", "Did you mean rtx-4090?",
        "estimate train/demo --device rtx-4090"),
    ('estimate train/demo --gpus 8',
     '--gpus 8 needs a device. Add --device NAME', 'estimate train/demo --device h100-sxm'),
    ("estimate train/demo --device h100-sxm --gpus 0", "--gpus 0 is too small: the minimum is 1",
        ""),
    ("estimate train/demo --device h100-sxm --gpus many", "argument --gpus: invalid int value: "
    "'many'", ""),
    ('estimate train/demo --device h100-sxm --price-per-hour -2',
     '--price-per-hour -2.0 is too small', 'estimate train/demo --device h100-sxm '
     '--price-per-hour 0'),
    ('estimate train/demo --documents 0',
     "'0' is not a list of document lengths in tokens", 'estimate train/demo --documents 512'),
    ("estimate train/demo --cluster nowhere.yaml", "cluster file nowhere.yaml does not exist", ""),
    ("plan model/llama-7b", "A plan needs a cluster. Give gpus=64 device=h100-sxm", ""),
    ("plan model/llama-7b gpus=8 device=a100", "Did you mean a100-40gb or a100-80gb?", ""),
    ("plan model/llama-7b gpus=eight device=h100-sxm", "gpus=eight is not a number of devices. "
    "Use 1 to 10000000", ""),
    ("plan model/llama-7b gpus=8 gpus=16 device=h100-sxm", "gpus=8 and gpus=16 were both given. "
    "Give gpus= once", ""),
    ("plan train/demo gpus=7 device=h100-sxm",
     "4 sequences of a step cannot be divided evenly over 7 data ranks. Choose another number of "
     "devices",
     "plan train/demo gpus=7 device=h100-sxm batch.sequences=7"),
    ("plan model/llama-7b gpus=8 device=h100-sxm --check foo", "'foo' is not an axis of a layout",
        ""),
    ("dryrun train/demo", "Give nodes=8:8 (8 machines with 8 devices each) and device=h100-sxm",
        ""),
    ("dryrun train/demo nodes=1 device=h100-sxm", "nodes=1 is not a cluster for a dry run. Use "
    "nodes=512:8", ""),
    ("dryrun train/demo nodes=1:2 device=h100-sxm rank=first", "rank=first is not a rank. Use "
    "rank=0 to rank=1", ""),
    ("launch train/demo", "A launch needs hosts. Give nodes=first:8,second:8", ""),
    ("launch train/demo nodes=64 launch.processes=0", "nodes=64 with launch.processes=0 starts no "
    "rank", ""),
    ("launch train/demo nodes=64", "launch.processes=2", ""),
    ("launch train/demo nodes=first", "nodes=first is neither", ""),
    ('launch train/demo nodes=2 --launcher torchrun',
     'nodes=2 is a number of hosts, but torchrun needs their names', ''),
    ("launch train/demo nodes=127.0.0.1:2 --launcher mpi", "invalid choice: 'mpi'", ""),
    ("launch train/demo nodes=127.0.0.1:2 --min-hosts 3", "--min-hosts 3 is not possible with 1 "
    "hosts. Use 1 to 1", ""),
    ("preflight train/demo", "A preflight needs hosts. Give nodes=first:8,second:8", ""),
    ("prepare train/demo data.inputs=[nothing/*.warc.gz]", "no file matches 'nothing/*.warc.gz'",
        ""),
    ('prepare train/demo data.inputs=[parquets]',
     "'parquets' is a folder, not a file. Give the files in it: 'parquets/*.parquet'", ''),
    ("prepare train/demo data.inputs=[empty]", "'empty' is a folder without files to read. Give "
    "one with .warc", ""),
    ("prepare train/demo data.inputs=[]", "data.inputs is empty. Name crawl files", ""),
    ("prepare train/demo data.inputs=[@list.txt]", "Put the value in quotes: [\"@files.txt\"]", ""),
    ("prepare train/demo --workers 4", "Did you mean data.executor.workers=4?", ""),
    ("prepare train/demo --until token", "invalid choice: 'token'", ""),
    ("prepare model/llama-7b", "is a bare model, but a run config is needed", ""),
    ("train model/llama-7b", "let llmsys init model/llama-7b write one", ""),
    ("trace train/demo", "Give exactly one of step=N, url=URL, document=ID or --worst N", ""),
    ("trace train/demo step=first", "step=first is not a step. Use a number", ""),
    ("replay train/demo", "Give the step to replay: step=N", ""),
    ("convert nowhere out", "nowhere is not a folder. Name a Hugging Face folder or a run folder",
        ""),
    ("convert run out --to onnx", "invalid choice: 'onnx'", ""),
    ("convert dataset out --to gguf", "dataset is neither a Hugging Face folder (no config.json) "
    "nor a run folder", ""),
    ("convert run out --to gguf --tokens megatron", "--to is for weights, and --tokens writes "
    "tokens. Leave", ""),
    ("init --template optimiser", "invalid choice: 'optimiser'", ""),
    ("train train/demo data.folder=dataset 'optimizer={kind: python, path: none.py:A}'",
     "none.py cannot be read", ""),
    ("convert empty", "convert empty needs a DESTINATION. Name a folder", ""),
    ("convert empty out --max-shard-size big", "--max-shard-size 'big' is not a size. Write a "
    "number and a unit", ""),
    ("inspect nowhere", "nowhere is not a dataset folder", ""),
    ("inspect dataset --token 5", "5", ""),
    ("report run --output run", "run is a folder, not a file. Name a file in it",
        "report run --output run/page.html"),
    ("scale budget=1e21 --html .", ". is a folder, not a file. Name a file",
        "scale budget=1e21 --html page.html"),
    ("compare run run", "1 runs cannot be compared on one page. Give 2 to 16 run folders", ""),
    ("generate run --prompt a --temperature 5", "Did you mean generation.temperature=5?", ""),
    ('report train/demo run.folder=norun data.folder=nodata',
     'neither run.folder norun nor data.folder nodata exists. Run', ''),
    ("scale budget=lots", "lots", ""),
    ("scale budgt=1e21", "unknown key. Did you mean budget?", ""),
    ("scale budget=100h", "device: is missing", ""),
    ("scale budget=1e21 device=h1000", "h1000 changes nothing: a budget of FLOPs", ""),
    ("estimate train/demo --tokens 5", "Did you mean train.tokens=5?", ""),
    ("train train/demo --tokens 5", "Did you mean train.tokens=5?", ""),
    ("calibrate --output empty", "empty is a folder. Name a file in it: --output empty/device.yaml",
        ""),
    ("calibrate --processes 0", "--processes 0 is not a number of processes. Use 1 or more", ""),
    ("calibrate --output nofolder/x.yaml", "nofolder is not a folder. Make it", ""),
    ("doctor crash --kills -1", "--kills -1 is not a number of kills. Use 1 or more", ""),
    ("doctor parit", "invalid choice: 'parit'", ""),
    ("doctor crash train/demo", "doctor crash trains its own toy run, not train/demo. Leave it out",
        ""),
    ("doctor parity --processes two", "'two' is not a list of numbers of processes. Use, for "
    "example, 1,2,4", ""),
    ("list model", "invalid choice: 'model'", "list models"),
    ("completion tcsh", "invalid choice: 'tcsh'", "completion zsh"),
    ("init nowhere", "nowhere does not exist", ""),
    ("init empty", "empty has no files that llmsys reads", "list configs"),
    ("inspect dataset --samples -1", "--samples: -1 is too small: the minimum is 1. Use 1 or more",
        ""),
    ("inspect dataset --samples 0", "--samples: 0 is too small: the minimum is 1", ""),
    ("inspect dataset --limit all", "'all' is not a whole number. Use digits, such as 8", ""),
    ("inspect dataset --document -1",
        "unrecognized arguments: --document -1. Known: --by, --by-loss, --compare, --dropped", ""),
    ("prepare train/demo data.inputs=[s3://]", "s3:// names no bucket. Write "
    "s3://BUCKET/FOLDER/FILE", ""),
    ("prepare train/demo data.inputs=[s3:///a.warc.gz]", "s3:///a.warc.gz names no bucket. Write "
    "s3://BUCKET", ""),
    ("prepare train/demo data.inputs=['größe/*.gz']", "no file matches 'größe/*.gz'", ""),
    ("reconcile run", "the prediction event has no parameters and no world_size. Another version "
    "or program", ""),
    ("reconcile bytes.yaml", "bytes.yaml/events.jsonl: the event file does not exist", ""),
    ("show 'with space/config.yaml' run.nme=a", "with space/config.yaml:\n  command line: "
    "run.nme: unknown key. Did",
     "show 'with space/config.yaml' run.name=a"),
    ("show größe/config.yml", "config 'größe/config.yml' was not found", "list configs"),
    ("show -", "config '-' was not found: neither a file nor a name", "list configs"),
    ("estimate train/demo --device bytes.yaml", "bytes.yaml is not UTF-8 text", ""),
    ("estimate train/demo --device nothing.yaml", "nothing.yaml is not a device profile. Write "
    "one with", ""),
    ("estimate train/demo --device empty", "'empty' has no device profile", ""),
    ("estimate train/demo --device h100-sxm --cluster bytes.yaml", "bytes.yaml is not UTF-8 text",
        ""),
    ("estimate train/demo --device h100-sxm --cluster nothing.yaml", "nothing.yaml is empty. "
    "Write at least the", ""),
    ("estimate run/events.jsonl", "run/events.jsonl:2: not YAML", ""),
    ("estimate train/demo --device h100-sxm --price-per-hour lots", "invalid float value: 'lots'. "
    "Use digits", ""),
    ("plan model/llama-7b gpus=8 device=h100-sxm --top 0", "--top: 0 is too small: the minimum is "
    "1", ""),
    ("plan model/llama-7b gpus=-8 device=h100-sxm", "gpus=-8 is not a number of devices. Use 1 to "
    "10000000", ""),
    ("dryrun train/demo nodes=2:8 device=h100-sxm rank=99", "rank=99 is not a rank of 2 nodes", ""),
    ("dryrun train/demo nodes=2:8 device=v99", "'v99' has no device profile", ""),
    ("dryrun train/demo nodes=2:8 device=tpu-v4", "has no compute_capability", ""),
    ("dryrun train/demo nodes=2:8 device=h100-sxm --expert-skew much", "'much' is not a number "
    "above 0", ""),
    ("launch train/demo nodes=127.0.0.1:2 --restarts -1", "--restarts: -1 is too small: the "
    "minimum is 0", ""),
    ("launch train/demo nodes=127.0.0.1:2 --patience 0", "--patience: 0 is too small: the minimum "
    "is 1", ""),
    ("launch train/demo nodes=127.0.0.1:2,127.0.0.1:2", "127.0.0.1 is listed 2 times. List each "
    "host once", ""),
    ("launch train/demo nodes=2 --print --by kubernets", "Did you mean kubernetes?", ""),
    ("preflight train/demo nodes=127.0.0.1:2 --patience soon", "'soon' is not a whole number. Use "
    "digits", ""),
    ("evaluate run --step 3", "unrecognized arguments: --step 3. Known: --help", ""),
    ("watch dataset", "dataset is a dataset folder, and a run is watched. Give the folder of a run",
        ""),
    ("watch run --every nan", "--every nan is not a time. Give seconds above 0, such as 2", ""),
    ("compare run dataset", "dataset has no logged step, so there is nothing to compare. Leave it "
    "out", ""),
    ("scale fit bytes.yaml", "bytes.yaml cannot be read", ""),
    ("scale fit table.csv", "needs the columns parameters, tokens, loss, and at least one row. "
    "Write", ""),
    ("scale budget=-1", "-1 is not positive. Use a positive budget", ""),
    ("calibrate --watts -5", "--watts: '-5' is not a number above 0. Use digits", ""),
    ("chat run --port 99999999", "--port 99999999 is no port. Give one from 1 to 65535", ""),
    ("convert bytes.yaml out", "bytes.yaml is not a folder. Name a Hugging Face folder or a run "
    "folder", ""),
    ("init bytes.yaml", "bytes.yaml is a file", ""),
    ("init parquets --output empty", "empty exists, and a config is not overwritten. Choose "
    "another file", ""),
    ("init run", "run is a run folder, which is a config already. Use it: llmsys train run",
        "show run"),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A working directory with what the commands name."""
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("mistakes")
        patch.chdir(root)
        build_mistaken_folders(root)
        yield


def read_answer(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one message of a command that fails with status 2."""
    assert main(shlex.split(command)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    answer = captured.err.strip()
    assert answer.startswith("llmsys: error: ")
    assert not RAW.search(answer)
    assert REMEDY.search(answer), answer
    return answer


def try_remedy(wrong: str, right: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the command that follows an answer; its new words must be in the answer, by name or by
    value.
    """
    for word in set(shlex.split(right)) - set(shlex.split(wrong)):
        name, _, value = word.partition("=")
        assert any(part and part in answer for part in (word, name.rpartition(".")[2], value)), (
            word,
            answer,
        )
    assert main(shlex.split(right)) == 0, capsys.readouterr().err
    capsys.readouterr()


@pytest.mark.parametrize(
    ("wrong", "says", "right"), OVERRIDES, ids=[wrong for wrong, _, _ in OVERRIDES]
)
def test_a_wrong_override_is_answered(
    wrong: str, says: str, right: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = read_answer(f"show train/demo {wrong}", capsys)
    assert says in answer
    if right:
        try_remedy(wrong, f"show train/demo {right}", f"{answer} show train/demo", capsys)


@pytest.mark.parametrize(
    ("wrong", "says", "right"), COMMANDS, ids=[wrong for wrong, _, _ in COMMANDS]
)
def test_a_wrong_command_is_answered(
    wrong: str, says: str, right: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = read_answer(wrong, capsys)
    assert says in answer
    if right:
        try_remedy(f"{wrong} list show init --output a.yaml", right, answer, capsys)


def test_there_are_as_many_as_were_asked_for() -> None:
    assert (
        len({wrong for wrong, _, _ in [*OVERRIDES, *COMMANDS]})
        == len(OVERRIDES) + len(COMMANDS)
        >= 150
    )
