"""A SentencePiece model as the tokenizer files of a Hugging Face folder."""

import json
import shutil
from pathlib import Path


def write_tokenizer(folder: Path, model_file: Path, model_type: str) -> None:
    """Copy the model and say what reads it."""
    shutil.copyfile(model_file, folder / "tokenizer.model")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
