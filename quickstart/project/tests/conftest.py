import pathlib
import sys
import uuid

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ledger.accounts import open_account  # noqa: E402
from ledger.database import connect  # noqa: E402


@pytest.fixture
def ledger():
    """A ledger of its own for one test: alice has 100.00, bob nothing."""
    schema = "test_" + uuid.uuid4().hex
    connection = connect(schema)
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE SCHEMA {schema}")
        cursor.execute((ROOT / "schema.sql").read_text())
    open_account(connection, "alice", 10000)
    open_account(connection, "bob")
    yield connection
    with connection.cursor() as cursor:
        cursor.execute("SET client_min_messages = warning")
        cursor.execute(f"DROP SCHEMA {schema} CASCADE")
    connection.close()
