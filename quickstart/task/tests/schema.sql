CREATE TABLE accounts (
    name    text PRIMARY KEY CHECK (name <> ''),
    balance bigint NOT NULL DEFAULT 0 CHECK (balance >= 0),
    closed  boolean NOT NULL DEFAULT false
);

CREATE TABLE transfers (
    id     bigserial PRIMARY KEY,
    source text NOT NULL REFERENCES accounts (name),
    target text NOT NULL REFERENCES accounts (name),
    cents  bigint NOT NULL CHECK (cents > 0),
    at     timestamptz NOT NULL DEFAULT now()
);
