# SPDX-License-Identifier: Apache-2.0
"""``python -m hofl.runtime.flower.app`` prints the folder of the app: what ``flwr run`` is given."""

from pathlib import Path

print(Path(__file__).resolve().parent)
