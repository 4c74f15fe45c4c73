"""Opening, closing and looking at accounts."""

import psycopg2.errors

from ledger import LedgerError


def open_account(connection, name, cents=0):
    """Open an account that holds cents to begin with."""
    with connection.cursor() as cursor:
        try:
            cursor.execute("INSERT INTO accounts (name, balance) VALUES (%s, %s)", (name, cents))
        except psycopg2.errors.UniqueViolation:
            raise LedgerError(f"account {name} exists") from None
        except psycopg2.errors.CheckViolation:
            raise LedgerError(f"account {name!r} with {cents} cents is not possible") from None


def close_account(connection, name):
    """Close an empty account: nothing can be paid into it any more."""
    with connection.cursor() as cursor:
        cursor.execute("UPDATE accounts SET closed = true WHERE name = %s AND balance = 0", (name,))
        if cursor.rowcount == 0:
            raise LedgerError(f"account {name} does not exist or is not empty")


def balance(connection, name):
    """Return what an account holds, in cents."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT balance FROM accounts WHERE name = %s", (name,))
        row = cursor.fetchone()
    if row is None:
        raise LedgerError(f"account {name} does not exist")
    return row[0]


def balances(connection):
    """Return (name, cents) of every open account, by name."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT name, balance FROM accounts WHERE NOT closed ORDER BY name")
        return cursor.fetchall()
