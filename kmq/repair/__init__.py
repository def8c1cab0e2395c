"""What is wrong with a data directory, and how it is made good: `kmq verify [--repair]`. Needs no process, and knows no link.

verify.py       everything that is wrong          check.py      the command
scan.py         one segment, byte by byte         ledger.py     what a broker says of itself, for auditors
copies.py       both copies of each record
rebuild.py      the order in which all is healed
places.py       segments that lie where others belong
wal.py          the WAL from the queues           queues.py     queues from the WAL
evidence.py     what can still be believed of damaged bytes
rewriting.py    segments written anew             small_files.py   all that is no log
"""
