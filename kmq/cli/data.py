"""The data directory of a command that only reads."""

from kmq.broker import supervisor
from kmq.config.settings import load
from kmq.errors import ConfigError


def existing_data() -> str:
    """Return KMQ_DATA. Raises ConfigError unless it is a data directory: a command that reads never makes one."""
    settings = load()
    if not supervisor.is_data(settings.data):
        raise ConfigError(supervisor.why_not_here(settings))
    return settings.data
