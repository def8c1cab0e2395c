"""Consumer groups: members, owners of partitions, commits, and messages that are delivered again."""
