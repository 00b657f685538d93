# SPDX-License-Identifier: Apache-2.0
"""The Flower app of hofl: thin, the installed package does the work."""
