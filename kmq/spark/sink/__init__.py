"""format("kmq") for writing: from rows to acknowledged messages."""
