"""Recurrent layers instead of blocks: language models, encoders, and sequence-to-sequence models
with attention over the source or without.

The encoder reads the source in both directions (Bahdanau 2014, arXiv:1409.0473). The decoder's top
state attends to the encoder's states, and tanh(W [context; state]) is the output (Luong 2015,
arXiv:1508.04025, equation 5). With input feeding it is an input of the next step too (3.3). Cells
are those of torch.nn.RNN, LSTM and GRU, with both biases. A decoder without a source begins with
zeros, and its top state is the output.

Invariants:
- Padding follows the source. No state depends on it.
- One call over T positions equals T calls with a cache.
"""

from collections.abc import Sequence
from typing import assert_never

import torch
from torch import Tensor, nn

from llmsys.config.model import ModelConfig
from llmsys.config.rnn import ElmanConfig, GruConfig, LstmConfig, RnnConfig
from llmsys.errors import ConfigError
from llmsys.model.dropout import apply_dropout
from llmsys.model.forward_context import ForwardContext
from llmsys.model.kv_cache import EncoderOutput

# B rows, T target positions, S source positions, D width, W width of a cell, G gates of all
# channels

State = tuple[Tensor, ...]
"""The tensors that a cell hands to the next position, each (B, W); the first is its output."""


class RecurrentCell(nn.Module):
    """One layer in one direction."""

    def __init__(self, rnn: RnnConfig, inputs: int, width: int) -> None:
        super().__init__()
        self.rnn = rnn
        self.width = width
        self.input_proj = nn.Linear(inputs, rnn.num_gates * width)
        self.state_proj = nn.Linear(width, rnn.num_gates * width)

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Read a row from its first position to its last.

        Args:
            x_BTD: inputs of all positions.
            state: state before the first one; None: zeros.

        Returns:
            The outputs of all positions, (B, T, W), and the state after the last one.
        """
        state = self._build_zeros(x_BTD) if state is None else state
        outputs = []
        for inputs_BG in self.input_proj(x_BTD).unbind(1):
            state = self.step(inputs_BG, state)
            outputs.append(state[0])
        return torch.stack(outputs, 1), state

    def step(self, inputs_BG: Tensor, state: State) -> State:
        """Return the state after one position.

        Args:
            inputs_BG: what `input_proj` gives for the position, (B, gates · W).
            state: state before it; its first tensor is the output.
        """
        recurrent_BG = self.state_proj(state[0])
        match self.rnn:
            case ElmanConfig():
                return (torch.tanh(inputs_BG + recurrent_BG),)
            case LstmConfig():
                input_BW, forget_BW, cell_BW, output_BW = (inputs_BG + recurrent_BG).chunk(
                    4, dim=-1
                )
                c_BW = forget_BW.sigmoid() * state[1] + input_BW.sigmoid() * cell_BW.tanh()
                return output_BW.sigmoid() * c_BW.tanh(), c_BW
            case GruConfig():
                width = self.width
                reset_BW, update_BW = (
                    (inputs_BG + recurrent_BG)[:, : 2 * width].sigmoid().chunk(2, dim=-1)
                )
                # The reset gate multiplies after the product with the weight, as in torch and
                # cuDNN.
                new_BW = (
                    inputs_BG[:, 2 * width :] + reset_BW * recurrent_BG[:, 2 * width :]
                ).tanh()
                return (new_BW + update_BW * (state[0] - new_BW),)
            case unreachable:
                assert_never(unreachable)

    def _build_zeros(self, x_BTD: Tensor) -> State:
        return tuple(x_BTD.new_zeros(len(x_BTD), self.width) for _ in range(self.rnn.num_states))


class RecurrentEncoder(nn.Module):
    """Layers of two cells, each of half the width; the second reads from the end of the source
    to its start.
    """

    def __init__(self, config: ModelConfig, rnn: RnnConfig) -> None:
        super().__init__()
        self.dropout = config.dropout.residual
        width = config.hidden_size
        layers = range(config.num_hidden_layers)
        self.forward_cells = nn.ModuleList(RecurrentCell(rnn, width, width // 2) for _ in layers)
        self.backward_cells = nn.ModuleList(RecurrentCell(rnn, width, width // 2) for _ in layers)

    def forward(self, x_BSD: Tensor, context: ForwardContext) -> Tensor:
        """Read the source in both directions.

        Args:
            x_BSD: Embedded source.
            context: Documents of the source: a reversed row begins with its last token, not with
                padding.

        Returns:
            States of both directions, joined, in the shape and dtype of the input.
        """
        reversed_BS = _reverse_positions(x_BSD, context.documents_BT)
        for layer, cells in enumerate(zip(self.forward_cells, self.backward_cells, strict=True)):
            x_BSD = apply_dropout(x_BSD, self.dropout if layer else 0.0, self.training)
            ahead_BSW, _ = cells[0](x_BSD)
            back_BSW, _ = cells[1](_gather_positions(x_BSD, reversed_BS))
            x_BSD = torch.cat([ahead_BSW, _gather_positions(back_BSW, reversed_BS)], dim=-1)
        return x_BSD


class SourceAttention(nn.Module):
    """Attention of decoder states over encoder states: one head, whose values are the encoder
    states themselves.
    """

    def __init__(self, width: int, rnn: RnnConfig) -> None:
        super().__init__()
        self.k_proj = nn.Linear(width, width, bias=False)
        is_additive = rnn.score == "additive"
        self.q_proj = nn.Linear(width, width) if is_additive else None
        self.score_proj = nn.Linear(width, 1, bias=False) if is_additive else None
        self.output_proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, x_BTD: Tensor, keys_BSD: Tensor, memory: EncoderOutput) -> Tensor:
        """Return tanh(W [context; state]) of every state.

        Args:
            x_BTD: states of the decoder.
            keys_BSD: keys of the source, from `k_proj`.
            memory: states of the source; padding gets no weight.

        Returns:
            (B, T, D) in the dtype of x_BTD.
        """
        scores_BTS = self._compute_scores(x_BTD, keys_BSD).float()
        if memory.documents_BS is not None:
            # Not minus infinity: a row of padding alone would be NaN.
            least = torch.finfo(scores_BTS.dtype).min
            scores_BTS = scores_BTS.masked_fill((memory.documents_BS < 0)[:, None], least)
        context_BTD = scores_BTS.softmax(-1).to(x_BTD.dtype) @ memory.hidden_BSD
        attended_BTD: Tensor = self.output_proj(torch.cat([context_BTD, x_BTD], dim=-1))
        return attended_BTD.tanh()

    def _compute_scores(self, x_BTD: Tensor, keys_BSD: Tensor) -> Tensor:
        """Return q·W k (Luong 2015, "general"), or v·tanh(W q + b + W' k) (Bahdanau 2014,
        A.1.2), (B, T, S).
        """
        if self.q_proj is None or self.score_proj is None:
            return x_BTD @ keys_BSD.mT
        scores_BTS1: Tensor = self.score_proj(
            (self.q_proj(x_BTD)[:, :, None] + keys_BSD[:, None]).tanh()
        )
        return scores_BTS1.squeeze(-1)


class RecurrentDecoder(nn.Module):
    """Layers of one cell each, and attention over the source, if any, after the last."""

    def __init__(self, config: ModelConfig, rnn: RnnConfig) -> None:
        super().__init__()
        self.rnn = rnn
        self.dropout = config.dropout.residual
        width = config.hidden_size
        self.cells = nn.ModuleList(
            RecurrentCell(rnn, width, width) for _ in range(config.num_hidden_layers)
        )
        # The part of the first layer's input matrix that reads the attended state of the position
        # before.
        self.feed_proj = (
            nn.Linear(width, rnn.num_gates * width, bias=False) if rnn.input_feeding else None
        )
        has_source = config.family == "encoder_decoder"
        states = config.num_hidden_layers * rnn.num_states * width
        self.bridge = nn.Linear(width, states) if has_source else None
        self.attention = SourceAttention(width, rnn) if rnn.score != "none" else None

    def forward(self, x_BTD: Tensor, context: ForwardContext) -> Tensor:
        """Decode all positions.

        Args:
            x_BTD: embedded targets.
            context: `memory` has the states of the source; the cache keeps the states after the
                last
                position.

        Returns:
            (B, T, D) in the dtype of the input.

        Raises:
            ConfigError: there is no source, or the cache holds rows of unequal length.
        """
        memory = context.memory
        cache = context.cache
        if memory is None and self.bridge is not None:
            raise ConfigError(
                "A recurrent decoder begins with a source, and none was given. Give source_BS."
            )
        if cache is not None and cache.is_padded:
            raise ConfigError(
                "A recurrent decoder would read the padding of a row. Give prompts of equal length."
            )
        if cache is None or not cache.states:
            states = [*self._build_first_states(x_BTD, memory)]
        else:
            states = [*cache.states]
        y_BTD: Tensor
        if memory is None or self.attention is None:
            y_BTD = self._run_layers(x_BTD, states)
        else:
            keys_BSD = self.attention.k_proj(memory.hidden_BSD)
            if self.feed_proj is None:
                y_BTD = self.attention(self._run_layers(x_BTD, states), keys_BSD, memory)
            else:
                feed = self.attention, self.feed_proj
                y_BTD = self._run_fed_steps(*feed, x_BTD, states, keys_BSD, memory)
        if cache is not None:
            cache.states = tuple(states)
        return y_BTD

    def _build_first_states(self, x_BTD: Tensor, memory: EncoderOutput | None) -> Sequence[Tensor]:
        """Return tanh(W summary + b) for every state (Bahdanau 2014, A.2.2), and zeros as the first
        fed state; zeros alone without a source.

        The summary joins what either direction of the encoder has read last.
        """
        if memory is None or self.bridge is None:
            states = len(self.cells) * self.rnn.num_states
            return [torch.zeros_like(x_BTD[:, 0]) for _ in range(states)]
        source_BSD = memory.hidden_BSD
        ahead_BSW, back_BSW = source_BSD.chunk(2, dim=-1)
        last_B11 = (_count_tokens(source_BSD, memory.documents_BS) - 1).clamp(min=0)[:, None, None]
        ahead_BW = ahead_BSW.gather(1, last_B11.expand(-1, 1, ahead_BSW.shape[2]))[:, 0]
        first_BN = self.bridge(torch.cat([ahead_BW, back_BSW[:, 0]], dim=-1)).tanh()
        states = first_BN.chunk(len(self.cells) * self.rnn.num_states, dim=-1)
        return states if self.feed_proj is None else (*states, torch.zeros_like(source_BSD[:, 0]))

    def _run_layers(self, x_BTD: Tensor, states: list[Tensor]) -> Tensor:
        """Return the outputs of the last layer; `states` are replaced by those after the last
        position.
        """
        count = self.rnn.num_states
        for layer, cell in enumerate(self.cells):
            x_BTD = apply_dropout(x_BTD, self.dropout if layer else 0.0, self.training)
            mine = slice(layer * count, (layer + 1) * count)
            x_BTD, states[mine] = cell(x_BTD, tuple(states[mine]))
        return x_BTD

    def _run_fed_steps(
        self,
        attention: SourceAttention,
        feed_proj: nn.Linear,
        x_BTD: Tensor,
        states: list[Tensor],
        keys_BSD: Tensor,
        memory: EncoderOutput,
    ) -> Tensor:
        """Return the attended states, each of which is an input of the next position."""
        first, *others = (cell for cell in self.cells if isinstance(cell, RecurrentCell))
        count = self.rnn.num_states
        outputs = []
        for inputs_BG in first.input_proj(x_BTD).unbind(1):
            state = first.step(inputs_BG + feed_proj(states[-1]), tuple(states[:count]))
            states[:count] = state
            for layer, cell in enumerate(others, start=1):
                x_BD = state[0]
                mine = slice(layer * count, (layer + 1) * count)
                x_BD = apply_dropout(x_BD, self.dropout, self.training)
                state = cell.step(cell.input_proj(x_BD), tuple(states[mine]))
                states[mine] = state
            states[-1] = attention(state[0][:, None], keys_BSD, memory)[:, 0]
            outputs.append(states[-1])
        return torch.stack(outputs, 1)


def build_recurrent_stack(
    config: ModelConfig, rnn: RnnConfig
) -> RecurrentEncoder | RecurrentDecoder:
    """Build all recurrent layers of an encoder or a decoder.

    Args:
        config: The stack.
        rnn: The section `model.rnn`.

    Returns:
        A module that is called as one block.
    """
    return (
        RecurrentEncoder(config, rnn)
        if config.family == "encoder"
        else RecurrentDecoder(config, rnn)
    )


def _count_tokens(x_BSD: Tensor, documents_BS: Tensor | None) -> Tensor:
    """Return the tokens of each row that are not padding, (B,)."""
    if documents_BS is None:
        return torch.full((len(x_BSD),), x_BSD.shape[1], device=x_BSD.device)
    return (documents_BS >= 0).sum(1)


def _reverse_positions(x_BSD: Tensor, documents_BS: Tensor | None) -> Tensor:
    """Return the indices that reverse the tokens of each row and leave its padding in place, (B,
    S).
    """
    positions_S = torch.arange(x_BSD.shape[1], device=x_BSD.device)
    length_B1 = _count_tokens(x_BSD, documents_BS)[:, None]
    return torch.where(positions_S < length_B1, length_B1 - 1 - positions_S, positions_S)


def _gather_positions(x_BSD: Tensor, positions_BS: Tensor) -> Tensor:
    return x_BSD.gather(1, positions_BS[..., None].expand_as(x_BSD))
