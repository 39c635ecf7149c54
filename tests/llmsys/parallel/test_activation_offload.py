"""What offload copies, how often, and when it lets go. Bits are compared in
test_activation_checkpoint.py.
"""

import gc
import weakref
from typing import Any

import pytest
import torch

from llmsys.config.model import ModelConfig
from llmsys.model.forward_context import ContextBuilder, ForwardContext
from llmsys.parallel import activation_offload
from llmsys.parallel.activation_offload import apply_activation_offload
from tests.helpers.model_sections import SHAPE
from tests.helpers.tiny_model import build_tiny_model, build_tiny_tokens


def test_each_saved_tensor_travels_once_and_what_blocks_share_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 1)
    model = build_tiny_model(ModelConfig.model_validate(SHAPE)).float().train()
    apply_activation_offload(model)
    copies: list[Any] = []
    start = activation_offload._HostCopy.__init__

    def note_copy(copy: Any, tensor: torch.Tensor, streams: Any) -> None:
        start(copy, tensor, streams)
        copies.append((tensor.untyped_storage()._cdata, tensor.shape, weakref.ref(copy), tensor))

    monkeypatch.setattr(activation_offload._HostCopy, "__init__", note_copy)
    contexts: list[ForwardContext] = []
    build = ContextBuilder.__call__

    def note_context(builder: ContextBuilder, *args: Any, **rest: Any) -> ForwardContext:
        contexts.append(build(builder, *args, **rest))
        return contexts[-1]

    monkeypatch.setattr(ContextBuilder, "__call__", note_context)
    documents_BT = torch.tensor([[0] * 5 + [1] * 4] * 2)
    loss = model(build_tiny_tokens(2, 9), documents_BT=documents_BT).square().sum()
    assert copies
    shared = activation_offload._iter_tensors(contexts)
    stored = {
        one.untyped_storage()._cdata for one in (*model.parameters(), *model.buffers(), *shared)
    }
    assert stored.isdisjoint(storage for storage, *_ in copies)
    # Queries, keys and values save one input between them, gate and up another.
    hidden = [
        shape for _, shape, _, _ in copies if tuple(shape[-2:]) == (9, model.config.hidden_size)
    ]
    assert len(hidden) <= 5 * model.config.num_hidden_layers
    assert all(copy() is not None and copy().original is None for _, _, copy, _ in copies)
    loss.backward()
    gc.collect()
    assert all(copy() is None for _, _, copy, _ in copies), "backward frees each copy"


def test_without_gradients_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_tiny_model(ModelConfig.model_validate(SHAPE)).eval()
    expected = model(build_tiny_tokens(2, 9))
    apply_activation_offload(model)
    monkeypatch.setattr(activation_offload, "_HostCopy", None)
    with torch.no_grad():
        assert torch.equal(model(build_tiny_tokens(2, 9)), expected)


def test_slices_of_one_tensor_are_copied_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 1)
    record = activation_offload._BlockRecord(
        torch.nn.Module(), set(), None, activation_offload._CopyStreams()
    )
    whole = torch.arange(8.0)
    column = whole.reshape(4, 2)[:, 0]
    parts = (whole[:4], whole[4:], whole[4:], column, column[:2, None].expand(2, 3))
    packed = [record.pack(part) for part in parts]
    record.release_originals()
    restored = [record.unpack(one) for one in packed]
    assert [one.tolist() for one in restored] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [4, 5, 6, 7],
        [0, 2, 4, 6],
        [[0, 0, 0], [2, 2, 2]],
    ]
    assert [one.stride() for one in restored] == [part.stride() for part in parts]
    assert packed[1][1] is packed[2][1], "an equal tensor travels once"


def test_a_recomputed_chunk_saves_what_its_first_pass_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of several rows has gaps between them. Its copy had none, and a linear layer with a
    bias is computed by another operation then.
    """
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 1)
    settings = {"feed_forward_chunk": 2, "feed_forward": {"kind": "gelu", "bias": True}}
    model = build_tiny_model(ModelConfig.model_validate(SHAPE | settings)).float().train()
    tokens_BT = build_tiny_tokens(3, 8)
    gradients = []
    for change in (lambda model: None, apply_activation_offload):
        model.zero_grad()
        change(model)
        model(tokens_BT).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
