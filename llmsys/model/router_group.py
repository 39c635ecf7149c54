"""Group-limited routing: a token visits experts of its best few groups only, so that it travels to few devices.

DeepSeek-V2 (arXiv:2405.04434, 2.2.2) ranks a group by its best expert, DeepSeek-V3 (arXiv:2412.19437, 2.1.2, released
code) by the sum of its best two, balance bias included.
"""

import torch
from torch import Tensor

from llmsys.config.moe import GroupLimitedRoutingConfig

# N tokens, E experts, G groups


def mask_outside_top_groups(merit_NE: Tensor, groups: GroupLimitedRoutingConfig) -> Tensor:
    """True where an expert belongs to none of the token's best groups, bool (N, E).

    DeepSeek's released inference code gives such experts −∞; libraries that give them 0 may choose one of them where
    bias makes every allowed merit negative.
    """
    merit_NGM = merit_NE.unflatten(-1, (groups.num_groups, -1))
    merit_NG = merit_NGM.amax(-1) if groups.score == "max" else merit_NGM.topk(2, dim=-1).values.sum(-1)
    best = merit_NG.topk(groups.groups_per_token, dim=-1).indices
    outside_NG = torch.ones_like(merit_NG, dtype=torch.bool).scatter_(-1, best, False)
    return outside_NG.repeat_interleave(merit_NGM.shape[-1], dim=-1, output_size=merit_NE.shape[-1])
