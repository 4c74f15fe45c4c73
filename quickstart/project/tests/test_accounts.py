import pytest

from ledger import LedgerError
from ledger.accounts import balance, balances, close_account, open_account


def test_new_account_is_empty(ledger):
    open_account(ledger, "carol")
    assert balance(ledger, "carol") == 0


def test_name_can_be_taken_once(ledger):
    with pytest.raises(LedgerError, match="exists"):
        open_account(ledger, "alice")


def test_account_with_money_stays_open(ledger):
    with pytest.raises(LedgerError, match="not empty"):
        close_account(ledger, "alice")
    assert balances(ledger) == [("alice", 10000), ("bob", 0)]
