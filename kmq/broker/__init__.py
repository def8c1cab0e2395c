"""What all processes of a broker share: start and end, the row on the stats page, whether to accept more messages."""
