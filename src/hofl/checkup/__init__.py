# SPDX-License-Identifier: Apache-2.0
"""A short look at a configuration before its run: measured, planned and said in words; nothing is written."""
