# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Transforms: functions from an algorithm to an algorithm, one file each."""

from fedblend.transforms.clip import adaptive_clip as adaptive_clip
from fedblend.transforms.clip import clip as clip
from fedblend.transforms.compressed import common_mask as common_mask
from fedblend.transforms.compressed import compressed as compressed
from fedblend.transforms.compressed import ef21 as ef21
from fedblend.transforms.compressed import perm_k as perm_k
from fedblend.transforms.diana import diana as diana
from fedblend.transforms.downlink import downlink as downlink
from fedblend.transforms.dp_blt import dp_blt as dp_blt
from fedblend.transforms.dp_fedavg import dp_fedavg as dp_fedavg
from fedblend.transforms.local_dp import local_dp as local_dp
from fedblend.transforms.mixed_fl import mixed_fl as mixed_fl
from fedblend.transforms.row_noise import row_noise as row_noise
