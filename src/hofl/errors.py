# SPDX-License-Identifier: Apache-2.0
"""The few errors hofl raises on purpose. Each message is one line and says what to do."""


class HoflError(Exception):
    """Something the user can mend: the command line prints it and exits 2."""


class ConfigError(HoflError):
    """A setting is unknown, out of range or contradicts another; nothing was written."""


class DataError(HoflError):
    """A data file, column or label is missing or empty."""


class ModelError(HoflError):
    """A model cannot be loaded, cut or trained as asked."""


class RecordError(HoflError):
    """A message, checkpoint or ledger is malformed or belongs to another run."""


class ClientError(Exception):
    """One client cannot finish its action (a non-finite loss, say); the round goes on."""


class RunFailed(Exception):
    """The run cannot go on: the command line prints it and exits 1."""
