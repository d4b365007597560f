# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What clients gain and how sure that is: intervals, corrections, baselines."""
