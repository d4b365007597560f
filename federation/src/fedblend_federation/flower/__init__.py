# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""All that touches Flower: its clients, its apps, its programs."""
