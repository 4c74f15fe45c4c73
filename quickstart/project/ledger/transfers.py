"""Moving money from one account to another."""

from ledger import LedgerError


def transfer(connection, source, target, cents):
    """Move cents from source to target and record it."""
    if cents <= 0:
        raise LedgerError(f"cannot transfer {cents} cents")
    if source == target:
        raise LedgerError(f"cannot transfer from {source} to itself")
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE accounts SET balance = balance - %s WHERE name = %s AND balance >= %s",
            (cents, source, cents),
        )
        if cursor.rowcount == 0:
            raise LedgerError(f"account {source} does not have {cents} cents")
        cursor.execute(
            "UPDATE accounts SET balance = balance + %s WHERE name = %s AND NOT closed",
            (cents, target),
        )
        if cursor.rowcount == 0:
            raise LedgerError(f"account {target} does not exist or is closed")
        cursor.execute(
            "INSERT INTO transfers (source, target, cents) VALUES (%s, %s, %s)",
            (source, target, cents),
        )
