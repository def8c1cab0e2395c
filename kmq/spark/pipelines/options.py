"""The options of pipelines, each declared once: for `kmq pipeline run`, and as keyword arguments of a pipeline's `run`.

    class Payloads(TypedDict, total=False):
        schema: Annotated[str, PipelineOption("infer", "--schema", "Schema of JSON payloads: …")]

    def run(spark, where, to, *, progress=None, **options: Unpack[ArchiveOptions]) -> Archived:
        asked = complete(ArchiveOptions, options)   # with the defaults

A command takes groups of options (kmq/cli/output.py) and hands them to `run`. An option without a flag is a keyword
argument only. Commands import this module at their start: it imports nothing of Spark.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypedDict, TypeVar, cast, get_type_hints

from kmq.message.text import MAX_REPLAYS


class PipelineOption(NamedTuple):
    """How an option is given to a command, and its default."""

    default: Any
    flag: str = ""
    help: str = ""
    min: float | None = None
    parse: Callable[[str], Any] | None = None  # of a value that a command takes as text


Options = TypeVar("Options", bound=Mapping[str, Any])
Value = TypeVar("Value", bound=tuple[Any, ...])


def declared(group: type[Any]) -> dict[str, tuple[Any, PipelineOption]]:
    """Return the options of a group by name, each with its type."""
    hints = get_type_hints(group, include_extras=True)
    return {name: (hint.__origin__, hint.__metadata__[0]) for name, hint in hints.items()}


def complete(group: type[Options], given: Options, **defaults: Any) -> Options:
    """Return all options of a group. `defaults`: those of this pipeline.

    Raises TypeError, as Python does, if one is given that the group lacks.
    """
    options = {name: option.default for name, (_, option) in declared(group).items()} | defaults
    for name in given:
        if name not in options:
            raise TypeError(f"run() got an unexpected keyword argument {name!r}")
    return cast(Options, options | dict(given))


def value(kind: type[Value], options: Mapping[str, Any], **more: Any) -> Value:
    """Return a NamedTuple made of the options that are named like its fields."""
    fields = kind._fields  # type: ignore[attr-defined]
    return kind(**{name: options[name] for name in fields if name in options}, **more)


# --- what pipelines share --------------------------------------------------------------------------------------------

PARQUET = "parquet"
BATCH_BYTES = "64m"  # of lines in a micro-batch

_Once = Annotated[
    bool, PipelineOption(True, "--once/--continuous", "Process what is stored now, then end; or run until stopped.")
]
_Checkpoint = Annotated[
    str, PipelineOption("", "--checkpoint", "Directory for the progress of the pipeline; a restart resumes there.")
]
_Catalog = Annotated[
    str,
    PipelineOption(
        "",
        "--catalog",
        "Iceberg: name[.namespace.table] in pyiceberg's configuration; default: SQLite beside the table.",
    ),
]


class Follow(TypedDict, total=False):
    """When a stream runs its batches, and where it keeps its progress: see streams.Trigger."""

    once: _Once
    every: Annotated[str, PipelineOption("10 seconds", "--every", "Time between two batches of --continuous.")]
    checkpoint: _Checkpoint


class SinkConnection(TypedDict, total=False):
    """The sink's options for token, TLS and timeout; None: as the pipeline reads."""

    connection: Annotated[Mapping[str, str] | None, PipelineOption(None)]


# --- archive ---------------------------------------------------------------------------------------------------------

INFER, NONE = "infer", "none"  # values in place of DDL


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


class ArchiveTable(TypedDict, total=False):
    """The table that the archive writes."""

    partition_by: Annotated[
        Sequence[str],
        PipelineOption(
            ("topic", "date", "hour"),
            "--partition-by",
            "Columns that name the directories, comma-separated.",
            parse=_names,
        ),
    ]
    catalog: _Catalog


class Payloads(TypedDict, total=False):
    """How the archive treats payloads."""

    schema: Annotated[
        str,
        PipelineOption(
            INFER, "--schema", "Schema of JSON payloads: DDL, a file of it, infer (once, by a sample), none (text)."
        ),
    ]
    bad: Annotated[
        str,
        PipelineOption("dlq", "--bad", "Payloads that do not fit: dlq (to <topic>.dlq), keep (with reason) or drop."),
    ]
    rest: Annotated[
        bool | None,
        PipelineOption(None, "--rest/--no-rest", "Column for fields that the schema lacks. \\[default: if inferred]"),
    ]
    enrich_with: Annotated[
        str, PipelineOption("", "--enrich", "module:function of yours; takes and returns a DataFrame.")
    ]


