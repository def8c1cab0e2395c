"""`kmq`, before anything is imported: Ctrl-C in that moment, too, ends with 130 and without a traceback."""


def main() -> None:
    """Entry point."""
    from kmq.errors import EXIT_SIGINT

    try:
        from kmq.cli import app

        app.main()
    except KeyboardInterrupt:
        raise SystemExit(EXIT_SIGINT) from None


if __name__ == "__main__":
    main()
