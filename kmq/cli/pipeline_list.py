"""`kmq pipeline list`: the pipelines there are."""

import json
from typing import Annotated

import typer

from kmq.cli.helptext import examples
from kmq.cli.pipelines import pipeline_app, run_app


@pipeline_app.command("list", epilog=examples("kmq pipeline list", "kmq pipeline list --json"))
def list_pipelines(
    as_json: Annotated[bool, typer.Option("--json", help='{"pipelines": [{"name", "help"}, …]}')] = False,
) -> None:
    """List the pipelines."""
    rows = []
    for command in run_app.registered_commands:
        function = command.callback
        assert function is not None
        name = command.name or function.__name__.replace("_", "-")
        rows.append({"name": name, "help": (function.__doc__ or "").strip().splitlines()[0]})
    if as_json:
        print(json.dumps({"pipelines": rows}))
    else:
        for row in rows:
            print(f"{row['name']:10} {row['help']}")
