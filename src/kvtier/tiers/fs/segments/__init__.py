"""Blocks in preallocated files of many slots: the layout for a local disk.

<root>/<namespace>/stores/<16 hex>/     a *store*: written by one process, read by all on the host
    lock                                flocked exclusively while its owner lives
    index.log                           what lies where: records of a fixed size
    <n>.segment                         slots of one size, rewritten in place
    requests/                           what others ask of the owner

records    the bytes of the log                  table      what a log says, in memory
log        appending and rewriting it            segment    the files of slots, and moving bytes
slots      the owner's index                     store      the directory of a store
owned      writing, reading, evicting            follower   reading the stores of others
upkeep     what happens once a second            tier       all of it as a `Tier`
inspection what the command line needs
"""

from kvtier.tiers.fs.segments.tier import SegmentsTier

__all__ = ["SegmentsTier"]
