"""Consumer groups: who is a member, who owns which partition, and who may commit. Pure code without I/O and clock."""
