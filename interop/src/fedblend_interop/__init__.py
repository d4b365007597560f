# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Models, estimators, files and trackers of other libraries for fedblend."""
