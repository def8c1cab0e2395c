"""Repair: finds damage in a data directory and heals it: `kmq verify [--repair]`.

verify.py       the command: everything that is wrong
heal.py         the order of healing: the WAL from the queues, queues from the WAL, two records under one seq
scan.py         one segment, byte by byte, and what can still be trusted in it
copies.py       both copies of each record
places.py       segments that lie where others belong
small_files.py  the small files: what is wrong, and healing
rewriting.py    rewriting segments, and the report
directory.py    the logs and named gaps of a data directory, and what is set aside
ledger.py       what a broker states about its logs, for audits
"""
