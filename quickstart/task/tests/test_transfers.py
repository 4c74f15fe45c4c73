"""What the ledger does, seen from outside: it is run as its users run it, by another user than this, and what came of it
is read from the database."""

import pathlib
import subprocess
import uuid

import psycopg2
import pytest


@pytest.fixture(scope="module")
def database():
    """A database that nobody has seen before."""
    name = "judged_" + uuid.uuid4().hex
    subprocess.run(["createdb", "--template", "template0", "--owner", "dev", name], check=True)
    connection = psycopg2.connect(dbname=name)
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute("SET ROLE dev")
        cursor.execute((pathlib.Path(__file__).parent / "schema.sql").read_text())
    yield connection
    connection.close()


@pytest.fixture
def accounts(database):
    """alice has 100.00, bob nothing, and carol's account is closed."""
    with database.cursor() as cursor:
        cursor.execute("TRUNCATE accounts, transfers")
        cursor.execute("INSERT INTO accounts VALUES ('alice', 10000, false), ('bob', 0, false), ('carol', 0, true)")
    return database


def ledger(database, *arguments):
    """Run the command line and return its exit status."""
    environment = {
        "PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1",
        "LEDGER_DATABASE": "dbname=" + database.info.dbname,
    }
    return subprocess.run(
        ["python3", "-m", "ledger", *arguments],
        cwd="/srv/ledger", env=environment, user="dev", group="dev", extra_groups=[], stdin=subprocess.DEVNULL, timeout=60,
    ).returncode


def rows(database, query):
    with database.cursor() as cursor:
        cursor.execute(query)
        return cursor.fetchall()


BALANCES = "SELECT name, balance FROM accounts ORDER BY name"
TRANSFERS = "SELECT source, target, cents FROM transfers ORDER BY id"


def test_money_moves(accounts):
    assert ledger(accounts, "transfer", "alice", "bob", "25.00") == 0
    assert rows(accounts, BALANCES) == [("alice", 7500), ("bob", 2500), ("carol", 0)]
    assert rows(accounts, TRANSFERS) == [("alice", "bob", 2500)]


@pytest.mark.parametrize("target", ["carol", "nobody"])
def test_refused_transfer_changes_nothing(accounts, target):
    assert ledger(accounts, "transfer", "alice", target, "25.00") == 1
    assert rows(accounts, BALANCES) == [("alice", 10000), ("bob", 0), ("carol", 0)]
    assert rows(accounts, TRANSFERS) == []
