# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""BitFit: the biases are trained, and nothing else.

The parameters are the difference from the base's biases. A bias is what is added to
activations, see ``models.parts``.

E. Ben Zaken, Y. Goldberg, S. Ravfogel, BitFit: Simple parameter-efficient fine-tuning
for transformer-based masked language-models, ACL 2022.
"""

import dataclasses

from fedblend.models.adapt.full import Full
from fedblend.models.adapt.uses import Use


@dataclasses.dataclass(frozen=True)
class Bias(Full):
    """What ``bias`` returns."""

    def takes(self, use: Use) -> bool:
        """Whether a weight with this use is a bias."""
        return use.is_bias


def bias() -> Bias:
    """A change of biases, all of them unless ``where`` says which, for ``adapt``."""
    return Bias()
