"""Recurrent stacks by torch's own recurrent layers and cells, one row and one position at a time,
without padding.

torch.lstm, torch.gru and torch.rnn_tanh are what torch.nn.LSTM, GRU and RNN call; the cells
likewise. The input matrix of a first layer with input feeding reads the input and the attended
state one after the other.
"""

from typing import Any, cast

import torch
from torch import Tensor

from llmsys.config.model import ModelConfig
from tests.reference.attention import Parameters, Vectors

LAYERS: dict[str, Any] = {"elman": torch.rnn_tanh, "gru": torch.gru, "lstm": torch.lstm}
CELLS: dict[str, Any] = {
    "elman": torch.rnn_tanh_cell,
    "gru": torch.gru_cell,
    "lstm": torch.lstm_cell,
}
State = tuple[Tensor, ...]


def encode(
    config: ModelConfig, p: Parameters, prefix: str, x: Vectors, documents: list[int]
) -> Vectors:
    """The states of a row; those of its padding are 0."""
    kind, length = cast(Any, config.rnn).kind, sum(number >= 0 for number in documents)
    sequence = torch.stack(x[:length])[:, None]
    for layer in range(config.num_hidden_layers):
        directions = [
            f"{prefix}blocks.0.{name}.{layer}" for name in ("forward_cells", "backward_cells")
        ]
        first = sequence.new_zeros(2, 1, config.hidden_size // 2)
        weights = [weight for name in directions for weight in list_weights(p, name)]
        states: Any = (first, first) if kind == "lstm" else first
        sequence = LAYERS[kind](sequence, states, weights, True, 1, 0.0, True, True, False)[0]
    return [*sequence[:, 0], *[torch.zeros_like(x[0])] * (len(x) - length)]


def decode(
    config: ModelConfig, p: Parameters, x: Vectors, memory: Vectors, sources: list[int]
) -> Vectors:
    """The attended states of a row, or those of the last layer."""
    rnn, width = cast(Any, config.rnn), config.hidden_size
    source = [one for one, number in zip(memory, sources, strict=True) if number >= 0]
    count = 2 if rnn.kind == "lstm" else 1
    summary = torch.cat([source[-1][: width // 2], source[0][width // 2 :]])
    first = torch.tanh(p["blocks.0.bridge.weight"] @ summary + p["blocks.0.bridge.bias"]).split(
        width
    )
    states: list[State] = [
        first[count * i : count * (i + 1)] for i in range(config.num_hidden_layers)
    ]
    fed, attended = torch.zeros_like(source[0]), []
    for one in x:
        for layer in range(config.num_hidden_layers):
            matrix, *others = list_weights(p, f"blocks.0.cells.{layer}")
            if layer == 0 and rnn.input_feeding:
                one, matrix = (
                    torch.cat([one, fed]),
                    torch.cat([matrix, p["blocks.0.feed_proj.weight"]], dim=1),
                )
            states[layer] = step(rnn.kind, one, states[layer], [matrix, *others])
            one = states[layer][0]
        fed = one if rnn.score == "none" else attend(p, one, source)
        attended.append(fed)
    return attended


def step(kind: str, x: Tensor, state: State, weights: list[Tensor]) -> State:
    rows = tuple(one[None] for one in state)
    found = CELLS[kind](x[None], rows if kind == "lstm" else rows[0], *weights)
    return tuple(one[0] for one in found) if kind == "lstm" else (found[0],)


def attend(p: Parameters, state: Tensor, source: Vectors) -> Tensor:
    scores = torch.stack([score(p, state, one) for one in source])
    context = sum(
        weight * one for weight, one in zip(torch.softmax(scores, 0), source, strict=True)
    )
    return torch.tanh(
        p["blocks.0.attention.output_proj.weight"] @ torch.cat([cast(Tensor, context), state])
    )


def score(p: Parameters, state: Tensor, one: Tensor) -> Tensor:
    """Luong 2015, "general", or Bahdanau 2014, A.1.2."""
    name = "blocks.0.attention"
    key = p[f"{name}.k_proj.weight"] @ one
    if f"{name}.q_proj.weight" not in p:
        return state @ key
    query = p[f"{name}.q_proj.weight"] @ state + p[f"{name}.q_proj.bias"]
    return (p[f"{name}.score_proj.weight"] @ torch.tanh(query + key))[0]


def list_weights(p: Parameters, name: str) -> list[Tensor]:
    """The weights of one cell in torch's order: both matrices, then both biases."""
    return [
        p[f"{name}.{side}.{kind}"]
        for kind in ("weight", "bias")
        for side in ("input_proj", "state_proj")
    ]
