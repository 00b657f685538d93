# SPDX-License-Identifier: Apache-2.0
"""What algorithms are written in: rounds, entries, messages, shared steps, averages; no paper's method."""
