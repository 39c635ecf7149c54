"""Configuration of fill-in-the-middle (`batch.fill_in_middle:`)."""

from pydantic import Field

from llmsys.config.section import Section


class FillInMiddleConfig(Section):
    """Some documents are cut into three parts, and the middle comes last (Bavarian 2022,
    arXiv:2207.14255).

    A document becomes PRE prefix SUF suffix MID middle (PSM), or PRE SUF suffix MID prefix middle
    (SPM). The cuts are between tokens, and a function of seed and document. Needs
    batch.packing=best_fit or first_fit.
    """

    rate: float = Field(0.5, gt=0, le=1, description="Share of the documents that are rearranged.")
    spm_rate: float = Field(
        0.5, ge=0, le=1, description="Share of these in the order SPM; the others are PSM."
    )
    prefix_token: str = Field(
        "<fim_prefix>", min_length=1, description="Token of the tokenizer before a prefix."
    )
    middle_token: str = Field(
        "<fim_middle>", min_length=1, description="Token of the tokenizer before a middle."
    )
    suffix_token: str = Field(
        "<fim_suffix>", min_length=1, description="Token of the tokenizer before a suffix."
    )
