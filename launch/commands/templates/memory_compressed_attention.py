"""T-DMCA's attention (Liu 2018, arXiv:1801.10198, 4.2.3), to copy and change. To test it, run
this file: python my_memory_compressed_attention.py

model:
  attention:
    kind: python
    path: my_memory_compressed_attention.py:MemoryCompressedAttention
    options: {block_length: 256, stride: 3}
"""

import torch
from pydantic import Field
from torch import Tensor, nn

from llmsys.config.block_measurement import BlockShape
from llmsys.config.model import ModelConfig
from llmsys.errors import ConfigError
from llmsys.model.python_block import MixerContext, PythonMixer
from llmsys.model.python_block_check import check_python_block

# B rows, T positions, H heads, K width of a head, N blocks of L positions, C compressed keys


class MemoryCompressedAttention(PythonMixer):
    """Softmax over the keys of a position's block and over compressed keys of all others.

    The paper alternates layers of local attention, by blocks, with layers whose keys and values a
    strided convolution compresses. Parameters are equal in all layers here, so that one softmax
    reads both. A compressed key is read when all of its positions may be: before the block of the
    query, and in its document.
    """

    masks_documents = True
    block_length: int = Field(256, ge=1, description="Positions that attend to each other.")
    stride: int = Field(3, ge=1, description="Keys that one compressed key stands for.")

    def build(self, shape: BlockShape) -> nn.Module:
        """Return the module of one layer."""
        if self.block_length % self.stride:
            raise ConfigError(
                f"block_length={self.block_length} is no multiple of stride={self.stride}, so a "
                "compressed key would lie in two blocks. Use block_length="
                f"{-(-self.block_length // self.stride) * self.stride}."
            )
        if shape.window is not None or shape.num_key_value_heads != shape.num_attention_heads:
            raise ConfigError(
                "MemoryCompressedAttention has no window, and a key for each head. Leave "
                "sliding_window and num_key_value_heads out."
            )
        return MemoryCompressedModule(shape, self.block_length, self.stride)

    def list_parameters(self, shape: BlockShape) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the parameters."""
        width = shape.num_attention_heads * shape.head_dim
        sizes: dict[str, tuple[int, ...]] = {"o_proj.weight": (shape.hidden_size, width)}
        sizes |= {f"{name}_proj.weight": (width, shape.hidden_size) for name in "qkv"}
        filters = (width, shape.head_dim, self.stride)
        return sizes | {f"{name}_compress.weight": filters for name in "kv"}

    def count_flops(self, shape: BlockShape, length: int, documents: tuple[int, ...]) -> int:
        """Return the FLOPs of projections, convolutions, scores and weighted sums."""
        width = shape.num_attention_heads * shape.head_dim
        compressed = length // self.stride
        flops = 8 * length * shape.hidden_size * width
        flops += 4 * compressed * width * shape.head_dim * self.stride
        blocks = -(-length // self.block_length)
        pairs = blocks * self.block_length * (self.block_length + compressed)
        if documents:
            pairs = self._count_visible_pairs(documents)
        return flops + 4 * width * pairs

    def _count_visible_pairs(self, documents: tuple[int, ...]) -> int:
        """Return the pairs of a causal query and a key, compressed or not, that masks show."""
        pairs, start = 0, 0
        for one in documents:
            first = -(-start // self.stride)  # compressed key that lies in the document
            for query in range(start, start + one):
                block = query // self.block_length * self.block_length
                pairs += query + 1 - max(start, block) + max(0, block // self.stride - first)
            start += one
        return pairs


class MemoryCompressedModule(nn.Module):
    """Attention of blocks to themselves and to compressed keys, linear in memory by blocks."""

    def __init__(self, shape: BlockShape, block_length: int, stride: int) -> None:
        super().__init__()
        width = shape.num_attention_heads * shape.head_dim
        self.heads = shape.num_attention_heads
        self.block_length = block_length
        self.stride = stride
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, width, bias=False)
        # A filter of each head for itself.
        self.k_compress = nn.Conv1d(width, width, stride, stride, groups=self.heads, bias=False)
        self.v_compress = nn.Conv1d(width, width, stride, stride, groups=self.heads, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor, context: MixerContext) -> Tensor:
        """Return the mixed states, in the shape and dtype of the input."""
        length = x_BTD.shape[1]
        q_BTHK = context.rotate(self._split(self.q_proj(x_BTD)))
        k_BTHK = context.rotate(self._split(self.k_proj(x_BTD)))
        v_BTHK = self._split(self.v_proj(x_BTD))
        k_BCHK = self._apply_filters(self.k_compress, k_BTHK)
        v_BCHK = self._apply_filters(self.v_compress, v_BTHK)
        q_BHNLK, k_BHNLK, v_BHNLK = (self._cut(one) for one in (q_BTHK, k_BTHK, v_BTHK))
        q_BHNLK = q_BHNLK * q_BHNLK.shape[-1] ** -0.5
        own_BHNLM = q_BHNLK @ k_BHNLK.mT
        # Every block reads the compressed keys of the row, which has one product for all of them.
        far_BHNLC = (q_BHNLK.flatten(2, 3) @ k_BCHK.permute(0, 2, 3, 1)).unflatten(
            2, (-1, self.block_length)
        )
        own_B1NLM, far_B1NLC = self._build_masks(length, context)
        scores = torch.cat(
            [
                own_BHNLM.masked_fill(~own_B1NLM, -torch.inf),
                far_BHNLC.masked_fill(~far_B1NLC, -torch.inf),
            ],
            dim=-1,
        )
        weights = scores.float().softmax(-1).to(x_BTD.dtype)
        own_BHNLM, far_BHNLC = weights.split([self.block_length, k_BCHK.shape[1]], dim=-1)
        mixed_BHTK = (own_BHNLM @ v_BHNLK).flatten(2, 3)
        mixed_BHTK = mixed_BHTK + far_BHNLC.flatten(2, 3) @ v_BCHK.transpose(1, 2)
        mixed_BTD: Tensor = self.o_proj(mixed_BHTK.transpose(1, 2)[:, :length].flatten(2))
        return mixed_BTD

    def _split(self, x_BTW: Tensor) -> Tensor:
        x_BTHK: Tensor = x_BTW.unflatten(-1, (self.heads, -1))
        return x_BTHK

    def _apply_filters(self, convolution: nn.Module, x_BTHK: Tensor) -> Tensor:
        """Return one vector for each `stride` positions; what is left over has none."""
        if x_BTHK.shape[1] < self.stride:
            return x_BTHK[:, :0]
        x_BCHK: Tensor = self._split(convolution(x_BTHK.flatten(2).mT).mT)
        return x_BCHK

    def _cut(self, x_BTHK: Tensor) -> Tensor:
        """Return blocks of positions, the last of them filled up with zeros."""
        missing = -x_BTHK.shape[1] % self.block_length
        padded_BHTK = nn.functional.pad(x_BTHK.transpose(1, 2), (0, 0, 0, missing))
        x_BHNLK: Tensor = padded_BHTK.unflatten(2, (-1, self.block_length))
        return x_BHNLK

    def _build_masks(self, length: int, context: MixerContext) -> tuple[Tensor, Tensor]:
        """Return which keys of its block, and which compressed ones, each query may read."""
        device = context.positions_BT.device
        places_T = torch.arange(length + -length % self.block_length, device=device)
        places_NL = places_T.unflatten(0, (-1, self.block_length))
        own_NLM = (places_NL[:, None, :] < length).expand(-1, self.block_length, -1)
        ends_C = torch.arange(length // self.stride, device=device) * self.stride + self.stride - 1
        far_NLC = (ends_C < places_NL[:, :1])[:, None].expand(-1, self.block_length, -1)
        if context.is_causal:
            own_NLM = own_NLM & (places_NL[:, :, None] >= places_NL[:, None, :])
        else:
            far_NLC = far_NLC | (ends_C > places_NL[:, -1:])[:, None]
        # Queries that fill up the last block read themselves, so that no row is empty.
        own_NLM = own_NLM | (places_NL[:, :, None] == places_NL[:, None, :])
        own_BNLM, far_BNLC = own_NLM[None], far_NLC[None]
        if context.documents_BT is not None:
            documents_BT = context.documents_BT
            filled_BT = nn.functional.pad(documents_BT, (0, len(places_T) - length), value=-1)
            query_BNL1 = filled_BT.unflatten(1, (-1, self.block_length))[..., None]
            own_BNLM = own_BNLM & (query_BNL1 == query_BNL1.mT)
            first_BC = documents_BT[:, ends_C - self.stride + 1]
            is_whole_BC = first_BC == documents_BT[:, ends_C]
            is_same_BNLC = (query_BNL1 == first_BC[:, None, None]) & is_whole_BC[:, None, None]
            far_BNLC = far_BNLC & is_same_BNLC
        return own_BNLM[:, None], far_BNLC[:, None]


if __name__ == "__main__":
    check_python_block(
        MemoryCompressedAttention(block_length=4, stride=2),
        ModelConfig(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
        ),
    )
    print("no position reads later ones or other documents, and every parameter is used")
