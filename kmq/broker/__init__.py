"""What every process of a broker has in common: its life, its row on the stats page, whether it may accept more."""
