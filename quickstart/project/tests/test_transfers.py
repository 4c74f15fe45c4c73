import pytest

from ledger import LedgerError
from ledger.accounts import balance, balances, close_account
from ledger.transfers import transfer


def test_money_moves(ledger):
    transfer(ledger, "alice", "bob", 2500)
    assert balances(ledger) == [("alice", 7500), ("bob", 2500)]


def test_nobody_spends_more_than_they_have(ledger):
    with pytest.raises(LedgerError, match="does not have"):
        transfer(ledger, "alice", "bob", 10001)
    assert balances(ledger) == [("alice", 10000), ("bob", 0)]


@pytest.mark.parametrize("cents", [0, -1])
def test_amount_must_be_positive(ledger, cents):
    with pytest.raises(LedgerError, match="cannot transfer"):
        transfer(ledger, "alice", "bob", cents)


def test_refused_transfer_leaves_the_money_where_it_was(ledger):
    close_account(ledger, "bob")
    with pytest.raises(LedgerError, match="closed"):
        transfer(ledger, "alice", "bob", 2500)
    assert balance(ledger, "alice") == 10000
