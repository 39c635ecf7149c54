"""A tokenizer of single characters."""


class Letters:
    """A tokenizer of one id per character; the end of a document is 0."""

    vocab_size, bos_id, eos_id, fingerprint = 256, -1, 0, ""

    def piece_id(self, piece: str) -> int | None:
        return ord(piece)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))
