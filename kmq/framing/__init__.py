"""The back room of the framer: from what ingress and other writers hand over to numbered lines."""
