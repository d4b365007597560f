# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The kinds of change of a frozen base."""

from collections.abc import Callable

from fedblend.models.adapt.bias import Bias as Bias
from fedblend.models.adapt.bias import bias
from fedblend.models.adapt.full import Full as Full
from fedblend.models.adapt.full import full
from fedblend.models.adapt.gated_lora import GatedLora as GatedLora
from fedblend.models.adapt.gated_lora import gated_lora
from fedblend.models.adapt.ia3 import Ia3 as Ia3
from fedblend.models.adapt.ia3 import ia3
from fedblend.models.adapt.lora import Lora as Lora
from fedblend.models.adapt.lora import lora
from fedblend.models.adapt.prefix import Prefix as Prefix
from fedblend.models.adapt.prefix import prefix

Change = Lora | GatedLora | Ia3 | Bias | Full
"""Those that change weights."""
How = Change | Prefix
"""All of them."""
KINDS: dict[str, Callable[..., How]] = {
    "lora": lora,
    "gated_lora": gated_lora,
    "ia3": ia3,
    "bias": bias,
    "full": full,
    "prefix": prefix,
}
"""What makes them, by name."""
