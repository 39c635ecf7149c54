"""The answers of lm_eval's backend for transformers (`hf`), one request and one token at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


class TransformersBackend:
    """A folder of transformers in float32, asked as the harness asks a model."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.longest = self.model.config.max_position_embeddings
        self.prefix = self.tokenizer.bos_token_id

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with what the tokenizer puts before it."""
        return list(self.tokenizer(text)["input_ids"])

    @torch.no_grad()
    def predict(self, ids: list[int]) -> torch.Tensor:
        """Log-probabilities of the next token after each of the last ids that the model can
        read, (T, V).
        """
        logits: torch.Tensor = self.model(torch.tensor([ids[-self.longest :]])).logits[0]
        return logits.log_softmax(-1)

    def score(self, context: list[int], scored: list[int]) -> tuple[float, bool]:
        """Sum over the scored ids, each predicted from all before it; whether each is the
        likeliest.
        """
        nats, is_greedy = 0.0, True
        whole = (context + scored)[-(self.longest + 1) :]
        begin = len(whole) - len(scored)
        predicted = self.predict(whole[:-1])
        for place in range(begin, len(whole)):
            row = predicted[place - 1]
            nats += float(row[whole[place]])
            is_greedy = is_greedy and int(row.argmax()) == whole[place]
        return nats, is_greedy

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Spaces at the end of a context belong to its continuation."""
        found = []
        for request in requests:
            context, continuation = request.args
            spaces = context[len(context.rstrip()) :]
            before = self.encode(context.rstrip())
            found.append(
                self.score(
                    before, self.encode(context.rstrip() + spaces + continuation)[len(before) :]
                )
            )
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Parts of the model's length; the last one has as many ids, of which only the new ones
        are scored.
        """
        sums = []
        for request in requests:
            ids, total = self.encode(request.args[0]), 0.0
            for begin in range(0, len(ids), self.longest):
                end = min(begin + self.longest, len(ids))
                context = ids[max(0, end - self.longest - 1) : begin] if begin else [self.prefix]
                total += self.score(context, ids[begin:end])[0]
            sums.append(total)
        return sums

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Greedy, up to the first stop."""
        texts = []
        for request in requests:
            context, settings = request.args
            room = settings["max_gen_toks"]
            ids, text = self.encode(context)[-(self.longest - room) :], ""
            new: list[int] = []
            while len(new) < room and not any(stop in text for stop in settings["until"]):
                new.append(int(self.predict(ids + new)[-1].argmax()))
                if new[-1] == self.tokenizer.eos_token_id:
                    break
                text = str(self.tokenizer.decode(new, skip_special_tokens=True))
            for stop in settings["until"]:
                text = text.split(stop)[0]
            texts.append(text)
        return texts
