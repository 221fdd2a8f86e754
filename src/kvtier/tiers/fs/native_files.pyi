from collections.abc import Sequence

from kvtier.tiers.base import Buffers

def write_files(
    temps: Sequence[bytes], paths: Sequence[bytes], data: Sequence[Buffers], flags: int, mode: int
) -> list[bool]: ...
def read_files(
    paths: Sequence[bytes], into: Sequence[Buffers], flags: int, touch_age_s: float
) -> list[bool]: ...
def find_files(directory: int, names: Sequence[str]) -> list[bool]: ...
