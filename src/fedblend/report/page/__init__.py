# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The report of runs: one HTML file that needs nothing else, made from run folders."""

from fedblend.report.page.document import write_page

__all__ = ["write_page"]
