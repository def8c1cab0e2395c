"""A broker's part in a shard: who it is, what it has promised, and who leads. Only where KMQ_SHARD is set."""
