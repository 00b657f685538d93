# SPDX-License-Identifier: Apache-2.0
"""The server's half."""

from hofl.runtime.flower.serverapp import app

__all__ = ["app"]
