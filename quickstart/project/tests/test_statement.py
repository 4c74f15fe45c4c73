from ledger.statement import statement
from ledger.transfers import transfer


def test_statement_lists_both_directions_in_order(ledger):
    transfer(ledger, "alice", "bob", 2500)
    transfer(ledger, "bob", "alice", 1000)
    assert statement(ledger, "bob") == [("alice", 2500), ("alice", -1000)]
