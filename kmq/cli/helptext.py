"""The part of help texts that all commands share: examples."""


def examples(*lines: str) -> str:
    """Return the end of a help text: commands to paste, each at most 74 columns wide, to fit a terminal of 80."""
    return "\b\nExamples:\n\n" + "\n\n".join(f"    {line}" for line in lines)
