import pytest

from fp8core.errors import last_words, printable, without_passwords

HOSTILE = "\x1b[2J\x1b]0;title\x07\r\x9b\u202egnp\u2066\u200b\x00\ud800"


def test_nothing_that_a_terminal_obeys_is_left() -> None:
    shown = printable(f"a\n{HOSTILE}b é 日本")
    assert shown.isprintable()
    assert shown.startswith("a\\n\\x1b[2J\\x1b]0;title\\x07\\r\\x9b\\u202egnp\\u2066\\u200b\\x00\\ud800b é 日本")
    assert printable(shown) == shown


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("postgresql://user:secret@host:5432/db", "postgresql://user:***@host:5432/db"),
        ("postgresql+psycopg2://user:se@c/r'e\"t:@host/db", "postgresql+psycopg2://user:***@host/db"),
        ("https://user:secret@host/path", "https://user:***@host/path"),
        ("https://secret@host", "https://***@host"),
        ("https://:secret@host", "https://:***@host"),
        ("postgresql://host/db?user=u&password=secret&sslmode=x", "postgresql://host/db?user=u&password=***&sslmode=x"),
        ("mssql+pyodbc:///?odbc_connect=PWD%3Dsecret", "mssql+pyodbc:///?odbc_connect=***"),
        ("postgresql://user@host/db", "postgresql://user@host/db"),
        ("http://127.0.0.1:5000/#/experiments/1", "http://127.0.0.1:5000/#/experiments/1"),
        ("sqlite:////home/a@b:c/my runs/mlflow.db", "sqlite:////home/a@b:c/my runs/mlflow.db"),
        ("databricks://profile", "databricks://profile"),
    ],
)
def test_passwords_of_addresses_are_masked(uri: str, shown: str) -> None:
    assert without_passwords(uri) == shown
    assert without_passwords(f"cannot reach {uri} and ask@host") == f"cannot reach {shown} and ask@host"
    assert without_passwords(shown) == shown
    assert "secret" not in printable(f"{uri}: no")


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("", "it said nothing"),
        ("step 2\nkilled\n\n", "killed"),
        (
            "Traceback\nx.OperationalError: disk is full\n[SQL: INSERT]\n(see https://x)\n",
            "x.OperationalError: disk is full",
        ),
    ],
)
def test_the_reason_of_a_process_is_its_exception_or_its_last_line(output, reason) -> None:
    assert last_words(output) == reason
