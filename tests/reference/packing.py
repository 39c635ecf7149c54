"""The plain twin of packing: one list of tokens for the whole epoch, then a slice."""

from llmsys.data.shuffle import build_permutation, derive_order_key
from llmsys.token_shards import TokenShards


def build_window(shards: TokenShards, *, length: int, seed: int, index: int) -> tuple[list[int], list[int]]:
    """Tokens and document numbers of sequence `index`, by building the epoch."""
    total = int(shards.lengths.sum())
    per_epoch = (total - 1) // length
    epoch, place = divmod(index, per_epoch)
    stream: list[int] = []
    owner: list[int] = []
    for number, document in enumerate(
        build_permutation(shards.num_documents, derive_order_key("documents", shards.fingerprint, seed, epoch))
    ):
        tokens = shards.get_tokens(int(document)).tolist()
        stream += tokens
        owner += [number] * (len(tokens) - 1) + [number + 1]
    start = (
        int(build_permutation(per_epoch, derive_order_key("windows", shards.fingerprint, seed, epoch))[place]) * length
    )
    return stream[start : start + length + 1], owner[start : start + length + 1]
