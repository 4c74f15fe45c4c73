"""The connection to PostgreSQL."""

import contextlib
import os

import psycopg2


def connect(schema="public"):
    """Open a connection. Each statement commits on its own unless it runs inside transaction()."""
    connection = psycopg2.connect(os.environ.get("LEDGER_DATABASE", "dbname=ledger"))
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('search_path', %s, false)", (schema,))
    return connection


@contextlib.contextmanager
def transaction(connection):
    """Give a cursor whose statements take effect together, or, after an exception, not at all."""
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")
        try:
            yield cursor
        except BaseException:
            cursor.execute("ROLLBACK")
            raise
        cursor.execute("COMMIT")
