"""What the README says that the code knows better."""

import re
from pathlib import Path

from kmq import errors, record, settings

README = Path(__file__).parents[2] / "README.md"


def test_the_settings_table_is_the_one_the_code_has():
    block = re.search(r"<!-- settings -->\n(.*?)\n<!-- /settings -->", README.read_text(), re.S)
    assert block and block[1] == settings.table(), "paste: python -c 'from kmq.settings import table; print(table())'"


def test_every_exit_code_is_explained():
    text = re.search(r"Exit codes: (.*?)\n\n", README.read_text(), re.S)
    assert text and all(re.search(rf"\b{code}\b", text[1]) for code in errors.EXIT_NAMES)


def test_every_reason_for_dead_malformed_is_explained():
    lines = [b"", b"x", b"|a", b".a|", b"append|x", b"a|\0", b"!a|"]
    reasons = {record.refusal(line) for line in lines} | {"too_long", "no_newline"}
    assert len(reasons) == 9
    assert all(f"`{reason}`" in README.read_text() for reason in reasons)
