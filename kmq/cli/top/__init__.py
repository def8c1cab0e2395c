"""`kmq top`: a broker at a glance, four times a second.

snapshot.py      what is known at one moment: one value, whoever looked
readers.py       who looks: at the broker of this directory (kmq/broker/overview.py), or at one elsewhere, by its gateway
screen.py        a snapshot and a size → lines; pure
terminal.py      the terminal: keys, size, signals, and how it was before
"""
