"""A proxy in a process of its own: prints its port; each line it reads is its delay in seconds."""

from __future__ import annotations

import sys

from kvtier.testing.proxy import Behaviour, FaultProxy


def main() -> None:
    with FaultProxy((sys.argv[1], int(sys.argv[2]))) as proxy:
        print(proxy.address[1], flush=True)
        for line in sys.stdin:
            proxy.behaviour = Behaviour(delay_s=float(line))
            print("set", flush=True)


if __name__ == "__main__":
    main()
