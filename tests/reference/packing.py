"""The plain twins of packing: one list of tokens for the whole epoch, then a slice."""

import numpy as np

from llmsys.data.shuffle import KeyedPermutation, derive_order_key
from llmsys.dataset.token_shards import TokenShards


def build_stream_window(
    shards: TokenShards, *, length: int, seed: int, index: int
) -> tuple[list[int], list[int], list[int]]:
    """Tokens, document of each token, and document that each token belongs to as an input.

    Documents that follow the end of the stream are counted on.
    """
    stream: list[int] = []
    owner: list[int] = []
    for document in range(shards.num_documents):
        tokens = shards.get_tokens(document).tolist()
        stream += tokens
        owner += [document] * len(tokens)
    per_epoch = len(stream) // length
    epoch, place = divmod(index, per_epoch)
    key = derive_order_key("stream windows", shards.fingerprint, seed, epoch)
    start = int(KeyedPermutation(per_epoch, key).get_values(np.arange(per_epoch))[place]) * length
    start += derive_order_key("stream shift", shards.fingerprint, seed, epoch)
    start %= len(stream)
    places = range(start, start + length + 1)
    tokens = [stream[at % len(stream)] for at in places]
    documents = [
        owner[at % len(stream)] + shards.num_documents * (at // len(stream)) for at in places
    ]
    is_last = [owner[at % len(stream)] != owner[(at + 1) % len(stream)] for at in places]
    return (
        tokens,
        documents,
        [document + last for document, last in zip(documents, is_last, strict=True)],
    )


def pack_best_fit(sizes: list[int], length: int, num_windows: int) -> tuple[list[int], list[int]]:
    """Window and kept tokens of each document: largest first, each into the fullest window with
    room for it.
    """
    room, windows, kept = [length] * num_windows, [-1] * len(sizes), [0] * len(sizes)
    for document in sorted(range(len(sizes)), key=lambda document: -sizes[document]):
        fits = [window for window in range(num_windows) if room[window] >= sizes[document]]
        chosen = (
            min(fits, key=lambda window: room[window])
            if fits
            else max(range(num_windows), key=room.__getitem__)
        )
        _place(document, chosen, sizes, room, windows, kept)
    return windows, kept


def pack_first_fit(sizes: list[int], length: int, num_windows: int) -> tuple[list[int], list[int]]:
    """Window and kept tokens of each document: in order, each into the first window with room
    for it.
    """
    room, windows, kept = [length] * num_windows, [-1] * len(sizes), [0] * len(sizes)
    for document, size in enumerate(sizes):
        fits = [window for window in range(num_windows) if room[window] >= size]
        chosen = fits[0] if fits else max(range(num_windows), key=room.__getitem__)
        _place(document, chosen, sizes, room, windows, kept)
    return windows, kept


def _place(
    document: int,
    window: int,
    sizes: list[int],
    room: list[int],
    windows: list[int],
    kept: list[int],
) -> None:
    kept[document] = min(sizes[document], room[window])
    windows[document] = window if kept[document] else -1
    room[window] -= kept[document]
