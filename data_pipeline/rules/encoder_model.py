"""Score texts by a sequence classification model of Hugging Face, on a CPU or a GPU.

The only module of the data pipeline that imports torch and transformers, where a config names such
a model and a text has no known score.

Invariants:
    - A score depends on its text alone. On a CPU each text is scored by itself and at its own
      length, by one thread, with the bits of transformers' pipeline. On a GPU texts of similar
      length fill batches of one shape, so that a text meets the same kernels in any company.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from llmsys.config.custom_rules import EncoderClassifierConfig
from llmsys.data_pipeline.rules.encoder_folder import Activation, EncoderFolder
from llmsys.errors import DataError

_STEP = 64  # tokens by which the lengths of batches differ


class EncoderModel:
    """A loaded model with its tokenizer. Keep one per process."""

    def __init__(self, config: EncoderClassifierConfig, folder: EncoderFolder) -> None:
        """Load the model.

        Args:
            config: The rule.
            folder: Its output, from `read_encoder_folder`.

        Raises:
            DataError: The model or its tokenizer cannot be loaded, or there is no GPU.
        """
        self._config = config
        self._folder = folder
        self._device = _choose_device(config)
        # It would tear the line of the preparation.
        disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            # No code of the folder is run.
            self._tokenizer: Any = AutoTokenizer.from_pretrained(config.model)
            model: Any
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                config.model, dtype=torch.float32, output_loading_info=True
            )
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(
                f"{config.model} cannot be loaded by transformers: {first}. Check it with "
                "AutoModelForSequenceClassification.from_pretrained."
            ) from error
        if loading["missing_keys"]:
            missing = ", ".join(sorted(loading["missing_keys"])[:3])
            raise DataError(
                f"{config.model} has no weights for {missing}: its scores would be random. Give "
                "the fine-tuned model."
            )
        self._model = model.eval().to(self._device)

    def score_texts(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return the score of each text, float32 of shape (len(texts),)."""
        if self._device.type != "cpu":
            return self._score_in_batches(texts)
        with _use_one_thread():
            return np.array([self._score_batch([text], None)[0] for text in texts], np.float32)

    def _score_in_batches(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        size = self._config.batch_size
        lengths = [len(ids) for ids in self._encode(list(texts))["input_ids"]]
        padded = [min(-(-length // _STEP) * _STEP, self._config.max_tokens) for length in lengths]
        scores = np.zeros(len(texts), np.float32)
        for length in sorted(set(padded)):
            rows = [row for row, own in enumerate(padded) if own == length]
            for first in range(0, len(rows), size):
                part = rows[first : first + size]
                # Filled up with the last text: every batch of a length has one shape.
                filled = [*part, *[part[-1]] * (size - len(part))]
                found = self._score_batch([texts[row] for row in filled], length)
                scores[part] = found[: len(part)]
        return scores

    def _encode(self, texts: list[str], length: int | None = None, **options: Any) -> Any:
        """Return the tokens of texts, padded to a length if there is one."""
        padding = {} if length is None else {"padding": "max_length"}
        limit = self._config.max_tokens if length is None else length
        return self._tokenizer(texts, truncation=True, max_length=limit, **padding, **options)

    def _score_batch(self, texts: list[str], length: int | None) -> npt.NDArray[np.float32]:
        encoded = self._encode(texts, length, return_tensors="pt").to(self._device)
        with torch.inference_mode():
            logits = self._model(**encoded).logits.float().cpu().numpy()
        activated = compute_activations(logits, self._folder.activation)
        return np.asarray(activated[:, self._folder.column], np.float32)


def compute_activations(
    logits: npt.NDArray[np.float32], activation: Activation
) -> npt.NDArray[np.float32]:
    """Return scores, with the operations of transformers' pipeline.

    Args:
        logits: Outputs of the model, (texts, labels).
        activation: What follows.

    Returns:
        (texts, labels).
    """
    if activation == "none":
        return logits
    if activation == "sigmoid":
        return np.asarray(1.0 / (1.0 + np.exp(-logits)), np.float32)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True), np.float32)


def _choose_device(config: EncoderClassifierConfig) -> torch.device:
    count = torch.cuda.device_count()
    if config.device == "cuda" and not count:
        raise DataError(
            f"device: cuda of the rule {config.title} needs a GPU, and this process sees none. "
            "Set device: auto."
        )
    if config.device == "cpu" or not count:
        return torch.device("cpu")
    return torch.device("cuda", os.getpid() % count)  # workers share the GPUs of a machine


@contextmanager
def _use_one_thread() -> Iterator[None]:
    # Sums of several threads may be grouped in another way.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
