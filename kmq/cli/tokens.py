"""`kmq token …`: the bearer tokens of producers and consumers."""

import json
from typing import Annotated, Any

import typer

from kmq.cli.output import examples
from kmq.config.settings import load
from kmq.errors import ConfigError
from kmq.logfmt import pairs

token_app = typer.Typer(
    no_args_is_help=True,
    help="Bearer tokens of producers and consumers, in the file KMQ_TOKENS.",
    epilog=examples("KMQ_TOKENS=tokens kmq token new orders", "KMQ_TOKENS=tokens kmq token list"),
)


def _token_file() -> str:
    settings = load()
    if not settings.tokens:
        raise ConfigError("KMQ_TOKENS is not set; set it to the path of the file of hashed tokens")
    return settings.tokens


@token_app.command(
    "new",
    epilog=examples("KMQ_TOKENS=tokens kmq token new orders", "KMQ_TOKENS=tokens kmq token new grafana --role consume"),
)
def new_token(
    name: Annotated[
        str, typer.Argument(help="Name of the token's owner: A-Z a-z 0-9 _ -. A name may have several tokens.")
    ],
    role: Annotated[
        list[str] | None,
        typer.Option("--role", help="produce, consume or admin (everything); several times for several; default: all."),
    ] = None,
    with_scram: Annotated[
        bool, typer.Option("--scram", help="Kafka's clients may also use it with SCRAM-SHA-256 and SCRAM-SHA-512.")
    ] = False,
) -> None:
    """Make a token and print it. It is shown only once: the file keeps a hash. It is valid within a second or two."""
    from kmq.access import tokens

    print(tokens.new(_token_file(), name, role or (), with_scram))


@token_app.command("list", epilog=examples("KMQ_TOKENS=tokens kmq token list"))
def list_tokens(
    as_json: Annotated[
        bool, typer.Option("--json", help='{"tokens": [{"name", "tokens", "ids", "roles"}, …]}')
    ] = False,
) -> None:
    """List the names that have tokens, how many, the id of each, and its roles.

    To revoke a token, delete its line in the file; in a whole fleet: kmq fleet token revoke.
    """
    from kmq.access import roles, tokens

    found = tokens.read(_token_file())
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "tokens": len(hashes),
            "ids": [tokens.id_of(name, row.digest) for row in hashes],
            "roles": [roles.text(row.roles) for row in hashes],
        }
        for name, hashes in found.items()
    ]
    if as_json:
        print(json.dumps({"tokens": rows}))
        return
    for row in rows:
        print(pairs(**row | {"ids": ",".join(row["ids"]), "roles": " ".join(row["roles"])}))


def add_to(app: typer.Typer) -> None:
    """Add these commands to `kmq`."""
    app.add_typer(token_app, name="token")
