"""Tables of which a rank holds some rows."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.runtime.special.base import SpecialCall, special


@special("embedding")
def embedding(call: SpecialCall, weight: Tensor, indices: Tensor) -> Tensor:
    """Rows held here, zeros for the others: Partial."""
    local, owned = call.localize("v", indices)
    padding = int(call.number(2, "padding_idx", -1))
    rows = torch.embedding(weight, local)
    if padding >= 0:
        # The padding row is read but not trained.
        rows = rows.detach().where((indices == padding).unsqueeze(-1), rows)
    return rows.where(owned.unsqueeze(-1), 0)
