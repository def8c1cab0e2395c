"""`kmq`: imports the commands. Ctrl-C during that import ends with exit code 130 and without a traceback."""


def main() -> None:
    """Run `kmq` with the arguments of this process."""
    from kmq.errors import EXIT_SIGINT

    try:
        from kmq.cli import app

        app.main()
    except KeyboardInterrupt:
        raise SystemExit(EXIT_SIGINT) from None


if __name__ == "__main__":
    main()
