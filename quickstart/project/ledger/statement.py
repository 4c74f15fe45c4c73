"""What happened to an account."""


def statement(connection, name):
    """Return (other account, cents) of each transfer, oldest first; what went out is negative."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT CASE WHEN source = %(name)s THEN target ELSE source END,
                   CASE WHEN source = %(name)s THEN -cents ELSE cents END
            FROM transfers
            WHERE %(name)s IN (source, target)
            ORDER BY id
            """,
            {"name": name},
        )
        return cursor.fetchall()
