# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Transformers: decoders, encoders, and the public weights of GPT-2, Llama, BERT."""
