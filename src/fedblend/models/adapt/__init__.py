# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Models with a frozen base, and a small change of it as their parameters."""

from fedblend.models.adapt.adapt import adapt as adapt
from fedblend.models.adapt.base import base_hash as base_hash
from fedblend.models.adapt.bias import bias as bias
from fedblend.models.adapt.full import full as full
from fedblend.models.adapt.gated_lora import gated_lora as gated_lora
from fedblend.models.adapt.ia3 import ia3 as ia3
from fedblend.models.adapt.lora import lora as lora
from fedblend.models.adapt.lora import with_frozen as with_frozen
from fedblend.models.adapt.peft import export_peft as export_peft
from fedblend.models.adapt.peft import import_peft as import_peft
from fedblend.models.adapt.prefix import prefix as prefix
from fedblend.models.adapt.two_adapters import two_adapters as two_adapters
