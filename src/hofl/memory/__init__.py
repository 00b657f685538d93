# SPDX-License-Identifier: Apache-2.0
"""What a participation needs: planned without allocating anything, or measured."""
