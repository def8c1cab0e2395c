"""Finds what is wrong with a data directory, and heals it: `kmq verify [--repair]`.

verify.py        the command                       directory.py  the logs and named gaps of a data directory
verify.py       everything that is wrong          scan.py    one thing that is wrong
scan.py         one segment, byte by byte         scan.py     the small files: what is wrong
copies.py       both copies of each record        ledger.py     what a broker states about its logs, for audits
heal.py      the order of healing              places.py     segments that lie where others belong
heal.py          the WAL from the queues           heal.py     queues from the WAL
heal.py    two records under one seq         small_files.py  the small files: healing
scan.py     what can still be trusted         rewriting.py  rewriting segments, and the report
directory.py   files and bytes that are set aside
recorded.py     what records of changes say of a topic
"""