class ArchiveLetters(TypedDict, total=False):
    """Where dead letters go."""

    producers: Annotated[
        str,
        PipelineOption("", "--producers", "For dlq: host:port of each broker's ingress, in order; default: this one."),
    ]


class ArchiveOptions(Payloads, ArchiveLetters, SinkConnection, Follow, ArchiveTable, total=False):
    """The keyword arguments of archive.run. `host`, `pod`: of records that do not name them; None: of this process."""

    host: Annotated[str | None, PipelineOption(None)]
    pod: Annotated[str | None, PipelineOption(None)]
    batch_bytes: Annotated[str, PipelineOption(BATCH_BYTES)]


# --- metrics ---------------------------------------------------------------------------------------------------------

WINDOW = "1 minute"
# recv_ts never decreases within a broker: this covers the time between reading two partitions.
WATERMARK = "10 seconds"


class Windows(TypedDict, total=False):
    """How records are assigned to time windows."""

    window: Annotated[str, PipelineOption(WINDOW, "--window", "Length of a window: '10 seconds', '1 hour', …")]
    watermark: Annotated[
        str, PipelineOption(WATERMARK, "--watermark", "How long a window stays open for records that arrive late.")
    ]
    on_late: Annotated[
        str,
        PipelineOption("fail", "--late", "Records later than --watermark: fail before their batch is added, or drop."),
    ]


class MetricsTo(TypedDict, total=False):
    """Where closed windows are written besides a table's directory."""

    catalog: _Catalog
    topic: Annotated[str, PipelineOption("", "--into", "Send closed windows to this topic, as JSON.")]
    producers: Annotated[
        str,
        PipelineOption("", "--producers", "host:port of the ingress of the broker with --into; default: this one."),
    ]


class MetricsOptions(Windows, SinkConnection, Follow, MetricsTo, total=False):
    """The keyword arguments of metrics.run."""


# --- mirror ----------------------------------------------------------------------------------------------------------

MIRROR_EVERY = "1 second"  # between two batches


class Replay(TypedDict, total=False):
    """What happens to a record that the target had already."""

    replay: Annotated[
        str,
        PipelineOption("stop", "--replay", "If the target holds another record, or none any more: stop, again, trust."),
    ]


class MirrorOptions(SinkConnection, Replay, Follow, total=False):
    """The keyword arguments of mirror.run."""


# --- redrive ---------------------------------------------------------------------------------------------------------


class RedriveSelection(TypedDict, total=False):
    """Which records are redriven, besides topic and condition."""

    dropped: Annotated[
        bool, PipelineOption(False, "--dropped", "Read from the WALs what drop_oldest dropped, from this queue or all.")
    ]
    name: Annotated[
        str, PipelineOption("", "--name", "Name of this redrive; another name redrives the same records again.")
    ]
    max_replays: Annotated[
        int, PipelineOption(MAX_REPLAYS, "--max-replays", "Letters that came back so often stay.", min=0)
    ]


class RedriveSending(TypedDict, total=False):
    """How the redriven records are sent."""

    rate: Annotated[float, PipelineOption(0, "--rate", "Maximum messages per second; 0: no limit.", min=0)]
    dry_run: Annotated[bool, PipelineOption(False, "--dry-run", "Count the messages per new key; send nothing.")]
    producers: Annotated[
        str, PipelineOption("", "--producers", "host:port of the ingress of the target broker; default: this one.")
    ]


class RedriveOptions(RedriveSelection, RedriveSending, SinkConnection, total=False):
    """The keyword arguments of redrive.run."""


# --- route -----------------------------------------------------------------------------------------------------------

LOG = "log"


class RouteTo(TypedDict, total=False):
    """By which table records are routed, and how many at a time."""

    table: Annotated[
        str, PipelineOption("", "--table", "Data directory whose routing table is used, in place of each pod's own.")
    ]
    batch_bytes: Annotated[str, PipelineOption("1g", "--batch", "Bytes of the WAL to sort at a time.")]
    catalog: _Catalog


class RouteFollow(TypedDict, total=False):
    """Follow, without the time between two batches."""

    once: _Once
    checkpoint: _Checkpoint


class RouteOptions(RouteTo, RouteFollow, total=False):
    """The keyword arguments of route.run."""
