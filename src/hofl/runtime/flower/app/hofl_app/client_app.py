# SPDX-License-Identifier: Apache-2.0
"""The client's half, for sites that run plain SuperNodes and for simulation."""

from hofl.runtime.flower.clientapp import app

__all__ = ["app"]
