"""`kmq sql`, `kmq audit`, `kmq pipeline …`: the commands that run on Spark (sql.py, pipelines.py, …)."""

import typer

from kmq.cli import checkpoints as checkpoints  # adds its commands to pipeline_app
from kmq.cli import pipeline_list as pipeline_list  # this one, too
from kmq.cli import pipelines, sql
from kmq.cli.helptext import examples


def add_to(app: typer.Typer) -> None:
    """Add these commands to `kmq`."""
    app.command(
        epilog=examples(
            'kmq sql "select topic, count(*) from all_topics group by topic"',
            'kmq sql "select max(recv_ts), max(length(value)) from append"',
            """kmq sql "select get_json_object(value_text, '$.user') from test" """.strip(),
            "kmq sql",
        )
    )(sql.sql)
    app.command("audit", epilog=examples("kmq audit", "kmq audit --path data --report audit.html"))(pipelines.audit)
    app.add_typer(pipelines.pipeline_app, name="pipeline")
