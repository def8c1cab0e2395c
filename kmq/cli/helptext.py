"""What help texts share."""


def examples(*lines: str) -> str:
    """Return the end of a help text: commands to paste, each of at most 74 columns for a terminal of 80."""
    return "\b\nExamples:\n\n" + "\n\n".join(f"    {line}" for line in lines)
