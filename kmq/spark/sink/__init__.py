"""format("kmq") for writing: the rows of a DataFrame become acknowledged messages."""
