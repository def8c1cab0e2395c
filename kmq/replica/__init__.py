"""Replica: the part that one broker plays in a shard, as leader or follower. Used only if KMQ_SHARD is set."""
