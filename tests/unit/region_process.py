"""A process of an engine, driven line by line: `python region_process.py <engine> <timeout>`.

It reads commands from its standard input and answers each with one line of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from kvtier.errors import RegionError
from kvtier.region import Geometry, Mark, Offer, Region, join, share

PAGE = 4096


def main() -> None:
    engine, timeout_s = sys.argv[1], float(sys.argv[2])
    region: Region | None = None
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        answer: object = None
        try:
            match command.pop("do"):
                case "share":
                    geometry = Geometry(command["slots"], PAGE, command["ranks"])
                    offer = Offer(geometry, command.get("facts", {}), command["rank"])
                    region = share(engine, offer, timeout_s)
                    answer = "shared"
                case "join":
                    region, answer = join(engine, timeout_s)
                case "write":
                    assert region is not None
                    region.rows[command["slot"]] = command["byte"]
                    region.marks[command["rank"], command["slot"]] = Mark[command["mark"]]
                case "read":
                    assert region is not None
                    row = np.unique(region.rows[command["slot"]]).tolist()
                    answer = [row, region.marks[:, command["slot"]].tolist()]
                case "populate":
                    assert region is not None
                    region.populate().join()
        except RegionError as error:
            answer = {"RegionError": str(error)}
        print(json.dumps({"answer": answer}), flush=True)


if __name__ == "__main__":
    main()
