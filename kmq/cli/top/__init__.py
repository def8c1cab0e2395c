"""`kmq top`: a broker at a glance, four times a second.

snapshot.py      what is known at one moment: one value, whoever looked
readers.py       who looks: at the broker of this directory, or at one elsewhere; counters → per second, and events
overview.py      asks a gateway
topic_rates.py   files of topics → per second
screen.py        a snapshot and a size → lines; pure
terminal.py      the terminal: keys, size, signals, and how it was before
"""
