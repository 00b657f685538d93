# SPDX-License-Identifier: Apache-2.0
"""Peak memory of this process since the last reset: the accelerator's where the model is on one.

On a CPU it is the resident set's high-water mark. Linux can set the mark back; elsewhere it is
the peak of the whole life of the process, and where there is no such mark it is not known.
"""

import sys
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak(device: torch.device) -> bool:
    """Start a new measurement; False where the mark cannot be set back."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def peak_bytes(device: torch.device) -> int | None:
    """The peak in bytes, or None where this platform does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return high_water(_STATUS.read_text())
    except (OSError, StopIteration):
        return _lifetime_peak()


def high_water(status: str) -> int:
    """VmHWM of a Linux ``status`` file, in bytes.

    Raises:
        StopIteration: there is no such line.
    """
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _lifetime_peak() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
