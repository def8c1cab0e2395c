"""The back room of ingress: connections of strangers, and what they may send."""
