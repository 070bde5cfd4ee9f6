"""Random orders of the passes of a pipeline that no stage waits in for ever."""

from __future__ import annotations

from random import Random


def random_orders(
    rng: Random, along: list[tuple[int, int]], micros: int, *, split: float = 0.5
) -> list[list[str]]:
    """[stage] the passes as a plan file writes them: again and again a pass that can run is drawn.

    along: (stage, chunk) of the virtual stages. split: the share of backward passes that are done
    in two parts.
    """
    chunked = len({chunk for _, chunk in along}) > 1
    in_parts = {(v, m): rng.random() < split for v in range(len(along)) for m in range(micros)}
    done: set[tuple[str, int, int]] = set()  # (side, virtual stage, micro-batch)
    orders: list[list[str]] = [[] for _ in {stage for stage, _ in along}]

    def can_run(side: str, v: int, m: int) -> bool:
        if side == "F":
            return v == 0 or ("F", v - 1, m) in done
        if side == "W":
            return in_parts[v, m] and ("B", v, m) in done
        behind = v + 1 == len(along) or ("B", v + 1, m) in done
        return behind and ("F", v, m) in done

    every = [(side, v, m) for side in "FBW" for v in range(len(along)) for m in range(micros)]
    while ready := [one for one in every if one not in done and can_run(*one)]:
        side, v, m = rng.choice(ready)
        done.add((side, v, m))
        stage, chunk = along[v]
        kind = "D" if side == "B" and not in_parts[v, m] else side
        orders[stage].append(f"{kind}{m}.{chunk}" if chunked else f"{kind}{m}")
    return orders
