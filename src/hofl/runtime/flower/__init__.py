# SPDX-License-Identifier: Apache-2.0
"""Runs on Flower: simulation, and deployment with resident nodes. Nothing outside imports flwr."""
