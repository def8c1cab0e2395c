"""Ends of help texts."""


def examples(*lines: str) -> str:
    """The end of a help text: examples that work when pasted. At most 74 columns, or a terminal of 80 breaks them."""
    return "\b\nExamples:\n\n" + "\n\n".join(f"    {line}" for line in lines)
