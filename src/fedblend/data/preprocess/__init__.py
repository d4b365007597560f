# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""From the columns of a raw table to inputs: schema, statistics, preprocessing."""

from fedblend.data.preprocess.preprocessing import Preprocessing as Preprocessing
from fedblend.data.preprocess.preprocessing import Statistics as Statistics
from fedblend.data.preprocess.preprocessing import (
    client_statistics as client_statistics,
)
from fedblend.data.preprocess.preprocessing import finish as finish
from fedblend.data.preprocess.preprocessing import fit as fit
from fedblend.data.preprocess.schema import Schema as Schema
from fedblend.data.preprocess.schema import schema_of as schema_of
