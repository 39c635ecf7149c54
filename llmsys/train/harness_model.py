"""A model as lm-evaluation-harness asks it: log-likelihoods of texts, and greedy continuations,
over all ranks.

Every rank builds all requests of a task and gets all answers, so the harness sees a single process.
Rows are divided among the ranks here, as those of every other evaluation are (train/evaluator.py).

Invariants:
- Logits come from `LogitsFunction` alone, so that every engine and layout answers; a continuation
  has no cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from llmsys.data.batch import IGNORED, Batch
from llmsys.data.harness_rows import HarnessTokenizer, build_continuation_row, iter_rolling_windows
from llmsys.data.multiple_choice import ChoiceRow, ScoredRows
from llmsys.data.packed_windows import PADDING
from llmsys.errors import DataError
from llmsys.parallel.process_group import all_reduce_sum, get_rank, get_world_size
from llmsys.train.evaluator import LogitsFunction, RowRanks, compute_row_metrics
from llmsys.vocabulary.chat_template import ChatTemplate
from llmsys.vocabulary.tokenizer import TextTokenizer

MAX_NEW_TOKENS = 256  # as the harness, for tasks that set none
NO_TOKEN = -1


class Request(Protocol):
    """A request of the harness."""

    @property
    def args(self) -> tuple[Any, ...]:
        """(context, continuation), (text,) or (context, settings)."""


class Continuation(NamedTuple):
    """A context to continue, at most `max_tokens` tokens and up to the first of `stops`."""

    context: list[int]
    stops: tuple[str, ...]
    max_tokens: int


@dataclass(frozen=True)
class HarnessModel:
    """The interface `LM` of lm_eval 0.4, without its base class.

    Attributes:
        compute_logits: computes the logits of a batch. Collective.
        device: device of the sums that are reduced over ranks.
        tokenizer: the tokenizer with the harness's rules.
        longest: the model's context in tokens.
        row_ranks: the ranks that compute the logits of a row together.
        sequences: rows in one forward pass of a rank.
        template: the chat template, for tasks that are given as chats.
    """

    compute_logits: LogitsFunction
    device: torch.device
    tokenizer: HarnessTokenizer
    longest: int
    row_ranks: RowRanks
    sequences: int
    template: ChatTemplate | None = None
    rank: int = 0
    world_size: int = 1
    tokenizer_name: str = "llmsys"

    def loglikelihood(
        self, requests: Sequence[Request], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood in nats, whether greedy decoding gives it) of each
        continuation. Collective.
        """
        pairs = [self.tokenizer.encode_pair(*request.args) for request in requests]
        return self._score_rows(
            [build_continuation_row(n, *pair, self.longest) for n, pair in enumerate(pairs)]
        )

    def loglikelihood_rolling(
        self, requests: Sequence[Request], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each text, every token once. Collective."""
        rows: list[ChoiceRow] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            ids = self.tokenizer.encode(request.args[0])
            for context, scored in iter_rolling_windows(
                ids, self.tokenizer.prefix_token, self.longest
            ):
                rows.append(build_continuation_row(len(rows), context, scored, self.longest))
                owners.append(owner)
        sums = [0.0] * len(requests)
        for owner, (nats, _) in zip(owners, self._score_rows(rows), strict=True):
            sums[owner] += nats
        return sums

    def generate_until(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[str]:
        """Return the greedy continuation of each context. Collective."""
        asked = [self._parse_generation(*request.args) for request in requests]
        per_round = self.sequences * (
            get_world_size() // self.row_ranks.stages // self.row_ranks.neighbours
        )
        # Long ones first: memory errors come early, and rows of a batch have similar lengths.
        order = sorted(range(len(asked)), key=lambda number: (-len(asked[number].context), number))
        texts = [""] * len(asked)
        for first in range(0, len(order), per_round):
            numbers = order[first : first + per_round]
            found = self._continue_round([asked[number] for number in numbers], per_round)
            for number, text in zip(numbers, found, strict=True):
                texts[number] = text
        return texts

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return messages in the chat template."""
        assert self.template is not None  # the evaluator was built with it
        if not add_generation_prompt:
            raise DataError(
                "a task begins the assistant's answer, which is not supported. Set "
                "apply_chat_template=false."
            )
        return self.template.render_prompt(chat_history)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the source of the chat template, for the harness's records."""
        return "" if self.template is None else self.template.source

    def _score_rows(self, rows: list[ChoiceRow]) -> list[tuple[float, bool]]:
        scored = ScoredRows(rows)
        found = compute_row_metrics(
            scored, self.compute_logits, self.device, self.row_ranks, self.sequences
        )
        answers = {row.question: (-nats, correct == targets)
                   for row, (nats, correct, targets) in zip(scored.sorted, found.tolist(),
                       strict=True)}  # fmt: skip
        return [answers[number] for number in range(len(rows))]

    def _parse_generation(self, context: str, settings: dict[str, Any]) -> Continuation:
        from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

        given = normalize_gen_kwargs(settings, MAX_NEW_TOKENS)
        library = self.tokenizer.tokenizer
        end = next(
            (
                piece
                for piece, token in library.get_control_pieces().items()
                if token == library.eos_id
            ),
            None,
        )
        stops = handle_stop_sequences(list(given["until"]), eos=end)
        room = self.longest - given["max_gen_toks"]
        if room < 1:
            raise DataError(
                f"a task generates up to {given['max_gen_toks']} tokens, and the model's context "
                f"has {self.longest} (model.max_position_embeddings). Set "
                "generation_kwargs.max_gen_toks in the task's file."
            )
        return Continuation(
            self.tokenizer.encode(context)[-room:], tuple(stops), given["max_gen_toks"]
        )

    def _continue_round(self, asked: list[Continuation], per_round: int) -> list[str]:
        """Return the texts of one batch on every rank; each rank computes its rows of it.
        Collective.
        """
        library = self.tokenizer.tokenizer
        new: list[list[int]] = [[] for _ in asked]
        is_open = [True] * len(asked)
        while any(is_open):
            tokens = self._choose_next_tokens([[*one.context, *ids] for one, ids in zip(asked, new,
                strict=True)],
                                              per_round)  # fmt: skip
            for row, one in enumerate(asked):
                if not is_open[row]:
                    continue
                new[row].append(tokens[row])
                text = _decode_known(library, new[row])
                is_ended = tokens[row] == library.eos_id or any(
                    stop in text for stop in one.stops if stop
                )
                is_open[row] = not is_ended and len(new[row]) < one.max_tokens
        return [
            _cut_text(_decode_known(library, ids), one.stops)
            for one, ids in zip(asked, new, strict=True)
        ]

    def _choose_next_tokens(self, rows: list[list[int]], per_round: int) -> list[int]:
        """Return the likeliest next token of every row, the same on every rank. Collective."""
        place = get_rank() % (get_world_size() // self.row_ranks.stages)
        first = place // self.row_ranks.neighbours * self.sequences
        own = rows[first : first + self.sequences]
        batch = _build_batch(own, self.sequences)
        logits_BTV = self.compute_logits(batch)
        chosen = torch.zeros(per_round, dtype=torch.int64, device=self.device)
        if logits_BTV is not None and not place % self.row_ranks.neighbours:
            for number, row in enumerate(own):
                chosen[first + number] = logits_BTV[number, len(row) - 1].argmax()
        return [int(token) for token in all_reduce_sum(chosen).tolist()[: len(rows)]]


def _decode_known(library: TextTokenizer, ids: Sequence[int]) -> str:
    """Return the text of the ids that the tokenizer has; a model may have more rows."""
    return library.decode([one for one in ids if one < library.vocab_size])


def _cut_text(text: str, stops: Sequence[str]) -> str:
    for stop in stops:
        if stop:
            text = text.split(stop)[0]
    return text


def _build_batch(rows: list[list[int]], count: int) -> Batch:
    length = max((len(row) for row in rows), default=1)
    tokens_BT = torch.zeros(count, length, dtype=torch.int64)
    documents_BT = torch.full((count, length), PADDING, dtype=torch.int64)
    documents_BT[len(rows) :] = 0  # a row of padding alone would have no key to attend to
    for number, row in enumerate(rows):
        tokens_BT[number, : len(row)] = torch.tensor(row)
        documents_BT[number, : len(row)] = 0
    return Batch(tokens_BT, torch.full_like(tokens_BT, IGNORED), documents_BT)
