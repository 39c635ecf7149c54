"""Score or embed texts by an encoder of Hugging Face, on a CPU or a GPU.

The only module of the data pipeline that imports torch and transformers, where a config names such
a model and a text has no known score or embedding.

Invariants:
    - A result depends on its text alone. On a CPU each text is read by itself and at its own
      length, by one thread, with the bits of transformers' pipeline. On a GPU texts of similar
      length fill batches of one shape, so that a text meets the same kernels in any company.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from llmsys.config.custom_rules import EncoderClassifierConfig
from llmsys.config.deduplication import EncoderEmbeddingsConfig
from llmsys.config.encoder_model import EncoderModelConfig
from llmsys.data_pipeline.rules.encoder_folder import Activation, EncoderFolder
from llmsys.errors import DataError

_STEP = 64  # tokens by which the lengths of batches differ


class _Encoder(ABC):
    """A loaded model with its tokenizer. Keep one per process."""

    def __init__(self, config: EncoderModelConfig, kind: Any, results: str) -> None:
        """Load the model by a class of transformers, whose `results` messages name."""
        self._config = config
        self._device = _choose_device(config)
        # It would tear the line of the preparation.
        disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            # No code of the folder is run.
            self._tokenizer: Any = AutoTokenizer.from_pretrained(config.model)
            model: Any
            model, loading = kind.from_pretrained(
                config.model, dtype=torch.float32, output_loading_info=True
            )
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(
                f"{config.model} cannot be loaded by transformers: {first}. Check it with "
                f"{kind.__name__}.from_pretrained."
            ) from error
        if names := sorted(filter(self._needs_weights, loading["missing_keys"])):
            raise DataError(
                f"{config.model} has no weights for {', '.join(names[:3])}: its {results} would be "
                "random. Give the fine-tuned model."
            )
        self._model = model.eval().to(self._device)

    def _needs_weights(self, name: str) -> bool:
        """Return whether results depend on a weight."""
        return True

    @abstractmethod
    def _run_model(self, encoded: Any) -> torch.Tensor:
        """Return what the model makes of tokens, (texts, results)."""

    def _run_texts(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return the results of some texts, float32 of shape (len(texts), results)."""
        if self._device.type != "cpu":
            return self._run_in_batches(texts)
        with _use_one_thread():
            return np.concatenate([self._run_batch([text], None) for text in texts])

    def _run_in_batches(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        size = self._config.batch_size
        lengths = [len(ids) for ids in self._encode(list(texts))["input_ids"]]
        padded = [min(-(-length // _STEP) * _STEP, self._config.max_tokens) for length in lengths]
        results: dict[int, npt.NDArray[np.float32]] = {}
        for length in sorted(set(padded)):
            rows = [row for row, own in enumerate(padded) if own == length]
            for first in range(0, len(rows), size):
                part = rows[first : first + size]
                # Filled up with the last text: every batch of a length has one shape.
                filled = [*part, *[part[-1]] * (size - len(part))]
                found = self._run_batch([texts[row] for row in filled], length)
                results |= zip(part, found[: len(part)], strict=True)
        return np.stack([results[row] for row in range(len(texts))])

    def _encode(self, texts: list[str], length: int | None = None, **options: Any) -> Any:
        """Return the tokens of texts, padded to a length if there is one."""
        padding = {} if length is None else {"padding": "max_length"}
        limit = self._config.max_tokens if length is None else length
        return self._tokenizer(texts, truncation=True, max_length=limit, **padding, **options)

    def _run_batch(self, texts: list[str], length: int | None) -> npt.NDArray[np.float32]:
        encoded = self._encode(texts, length, return_tensors="pt").to(self._device)
        with torch.inference_mode():
            return np.asarray(self._run_model(encoded).float().cpu().numpy(), np.float32)


class EncoderModel(_Encoder):
    """A classifier."""

    def __init__(self, config: EncoderClassifierConfig, folder: EncoderFolder) -> None:
        """Load the model.

        Args:
            config: The rule.
            folder: Its output, from `read_encoder_folder`.

        Raises:
            DataError: The model or its tokenizer cannot be loaded, or there is no GPU.
        """
        super().__init__(config, AutoModelForSequenceClassification, "scores")
        self._folder = folder

    def score_texts(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return the score of each text, float32 of shape (len(texts),)."""
        return self._choose_scores(self._run_texts(texts))

    def _choose_scores(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        activated = compute_activations(logits, self._folder.activation)
        return np.asarray(activated[:, self._folder.column], np.float32)

    def _run_model(self, encoded: Any) -> torch.Tensor:
        logits: torch.Tensor = self._model(**encoded).logits
        return logits


class EmbeddingModel(_Encoder):
    """An encoder whose hidden states are pooled."""

    def __init__(self, config: EncoderEmbeddingsConfig) -> None:
        """Load the model.

        Args:
            config: The embeddings.

        Raises:
            DataError: The model or its tokenizer cannot be loaded, or there is no GPU.
        """
        super().__init__(config, AutoModel, "embeddings")
        self._prefix = config.prefix
        self._pooling = config.pooling

    def embed_texts(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return the embedding of each text, float32 of shape (len(texts), numbers); texts is not
        empty.
        """
        return self._run_texts([self._prefix + text for text in texts])

    def _needs_weights(self, name: str) -> bool:
        return not name.startswith("pooler.")  # which is not asked

    def _run_model(self, encoded: Any) -> torch.Tensor:
        states_BTD: torch.Tensor = self._model(**encoded).last_hidden_state.float()
        if self._pooling == "cls":
            return states_BTD[:, 0]
        mask_BT1 = encoded["attention_mask"].unsqueeze(-1).to(states_BTD.dtype)
        # As sentence-transformers.
        mean_BD: torch.Tensor = (states_BTD * mask_BT1).sum(1) / mask_BT1.sum(1).clamp(min=1e-9)
        return mean_BD


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


def _choose_device(config: EncoderModelConfig) -> torch.device:
    count = torch.cuda.device_count()
    if config.device == "cuda" and not count:
        raise DataError(
            f"device: cuda of {_describe_use(config)} needs a GPU, and this process sees none. "
            "Set device: auto."
        )
    if config.device == "cpu" or not count:
        return torch.device("cpu")
    return torch.device("cuda", os.getpid() % count)  # workers share the GPUs of a machine


def _describe_use(config: EncoderModelConfig) -> str:
    if isinstance(config, EncoderClassifierConfig):
        return f"the rule {config.title}"
    return "data.deduplicate.semantic.embeddings"


@contextmanager
def _use_one_thread() -> Iterator[None]:
    # Sums of several threads may be grouped in another way.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
