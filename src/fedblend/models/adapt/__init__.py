# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Models with a frozen base, and a small change of it as their parameters."""

from fedblend.models.adapt.adapt import adapt as adapt
from fedblend.models.adapt.adapt import base_hash as base_hash
from fedblend.models.adapt.adapt import two_adapters as two_adapters
from fedblend.models.adapt.kinds import bias as bias
from fedblend.models.adapt.kinds import full as full
from fedblend.models.adapt.kinds import gated_lora as gated_lora
from fedblend.models.adapt.kinds import ia3 as ia3
from fedblend.models.adapt.kinds import lora as lora
from fedblend.models.adapt.kinds import prefix as prefix
from fedblend.models.adapt.kinds import with_frozen as with_frozen
