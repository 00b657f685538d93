# SPDX-License-Identifier: Apache-2.0
"""The subcommands of ``hofl``, a file each; what is heavy is imported when a command runs."""
