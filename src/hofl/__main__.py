# SPDX-License-Identifier: Apache-2.0
"""``python -m hofl``: the same as the ``hofl`` command."""

from hofl.cli import main

if __name__ == "__main__":
    main()
