"""A small ledger: accounts, transfers between them, statements."""


class LedgerError(Exception):
    """What a caller did wrong; the ledger is unchanged."""
