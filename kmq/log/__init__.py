"""What is on disk: identity, segments with their text index, the WAL, partition logs, checkpoints, dropped.log.

Assumptions, in one place
  - fdatasync returned: the bytes written through this file before it survive a power cut.
  - fdatasync failed: bytes written since the last one that returned may be lost, although reads still show them (the
    kernel marks the pages clean). A second call would return success and mean nothing, so none is made.
  - A new, renamed or removed name survives a power cut once its directory has been fsynced.
  - After a power cut the unsynced end of a file may be missing, torn, or (ext4) NUL bytes.
  - SIGKILL loses nothing that `write` accepted; a write that it interrupts may be short.
"""
