"""Settings of `llmsys estimate --serve` and `--finetune`: how a model is served, and which part
of it is trained on.
"""

from typing import Literal

from pydantic import Field

from llmsys.config.section import Section

ServedDtype = Literal["bf16", "fp8", "int8", "int4"]
CacheDtype = Literal["bf16", "fp8"]


class ServingConfig(Section):
    """One load of a served model, from `--serve batch=32,prompt=2048,output=512`."""

    batch: int = Field(
        1, ge=1, le=10**6, description="Requests that are answered at the same time."
    )
    prompt: int = Field(
        1024, ge=1, le=10**8, description="Tokens of a prompt; of the source in an encoder-decoder."
    )
    output: int = Field(256, ge=1, le=10**8, description="Tokens of an answer.")
    weights: ServedDtype = Field(
        "bf16",
        description="Dtype of matrices; embeddings, head, router and norms stay bf16. int4: "
        "groups of 128.",
    )
    cache: CacheDtype = Field("bf16", description="Dtype of cached keys and values.")


class FinetuneConfig(Section):
    """The part of a pretrained model that is trained, from `--finetune
    rank=16,targets=attention`.
    """

    rank: int = Field(
        0, ge=0, le=65536, description="Rank of low-rank adapters (Hu 2021). 0: no adapters."
    )
    targets: Literal["attention", "feed_forward", "all"] = Field(
        "all", description="Matrices that get adapters, in blocks."
    )
    train: Literal["none", "all", "last", "norms", "head"] = Field(
        "none",
        description="Part of the pretrained weights that is trained too. last: the last `layers` "
        "blocks.",
    )
    layers: int = Field(
        1,
        ge=1,
        description="Number of blocks that train=last trains, with the final norm and head.",
    )
    weights: ServedDtype = Field(
        "bf16", description="Dtype of frozen matrices. int4: QLoRA's 4 bits in groups."
    )
