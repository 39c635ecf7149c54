"""The encoder output of an encoder-decoder, which cross-attention reads."""

from dataclasses import dataclass

from torch import Tensor

# B rows, S source positions, D width


@dataclass(frozen=True)
class EncoderOutput:
    """The encoder's last hidden states and the document number of each position; padding has its own number."""

    hidden_BSD: Tensor
    documents_BS: Tensor | None = None

    def select_rows(self, rows_B: Tensor) -> "EncoderOutput":
        """Return the given rows, in this order; a row may be repeated."""
        rows_B = rows_B.to(self.hidden_BSD.device)
        documents_BS = None if self.documents_BS is None else self.documents_BS[rows_B]
        return EncoderOutput(self.hidden_BSD[rows_B], documents_BS)
