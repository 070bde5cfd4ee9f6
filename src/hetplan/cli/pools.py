"""How the text of `hetplan search`'s options becomes a pool of GPUs and a parameter space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hetplan.cli.options import split_list
from hetplan.cli.sources import open_cluster
from hetplan.errors import InputError
from hetplan.names import unknown_name

if TYPE_CHECKING:
    from hetplan.formulations.astra.search.pool import Offer, Pool
    from hetplan.formulations.astra.search.space import Space

MODES = ("homogeneous", "heterogeneous", "cost")
LISTS = ("pipeline", "tensor", "expert", "micro_batch", "virtual", "recompute_layers")
SWITCHES = ("sequence_parallel", "distributed_optimizer", "no_overlap_offload")
SINGLE = ("overlap", "interleaving", "offload")
WORDS = ("recompute", "recompute_method")
LINK_OPTIONS = {
    "node_devices": "--devices-per-node",
    "intra_gbit": "--intra-node-gbit",
    "network_gbit": "--network-gbit",
}
PARAMETERS = (*LISTS, *SWITCHES, *SINGLE, *WORDS)


def offers_from(
    gpus: Sequence[str] | None, cluster: str | None, links: dict[str, float | int | None]
) -> tuple[Offer, ...]:
    """The types on offer, from `TYPE:COUNT` texts or a cluster file, with any links given; raises
    InputError."""
    from dataclasses import replace

    from hetplan.formulations.astra.search.pool import offer_of, offers_of_cluster
    from hetplan.profiling.cluster import GBIT, MAX_DEVICES
    from hetplan.schema import LEAST_RATE, MOST_RATE

    if (gpus is None) == (cluster is None):
        raise InputError("the pool is given by --gpus or by --cluster", expected="one of the two")
    if cluster is not None:
        offers = offers_of_cluster(open_cluster(cluster))
    else:
        offers = tuple(offer_of(*name_and_count(text)) for text in split_list(gpus or []))
    for name, value in links.items():
        least, most = (1, MAX_DEVICES) if name == "node_devices" else (LEAST_RATE, MOST_RATE)
        if value is not None and not least <= value <= most:
            expected = f"{least:g} to {most:g}"
            raise InputError("not usable", where=LINK_OPTIONS[name], got=value, expected=expected)
    changes: dict[str, Any] = {}
    if links["node_devices"] is not None:
        changes["node_devices"] = int(links["node_devices"])
    for given, field in (("intra_gbit", "intra"), ("network_gbit", "network")):
        value = links[given]
        if value is not None:
            changes[field] = value * GBIT
    return tuple(replace(offer, **changes) for offer in offers)


def name_and_count(text: str) -> tuple[str, int]:
    """`A800:2048` as ("A800", 2048); raises InputError."""
    name, colon, count = text.rpartition(":")
    if not (colon and name and count.isdecimal() and 0 < int(count) <= 10**6):
        raise InputError(
            "not usable", where="--gpus", got=text, expected="TYPE:COUNT, like A800:2048"
        )
    return name, int(count)


def make_pool(offers: tuple[Offer, ...], mode: str | None, total: int | None) -> Pool:
    """The pool of a mode; without one, several types are mixed. Raises InputError."""
    from hetplan.formulations.astra.search import pool

    mode = mode or ("homogeneous" if len(offers) == 1 else "heterogeneous")
    if mode not in MODES:
        raise unknown_name("unknown mode", mode, MODES, where="--mode")
    if total is not None and mode != "heterogeneous":
        raise InputError("--total is for the heterogeneous mode", got=total)
    if mode == "cost":
        return pool.cost(offers, max(offer.most for offer in offers))
    if mode == "heterogeneous":
        most = sum(offer.most for offer in offers)
        return pool.heterogeneous(most if total is None else total, offers)
    if len(offers) != 1:
        raise InputError(
            "the homogeneous mode takes one type", where="--gpus", got=f"{len(offers)} types"
        )
    return pool.homogeneous(offers[0])


def make_space(texts: Sequence[str]) -> Space:
    """The parameter space with the given ranges replaced; raises InputError."""
    from hetplan.formulations.astra.search.space import Space

    values: dict[str, Any] = {}
    for text in texts:
        name, equals, given = (part.strip() for part in text.partition("="))
        name = name.replace("-", "_")
        if not equals or not given:
            raise InputError(
                "not usable", where="--param", got=text, expected="NAME=VALUE[,VALUE…]"
            )
        if name in values:
            raise InputError(f"{name} is given twice", where="--param")
        parts = split_list([given])
        if name in LISTS:
            values[name] = tuple(dict.fromkeys(n for part in parts for n in numbers(part)))
        elif name in SWITCHES:
            values[name] = tuple(dict.fromkeys(switch(part) for part in parts))
        elif name in SINGLE:
            values[name] = switch(given)
        elif name in WORDS:
            values[name] = tuple(None if part.lower() == "none" else part for part in parts)
        else:
            raise unknown_name("unknown parameter", name, PARAMETERS, where="--param")
    return Space(**values)


def numbers(text: str) -> range:
    """`4` or `1-8` as a range; raises InputError."""
    first, dash, last = text.partition("-")
    if not (first.isdecimal() and (last.isdecimal() if dash else True)):
        raise InputError(
            "not usable", where="--param", got=text, expected="a number or a range like 1-8"
        )
    low, high = int(first), int(last or first)
    if not 1 <= low <= high <= 10**4:
        raise InputError("not usable", where="--param", got=text, expected="1 to 10000, ascending")
    return range(low, high + 1)


def switch(text: str) -> bool:
    """`true` or `false`; raises InputError."""
    if text.lower() not in ("true", "false"):
        raise InputError("not usable", where="--param", got=text, expected="true or false")
    return text.lower() == "true"
