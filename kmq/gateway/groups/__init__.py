"""Consumer groups: who is a member, who owns which partition, who may commit, and what comes again."""
