"""The command line."""

import argparse
import decimal
import sys

from ledger import LedgerError
from ledger.accounts import balances, open_account
from ledger.database import connect
from ledger.statement import statement
from ledger.transfers import transfer


def cents(text):
    """Read an amount such as 12.50."""
    try:
        amount = decimal.Decimal(text) * 100
        if amount != int(amount):
            raise ValueError
    except (decimal.InvalidOperation, ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount such as 12.50") from None
    return int(amount)


def show(amount):
    """Write cents with a decimal point."""
    return f"{amount / decimal.Decimal(100):.2f}"


def parser():
    """Describe the verbs and what they take."""
    top = argparse.ArgumentParser(prog="ledger")
    verbs = top.add_subparsers(dest="verb", required=True)
    verbs.add_parser("accounts", help="list the accounts and what they hold")
    verb = verbs.add_parser("open", help="open an account")
    verb.add_argument("name")
    verb = verbs.add_parser("transfer", help="move money between accounts")
    verb.add_argument("source")
    verb.add_argument("target")
    verb.add_argument("amount", type=cents)
    verb = verbs.add_parser("statement", help="list what happened to an account")
    verb.add_argument("name")
    return top


def main():
    """Do what the command line says; the exit status is 1 if the ledger refuses."""
    arguments = parser().parse_args()
    connection = connect()
    try:
        if arguments.verb == "accounts":
            for name, amount in balances(connection):
                print(f"{name}\t{show(amount)}")
        elif arguments.verb == "open":
            open_account(connection, arguments.name)
        elif arguments.verb == "transfer":
            transfer(connection, arguments.source, arguments.target, arguments.amount)
        else:
            for other, amount in statement(connection, arguments.name):
                print(f"{other}\t{show(amount)}")
    except LedgerError as error:
        print(f"ledger: {error}", file=sys.stderr)
        return 1
    finally:
        connection.close()
    return 0


sys.exit(main())
